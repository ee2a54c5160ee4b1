"""Which matmuls share which rings, and whether a ring pays."""
