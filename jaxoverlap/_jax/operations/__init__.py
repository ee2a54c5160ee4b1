"""Parts of jax that may change: primitives whose operations partition themselves."""
