"""Plans: what is done with each matmul of a step, as data."""
