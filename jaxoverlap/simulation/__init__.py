"""Read XLA's schedule of a compiled module, audit it and lay it out in time."""
