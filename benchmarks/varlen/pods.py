"""Compile a train step on a batch of real lengths for pods: are hops covered, what does it take.

    python -m benchmarks.varlen.pods --lengths FOLDER --out rows.jsonl
    python -m benchmarks.varlen.pods --lengths FOLDER --pod h100-sxm:2x8 --way planned

One batch, four ways, each compiled by XLA's GPU compiler and its schedule simulated:

- planned: rings of several sizes by the plan, moves for the linear layers where they pay.
- ring: every document split over all GPUs, one ring of all (the same engine).
- packed: the batch as rows of two a pod, causal over whole rows, each split over the GPUs of a node
  in this project's ring attention: what packing computes that no document asked for.
- padded: a row a document, as long as the longest, over all GPUs as data parallelism.

Attention's blocks are plain matmuls in all four. Two layers of a 7B GPT.
"""

from __future__ import annotations

import json
import time
import warnings
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.table import Table

import jaxoverlap
from benchmarks.varlen.table import first
from jaxoverlap import parse_cluster, pod_mesh
from jaxoverlap.hardware.pods import compiler_options
from jaxoverlap.train import varlen
from jaxoverlap.train.varlen.partition import Sharing, prices_of
from models import gpt
from models.long_context import RECIPE, Config
from models.recipe import Recipe
from models.varlen import Documents, make_step

PODS = ("h100-sxm:2x8", "a100-sxm-80:2x8")
WAYS = ("planned", "ring", "packed", "padded")
TOKENS = 4096  # a GPU
HEADS_AT_ONCE = 4


def config_of(**changes: Any) -> Config:
    sizes: dict[str, Any] = dict(
        hidden=4096, heads=32, mlp=16384, layers=2, dtype="bfloat16", data=2, context=8,
        sequence=16 * TOKENS // 2, batch=2, heads_at_once=HEADS_AT_ONCE, step_tokens=16 * TOKENS,
        longest=16 * TOKENS - 1,
    )  # fmt: skip
    return Config(**sizes | changes)


def plan_of(way: str, pod: str, lengths: np.ndarray) -> varlen.BatchPlan:
    costs = varlen.attention_costs(pod, heads=32, head_size=128, hidden=4096, mlp=16384)
    planner = varlen.Planner(costs, pod, capacity=round(1.25 * TOKENS))
    if way == "planned":
        return planner(lengths)
    even = Sharing(lengths, planner.nodes, costs, planner.capacity)
    everything, at = np.arange(len(lengths)), len(planner.nodes.ring_sizes) - 1
    price = prices_of(lengths, planner.nodes, costs)
    even.put(everything, at, np.zeros_like(everything), price)
    return planner.plan_of(even)


def with_rings(way: str, pod: str, lengths: np.ndarray) -> tuple[Any, varlen.BatchPlan]:
    """Compile the step of a plan."""
    mesh, config = pod_mesh(pod, {"data": 2, "context": 8}), config_of(varlen=True, prices=pod)
    recipe, plan = Recipe(Config, Documents, RECIPE.batches), plan_of(way, pod, lengths)
    step, _ = make_step(recipe, config, mesh)
    step.transform = lambda jitted: jaxoverlap.overlap(jitted, cluster=pod)
    state = recipe.abstract_args(config, mesh)[0]
    shape = plan.nodes.count, plan.nodes.devices * plan.bounds.tokens
    at = NamedSharding(mesh, P("data", "context"))
    batch = {
        name: jax.ShapeDtypeStruct(shape, kind, sharding=at)
        for name, kind in dict(
            inputs=jnp.int32, targets=jnp.int32, positions=jnp.int32, weights=jnp.float32
        ).items()
    }
    whole, each = NamedSharding(mesh, P()), NamedSharding(mesh, P(("data", "context")))

    def like(x: np.ndarray, at: NamedSharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at)

    made = plan.arrays
    moves = jax.tree.map(lambda x: like(x, each), (made.to_attention, made.to_linear))
    arrays = varlen.PlanArrays(like(made.segment, whole), like(made.position, whole), *moves)
    lowered = step.program(plan.bounds, state).lower(state, batch, arrays)
    return lowered.compile(compiler_options()), plan


def usual(way: str, pod: str, lengths: np.ndarray) -> Any:
    """Compile the long-context GPT on packed rows, or the GPT on padded ones."""
    if way == "packed":
        recipe, config = RECIPE, config_of(ops=True)
        mesh = pod_mesh(pod, {"data": 2, "context": 8})
        step = recipe.make_step(config, mesh)
        options = jaxoverlap.compiler_options(mesh)
    else:
        recipe = gpt.RECIPE
        rows = -(-len(lengths) // 16) * 16
        sizes = dict(hidden=4096, heads=32, mlp=16384, layers=2, data=16, model=1)
        config = gpt.Config.pod(**sizes | dict(sequence=int(lengths.max()), batch=rows))
        mesh = pod_mesh(pod, {"data": 16, "model": 1})
        step = jaxoverlap.overlap(recipe.make_step(config, mesh), cluster=pod)
        options = {}
    lowered = step.lower(*recipe.abstract_args(config, mesh))
    return lowered.compile(compiler_options() | options)


def measured(way: str, pod: str, lengths: np.ndarray) -> dict[str, Any]:
    began, plan = time.perf_counter(), None
    if way in ("planned", "ring"):
        compiled, plan = with_rings(way, pod, lengths)
    else:
        compiled = usual(way, pod, lengths)
    text = compiled.as_text()
    audit = jaxoverlap.audit(text)
    simulation = jaxoverlap.simulate(text, parse_cluster(pod))
    hops = [c for c in audit.collectives if c.kind == "collective-permute"]
    memory = compiled.memory_analysis()
    return dict(
        pod=pod, way=way, ms=simulation.step_s * 1e3, exposed_ms=simulation.exposed_s * 1e3,
        compute_ms=simulation.compute_s * 1e3, hops=len(hops),
        covered=sum(c.covered for c in hops), bounds=str(plan.bounds if plan else ""),
        temp_gb=memory.temp_size_in_bytes / 1e9, compile_s=time.perf_counter() - began,
        uncovered=[str(c) for c in hops if not c.covered][:6],
    )  # fmt: skip


def main(
    lengths: Annotated[Path, typer.Option(help="Folder of lists.")],
    out: Annotated[Path | None, typer.Option(help="Add rows to this file.")] = None,
    pod: list[str] | None = None,
    way: list[str] | None = None,
) -> None:
    """Compile and simulate, and print a table."""
    known = np.loadtxt(lengths / "prolong.txt", dtype=int)
    (batch,) = first(known, 16 * TOKENS, 1, seed=0)
    rows = []
    for name in pod or PODS:
        for which in way or WAYS:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                row = measured(which, name, batch)
            rows.append(row)
            if out:
                with out.open("a") as file:
                    print(json.dumps(row), file=file)
    columns = ("ms", "exposed_ms", "compute_ms", "hops", "covered", "temp_gb", "compile_s")
    table = Table("pod", "way", *columns, title=f"{len(batch)} documents, longest {batch.max()}")
    for row in rows:
        cells = (f"{row[c]:.1f}" if isinstance(row[c], float) else str(row[c]) for c in columns)
        table.add_row(row["pod"], row["way"], *cells)
    Console(width=110).print(table)
    for row in rows:
        for line in row["uncovered"]:
            print(row["pod"], row["way"], line)


if __name__ == "__main__":
    typer.run(main)
