"""Start a step at once, and keep of its programs the one that the clock prefers."""
