"""Passes that change a jaxpr."""
