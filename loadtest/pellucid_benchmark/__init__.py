"""Benchmarks: Pellucid through its public API beside other engines, in one run, and beside what the machine can do."""
