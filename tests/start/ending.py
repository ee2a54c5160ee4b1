"""Train with a step that starts as it is, until a phase begins: a run that test_endings.py ends.

python -m tests.start.ending FOLDER PHASE HOW

PHASE is "first" (the first step, which is being traced), "search", "tuning" (the search of `tune=`,
which compiles in children), "compile", "trials", "decided", or "without" (a run without the
library); HOW is "return", "raise" or "wait" (for a signal). Prints the phase once it has begun, and
whether an earlier run had decided.
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
from jax import lax

import jaxoverlap
from jaxoverlap.search.evaluate import Evaluator
from jaxoverlap.start import contender
from jaxoverlap.step import trial
from tests.start.case import arguments, make_mesh, make_step, slow

PHASES = "first", "search", "tuning", "compile", "trials", "decided", "without"
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
    if "_in_child" in BEGUN:
        return "tuning"
    return "trials" if step.trials and step.trials[0].trial_steps else ""


def end(how: str) -> None:
    """End the run from within; wait for a signal otherwise."""
    if how == "return":
        sys.exit()
    if how == "raise":
        raise OwnError("its own")


def train(step: Any, phase: str, how: str) -> None:
    """Train until a phase has begun, say so, and end; "first" is said by the step itself."""
    state, x = arguments(make_mesh())
    stop = time.monotonic() + LONG_S
    while time.monotonic() < stop:
        state, loss = step(state, x)
        float(loss)
        if phase == "without" or phase_of(step) == phase:
            cached = phase != "without" and step.trials[0].cached
            print(phase, "as before" if cached else "", flush=True)
            end(how)
    raise OwnError(f"nothing ended the run in {LONG_S} s")


def main(folder: Path, phase: str, how: str) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells ignore it in the background
    jax.config.update("jax_num_cpu_devices", 8)
    patch = pytest.MonkeyPatch()
    if phase == "first":

        def traced(x: jax.Array, sharding: Any) -> jax.Array:
            print(phase, flush=True)
            end(how)
            time.sleep(LONG_S)
            return x

        patch.setattr(lax, "with_sharding_constraint", traced)
    if phase == "search":
        slowly(patch, Evaluator, "__call__", 0.2, LONG_S)
    if phase == "tuning":
        slowly(patch, trial, "_in_child", 0.0, 1)
    if phase == "compile":
        slowly(patch, contender, "_compiled", 2.0, 2)
    slow(patch, {"plain": 0.05 if phase != "trials" else 1.0})
    step = make_step(make_mesh())
    if phase != "without":
        priced = {"cluster": "h100-sxm:1x8"} if phase in ("search", "tuning") else {}
        tunes = {"tune": jaxoverlap.Tuning(cache=str(folder), show=False)}
        options = priced | (tunes if phase == "tuning" else {})
        step = jaxoverlap.overlap(step, start="plain", cache=folder, **options)
    train(step, phase, how)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
