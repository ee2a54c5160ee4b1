"""The tuner: candidates, trials in child processes, and the search among them."""
