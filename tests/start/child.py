"""Run one of several processes that train together, for test_processes.py.

python -m tests.start.child RANK PROCESSES PORT FOLDER SCENARIO...

Each scenario prints a line of JSON.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import msgspec
import pytest

import jaxoverlap
from jaxoverlap import DisagreementError
from jaxoverlap._jax import jits
from jaxoverlap.start import at_once, contender
from jaxoverlap.start.at_once import AtOnce
from jaxoverlap.start.record import PLAIN
from tests.start.case import (
    arguments,
    make_mesh,
    make_step,
    offer,
    replace_run,
    slow,
    train,
    trials_of,
)

AXES = (("data", 2), ("model", 2))


def trained(folder: Path, name: str = "", **options: Any) -> dict[str, Any]:
    trials, losses = trials_of(folder / (name or "cache"), make_mesh(dict(AXES)), **options)
    return {"trials": msgspec.to_builtins(trials), "losses": losses}


def offered(patch: pytest.MonkeyPatch, rank: int, names: tuple[str, ...]) -> None:
    """Have process 0 offer programs; no other may search."""
    if rank == 0:
        offer(patch, names, AXES)
    else:
        patch.setattr(at_once, "offers_of", lambda *_: pytest.fail("process 0 searches"))


def slower_elsewhere(folder: Path, rank: int, patch: pytest.MonkeyPatch) -> Any:
    """One program is slow in the last process alone, the other one in all."""
    offered(patch, rank, ("one_way", "two_way"))
    last = rank == jax.process_count() - 1
    slow(patch, {PLAIN: 0.04, "one_way": 0.08 if last else 0.0, "two_way": 0.01})
    return trained(folder)


def again(folder: Path, rank: int, patch: pytest.MonkeyPatch) -> Any:
    """Process 0 alone finds what was decided."""
    patch.setattr(at_once, "offers_of", lambda *_: pytest.fail("it decides again"))
    cache, mesh = folder / ("cache" if rank == 0 else "none"), make_mesh(dict(AXES))
    step = jaxoverlap.overlap(make_step(mesh), start="plain", cache=cache)
    _, losses = train(step, *arguments(mesh), lambda number: number == 5)
    return {"trials": msgspec.to_builtins(step.trials[0]), "losses": losses}


def fails_in_one(folder: Path, rank: int, patch: pytest.MonkeyPatch) -> Any:
    """A program does not compile in the last process."""
    offered(patch, rank, ("one_way", "two_way"))
    real = contender._compiled

    def compiled(call: Any, program: Any) -> Any:
        if rank == jax.process_count() - 1 and "two_way" in str(program.plan.edits):
            raise jax.errors.JaxRuntimeError("XLA gives up here")
        return real(call, program)

    patch.setattr(contender, "_compiled", compiled)
    return trained(folder, "fails")


def another_in_one(folder: Path, rank: int, patch: pytest.MonkeyPatch) -> Any:
    """A program is another one in the last process."""
    offered(patch, rank, ("one_way", "two_way"))
    real = contender.contender

    def made(call: Any, options: Any, offer: Any, *args: Any) -> Any:
        one = real(call, options, offer, *args)
        differs = offer.name == "one_way" and rank == jax.process_count() - 1
        return dataclasses.replace(one, digest="another") if differs else one

    patch.setattr(contender, "contender", made)
    return trained(folder, "another")


def late_in_one(folder: Path, rank: int, patch: pytest.MonkeyPatch) -> Any:
    """The last process stops for a while in its first trial steps."""
    offered(patch, rank, ("two_way",))
    slow(patch, {PLAIN: 0.03})
    late = [rank == jax.process_count() - 1]

    def once(name: str, run: Any) -> Any:
        def call(flat: Any) -> Any:
            if late and late.pop():
                time.sleep(3)
            return run(flat)

        return call

    replace_run(patch, once)
    return trained(folder, "late")


def another_step(folder: Path, rank: int, patch: pytest.MonkeyPatch) -> Any:
    """The last process has another step; it ends before the others run theirs."""
    rate = 0.1 + (rank == jax.process_count() - 1)
    mesh = make_mesh(dict(AXES))
    step = jaxoverlap.overlap(make_step(mesh, rate), start="plain", cache=folder / "never")
    args = arguments(mesh)
    if rank != jax.process_count() - 1:
        AtOnce(jits.infer(step._jitted, args, {}), step._options, step._start)
        return "none"
    try:
        step(*args)
    except DisagreementError as error:
        return str(error)


def search_fails(folder: Path, rank: int, patch: pytest.MonkeyPatch) -> Any:
    """Process 0 finds nothing."""
    if rank == 0:
        patch.setattr(at_once, "offers_of", lambda *_: 1 / 0)
    return trained(folder, "search")


SCENARIOS: tuple[Callable[[Path, int, pytest.MonkeyPatch], Any], ...] = (
    *(slower_elsewhere, again, fails_in_one, another_in_one, late_in_one, search_fails),
    another_step,
)


def main(rank: int, processes: int, port: str, folder: Path, names: list[str]) -> None:
    jax.config.update("jax_num_cpu_devices", 4 // processes)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", processes, rank)
    scenarios = {scenario.__name__: scenario for scenario in SCENARIOS}
    for name in names:
        with pytest.MonkeyPatch.context() as patch:
            result = scenarios[name](folder, rank, patch)
        print(json.dumps({"scenario": name, "result": result, "seconds": 0.0}), flush=True)


if __name__ == "__main__":
    rank, processes, port, folder, *names = sys.argv[1:]
    main(int(rank), int(processes), port, Path(folder), names)
