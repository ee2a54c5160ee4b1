"""The `jaxoverlap` command; `shell/errors.py` has its exit codes."""

from jaxoverlap.cli.app import app, main

__all__ = ["app", "main"]
