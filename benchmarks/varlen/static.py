"""Compare what batches take in the compiled programs with ragged sizes, on batches held out.

    python -m benchmarks.varlen.static --lengths FOLDER
    python -m benchmarks.varlen.static --lengths FOLDER --cluster C --nodes 4 --tokens 8192

Programs are fitted on batches of the first half of a list, and batches of the second half of every
list are planned for them. The ratio is that of the sums of a layer's seconds: at the static sizes
of the program that runs, and at sizes as each batch is (`partition.ragged_seconds`).
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.frame import MaybeOut, add_rows
from benchmarks.varlen.partition import ragged_seconds
from benchmarks.varlen.table import CLUSTERS, batches, first, setup_of
from jaxoverlap.train.varlen import Planner

FITTED = 16  # batches that programs are fitted on


def main(
    lengths: Annotated[Path, typer.Option(help="Folder of lists.")],
    cluster: list[str] | None = None,
    nodes: int = 2,
    tokens: int = 4096,
    count: Annotated[int, typer.Option(help="Batches held out of each list.")] = 120,
    out: MaybeOut = None,
) -> None:
    """Fit on one half of each list, plan the other halves, and print a table."""
    known = {p.stem: np.loadtxt(p, dtype=int) for p in sorted(lengths.glob("*.txt"))}
    columns = ("static/ragged", "worst", "programs", "used", "slots/capacity")
    table = Table("cluster", "fitted on", "batches of", *columns)
    for name in cluster or CLUSTERS:
        setup = setup_of(name, nodes, tokens)
        total = nodes * 8 * tokens
        held = {n: _held(x[len(x) // 2 :], total, count) for n, x in known.items()}
        planner = Planner(setup.costs, setup.nodes, capacity=setup.capacity)
        ragged_s = partial(
            ragged_seconds, nodes=planner.nodes, costs=planner.costs, capacity=planner.capacity
        )
        ragged = {n: np.array([ragged_s(x) for x in b]) for n, b in held.items()}
        for fitted, half in known.items():
            planner.fit(first(half[: len(half) // 2], total, FITTED, seed=0))
            for tried, bounds_s in ragged.items():
                plans = [planner(x) for x in held[tried]]
                static = np.array([plan.layer_seconds for plan in plans])
                row = dict(
                    cluster=name, nodes=nodes, tokens=tokens, fitted=fitted, batches=tried,
                    ratio=static.sum() / bounds_s.sum(), worst=(static / bounds_s).max(),
                    programs=len(planner.programs), used=len({plan.bounds for plan in plans}),
                    slots=max(b.slots for b in planner.programs) / planner.capacity,
                )  # fmt: skip
                cells = (f"{row[k]:.3f}" for k in ("ratio", "worst"))
                rest = str(row["programs"]), str(row["used"]), f"{row['slots']:.2f}"
                table.add_row(name, fitted, tried, *cells, *rest)
                print(json.dumps(row), flush=True)
                add_rows(out, row)
    Console(width=100).print(table)


def _held(lengths: np.ndarray, total: int, count: int) -> list[np.ndarray]:
    """Return so many batches, shuffled again at the end of the list."""
    made: list[np.ndarray] = []
    seed = 1
    while len(made) < count:
        made += list(batches(lengths, total, seed=seed))
        seed += 1
    return made[:count]


if __name__ == "__main__":
    typer.run(main)
