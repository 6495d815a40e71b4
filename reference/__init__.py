"""Defines the expected results of the operators, for tests and benchmarks; this package is not installed."""
