"""Rings in shard_maps that the user wrote: found, decided on and written."""
