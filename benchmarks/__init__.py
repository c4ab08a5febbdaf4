"""Benchmarks of the operators against recorded peers; see docs/benchmarking.md."""
