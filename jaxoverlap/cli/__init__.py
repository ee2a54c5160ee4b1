"""The `jaxoverlap` command.

Exit codes: 0, all is well; 1, the answer is no (a dead flag, nothing to overlap, too few hops
covered); 2, a mistake on the command line or in what it names; 3, something failed on the way.
"""

from jaxoverlap.cli.app import app, main

__all__ = ["app", "main"]
