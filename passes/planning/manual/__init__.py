"""Rings in shard_maps that the user wrote: which collectives and matmuls share one."""
