"""What each device runs: groups of every size, their hops, exchanges and blocks."""
