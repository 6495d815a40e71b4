"""Faults that tests must detect: ``python -m mutants``. A mutant that survives shows that a test is missing."""
