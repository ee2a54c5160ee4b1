"""Does a profile say what is exposed? On four hosts: against a step's time less its compute alone.

python -m benchmarks.lab.races.profiled [--rate 1000] [--case fsdp]...
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import jax
import typer
from jax.sharding import PartitionSpec as P

import jaxoverlap
from benchmarks.lab import Host, Lab, Network
from benchmarks.lab.__main__ import BLOCKS, SMALL
from benchmarks.lab.races.blocks import AXIS, Blocks, Size
from benchmarks.lab.timing import interleaved, timed
from jaxoverlap._util.text import table

RUNS = 5
Row = dict[str, Any]


def profiled(host: Host, *, way: str, size: dict[str, int], runs: int) -> Row:
    """Profile a stack of blocks, and time it and its compute alone; every host profiles its own.

    Returns:
        What this host saw: "rows" as `interleaved` has them; of the profile of all hosts (which
        host 0 reads) the seconds, and the collectives that only the schedule or the profile has.
    """
    host.start_jax()
    blocks = Blocks(host.mesh(**{AXIS: host.count}), way, Size(**size))
    args, step = blocks.arguments(), blocks.step()
    alone, own = blocks.compute()
    mapped = jax.shard_map(
        lambda x: jax.lax.psum(x, AXIS), mesh=blocks.mesh, in_specs=P(AXIS), out_specs=P()
    )
    add = jax.jit(mapped)
    barrier = jax.device_put(jax.numpy.ones(host.count), blocks.at(AXIS))
    rows = interleaved(
        {
            "compute alone": lambda: jax.block_until_ready(alone(*own)),
            "step": lambda: jax.block_until_ready(step(*args)),
        },
        runs=runs,
        barrier=lambda: jax.block_until_ready(add(barrier)),
        sent_bytes=host.sent_bytes,
    )
    folder = Path(host.folder) / f"profile-{way}"
    profile = jaxoverlap.profile(step, *args, steps=runs, folder=folder)
    scheduled = {c.name for c in jaxoverlap.audit(step.lower(*args).compile()).collectives}
    seen = {run.collective.name for run in profile.collectives}
    names = ("step_s", "compute_s", "communication_s", "exposed_s", "idle_s")
    return {
        "rows": rows,
        "devices": len(profile.devices),
        "missed": sorted(scheduled ^ seen),
        "text": str(profile),
        **{name: getattr(profile.sums, name) for name in names},
    }


def main(
    hosts: Annotated[int, typer.Option(help="Hosts, each with one CPU device.")] = 4,
    rate: Annotated[float, typer.Option(help="Of the links, in Mbit/s.")] = 1000.0,
    case: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(BLOCKS)}.")] = None,
    runs: Annotated[int, typer.Option(help="Of the step, profiled and not.")] = RUNS,
    smoke: Annotated[bool, typer.Option("--smoke", help="Two hosts, small.")] = False,
) -> None:
    """Profile on hosts of this machine, and print a table."""
    lines = []
    with Lab(Network(hosts=2 if smoke else hosts, rate_mbit=rate)) as lab:
        for way in case or BLOCKS:
            size = SMALL if smoke else BLOCKS[way]
            answers = lab.run(f"{__spec__.name}:profiled", way=way, size=size, runs=runs)
            lines.append(_row(way, answers))
            print(answers[0]["text"], end="\n\n")
    columns = ("case", "step ms", "profiled ms", "compute alone ms", "difference ms", "exposed ms")
    columns += ("exposed / difference", "collectives missed")
    title = f"exposed by profile against step - compute alone, {rate:g} Mbit/s"
    print(table(title, columns, lines, right=columns[1:]))


def _row(way: str, answers: list[Row]) -> tuple[str, ...]:
    times, first = timed([answer["rows"] for answer in answers]), answers[0]
    assert first["devices"] == len(answers)
    step_s, alone_s = first["step_s"], times["compute alone"].median_s
    seconds = (times["step"].median_s, step_s, alone_s, step_s - alone_s, first["exposed_s"])
    missed = max(len(answer["missed"]) for answer in answers)
    ratio = first["exposed_s"] / (step_s - alone_s)
    return (way, *(f"{s * 1e3:.1f}" for s in seconds), f"{ratio:.2f}", str(missed))


if __name__ == "__main__":
    typer.run(main)
