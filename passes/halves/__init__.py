"""Split the rows of a step in halves, so that one half's collectives hide behind the other."""
