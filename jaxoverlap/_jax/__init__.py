"""The only modules that name internals of JAX and XLA."""
