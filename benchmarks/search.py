"""Compare the search with its yardsticks, on one model: python -m benchmarks.search.

Problems of one to four communications, each with 24 settings, on five clusters; what is best is
known, as all combinations are evaluated. The search (`jaxoverlap/tuning/lagom/search.py`) is
compared with its parts, with AutoCCL's descent for each communication's own time, as published, and
with the same descent on the step's time. Then evaluations for 2 to 128 communications. Arithmetic
only: no GPU, no compile.
"""

import datetime
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from benchmarks.autoccl import descend
from benchmarks.frame import Row, commit, write_rows
from jaxoverlap._util.text import table
from jaxoverlap.cost.find import cost_model
from jaxoverlap.cost.groups import Group
from jaxoverlap.cost.kernels import KernelWork, MatmulKernel
from jaxoverlap.cost.model import CostModel
from jaxoverlap.tuning.lagom.model import Communication, Computation, Makespan, SettingSpace, places
from jaxoverlap.tuning.lagom.search import Config, ModelledStep, search

RESULTS = Path(__file__).parent / "results" / "search.jsonl"
CLUSTERS = ("h100-sxm:1x8", "h100-sxm:2x8", "a100-sxm-80:1x8", "h200:1x8", "h200:2x8")
_KB = 1 << 10
SPACES = {  # each of 24 settings
    "channels x chunk": SettingSpace(
        (1, 2, 4, 8, 16, 24), (128 * _KB, 512 * _KB, 1024 * _KB, 2048 * _KB)
    ),
    "channels x chunk x threads": SettingSpace(
        (2, 4, 8, 24), (128 * _KB, 512 * _KB, 2048 * _KB), (96, 512)
    ),
    "channels x chunk x pieces": SettingSpace(
        (2, 4, 8, 24), (512 * _KB, 2048 * _KB), pieces=(1, 2, 4)
    ),
}
# Each balance is the time of a problem's communications alone, by NCCL's default, over the time of
# its computation.
BALANCES = {"compute-bound": 0.4, "balanced": 1.0, "communication-bound": 2.0}
TOKENS, HIDDEN = 8192, 4096
WITHIN = 1.02
Way = Callable[[Makespan], tuple[Config, int]]


# -- problems -------------------------------------------------------------------------------------


def problem(cluster: str, space: str, balance: str, count: int, *, seed: int = 0) -> Makespan:
    """A problem: the matmuls of a few layers, and communications that take a share of their time.

    Sizes differ from one communication to the next; the seed draws them.
    """
    cost, draw = cost_model(cluster), np.random.default_rng(seed)
    computations = tuple(_computations(count, draw))
    alone_s = sum(
        c.runs * cost.matmul_s(m.m, m.n, m.k) for c in computations for m in c.work.matmuls
    ) + sum(cost.memory_s(c.work.memory_bytes) for c in computations if c.work.memory_bytes)
    parts = draw.dirichlet(np.full(count, 4.0)) * alone_s * BALANCES[balance]
    kinds = draw.choice(["all-gather", "reduce-scatter", "all-reduce"], count)
    in_pieces = len(SPACES[space].pieces) > 1
    with_matmuls = [i for i, c in enumerate(computations) if c.work.matmuls]
    return Makespan(
        cost,
        tuple(
            Communication(
                str(kind),
                _bytes_for(cost, str(kind), part_s),
                _group(cost),
                site=with_matmuls[j] if in_pieces else None,
                space=SPACES[space],
            )
            for j, (kind, part_s) in enumerate(zip(kinds, parts, strict=True))
        ),
        computations,
    )


def _computations(count: int, draw: np.random.Generator) -> Iterator[Computation]:
    """Draw a layer for each communication: two matmuls, and a memory-bound kernel between them."""
    for _ in range(count):
        tokens, wide = TOKENS // int(draw.choice([1, 2, 4])), HIDDEN * int(draw.choice([1, 2, 4]))
        yield Computation(KernelWork((MatmulKernel(tokens, wide, HIDDEN),)))
        yield Computation(KernelWork(memory_bytes=4 * tokens * wide))
        yield Computation(KernelWork((MatmulKernel(tokens, HIDDEN, wide),)))


def _group(cost: CostModel) -> Group:
    return Group(cost.cluster.num_devices, cost.cluster.num_hosts)


def _bytes_for(cost: CostModel, kind: str, seconds: float) -> int:
    """Find the bytes that a collective moves in so many seconds, by bisection."""
    low, high = 0, 1 << 40
    while high - low > 1024:
        mid = (low + high) // 2
        low, high = (
            (low, mid) if cost.collective_s(kind, mid, _group(cost)) > seconds else (mid, high)
        )
    return max(high, 1 << 20)


def grid(first_seed: int = 0) -> Iterator[tuple[Row, Makespan]]:
    """Yield all problems, each with a head that names it. Each has the next seed."""
    seeds = itertools.count(first_seed)
    for cluster, space, balance, count in itertools.product(
        CLUSTERS, SPACES, BALANCES, range(1, 5)
    ):
        seed = next(seeds)
        head: Row = {
            "cluster": cluster,
            "space": space,
            "balance": balance,
            "communications": count,
            "seed": seed,
        }
        yield head, problem(cluster, space, balance, count, seed=seed)


# -- ways to search -------------------------------------------------------------------------------


def exhaustive(p: Makespan) -> float:
    """Seconds of the best of all combinations: `Makespan.measure`, on arrays of them all.

    An axis of the arrays is a communication, a place on it one of its settings.
    """
    everywhere = [places(axes) for axes in p.axes]
    count = len(everywhere)

    def along(j: int, values: Sequence[float]) -> np.ndarray:
        shape = [1] * count
        shape[j] = len(values)
        return np.array(values).reshape(shape)

    each = [along(j, [p.seconds(j, q) for q in everywhere[j]]) for j in range(count)]
    times: list[np.ndarray | float] = [float(c.runs) for c in p.computations]
    communication, head, windows = sum(each), 0.0, []
    for j, c in enumerate(p.communications):
        if c.site is None:
            windows.append(each[j])
            continue
        part = along(j, [1 / c.space.setting(q)[1] for q in everywhere[j]])
        times[c.site] = times[c.site] * along(j, [p.in_pieces(j, q) for q in everywhere[j]])
        communication = communication + part * times[c.site] * p.alone_s(c.site)
        head = head + part * each[j]
        windows.append((1 - part) * each[j])
    computation = head
    left = list(times)
    for j, window in enumerate(windows):
        for i in range(len(left)):
            slowed = along(j, [p.slowed_s(i, j, q) for q in everywhere[j]])
            takes = np.minimum(left[i] * slowed, window)
            computation, window = computation + takes, window - takes
            left[i] = np.maximum(left[i] - takes / slowed, 0.0)
    computation = computation + sum(n * p.alone_s(i) for i, n in enumerate(left))
    return float(np.maximum(communication, computation).min())


def _searched(passes: int) -> Way:
    def way(p: Makespan) -> tuple[Config, int]:
        searched = search(p, passes=passes)
        return searched.config, searched.evaluations

    return way


def own_time(p: Makespan) -> tuple[Config, int]:
    """AutoCCL as published: each communication's own time; how many were timed in all."""
    config, evaluations = [], 0
    for j, axes in enumerate(p.axes):
        point, tried = descend(axes, lambda point, j=j: p.seconds(j, point), seed=j)
        config.append(point)
        evaluations += tried
    return tuple(config), evaluations


def whole_step(p: Makespan) -> tuple[Config, int]:
    """AutoCCL's descent with all axes as one space, on the seconds of the step."""
    sizes = [len(axes) for axes in p.axes]

    def config(flat: Sequence[int]) -> Config:
        ends = list(itertools.accumulate(sizes))
        return tuple(tuple(flat[e - n : e]) for e, n in zip(ends, sizes, strict=True))

    axes = [n for axes in p.axes for n in axes]
    flat, tried = descend(axes, lambda flat: p.measure(config(flat)).step_s, seed=0)
    return config(flat), tried


@dataclass(frozen=True)
class _Least:
    """A problem whose default is the least that there is, so that the search walks from there."""

    problem: Makespan

    @property
    def axes(self) -> Sequence[Sequence[int]]:
        return self.problem.axes

    @property
    def default(self) -> Config:
        return tuple((0,) * len(axes) for axes in self.axes)

    def measure(self, config: Config) -> ModelledStep:
        return self.problem.measure(config)


def _from_the_least(p: Makespan) -> tuple[Config, int]:
    searched = search(_Least(p), passes=0)
    return searched.config, searched.evaluations


WAYS: dict[str, Way] = {
    "NCCL's default": lambda p: (p.default, 1),
    "AutoCCL, each one's own time": own_time,
    "AutoCCL's descent on the step": whole_step,
    "Lagom's walk, from the least": _from_the_least,
    "and from the default": _searched(0),
    "and one pass": _searched(1),
    "and two: the search": _searched(2),
}


# -- rows -----------------------------------------------------------------------------------------


def measure(head: Row, p: Makespan) -> Row:
    """Measure a row: each method's step over the best one, and its number of evaluations."""
    best_s = exhaustive(p)
    combinations = math.prod(math.prod(axes) for axes in p.axes)
    results = {}
    for name, method in WAYS.items():
        config, evaluations = method(p)
        ratio = p.measure(config).step_s / best_s
        results[name] = {"ratio": round(ratio, 5), "evaluations": evaluations}
    return {**head, "best_s": best_s, "combinations": combinations, "ways": results}


def grid_table(rows: Sequence[Row], title: str) -> str:
    """Tabulate how close each method comes to the best, over all problems."""
    lines = []
    for name in WAYS:
        ratios = np.array([row["ways"][name]["ratio"] for row in rows])
        evaluations = [row["ways"][name]["evaluations"] for row in rows]
        share = f"{(ratios <= WITHIN).mean():.1%}"
        mean, worst = f"{ratios.mean():.4f}", f"{ratios.max():.4f}"
        lines.append(
            (name, share, mean, worst, f"{np.mean(evaluations):.0f}", str(max(evaluations)))
        )
    every = [row["combinations"] for row in rows]
    lines.append(("exhaustive", "100.0%", "1", "1", f"{np.mean(every):.0f}", str(max(every))))
    columns = ("way", "within 2% of the best", "mean", "worst", "evaluations", "at most")
    title = f"{len(rows)} {title}: step over the best step of the same model"
    return table(title, columns, lines, right=columns[1:])


def growth() -> list[Row]:
    """Evaluations of the search for more and more communications, and of AutoCCL's descent."""
    rows: list[Row] = []
    for count, balance in itertools.product((2, 4, 8, 16, 32, 64, 128), BALANCES):
        p = problem("h100-sxm:2x8", "channels x chunk", balance, count, seed=count)
        default_s = p.measure(p.default).step_s
        began = time.process_time()
        searched = search(p)
        cpu_s = time.process_time() - began
        descended, tried = whole_step(p)
        rows.append(
            {
                "communications": count,
                "balance": balance,
                "evaluations": searched.evaluations,
                "over_default": round(searched.outcome.step_s / default_s, 4),
                "cpu_s": round(cpu_s, 3),
                "descent_evaluations": tried,
                "descent_over_default": round(p.measure(descended).step_s / default_s, 4),
            }
        )
    return rows


def growth_table(rows: Sequence[Row]) -> str:
    """Each balance's evaluations with the straight line through them, and what they come to."""
    counts = sorted({row["communications"] for row in rows})
    cells = []
    for balance in BALANCES:
        mine = [row for row in rows if row["balance"] == balance]
        evaluations = [row["evaluations"] for row in mine]
        (slope, start), spread = np.polyfit(counts, evaluations, 1), np.var(evaluations)
        r2 = 1 - np.var(evaluations - slope * np.array(counts)) / spread
        line = f"{slope:.1f} N {start:+.0f}"
        cells.append((balance, "evaluations", *map(str, evaluations), line, f"{r2:.4f}"))
        tried = (str(row["descent_evaluations"]) for row in mine)
        for what, key in (("step over the default's", ""), ("AutoCCL's descent on it", "descent_")):
            ratios = (f"{row[f'{key}over_default']:.3f}" for row in mine)
            cells.append(("", what, *ratios, "", ""))
        cells.append(("", "its evaluations", *tried, "", ""))
    columns = ("balance", "", *map(str, counts), "line", "R²")
    return table("For so many communications", columns, cells, right=columns[2:])


def main(
    save: Annotated[bool, typer.Option(help="Write the rows to benchmarks/results.")] = False,
) -> None:
    """Search all problems by all methods, and print how close they come."""
    rows = [measure(head, p) for head, p in grid()]
    fresh = [measure(head, p) for head, p in grid(first_seed=2000)]
    more = growth()
    print(grid_table(rows, "problems"))
    print(grid_table(fresh, "more, drawn after the search was done"))
    print(growth_table(more))
    if save:
        provenance = {"commit": commit(), "date": datetime.date.today().isoformat()}
        write_rows(RESULTS, [{**row, **provenance} for row in (*rows, *fresh, *more)])


if __name__ == "__main__":
    typer.run(main)
