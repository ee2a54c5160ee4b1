"""Split a step's batch in parts, so that one part's collectives overlap with another's matmuls."""
