"""Estimate the GPU time of a zeroth-order step's random directions, and steps with it.

    python -m benchmarks.zeroth_order.random_numbers benchmarks/results/zeroth_order_pods.jsonl

`simulate()` prices kernels by their bytes and matmuls, so the arithmetic of random numbers is free
there. Here the instructions of one element are counted in the kernel that XLA:GPU makes of
`directions.direction`, and divided by the GPU's rate of integer instructions. Nothing ran on a GPU.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import typer
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.table import Table

from benchmarks.frame import read_rows
from benchmarks.zeroth_order import opt, steps
from jaxoverlap.hardware.pods import compiler_options
from jaxoverlap.train.zeroth_order.directions import Draw, direction

ROWS, COLUMNS = 8, 4096
# Integer instructions a second: 64 an SM and cycle, of 108 SMs at 1.41 GHz and 132 at 1.98 (the
# A100's and H100's whitepapers have 19.5 and 33.5 TOPS, which count a multiply-add as two).
INTEGER_RATE = {"a100-sxm-80": 9.75e12, "h100-sxm": 16.75e12}
_INTEGER = {"add", "subtract", "multiply", "xor", "and", "shift-left", "shift-right-logical"}
_LINE = re.compile(r"= ([usf]\d+)\[([\d,]*)\][^ ]* ([a-z\-]+)\(")


def instructions() -> dict[str, float]:
    """Return the instructions of one element of a direction, {"integer", "float"}.

    A rotation is two shifts and an `or` in XLA's program and one instruction (SHF) on the GPU.
    """
    sharding = NamedSharding(steps.mesh_of("a100-sxm-80", 1), P())

    def draw(seed: jax.Array, step: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        return direction(Draw(key, step), 0, (ROWS, COLUMNS))

    arguments = (jax.ShapeDtypeStruct((2,), jnp.uint32, sharding=sharding),
             jax.ShapeDtypeStruct((), jnp.int32, sharding=sharding))  # fmt: skip
    text = (
        jax.jit(draw, out_shardings=sharding)
        .lower(*arguments)
        .compile(compiler_options())
        .as_text()
    )
    assert text is not None
    counts = dict.fromkeys(("integer", "float", "or", "shift"), 0.0)
    for kind, dims, name in _LINE.findall(text):
        size = 1
        for dim in filter(None, dims.split(",")):
            size *= int(dim)
        share = size / (ROWS * COLUMNS)
        if kind.startswith("f"):
            counts["float"] += share if name not in ("parameter", "fusion", "constant") else 0
        elif name == "or":
            counts["or"] += share
        elif name in _INTEGER:
            counts["integer"] += share
    # Two shifts and an or are one rotation: two instructions less for each or.
    return dict(integer=counts["integer"] - counts["or"], float=counts["float"])


def with_random(row: dict[str, Any], integer: float) -> dict[str, float]:
    """Return the seconds of a row's random numbers, and of its step with them.

    A GPU draws every parameter's direction for each of its signs, and once for the update. What a
    step takes beyond the longer one of link and compute stays.
    """
    draws = (2 if row["gpus"] == 1 else 1) + 1
    elements = sum(leaf.size for leaf in jax.tree.leaves(opt.shapes(opt.SIZES[row["model"]])))
    random_s = draws * elements * integer / INTEGER_RATE[row["chip"]]
    link = max(row["link_s"]["from host"], row["link_s"]["to host"])
    computes = row["compute_s"] + row["slowed_s"]
    beyond = row["step_s"] - max(link, computes)
    return dict(random_s=random_s, step_s=beyond + max(link, computes + random_s))


def main(path: Path) -> None:
    """Print the rows with the cost of their random numbers."""
    count = instructions()
    console = Console()
    console.print({name: round(value, 1) for name, value in count.items()}, "an element")
    table = Table(box=None)
    for name in ("model", "GPUs", "uploads", "step s", "random s", "with it", "tokens/s", "of 1"):
        table.add_column(name, justify="right")
    rows = [(r, with_random(r, count["integer"])) for r in read_rows(path)]

    def tokens(row: dict[str, Any], step_s: float) -> float:
        return row["tokens_per_s"] * row["step_s"] / step_s

    alone = {(r["model"], r["chip"]): tokens(r, p["step_s"]) for r, p in rows if r["gpus"] == 1}
    for r, costs in rows:
        found = tokens(r, costs["step_s"])
        table.add_row(
            r["model"],
            f"{r['gpus']} {r['chip'].split('-')[0]}",
            "slices" if r["sliced"] and r["gpus"] > 1 else "blocks",
            f"{r['step_s']:.2f}",
            f"{costs['random_s']:.2f}",
            f"{costs['step_s']:.2f}",
            f"{found:.0f}",
            f"{found / alone[r['model'], r['chip']]:.2f}",
        )
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
