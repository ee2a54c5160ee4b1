"""Look for deadlocks: many steps on 2 x 2 processes, NVLink's collectives on a stream of their own.

With and without CUDA graphs; and what the others do when a process dies.
"""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.frame import Row
from benchmarks.gpu.child import Process
from benchmarks.gpu.jobs import Job
from benchmarks.gpu.wires import WIRES

STEPS, REHEARSED_STEPS = 200, 4
COLUMNS = ("case", "steps", "median ms", "slowest", "streams", "how it ended")
NUMBERS = COLUMNS[1:4]
GRAPHS, NO_GRAPHS, DEATH = "CUDA graphs", "no CUDA graphs", "a process dies"
_WIRE = WIRES["copies in pairs, sockets between"]
_FUNCTION = "benchmarks.gpu.hang:steps"


def jobs(*, rehearse: bool) -> Iterator[Job]:
    """Yield the jobs; a rehearsal takes few steps."""
    count = REHEARSED_STEPS if rehearse else STEPS
    no_graphs = {"XLA_FLAGS": "--xla_gpu_enable_command_buffer="}
    for name, environment in ((GRAPHS, {}), (NO_GRAPHS, no_graphs)):
        arguments = dict(name=name, count=count, dies_at=-1)
        yield Job("deadlocks", name, _FUNCTION, arguments, _WIRE, environment=environment)
    arguments = dict(name=DEATH, count=count, dies_at=count // 2)
    patience = dict(heartbeat_s=10.0, mourn_s=5.0 if rehearse else 60.0)
    yield Job("deadlocks", DEATH, _FUNCTION, arguments, _WIRE, options=patience)


def steps(here: Process, *, name: str, count: int, dies_at: int) -> None:
    """Take steps of the race's step "both", overlapped; one process kills itself, if it is to."""
    import jax

    import jaxoverlap
    from benchmarks.gpu.race_child import about, build
    from jaxoverlap.hardware.cluster import Cluster, chips

    here.send("device", **about())
    here.send("doing", row=name, what="compiling")
    kind = jax.devices()[0].device_kind
    chip = next((c for c in chips() if c.device_name == kind), None)
    on_cpu = jax.devices()[0].platform == "cpu"
    built = build("both", "float32" if on_cpu else "bfloat16")
    where: dict[str, Any] = {}
    if chip is not None:  # two hosts of two, whatever this machine's boot id says
        where = dict(cluster=Cluster(chip, 2, 2, chip.nvlink, chip.network, 2))
    step: Any = jaxoverlap.overlap(built.step, never_slower=False, **where)
    compiled = step.lower(*built.args).compile()
    streams = "collective_communication_domain" in (compiled.as_text() or "")
    here.send("doing", row=name, what=f"taking {count} steps")
    seconds, state, loss = [], built.args[:-1], jax.numpy.zeros(())
    for number in range(count):
        if number == dies_at and here.rank == here.count - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        began = time.perf_counter()
        state, loss = compiled(*state, built.args[-1])
        jax.block_until_ready(state)
        seconds.append(time.perf_counter() - began)
        if number % 20 == 19:
            here.send("doing", row=name, what=f"{number + 1} steps")
    last = float(loss.addressable_data(0))
    here.send("row", row=name, seconds=seconds, loss=last, nvlink_stream=streams)


def table(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Return the cells of each row under COLUMNS."""
    cells = []
    for row in rows:
        if seconds := row.get("seconds"):
            times = (f"{s * 1e3:.1f}" for s in (statistics.median(seconds), max(seconds)))
            streams = "NVLink's own" if row["nvlink_stream"] else "one"
            cells.append((row["row"], str(len(seconds)), *times, streams, "all steps done"))
        else:
            cells.append((row["row"], "", "", "", "", row["error"].replace("|", "/")))
    return cells


def shown(rows: Sequence[Row]) -> Any:
    """Return the columns, the numbers among them, and the cells."""
    return COLUMNS, NUMBERS, table(rows)
