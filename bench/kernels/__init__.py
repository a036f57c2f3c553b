"""Kernel micro-benchmarks: one row per shape, peers in the same run. See README.md beside this file."""
