"""The seeds of random steps that one run draws: a window that another commit moves.

A run of all would take minutes; each commit takes some, and `make nightly` takes all: a test of
such seeds is marked `rotating`. SEEDS of the environment repeats a run's windows.
"""

from __future__ import annotations

import functools
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]


@functools.cache
def turn() -> int | None:
    """Return the number that places every window: SEEDS, or HEAD's hash; None for all seeds."""
    if given := os.environ.get("SEEDS"):
        return None if given == "all" else int(given)
    command = ["git", "rev-parse", "HEAD"]
    head = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return int(head.stdout.strip()[:6] or "0", 16)


def window(count: int, among: range, turn: int) -> range:
    """Return `count` neighbours of a range; windows of successive turns cover all of it.

    Raises:
        ValueError: if the windows do not fit the range.
    """
    windows, rest = divmod(len(among), count)
    if rest or not windows:
        raise ValueError(f"{len(among)} seeds are not windows of {count}")
    first = turn % windows * count
    return among[first : first + count]


def rotating(count: int, among: range) -> range:
    """Return this run's window of a range of seeds."""
    number = turn()
    return among if number is None else window(count, among, number)


def some[Case](count: int, cases: Sequence[Case]) -> list[Case]:
    """Return this run's few of many cases, neighbours in their order; all for all seeds."""
    number = turn()
    if number is None or count >= len(cases):
        return list(cases)
    return [cases[(number * count + n) % len(cases)] for n in range(count)]
