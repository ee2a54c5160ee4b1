"""Names of scopes that say how often a conditional takes its slowest branch.

    jit(step)/while/body/runs_1_of_8_and_last/cond

A pass that makes a conditional may know that; the compiled program does not, but for the name.
"""

from __future__ import annotations

import re

_RUNS = re.compile(r"/runs_(\d+)_of_(\d+)(?:_and_last)?/cond$")


def runs_scope(runs: int, iterations: int, *, at_end: bool = False) -> str:
    """Return the name scope of a conditional, which says how often it takes its slowest branch.

    Args:
        runs: how often, in the iterations of the loop that it is in.
        iterations: the iterations.
        at_end: whether it does so in the last one.
    """
    return f"runs_{runs}_of_{iterations}{'_and_last' if at_end else ''}"


def is_at_end(scopes: str) -> bool:
    """Return whether names of scopes say that the last iteration takes the slowest branch."""
    return scopes.endswith("_and_last")


def share_of(op_name: str) -> float | None:
    """Return the share of its runs in which a conditional takes its slowest branch, if named."""
    match = _RUNS.search(op_name)
    return int(match.group(1)) / int(match.group(2)) if match else None
