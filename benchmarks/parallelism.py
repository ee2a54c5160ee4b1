"""Compare the form of `jaxoverlap.configure` with measured steps.

python -m benchmarks.parallelism                  # all tables
python -m benchmarks.parallelism --csv FILE       # predict every row of a file like vTrain's

Nothing is compiled. vTrain's rows are read from ../shared/data where they are there.
"""

import csv
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from scipy.optimize import brentq

from benchmarks import frame
from benchmarks.published.recipes import (
    FRONTIER,
    FRONTIER_STACK,
    SCALING,
    Recipe,
    megatron_flops,
)
from benchmarks.published.stacks import MEGATRON_DEEPSPEED
from jaxoverlap._util.text import table
from jaxoverlap.cost.find import cost_model, cost_or_data_sheet
from jaxoverlap.cost.model import CostModel
from jaxoverlap.hardware.cluster import Link, parse_cluster
from jaxoverlap.parallelism.configuration import Configuration
from jaxoverlap.parallelism.iteration_time import IterationTime
from jaxoverlap.parallelism.memory import memory
from jaxoverlap.parallelism.model import Transformer
from jaxoverlap.parallelism.placement import place
from jaxoverlap.parallelism.published.models import named_model
from jaxoverlap.parallelism.search import (
    Space,
    best_placement,
    memory_budget,
    menu,
    search,
    splits,
)
from jaxoverlap.parallelism.stack import JAX, MEGATRON, Stack
from jaxoverlap.parallelism.terms import StepTerms

VTRAIN = Path("../shared/data/vtrain_multi_node.csv")
# vTrain's cluster: 800 Gb/s for eight GPUs, two of which share a NIC, behind two AMD sockets. NCCL
# counts 16 GB/s between them each way (AMD_BW in src/graph/topo.h). That it was older than 2.12 is
# an assumption: gradient sums over two or four GPUs of a host call for it.
_HDR = Link("4 HDR NICs a host", 12.5e9, 18e-6, between_sockets_bytes_per_s=2 * 16e9)

console = Console(width=160)
app = frame.app()


# -- vTrain ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A measured step: its size of model as the file names it, and how it was split."""

    size: str
    model: Transformer
    of: Configuration
    devices: int
    global_batch: int
    measured_s: float


def read(path: Path) -> list[Row]:
    """The rows of a file with vTrain's columns."""
    with path.open() as file:
        return [_row(fields) for fields in csv.DictReader(file)]


def _row(fields: dict[str, str]) -> Row:
    def number(name: str) -> int:
        return int(float(fields[name]))

    sequence = number("sequence length")
    model = Transformer(
        name=f"{fields['Parameters (billion)']}B",
        layers=number("# layers"),
        hidden=number("hidden size"),
        heads=number("attention heads"),
        sequence=sequence,
        learned_positions=sequence,
    )
    config = Configuration(
        data=number("data parallelism"),
        model=number("tensor parallelism"),
        pipeline=number("pipeline parallelism"),
        micro_batch=number("micro batch"),
    )
    measured_s = float(fields["iteration time (ms)"]) / 1e3
    return Row(
        fields["Parameters (billion)"], model, config, number("# GPUs"), number("global batch"),
        measured_s,
    )  # fmt: skip


_costs: dict[int, CostModel] = {}


def predicted(row: Row, stack: Stack) -> StepTerms:
    """A row's seconds by term."""
    hosts, gpus = max(row.devices // 8, 1), min(row.devices, 8)
    cluster = replace(parse_cluster(f"a100-sxm-80:{hosts}x{gpus}"), network=_HDR)
    if row.devices not in _costs:
        _costs[row.devices] = cost_model(cluster)
    times = IterationTime(row.model, _costs[row.devices], stack, global_batch=row.global_batch)
    return times.terms(row.of, place(row.of, cluster))


def errors(rows: Sequence[Row], stack: Stack) -> np.ndarray:
    """predicted / measured - 1."""
    return np.array([predicted(row, stack).step_s / row.measured_s - 1 for row in rows])


def by_size(rows: Sequence[Row], stack: Stack) -> str:
    """Errors of each size of model, and what its first choice loses to the best one measured."""
    off, lines = errors(rows, stack), []
    for size in dict.fromkeys(row.size for row in rows):
        mine = [i for i, row in enumerate(rows) if row.size == size]
        lines.append(
            (f"{size}B", *_summary(off[mine]), *_choice([rows[i] for i in mine], off[mine]))
        )
    lines.append(("all", *_summary(off), "", ""))
    columns = ("model", "rows", "mean", "median", "worst", "slower", "first choice")
    title = "|predicted / measured - 1| with nothing fitted, and the first choice against the best"
    return table(title, columns, lines, right=columns[1:6], width=console.width)


def _summary(off: np.ndarray) -> tuple[str, ...]:
    size = np.abs(off)
    return (str(len(off)), *(f"{x:.1%}" for x in (size.mean(), np.median(size), size.max())))


def _choice(rows: Sequence[Row], off: np.ndarray) -> tuple[str, str]:
    """How much slower the first choice is than the best that was measured, and which it is."""
    seconds = np.array([row.measured_s for row in rows])
    chosen = int(np.argmin(seconds * (1 + off)))
    return f"{seconds[chosen] / seconds.min() - 1:.1%}", str(rows[chosen].of)


def every_row(rows: Sequence[Row]) -> str:
    """Each row."""
    lines = []
    for row in rows:
        terms = predicted(row, MEGATRON_DEEPSPEED)
        parts = ", ".join(f"{n} {s:.2f}" for n, s in terms.by_term.items() if s > 0.005)
        off = terms.step_s / row.measured_s - 1
        lines.append(
            (f"{row.size}B", str(row.of), f"{row.measured_s:.3f}", f"{terms.step_s:.3f}",
             f"{off:+.1%}", parts)
        )  # fmt: skip
    columns = ("model", "configuration", "measured s", "predicted s", "off", "terms, s")
    title = "Every row; nothing is fitted"
    return table(title, columns, lines, right=columns[2:5], width=console.width)


# -- calculon's set -------------------------------------------------------------------------------

# Korthikanti et al., arXiv 2205.05198, table 5: full recompute, and sequence + selective.
_KORTHIKANTI = (
    ("gpt-22b", 8, 1, 1, 4, 4, 1.42, 1.10),
    ("gpt-175b", 64, 8, 3, 1, 64, 18.13, 13.75),
    ("gpt-530b", 280, 35, 3, 1, 280, 49.05, 37.83),
    ("gpt-1t", 512, 64, 1, 1, 512, 94.42, 71.49),
)
_CALCULON = (1.40, 1.14, 18.03, 13.64, 49.89, 34.47, 90.08, 66.04)  # as run for ../shared/facts


def korthikanti_rows() -> Iterator[tuple[str, str, float, StepTerms]]:
    """(model, what is recomputed, measured seconds, predicted terms); nothing is fitted."""
    for name, gpus, pipeline, pieces, micro_batch, batch, full_s, selective_s in _KORTHIKANTI:
        cluster = parse_cluster(f"a100-sxm-80:{gpus // 8}x8")
        times = IterationTime(
            named_model(name), cost_or_data_sheet(cluster), MEGATRON, global_batch=batch
        )
        for recompute, measured_s in (("full", full_s), ("selective", selective_s)):
            config = Configuration(
                model=8,
                pipeline=pipeline,
                interleave=pieces,
                micro_batch=micro_batch,
                recompute=recompute,
                sequence_parallel=recompute == "selective",
            )
            yield name, recompute, measured_s, times.terms(config, place(config, cluster))


def korthikanti() -> str:
    """Megatron-LM on A100s, from the chip's tables alone."""
    lines, off = [], []
    for (name, recompute, measured_s, terms), other_s in zip(
        korthikanti_rows(), _CALCULON, strict=True
    ):
        off.append(terms.step_s / measured_s - 1)
        parts = ", ".join(f"{n} {s:.2f}" for n, s in terms.by_term.items() if s > 0.005)
        lines.append(
            (name, recompute, f"{measured_s:.2f}", f"{terms.step_s:.2f}", f"{off[-1]:+.1%}",
             f"{other_s / measured_s - 1:+.1%}", parts)
        )  # fmt: skip
    mean, other = (
        np.abs(off).mean(),
        np.mean(
            np.abs(
                [c / m - 1 for c, (_, _, m, _) in zip(_CALCULON, korthikanti_rows(), strict=True)]
            )
        ),
    )
    lines.append(("mean", "", "", "", f"{mean:.1%}", f"{other:.1%}", ""))
    columns = ("model", "recompute", "measured s", "predicted s", "off", "calculon", "terms, s")
    title = "Korthikanti et al., table 5, A100: nothing fitted"
    return table(title, columns, lines, right=columns[2:6], width=console.width)


# -- Frontier -------------------------------------------------------------------------------------


def share_of_peak(recipe: Recipe, matmul_share: float) -> float:
    """A recipe's operations per second over the peak, as the paper counts them."""
    cluster = parse_cluster(recipe.cluster)
    cost = cost_model(cluster, matmul_share=matmul_share)
    times = IterationTime(recipe.model, cost, FRONTIER_STACK, global_batch=recipe.global_batch)
    step_s = times.terms(recipe.configuration, place(recipe.configuration, cluster)).step_s
    peak = cluster.num_devices * cluster.chip.bf16_flops_per_s
    return megatron_flops(recipe.model, recipe.global_batch) / step_s / peak


def frontier_matmul_share() -> float:
    """Matmuls' share of the peak that gives the 22B run's published rate."""
    small = FRONTIER["frontier-22b"]
    published = small.share_of_peak
    assert published is not None
    return brentq(lambda x: share_of_peak(small, x) - published, 0.2, 0.95)  # type: ignore[return-value]


def scaled(name: str, devices: int, batch: int) -> Recipe:
    """A recipe with as many replicas as fit, and another batch."""
    recipe = FRONTIER[name]
    config = recipe.configuration
    data = devices // (config.model * config.pipeline)
    return replace(
        recipe,
        configuration=replace(config, data=data),
        cluster=f"mi250x-gcd:{devices // 8}x8",
        global_batch=batch // data * data,
    )


def frontier() -> str:
    """Frontier: one constant, from the 22B run."""
    share, lines = frontier_matmul_share(), []
    for name, recipe in FRONTIER.items():
        mine, published = share_of_peak(recipe, share), recipe.share_of_peak
        if published is None:
            lines.append((name, f"{mine:.1%}", "", ""))
            continue
        lines.append((name, f"{mine:.1%}", f"{published:.1%}", f"{mine / published - 1:+.1%}"))
    for name, s in SCALING.items():
        more = share_of_peak(scaled(s.recipe, s.devices, s.batch), share)
        few = share_of_peak(scaled(s.recipe, s.base, s.base_batch), share)
        points = (more / few - s.published) * 100
        what = f"{name} scaling, {s.base} to {s.devices}"
        lines.append((what, f"{more / few:.1%}", f"{s.published:.1%}", f"{points:+.1f} points"))
    title = f"Frontier: matmuls at {share:.3f} of the peak, fitted to the 22B run alone"
    columns = ("what", "predicted", "published", "off")
    return table(title, columns, lines, right=columns[1:], width=console.width)


# A run's log, branch frontier-sd, logs/gpt175b_megatron_16N_newcomm-405287.o: MiB at the peak.
FRONTIER_LOG_MIB = {
    0: 33901.5,
    **{stage: 26935.5 + 300.0 * (16 - stage) for stage in range(1, 15)},
    15: 29137.8,
}


def frontier_memory() -> str:
    """Memory of the 175B run, stage by stage."""
    recipe, lines = FRONTIER["frontier-175b"], []
    for stage, logged in FRONTIER_LOG_MIB.items():
        needs = memory(recipe.model, recipe.configuration, FRONTIER_STACK, 640, stage)
        mine = needs.total / 2**20
        lines.append((str(stage), f"{mine:.1f}", f"{logged:.1f}", f"{mine / logged - 1:+.2%}"))
    title = "Frontier, 175B on 128 GCDs: MiB at the peak (two constants read off stages 1 to 14)"
    columns = ("stage", "estimated", "logged", "off")
    return table(title, columns, lines, right=columns[1:])


# -- large runs -----------------------------------------------------------------------------------

# Its gradients are summed as they come, in 32 bits; the cost of contention is JAX's.
_MODERN = replace(
    MEGATRON, name="Megatron, fused attention", fused_attention=True, causal=True, dropout=False,
    gradient_passes=3, hides_data=True, hidden_cost=JAX.hidden_cost,
)  # fmt: skip
_LLAMA_405B = Configuration(
    data=64, pipeline=16, model=8, interleave=8, sequence_parallel=True, zero_stage=2,
    recompute="none",
)  # fmt: skip
_BLOOM = Transformer(
    name="BLOOM", layers=70, hidden=14336, heads=112, sequence=2048, vocab=250880,
    source="Le Scao et al., arXiv 2211.05100",
)  # fmt: skip
_OPT = Transformer(
    name="OPT-175B",
    layers=96,
    hidden=12288,
    heads=96,
    sequence=2048,
    vocab=50272,
    source="Zhang et al., arXiv 2205.01068",
)
# (model, how it was split, cluster, batch, stack, published TFLOP/s of a GPU, with recompute).
# Llama 3's interleaving is a reconstruction: Dubey et al. (arXiv 2407.21783, table 4) give none.
LARGE_RUNS: tuple[tuple[Transformer, Configuration, str, int, Stack, float], ...] = (
    (named_model("llama3-405b"), _LLAMA_405B, "h100-sxm:1024x8", 2048, _MODERN, 430),
    (named_model("llama3-405b"), replace(_LLAMA_405B, data=128), "h100-sxm:2048x8", 2048, _MODERN,
     400),
    (_BLOOM, Configuration(data=8, pipeline=12, model=4, micro_batch=2, zero_stage=1),
     "a100-sxm-80:48x8", 2048, replace(MEGATRON, dropout=False), 150),
    (_OPT, Configuration(fsdp=124, model=8, micro_batch=8), "a100-sxm-80:124x8", 992, MEGATRON,
     147),
)  # fmt: skip


def large_runs() -> str:
    """Published large runs that are none of Korthikanti et al.'s; nothing is fitted."""
    lines = []
    for model, config, pod, batch, stack, published in LARGE_RUNS:
        cluster = parse_cluster(pod)
        times = IterationTime(model, cost_or_data_sheet(cluster), stack, global_batch=batch)
        step_s = times.terms(config, place(config, cluster)).step_s
        tokens, passes = batch * model.sequence, 4 if config.recompute == "full" else 3
        scores = model.layers * model.query_hidden * model.sequence * (1 if stack.causal else 2)
        flops = 2 * passes * tokens * (model.params + scores)
        rate = flops / step_s / cluster.num_devices / 1e12
        lines.append((model.name, str(config), f"{rate:.0f}", f"{published:.0f}",
                      f"{rate / published - 1:+.0%}"))  # fmt: skip
    columns = ("model", "configuration", "predicted", "published", "off")
    title = "TFLOP/s of a GPU, with what is computed again"
    return table(title, columns, lines, right=columns[2:], width=console.width)


# -- the search -----------------------------------------------------------------------------------


def searched() -> str:
    """The search, against an estimate of every candidate, and against Alpa's space."""
    lines = []
    for name, pod, batch in (
        ("gpt-3.6b", "a100-sxm-80:2x8", 64),
        ("gpt-18.4b", "a100-sxm-80:8x8", 512),
        ("gpt-175b", "a100-sxm-80:64x8", 1536),
    ):
        model, cluster, space = named_model(name), parse_cluster(pod), Space(axes={})
        times = IterationTime(model, cost_or_data_sheet(cluster), JAX, global_batch=batch)
        found = search(model, cluster, times, space=space, keep=1)
        candidates = 6 * sum(1 for _ in splits(model, cluster, batch, space, JAX))
        layouts = 6 * model.layers * np.log10(9)
        lines.append(
            (name, pod, str(candidates), str(found.priced), f"{found.search_s * 1e3:.0f}",
             f"1e{layouts:.0f}", str(found.best[0].configuration))
        )  # fmt: skip
    title = (
        "The search. Alpa-like: each of six matmuls of each layer has nine shardings over two "
        "axes, counted, not run"
    )
    columns = ("model", "cluster", "candidates", "priced", "ms", "Alpa-like", "choice")
    return table(title, columns, lines, right=columns[2:6], width=console.width)


def brute_force(model: Transformer, pod: str, batch: int, stack: Stack) -> float:
    """The fastest step of every legal candidate that fits, each in every placement."""
    from jaxoverlap.parallelism.memory import peak

    cluster = parse_cluster(pod)
    times = IterationTime(model, cost_or_data_sheet(cluster), stack, global_batch=batch)
    budget, best_s = memory_budget(cluster, stack), np.inf
    for split in splits(model, cluster, batch, Space(axes={}), stack):
        for zero_stage in (0, *stack.zero_stages):
            for recompute in menu(stack, model):
                config = replace(split, zero_stage=zero_stage, recompute=recompute)
                if config.illegal(model, batch, stack):
                    continue
                needs = peak(model, config, stack, batch)
                if needs.total <= budget:
                    best_s = min(best_s, best_placement(config, cluster, times, needs).step_s)
    return float(best_s)


TABLES: tuple[Callable[[], str], ...] = (
    korthikanti,
    large_runs,
    frontier,
    frontier_memory,
    searched,
)


@app.command()
def main(
    path: Annotated[
        Path | None, typer.Option("--csv", help="Predict every row of a file like vTrain's.")
    ] = None,
) -> None:
    """Print all tables; of a file that is named, only its own."""
    rows_from = path or VTRAIN
    if rows_from.exists():
        rows = read(rows_from)
        print(every_row(rows))
        print("\n" + by_size(rows, MEGATRON_DEEPSPEED))
    elif path:
        raise typer.BadParameter(f"--csv {path}: there is no such file")
    else:
        print(f"vTrain's rows are left out: {VTRAIN} is not there")
    if not path:
        for make in TABLES:
            print("\n" + make())


if __name__ == "__main__":
    app()
