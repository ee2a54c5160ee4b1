"""Train with a step that starts as it is, until a phase begins: a run that test_endings.py ends.

python -m tests.start.ending FOLDER PHASE HOW

PHASE is "search", "compile", "trials" or "decided"; HOW is "return", "raise" or "wait" (for a
signal). Prints the phase once it has begun, and whether an earlier run had decided.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax
import pytest

import jaxoverlap
from jaxoverlap.search.evaluate import Evaluator
from jaxoverlap.start import contender
from tests.start.case import arguments, make_mesh, make_step, slow

PHASES = "search", "compile", "trials", "decided"
LONG_S = 600  # that the search and the trials take, if nothing ends them
BEGUN = set[str]()


class OwnError(Exception):
    """What a run raises that ends by an exception."""


def slowly(patch: pytest.MonkeyPatch, owner: Any, name: str, seconds: float, pieces: int) -> None:
    """Have a function take longer, in pieces of its own; note that it has begun."""
    real = getattr(owner, name)

    def slower(*args: Any, **kwargs: Any) -> Any:
        BEGUN.add(name)
        for _ in range(pieces - 1):
            real(*args, **kwargs)
            time.sleep(seconds)
        return real(*args, **kwargs)

    patch.setattr(owner, name, slower)


def phase_of(step: Any) -> str:
    """Return the phase that a step is in."""
    names = {thread.name for thread in threading.enumerate()}
    if step.trials and step.trials[0].taken:
        return "decided"
    if "jaxoverlap compiles" in names:
        return "compile"
    if "__call__" in BEGUN:
        return "search"
    return "trials" if step.trials and step.trials[0].trial_steps else ""


def main(folder: Path, phase: str, how: str) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells ignore it in the background
    jax.config.update("jax_num_cpu_devices", 8)
    patch = pytest.MonkeyPatch()
    if phase == "search":
        slowly(patch, Evaluator, "__call__", 0.2, LONG_S)
    if phase == "compile":
        slowly(patch, contender, "_compiled", 2.0, 2)
    slow(patch, {"plain": 0.05 if phase != "trials" else 1.0})
    mesh = make_mesh()
    cluster = "h100-sxm:1x8" if phase == "search" else None  # whose prices there are
    step = jaxoverlap.overlap(make_step(mesh), start="plain", cache=folder, cluster=cluster)
    state, x = arguments(mesh)
    end = time.monotonic() + LONG_S
    while time.monotonic() < end:
        state, loss = step(state, x)
        float(loss)
        if phase_of(step) == phase:
            print(phase, "as before" if step.trials[0].cached else "", flush=True)
            if how == "return":
                return
            if how == "raise":
                raise OwnError("its own")
    raise OwnError(f"nothing ended the run in {LONG_S} s")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
