"""Read what a profiler measured of a train step, and say what of its communication is hidden."""
