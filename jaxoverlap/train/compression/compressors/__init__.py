"""Compressors: averages over workers that send less than the gradients."""
