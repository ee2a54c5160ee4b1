"""A change of structure leaves what the library makes of a fixed set of steps as it was."""
