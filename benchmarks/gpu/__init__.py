"""Measure on one GPU, which several JAX processes share: `python -m benchmarks.gpu --help`."""
