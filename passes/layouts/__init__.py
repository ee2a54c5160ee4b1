"""Choose the shardings of a step's values where the user leaves them to XLA."""
