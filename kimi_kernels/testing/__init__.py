"""What tests and benchmarks share: comparison, K3 shapes, GPU timing. Not imported by the package itself."""
