"""The rings: decomposed collectives interleaved with the chunks of matmuls."""
