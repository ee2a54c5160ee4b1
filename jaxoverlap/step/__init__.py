"""Take one step through the passes, the compiler and the processes."""
