"""What the operators are to compute, for tests and benchmarks alike: no part of what is installed."""
