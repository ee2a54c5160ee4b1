"""The cost model: seconds of kernels and collectives on a cluster."""
