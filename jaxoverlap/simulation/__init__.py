"""What a compiled module says: XLA's schedule read, audited and laid out in time."""
