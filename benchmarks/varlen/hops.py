"""Price a ring's hops beside an unsharded kernel, seconds a pair of query and key.

    python -m benchmarks.varlen.hops --out benchmarks/results/varlen_hops.jsonl

One sequence fills a ring; its attention, forward and backward, is compiled for a pod and its
schedule simulated. The simulator counts a kernel's slots in full, as it does not know the lengths:
a kernel without a causal mask is of one chunk of two by both, so it is counted half. With it is the
price of the kernel that has the sequence on one GPU, over as many GPUs.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import typer
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.table import Table

import jaxoverlap
from benchmarks.frame import MaybeOut, add_rows
from jaxoverlap import parse_cluster, pod_mesh
from jaxoverlap.cost.find import cost_model
from jaxoverlap.hardware.pods import compiler_options
from jaxoverlap.train import varlen
from jaxoverlap.train.varlen.remap import Moves
from jaxoverlap.train.varlen.rings import bounds_of

HEADS, HEAD = 32, 128
POD, SIZES = "h100-sxm:1x8", ((2, 8192), (4, 4096), (8, 4096), (8, 8192), (8, 16384))


def compiled(pod: str, size: int, width: int, kv_heads: int, ringed: int) -> str:
    """Return the HLO of attention of one ring with its gradients."""
    mesh = pod_mesh(pod, {"node": 1, "device": size})
    costs = varlen.attention_costs(pod, heads=HEADS, kv_heads=kv_heads, head_size=HEAD)
    bounds = bounds_of({size: width}, width, 0, ringed=ringed)

    def like(shape: tuple[int, ...], spec: P, dtype: Any = jnp.int32) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    rows, each = P("node", "device"), P(("node", "device"))
    q, k = (like((1, size * width, h, HEAD), rows, jnp.bfloat16) for h in (HEADS, kv_heads))
    where = like((size, width), P())
    moves: Any = Moves(like((size, size, 0), each), like((size, width), each))
    arrays = varlen.PlanArrays(where, where, moves, moves)

    def both(q: Any, k: Any, v: Any, arrays: Any, to_out: Any) -> Any:
        how: Any = dict(mesh=mesh, bounds=bounds, costs=replace(costs, rails=1))
        out, back = jax.vjp(lambda q, k, v: varlen.attention(q, k, v, arrays, **how), q, k, v)
        return out, *back(to_out)

    options = compiler_options() | jaxoverlap.compiler_options(mesh)
    done = jax.jit(both).lower(q, k, k, arrays, q).compile(options)
    return str(done.as_text())


def measured(size: int, width: int, kv_heads: int, ringed: int) -> dict[str, Any]:
    pod = f"{POD.partition(':')[0]}:1x{size}"
    simulation = jaxoverlap.simulate(
        compiled(pod, size, width, kv_heads, ringed), parse_cluster(pod)
    )
    kernels_s = others_s = 0.0
    for event in simulation.events:
        attention, seconds = event.work.attention, (event.end_s - event.start_s) * event.runs
        if event.collective is None and event.kind != "wait":
            kernels_s += (
                bool(attention) * seconds * (0.5 if attention and not attention.causal else 1)
            )
            others_s += (not attention) * seconds
    model, length = cost_model(pod), size * width
    alone_s = 3.5 * model.attention_s(length, length, HEADS, HEAD, causal=True) / size
    total_s = kernels_s + others_s + simulation.exposed_s
    return dict(
        pod=pod, width=width, kv_heads=kv_heads, hop="fused" if ringed else "matmuls",
        kernels_ms=kernels_s * 1e3, others_ms=others_s * 1e3,
        exposed_ms=simulation.exposed_s * 1e3, unsharded_ms=alone_s * 1e3, ratio=total_s / alone_s,
    )  # fmt: skip


def main(out: MaybeOut = None) -> None:
    """Compile and simulate, and print a table."""
    columns = ("kernels_ms", "others_ms", "exposed_ms", "unsharded_ms", "ratio")
    table = Table("pod", "tokens a GPU", "kv heads", "hop", *columns)
    for (size, width), kv_heads, ringed in itertools.product(SIZES, (HEADS, 8), (8, 0)):
        row = measured(size, width, kv_heads, ringed)
        add_rows(out, row)
        cells = (f"{row[name]:.2f}" for name in columns)
        table.add_row(row["pod"], f"{width}", f"{kv_heads}", row["hop"], *cells)
    Console(width=110).print(table)


if __name__ == "__main__":
    typer.run(main)
