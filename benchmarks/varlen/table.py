"""Compare methods to distribute batches of real lengths, by one cost model.

    python -m benchmarks.varlen.table lists          # eight ways on the real lists, three clusters
    python -m benchmarks.varlen.table apart          # what the gain over TE's ring is made of
    python -m benchmarks.varlen.table ablation       # ours part by part, against the paper's
    python -m benchmarks.varlen.table magi           # in MagiAttention's own setting
    python -m benchmarks.varlen.table planner        # milliseconds of planning

Lists of token lengths are read from --lengths, one number a line and list.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from benchmarks import frame
from benchmarks.frame import MaybeOut, add_rows
from benchmarks.varlen.methods import (
    METHODS,
    Setup,
    by_attention,
    ragged,
    routed_ring,
    te_ring,
)
from jaxoverlap.hardware.cluster import Cluster, Link, parse_cluster
from jaxoverlap.train.varlen import AttentionCosts, Nodes, Planner, attention_costs
from jaxoverlap.train.varlen.costs import Hop

# The paper's clusters. A: A800, NVLink of 400 GB/s both ways, 4 NICs of 200 Gbit/s a node. B: H800,
# the same NVLink, 8 RoCE NICs, whose rate is not given: 400 Gbit/s, as H800 nodes have. C: H200,
# 8 NICs of 400 Gbit/s.
CLUSTERS = {
    "A": ("a100-sxm-80", 200e9, 25e9, 4),
    "B": ("h100-sxm", 200e9, 50e9, 8),
    "C": ("h200", 450e9, 50e9, 8),
}
MODEL_7B: dict[str, Any] = dict(heads=32, head_size=128, hidden=4096, mlp=11008, matrices=3)
SETTINGS = ((2, 4096), (4, 4096), (2, 8192), (4, 8192))  # nodes of eight, tokens a GPU
ROOM = 1.5
HEADLINE = "USP"  # Transformer Engine's "a2a+p2p": its best way for long sequences
PAPER = {"routing": 1.6, "partition + engine": 3.2, "routing + engine": 3.51, "all, ragged": 3.64}

app = frame.app()
Lengths = Annotated[Path, typer.Option(help="Folder of lists.")]


def cluster_of(name: str, count: int) -> tuple[Cluster, int]:
    """Return one of the paper's clusters, and the rails of a node."""
    chip, nvlink, nic, rails = CLUSTERS[name]
    usual = parse_cluster(f"{chip}:{count}x8")
    links = dict(
        nvlink=Link("NVLink", nvlink, usual.nvlink.latency_s),
        network=Link("RoCE", nic, usual.network.latency_s),
    )
    return replace(usual, **links), rails


def setup_of(name: str, count: int, tokens: int, model: dict[str, Any] | None = None) -> Setup:
    cluster, rails = cluster_of(name, count)
    sizes = model or MODEL_7B
    costs = attention_costs(cluster, rails=rails, **sizes)
    flash = flash_costs(cluster, rails=rails, **sizes)
    return Setup(Nodes(count, 8), costs, round(ROOM * tokens), flash)


def flash_costs(cluster: Cluster | str, **sizes: Any) -> AttentionCosts:
    """Return the others' prices: a fused kernel on any chip, for a ring's blocks too.

    Their merges are not counted, and no sums go home exposed.
    """
    costs = attention_costs(cluster, fused=True, **sizes)
    return replace(costs, ring_times=1.0, fused_rings=False, trip_s=0.0)


def with_programs(setup: Setup, sample: list[np.ndarray]) -> Setup:
    """Return a setup with our programs chosen on a sample."""
    planner = Planner(setup.costs, setup.nodes, capacity=setup.capacity)
    planner.fit(sample)
    return replace(setup, planner=planner)


def batches(
    lengths: np.ndarray, total: int, *, seed: int, share: float = 1.0
) -> Iterator[np.ndarray]:
    """Yield full batches of documents in a random order, truncated to a share of the batch."""
    order = np.random.default_rng(seed).permutation(np.minimum(lengths, int(share * total)))
    batch: list[int] = []
    for length in order.tolist():
        free = total - sum(batch)
        batch.append(min(length, free))
        if length >= free:
            yield np.array(batch)
            batch = []


def first(lengths: np.ndarray, total: int, count: int, **how: Any) -> list[np.ndarray]:
    made = batches(lengths, total, **how)
    return [next(made) for _ in range(count)]


def geometric(values: Any) -> float:
    return float(np.exp(np.nanmean(np.log(list(values)))))


@app.command()
def lists(
    lengths: Lengths,
    batches_each: int = 3,
    out: MaybeOut = None,
    seed: int = 0,
    settings: Annotated[int, typer.Option(help="How many of SETTINGS.")] = 4,
) -> None:
    """Compare all methods: how many times as fast as Transformer Engine's best each is."""
    rows: list[dict[str, Any]] = []
    for path in sorted(lengths.glob("*.txt")):
        if path.name == "README.md":
            continue
        known = np.loadtxt(path, dtype=int)
        for cluster in CLUSTERS:
            for count, tokens in SETTINGS[:settings]:
                total = count * 8 * tokens
                sample = first(known, total, 16, seed=seed + 1000)
                setup = with_programs(setup_of(cluster, count, tokens), sample)
                for index, batch in enumerate(first(known, total, batches_each, seed=seed)):
                    took = {n: method(setup, batch) for n, method in METHODS.items()}
                    took["ragged"] = ragged(setup, batch)
                    fields = dict(list=path.stem, cluster=cluster, nodes=count, tokens=tokens)
                    row = fields | dict(batch=index, longest=int(batch.max()), seconds=took)
                    rows.append(row)
                    add_rows(out, row)
    _lists(rows)


def _lists(rows: list[dict[str, Any]]) -> None:
    table = Table(*COLUMNS, title=f"times as fast as {HEADLINE}, geometric means")
    for cells in page_table(rows):
        table.add_row(*cells)
    Console(width=120).print(table)
    print(summary(rows))


COLUMNS = ("list", "cluster", *METHODS, "ragged")


def page_table(rows: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Return the cells of docs/varlen.md: times as fast as the headline, by list and cluster."""
    kinds = sorted({(r["list"], r["cluster"]) for r in rows})
    found = []
    for kind in [*kinds, ("all", "all")]:
        on = [r for r in rows if kind[0] in (r["list"], "all") and kind[1] in (r["cluster"], "all")]
        cells = (
            geometric(r["seconds"][HEADLINE] / r["seconds"][name] for r in on)
            for name in COLUMNS[2:]
        )
        found.append((*kind, *(f"{cell:.2f}" for cell in cells)))
    return found


def summary(rows: list[dict[str, Any]]) -> str:
    """Say of how many batches rows are, and how the best other method of each compares."""
    others = [name for name in METHODS if name != "this"]
    each = geometric(min(r["seconds"][o] for o in others) / r["seconds"]["this"] for r in rows)
    sizes = sorted({(r["nodes"] * 8, r["tokens"]) for r in rows})
    gpus = ", ".join(f"{gpus} GPUs of {tokens} tokens" for gpus, tokens in sizes)
    return (
        f"{len(rows)} batches, {gpus}. The best other method of each batch takes {each:.3f} times "
        "as long as this."
    )


@app.command()
def apart(lengths: Lengths) -> None:
    """Take the gain over TE's ring apart: tiles, hops, and documents' lengths."""
    known = [np.loadtxt(path, dtype=int) for path in sorted(lengths.glob("*.txt"))]
    table = Table("cluster", "batches", "whole tiles", "no tiles", "hops free", "TE's hops, share")
    for cluster in CLUSTERS:
        rows = []
        for one, (count, tokens) in itertools.product(known, SETTINGS):
            setup = setup_of(cluster, count, tokens)
            (batch,) = first(one, count * 8 * tokens, 1, seed=0)
            rows.append((f"{count * 8} GPUs, {tokens} tokens each", *_apart(setup, batch)))
        means = (geometric(row[i] for row in rows) for i in range(1, 5))
        table.add_row(cluster, "drawn from the lists", *(f"{x:.2f}" for x in means))
        for length in (2048, 8192, 32768, 65536):
            setup = setup_of(cluster, 2, 4096)
            batch = np.full(16 * 4096 // length, length)
            cells = (f"{x:.2f}" for x in _apart(setup, batch))
            table.add_row(cluster, f"documents of {length}, 16 GPUs", *cells)
    Console(width=110).print(table)


def _apart(setup: Setup, batch: np.ndarray) -> tuple[float, float, float, float]:
    """Return TE's seconds over ours: estimated, without tiles, without hops; and hops' share."""
    even = {n: replace(getattr(setup, n), tile=(1, 1)) for n in ("costs", "flash")}
    even = replace(setup, **even)
    fast = Hop(0.0, 1e18)
    free = {n: replace(getattr(setup, n), intra=fast, network=fast) for n in ("costs", "flash")}
    free = replace(setup, **free)
    gain, no_tiles, no_hops = (te_ring(p, batch) / ragged(p, batch) for p in (setup, even, free))
    return gain, no_tiles, no_hops, 1 - te_ring(free, batch) / te_ring(setup, batch)


@app.command()
def ablation(lengths: Lengths, batches_each: int = 3, out: MaybeOut = None) -> None:
    """Show ours part by part on cluster A."""
    parts = {
        "routing": routed_ring,
        "partition + engine": lambda p, b: by_attention(p, b, routing=False),
        "routing + engine": lambda p, b: by_attention(p, b, routing=True),
        "all, ragged": ragged,
    }
    rows = []
    for path in sorted(lengths.glob("*.txt")):
        known = np.loadtxt(path, dtype=int)
        for count, tokens in SETTINGS:
            setup = setup_of("A", count, tokens)
            for batch in first(known, count * 8 * tokens, batches_each, seed=0):
                base = te_ring(setup, batch)
                gains = {name: base / method(setup, batch) for name, method in parts.items()}
                rows.append(dict(list=path.stem, nodes=count, tokens=tokens, gains=gains))
    add_rows(out, *rows)
    names = sorted({r["list"] for r in rows})
    table = Table("part", *names, "all lists", "greatest", "paper (ArXiv)")
    for part in parts:
        each = [geometric(r["gains"][part] for r in rows if r["list"] == n) for n in names]
        all_parts = geometric(r["gains"][part] for r in rows)
        most = max(r["gains"][part] for r in rows)
        cells = (f"{x:.2f}" for x in (*each, all_parts, most, PAPER[part]))
        table.add_row(part, *cells)
    Console(width=100).print(table)


@app.command()
def magi(lengths: Lengths, batches_each: int = 3, out: MaybeOut = None) -> None:
    """Compare in MagiAttention's setting: TFLOP/s/GPU of attention, 8 to 64 H100s."""
    model: dict[str, Any] = dict(heads=64, kv_heads=8, head_size=128)
    table, rows = Table("way", "8 GPUs", "16", "32", "64", title="TFLOP/s/GPU, simulated"), []
    known = np.concatenate([np.loadtxt(p, dtype=int) for p in sorted(lengths.glob("*.txt"))])
    names = [name for name in METHODS if name != "FlexSP"]
    for count in (1, 2, 4, 8):
        cluster = f"h100-sxm:{count}x8"
        costs = replace(attention_costs(cluster, **model), linear_s=0.0)
        flash = replace(flash_costs(cluster, **model), linear_s=0.0)
        setup = Setup(Nodes(count, 8), costs, round(ROOM * 8192), flash)
        total = count * 8 * 8192
        setup = with_programs(setup, first(known, total, 16, seed=1000, share=0.25))
        for batch in first(known, total, batches_each, seed=0, share=0.25):
            # Forward and backward, seven matmuls of the unmasked scores.
            flops = 7 * 2 * 64 * 128 * float((batch * (batch + 1) / 2).sum())
            for name in names:
                rate = flops / METHODS[name](setup, batch) / (count * 8) / 1e12
                rows.append(dict(way=name, gpus=count * 8, tflops=rate))
    add_rows(out, *rows)
    for name in names:
        rates = [
            geometric(r["tflops"] for r in rows if r["way"] == name and r["gpus"] == n)
            for n in (8, 16, 32, 64)
        ]
        table.add_row(name, *(f"{r:.0f}" for r in rates))
    Console(width=90).print(table)


@app.command(name="planner")
def planning(lengths: Lengths, runs: int = 7) -> None:
    """Time planning for five programs: 10,000 sequences on 128 devices, and fewer; medians."""
    table = Table("list", "sequences", "devices", "ms", "ms of a core")
    for path in sorted(lengths.glob("*.txt")):
        known = np.loadtxt(path, dtype=int)
        for number, count in ((10_000, 16), (1_000, 16), (100, 2)):
            batch = known[:number]
            setup = setup_of("C", count, 1)
            capacity = round(ROOM * batch.sum() / (count * 8)) + 2
            took = []
            planner = Planner(setup.costs, setup.nodes, capacity=capacity)
            planner.fit([batch])
            for _ in range(runs):
                began = time.perf_counter(), time.process_time()
                planner(batch)
                ended = time.perf_counter(), time.process_time()
                took.append([after - before for before, after in zip(began, ended, strict=True)])
            medians = (f"{ms:.0f}" for ms in np.median(took, axis=0) * 1e3)
            table.add_row(path.stem, f"{number}", f"{count * 8}", *medians)
    Console(width=80).print(table)


if __name__ == "__main__":
    app()
