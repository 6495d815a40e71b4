"""Faults for the tests to see: ``python -m mutants``. A mutant that no test sees is a missing test."""
