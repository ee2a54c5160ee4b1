"""Helpers that know nothing of JAX: text, files, a hash of the source."""
