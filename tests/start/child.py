"""Run one of several processes that train together, for test_processes.py.

python -m tests.start.child RANK PROCESSES PORT FOLDER SCENARIO...

Each scenario prints a line of JSON.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import msgspec
import pytest

import jaxoverlap
from benchmarks.lab.hosts import Host
from jaxoverlap import DisagreementError
from jaxoverlap._jax import jits
from jaxoverlap.start import at_once, candidates, contender
from jaxoverlap.start.at_once import AtOnce
from jaxoverlap.start.record import PLAIN
from tests.start.case import (
    VARIANTS,
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


def fastest(case: int, folder: Path, rank: int, patch: pytest.MonkeyPatch) -> Any:
    """One program is the fastest: each other one is slow, in all processes or in one alone.

    By seconds that stand out: by gloo a small all-reduce may take 40 ms (TCP's delayed answers).
    """
    rng, last = random.Random(case), jax.process_count() - 1
    names = VARIANTS[: 1 + case % 3]
    wanted = [PLAIN, *names][case % (len(names) + 1)]
    offered(patch, rank, names)
    seconds = dict.fromkeys([PLAIN, *names], 0.0)
    for name in [name for name in seconds if name != wanted]:
        slowed_s, slow_rank = rng.uniform(0.15, 0.25), rng.choice([None, 0, last])
        if slow_rank in (None, rank):
            seconds[name] = slowed_s
    slow(patch, seconds)
    return trained(folder, f"fastest {case}") | {"wanted": wanted}


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


def dropped_in_one(folder: Path, rank: int, patch: pytest.MonkeyPatch) -> Any:
    """In the last process a program hangs at compile, one is too large, one has other results."""
    offered(patch, rank, VARIANTS)
    if rank == jax.process_count() - 1:
        real, made = contender._compiled, contender.contender

        def compiled(call: Any, program: Any) -> Any:
            if "one_way" in str(program.plan.edits):
                time.sleep(20)
            return real(call, program)

        def other(call: Any, options: Any, offer: Any, room: float) -> Any:
            with pytest.MonkeyPatch.context() as patch:
                if offer.name == "one_way":
                    patch.setattr(contender, "COMPILE_WITHIN_S", 0.5)
                if offer.name == "direct":
                    patch.setattr(contender.Results, "differ", lambda *_: "its results differ")
                return made(call, options, offer, 1000 if offer.name == "two_way" else room)

        patch.setattr(contender, "_compiled", compiled)
        patch.setattr(contender, "contender", other)
    return trained(folder, "dropped")


def tuned(folder: Path, rank: int, patch: pytest.MonkeyPatch) -> Any:
    """The candidates are those of a tuning, by process 0."""
    patch.setattr(candidates, "_TUNED", 2)
    if rank:
        patch.setattr(at_once, "tuned_offers_of", lambda *_: pytest.fail("process 0 searches"))
    tuning = jaxoverlap.Tuning(show=False, cache=str(folder))
    return trained(folder, "tuned", tune=tuning)


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


CASES = 12
FASTEST = {f"fastest_{case}": functools.partial(fastest, case) for case in range(CASES)}
SCENARIOS: dict[str, Callable[[Path, int, pytest.MonkeyPatch], Any]] = {
    **{
        scenario.__name__: scenario
        for scenario in (
            *(slower_elsewhere, again, fails_in_one, another_in_one, dropped_in_one, late_in_one),
            *(search_fails, tuned),
        )
    },
    **FASTEST,
    "another_step": another_step,  # the last, as one process ends by it
}


def results_of(names: list[str], folder: Path, rank: int) -> Iterator[dict[str, Any]]:
    """Run scenarios in this process; yield a row for each."""
    for name in names:
        began = time.monotonic()
        with pytest.MonkeyPatch.context() as patch:
            result = SCENARIOS[name](folder, rank, patch)
        yield {"scenario": name, "result": result, "seconds": time.monotonic() - began}


def on_host(host: Host, *, names: list[str]) -> list[dict[str, Any]]:
    """Run scenarios on a host of the lab."""
    host.start_jax(devices=4 // host.count)
    return list(results_of(names, Path(host.folder), host.rank))


def main(rank: int, processes: int, port: str, folder: Path, names: list[str]) -> None:
    jax.config.update("jax_num_cpu_devices", 4 // processes)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", processes, rank)
    for row in results_of(names, folder, rank):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    rank, processes, port, folder, *names = sys.argv[1:]
    main(int(rank), int(processes), port, Path(folder), names)
