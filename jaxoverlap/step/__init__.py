"""One step on its way through the passes, the compiler and the processes."""
