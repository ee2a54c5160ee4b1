"""Decide which matmuls share which rings, and whether a ring pays."""
