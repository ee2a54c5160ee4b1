"""Compile a train step on a batch of real lengths for pods: are hops covered, what does it take.

    python -m benchmarks.varlen.pods --lengths FOLDER --out rows.jsonl
    python -m benchmarks.varlen.pods --lengths FOLDER --pod h100-sxm:2x8 --batch long --way planned

Two batches, five ways, each compiled by XLA's GPU compiler and its schedule simulated. One batch is
of short documents (ProLong), the other has one of 41,743 tokens (WLB-LLM's list).

- planned: groups of several sizes by the plan, moves for the linear layers where they pay; whole
  sequences by cuDNN's kernel where the chip has it. It is priced as causal over all slots.
- matmuls: the same without that kernel.
- ring: every document split over all GPUs, one ring of all on one rail (the same engine).
- packed: the batch as rows of two a pod, causal over whole rows, each split over the GPUs of a node
  in this project's ring attention: what packing computes that no document asked for.
- padded: a row a document, as long as the longest, over all GPUs as data parallelism.

Attention's blocks are plain matmuls under a mask in all others. Two layers of a 7B GPT.
"""

from __future__ import annotations

import itertools
import re
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer
from rich.console import Console
from rich.table import Table

import jaxoverlap
from benchmarks.frame import MaybeOut, add_rows
from benchmarks.varlen.table import first
from jaxoverlap import parse_cluster, pod_mesh
from jaxoverlap.hardware.pods import compiler_options
from jaxoverlap.train import varlen
from jaxoverlap.train.varlen.planner import nodes_of
from jaxoverlap.train.varlen.rings import bounds_of
from models import gpt
from models.long_context import RECIPE, Config
from models.recipe import Recipe
from models.varlen import Documents, make_step

PODS = ("h100-sxm:2x8", "a100-sxm-80:2x8")
WAYS = ("planned", "matmuls", "ring", "packed", "padded")
TOKENS = 4096  # a GPU
HEADS_AT_ONCE = 4
BATCHES = {"short": ("prolong", 0), "long": ("wlbllm", 47)}  # a list, and which of its batches


def config_of(**changes: Any) -> Config:
    sizes: dict[str, Any] = dict(
        hidden=4096, heads=32, mlp=16384, layers=2, dtype="bfloat16", data=2, context=8,
        sequence=16 * TOKENS // 2, batch=2, heads_at_once=HEADS_AT_ONCE, step_tokens=16 * TOKENS,
        longest=16 * TOKENS - 1,
    )  # fmt: skip
    return Config(**sizes | changes)


def plan_of(way: str, pod: str, lengths: np.ndarray) -> varlen.BatchPlan:
    costs = varlen.attention_costs(pod, heads=32, head_size=128, hidden=4096, mlp=16384)
    if way != "ring":
        return varlen.Planner(costs, pod, capacity=round(1.25 * TOKENS))(lengths)
    costs = replace(costs, rails=1, kv_heads=1)  # one head is not exchanged
    nodes = nodes_of(pod)
    width = 2 * int((-(-lengths // (2 * nodes.total))).sum())
    bounds = bounds_of({nodes.total: width}, width, 0)
    return varlen.Planner(costs, pod, capacity=width, programs=[bounds])(lengths)


def with_rings(way: str, pod: str, lengths: np.ndarray) -> tuple[Any, varlen.BatchPlan]:
    """Compile the step of a plan."""
    mesh, config = pod_mesh(pod, {"data": 2, "context": 8}), config_of(varlen=True, prices=pod)
    recipe, plan = Recipe(Config, Documents, RECIPE.batches), plan_of(way, pod, lengths)
    step, _ = make_step(recipe, config, mesh)
    step.costs, step.fused = plan.costs, step.fused and way == "planned"
    step.transform = lambda jitted: jaxoverlap.overlap(jitted, cluster=pod)
    state = recipe.abstract_args(config, mesh)[0]
    tokens = {n: jax.ShapeDtypeStruct((plan.tokens,), jnp.int32) for n in ("inputs", "targets")}
    batch, arrays = step.shapes(plan.bounds, tokens)
    lowered = step.program(plan.bounds, state, batch).lower(state, batch, arrays)
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


def kind_of(groups: str) -> str:
    """Return what a permute is, by who sends to whom: "{{0,1},{1,2}}", nodes of eight."""
    pairs = [tuple(map(int, pair.split(","))) for pair in re.findall(r"\d+,\d+", groups)]
    crossing = sum(a // 8 != b // 8 for a, b in pairs)
    if crossing:
        return "transfer over rails" if crossing == len(pairs) else "hop"
    if len(pairs) <= 2:  # a pair a node
        return "dispatch or combine"
    return "hop inside nodes"


def measured(way: str, pod: str, lengths: np.ndarray) -> dict[str, Any]:
    began, plan = time.perf_counter(), None
    if way in ("planned", "matmuls", "ring"):
        compiled, plan = with_rings(way, pod, lengths)
    else:
        compiled = usual(way, pod, lengths)
    text = compiled.as_text()
    collectives = jaxoverlap.audit(text).collectives
    simulation = jaxoverlap.simulate(text, parse_cluster(pod))
    hops = [c for c in collectives if c.kind == "collective-permute"]
    kinds: dict[str, list[int]] = {}
    for c in hops:
        sums = kinds.setdefault(kind_of(c.groups), [0, 0])
        sums[0], sums[1] = sums[0] + c.runs * c.covered, sums[1] + c.runs
    others: dict[str, list[int]] = {}
    for c in collectives:
        if c.kind != "collective-permute":
            sums = others.setdefault(c.kind, [0, 0])
            sums[0], sums[1] = sums[0] + c.runs * c.covered, sums[1] + c.runs
    memory = compiled.memory_analysis()
    return dict(
        pod=pod, way=way, ms=simulation.step_s * 1e3, exposed_ms=simulation.exposed_s * 1e3,
        compute_ms=simulation.compute_s * 1e3, hops=sum(n for _, n in kinds.values()),
        covered=sum(n for n, _ in kinds.values()), kinds=kinds, others=others,
        bounds=str(plan.bounds if plan else ""), temp_gb=memory.temp_size_in_bytes / 1e9,
        compile_s=time.perf_counter() - began,
    )  # fmt: skip


def main(
    lengths: Annotated[Path, typer.Option(help="Folder of lists.")],
    out: MaybeOut = None,
    pod: list[str] | None = None,
    batch: list[str] | None = None,
    way: list[str] | None = None,
) -> None:
    """Compile and simulate, and print a table."""
    columns = ("ms", "exposed_ms", "compute_ms", "hops", "covered", "temp_gb", "compile_s")
    table = Table("pod", "batch", "way", *columns)
    for which in batch or BATCHES:
        name, number = BATCHES[which]
        known = np.loadtxt(lengths / f"{name}.txt", dtype=int)
        documents = first(known, 16 * TOKENS, number + 1, seed=0)[number]
        for cluster, how in itertools.product(pod or PODS, way or WAYS):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                row = dict(batch=which, **measured(how, cluster, documents))
            cells = (f"{row[c]:.1f}" if isinstance(row[c], float) else str(row[c]) for c in columns)
            table.add_row(cluster, which, how, *cells)
            print(
                cluster, which, how, "covered of all:", row["kinds"], row["others"], row["bounds"]
            )
            add_rows(out, row)
    Console(width=110).print(table)


if __name__ == "__main__":
    typer.run(main)
