"""A process's part in the race: measure the wire, compile, check numbers, time in turn."""

from __future__ import annotations

import datetime
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.gpu.candidates import PLAIN, Compiled, compiled
from benchmarks.gpu.child import Process
from benchmarks.gpu.steps import STEPS, Built
from benchmarks.lab.timing import interleaved
from jaxoverlap.calibrate import calibrate, links
from jaxoverlap.cost.find import cost_model
from jaxoverlap.cost.model import CostModel
from jaxoverlap.hardware.cluster import Cluster, chips

REHEARSED = links.Sizes(
    (64, 512, 4096, 32768), (128, 128), 1 << 14, ("f32",), rounds=1, target_s=1e-3
)
_REHEARSED_AS = "h100-sxm"  # whose tables CPU devices scale, in a rehearsal


def race(
    here: Process,
    *,
    jobs: dict[str, list[str]],
    dtype: str,
    hosts: int,
    prices: str,
    rounds: int,
    until: float,
    numbers: list[str],
) -> None:
    """Race candidates of steps; send what is being done, and what was found.

    Args:
        here: this process.
        jobs: the candidates to race, by step; plain is among them.
        dtype: of matmuls.
        hosts: that the links are told apart by.
        prices: the file that process 0 writes the measured prices to, if it is not there.
        rounds: how often each candidate runs.
        until: the `time.time()` at which no further step begins.
        numbers: the steps whose numbers are compared, in float32.
    """
    here.send("device", **about())
    path = Path(prices)
    if not here.all(path.exists()):
        here.send("doing", what="measuring the wire")
        began = time.perf_counter()
        measure(here, path, hosts)
        here.send("wire", seconds=time.perf_counter() - began)
    cost = cost_model(table=path)
    longest = 0.0
    for step, candidates in jobs.items():
        began = time.time()
        if not here.all(began + longest < until):
            here.send("late", step=step)
            continue
        built, made = _race_step(here, step, candidates, dtype, path, cost, rounds)
        if step in numbers and dtype == "float32":
            _compare(here, step, list(made), built, lambda name, made=made: made[name])
        elif step in numbers:
            del made, built
            here.send("doing", step=step, what="building in float32")
            exact = build(step, "float32")
            _compare(here, step, candidates, exact, lambda c, b=exact: compiled(c, b, path, cost))
        longest = max(longest, time.time() - began)


def about() -> dict[str, Any]:
    """Return what rows say of the devices."""
    device = jax.devices()[0]
    platform = device.client.platform_version.splitlines()[0]
    counts = dict(devices=len(jax.devices()), processes=jax.process_count())
    return dict(device=device.device_kind, platform=platform, **counts)


def measure(here: Process, path: Path, hosts: int) -> None:
    """Measure the wire's prices, and write them in process 0, before any process reads them."""
    on_cpu = jax.devices()[0].platform == "cpu"
    kind = jax.devices()[0].device_kind
    known = (c for c in chips() if (c.name == _REHEARSED_AS if on_cpu else c.device_name == kind))
    chip = next(known, None)
    if chip is None:
        raise ValueError(f"no cost table has {kind}: expected a chip of jaxoverlap's tables")
    one = Cluster(chip, 1, 1, chip.nvlink, chip.network)
    tables = links.tables_with_links(
        cost_model(one).tables,
        datetime.date.today().isoformat(),
        lambda what: here.send("doing", what=what),
        hosts=hosts,
        loops=cost_model(one, loops=True).tables,
        sizes=REHEARSED if on_cpu else links.USUAL,
    )
    if here.rank == 0:
        calibrate.write(tables, path)
    here.barrier()


def build(step: str, dtype: str) -> Built:
    """Return a step at its size for GPUs, in float32 a narrower one; on CPU devices a small one."""
    make, size, small = STEPS[step]
    if jax.devices()[0].platform == "cpu":
        size = small
    elif dtype == "float32":
        size = size.narrow()
    # float32's matmuls are exact ones here: TF32 has three digits.
    jax.config.update("jax_default_matmul_precision", "highest" if dtype == "float32" else None)
    return make(size, dtype)


def _race_step(
    here: Process,
    step: str,
    candidates: list[str],
    dtype: str,
    prices: Path,
    cost: CostModel,
    rounds: int,
) -> tuple[Built, dict[str, Compiled]]:
    here.send("doing", step=step, what="building")
    built = build(step, dtype)
    made = _compiled(here, step, candidates, built, prices, cost)

    def contender(name: str) -> Any:
        def run() -> None:
            jax.block_until_ready(made[name].run(*built.args))

        return run

    for name in made:  # one by one first, so that it is known which one hangs
        here.send("doing", step=step, candidate=name, what="running")
        contender(name)()
    turns = itertools.cycle(made)

    def barrier() -> None:
        here.barrier()
        here.send("doing", step=step, candidate=next(turns), what="racing")

    rows = interleaved(
        {name: contender(name) for name in made},
        runs=rounds,
        barrier=barrier,
        sent_bytes=lambda: 0,
    )
    here.send("raced", step=step, rows=rows)
    return built, made


def _compiled(
    here: Process, step: str, candidates: list[str], built: Built, prices: Path, cost: CostModel
) -> dict[str, Compiled]:
    """Compile candidates; send why one is not, in all processes if in one."""
    made = {}
    for name in candidates:
        here.send("doing", step=step, candidate=name, what="compiling")
        began, why = time.perf_counter(), ""
        try:
            made[name] = compiled(name, built, prices, cost)
        except Exception as error:
            why = _first_line(error)
        if here.all(not why):
            found = dict(simulated=made[name].simulated, taken=made[name].taken)
            seconds = time.perf_counter() - began
            here.send("compiled", step=step, candidate=name, compile_s=seconds, **found)
        else:
            made.pop(name, None)
            here.send("refused", step=step, candidate=name, why=why)
    return made


def _compare(
    here: Process,
    step: str,
    candidates: list[str],
    built: Built,
    compile_one: Callable[[str], Compiled],
) -> None:
    """Send how far each candidate's results are from plain's, of a step in float32."""
    plain = None
    for name in (PLAIN, *(c for c in candidates if c != PLAIN)):
        here.send("doing", step=step, candidate=name, what="comparing numbers")
        out, why = None, ""
        try:
            out = _on_host(compile_one(name).run(*built.args))
        except Exception as error:
            why = _first_line(error)
        if not here.all(out is not None) or out is None:
            here.send("incomparable", step=step, candidate=name, why=why)
            if name == PLAIN:
                return
            continue
        plain = out if plain is None else plain
        here.send("compared", step=step, candidate=name, difference=difference(out, plain))


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}"


def _on_host(tree: Any) -> list[np.ndarray]:
    """Copy this process's first part of each array."""
    return [np.asarray(leaf.addressable_data(0), np.float64) for leaf in jax.tree.leaves(tree)]


def difference(ours: list[np.ndarray], plain: list[np.ndarray]) -> float:
    """Return |ours - plain| / |plain| of the worst array, by norm; inf if a value is not finite."""
    worst = 0.0
    for one, other in zip(ours, plain, strict=True):
        off = float(np.linalg.norm(one - other))
        worst = max(worst, off / float(np.linalg.norm(other)) if off else 0.0)
    return worst if np.isfinite(worst) else float("inf")
