"""Lay out pipeline schedules with free-running stages as tables: 1F1B, interleaved, ZB-H1.

A schedule is a table of passes with their start and end: forward F, backward B, and where the
backward pass is split, B for the gradient of the input and W for that of the weights (Qi et al.,
"Zero Bubble Pipeline Parallelism", arXiv 2401.10241). Sends take no time. With passes of f, b and w
seconds, p stages of v chunks and m micro-batches, a step takes

    1F1B           (m + p - 1) (f + b + w)
    interleaved    (m + (p - 1) / v) (f + b + w)          passes of a chunk take 1 / v of a stage's
    ZB-H1          m (f + b + w) + (p - 1) (f + b - w)     for w <= f and w <= b; m >= 2 p - 1

ZB-H1's table is a reconstruction from its rule: as many micro-batches in memory as 1F1B has on its
first stage, and W where 1F1B waits. `pipeline.value_and_grad` runs it with order="ZB-H1", on a
clock that its stages share; its 1F1B has such a clock too, and a table of its own
(`PipelineSchedule`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_COLOURS = {"F": "#4c72b0", "B": "#dd8452", "W": "#55a868"}


@dataclass(frozen=True)
class StagePass:
    """One pass of one chunk: `kind` is "F", "B" or "W"; B includes W where it is not split."""

    stage: int
    kind: str
    micro_batch: int
    chunk: int
    start: float
    end: float


@dataclass(frozen=True)
class Timetable:
    """All passes of a step, in the order in which they start.

    Attributes:
        stages: how many.
        passes: the table.
    """

    stages: int
    passes: tuple[StagePass, ...]

    @property
    def step_s(self) -> float:
        """Seconds of the step."""
        return max(one.end for one in self.passes)

    @property
    def bubble_s(self) -> float:
        """Seconds that the stage with most to do is idle."""
        busy = [0.0] * self.stages
        for one in self.passes:
            busy[one.stage] += one.end - one.start
        return self.step_s - max(busy)

    def live(self, stage: int) -> int:
        """Chunks of micro-batches whose activations a stage keeps at most."""
        last = "W" if any(one.kind == "W" for one in self.passes) else "B"
        mine = [one for one in self.passes if one.stage == stage]
        begins = sorted(one.start for one in mine if one.kind == "F")
        ends = sorted(one.end for one in mine if one.kind == last)
        return max(i + 1 - sum(end <= begin for end in ends) for i, begin in enumerate(begins))

    def text(self, tick: float = 1.0) -> str:
        """Return the table as text, a row a stage; a cell is `tick` seconds of a pass."""
        width = 1 + max(len(f"{one.kind}{one.micro_batch}") for one in self.passes)
        columns = round(self.step_s / tick)
        lines = []
        for stage in range(self.stages):
            cells = ["."] * columns
            for one in self.passes:
                if one.stage == stage:
                    for at in range(round(one.start / tick), round(one.end / tick)):
                        cells[at] = f"{one.kind}{one.micro_batch}"
            lines.append("".join(cell.ljust(width) for cell in cells).rstrip())
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.text()

    def draw(self, path: str | Path) -> None:
        """Write a figure with a bar per pass and a line per stage, in the format of the suffix.

        Raises:
            ImportError: if matplotlib is not installed.
        """
        from matplotlib.figure import Figure

        figure = Figure(figsize=(13, 0.6 + 0.4 * self.stages), layout="constrained")
        axes = figure.add_subplot()
        for one in self.passes:
            width = one.end - one.start
            axes.barh(one.stage, width, left=one.start, color=_COLOURS[one.kind], edgecolor="white")
            axes.text(one.start + width / 2, one.stage, str(one.micro_batch), ha="center",
                      va="center", fontsize=7)  # fmt: skip
        axes.invert_yaxis()
        axes.set_yticks(range(self.stages))
        axes.set_ylabel("stage")
        axes.set_xlabel("seconds")
        figure.savefig(path)


def one_f_one_b(
    stages: int, micro_batches: int, *, chunks: int = 1, f: float = 1.0, b: float = 2.0
) -> Timetable:
    """Lay out 1F1B, interleaved by `chunks` (Narayanan et al., arXiv 2104.04473, section 2.2).

    Args:
        stages, micro_batches, chunks: p, m and v; with v > 1, m has to be a multiple of p.
        f, b: seconds of a stage's forward and full backward pass, all its chunks together.
    """
    if chunks > 1 and micro_batches % stages:
        raise ValueError(
            f"{micro_batches} micro-batches in rounds of {stages} stages: interleaving needs a "
            "multiple"
        )
    orders = [_order(stages, micro_batches, chunks, stage) for stage in range(stages)]
    return _timed(stages, chunks, orders, {"F": f / chunks, "B": b / chunks})


def _order(stages: int, micro_batches: int, chunks: int, stage: int) -> list[tuple[str, int, int]]:
    """Return a stage's passes in order: (kind, micro-batch, chunk)."""

    def passes(kind: str) -> list[tuple[str, int, int]]:
        rounds = range(0, micro_batches, stages if chunks > 1 else micro_batches)
        size = stages if chunks > 1 else micro_batches
        turn = range(chunks) if kind == "F" else range(chunks - 1, -1, -1)
        return [(kind, r + q, k) for r in rounds for k in turn for q in range(size)]

    forward, backward = passes("F"), passes("B")
    warm_up = stages - 1 - stage
    if chunks > 1:
        warm_up = 2 * (stages - 1 - stage) + (chunks - 1) * stages
    warm_up = min(warm_up, len(forward))
    steady = [one for pair in zip(forward[warm_up:], backward, strict=False) for one in pair]
    return forward[:warm_up] + steady + backward[len(forward) - warm_up :]


def _timed(
    stages: int, chunks: int, orders: list[list[tuple[str, int, int]]], seconds: dict[str, float]
) -> Timetable:
    """Start each pass as soon as its stage is free and what it needs has ended."""
    ended, free = dict[tuple[str, int, int], float](), [0.0] * stages
    passes, left = list[StagePass](), [list(order) for order in orders]
    last = stages * chunks - 1
    while any(left):
        moved = False
        for stage, order in enumerate(left):
            while order:
                kind, micro_batch, chunk = order[0]
                ready = _ready(ended, kind, micro_batch, chunk * stages + stage, last)
                if ready is None:
                    break
                start = max(free[stage], ready)
                free[stage] = start + seconds[kind]
                ended[kind, micro_batch, chunk * stages + stage] = free[stage]
                passes.append(StagePass(stage, kind, micro_batch, chunk, start, free[stage]))
                order.pop(0)
                moved = True
        assert moved, "a schedule's stages wait for each other"
    return Timetable(stages, tuple(sorted(passes, key=lambda one: (one.start, one.stage))))


def _ready(
    ended: dict[tuple[str, int, int], float], kind: str, micro_batch: int, virtual: int, last: int
) -> float | None:
    """Return when what a pass needs has ended; None if that is not known yet."""
    if kind == "F":
        return 0.0 if virtual == 0 else ended.get(("F", micro_batch, virtual - 1))
    own = ended.get(("F" if kind == "B" else "B", micro_batch, virtual))
    if own is None or kind == "W" or virtual == last:
        return own
    after = ended.get(("B", micro_batch, virtual + 1))
    return None if after is None else max(own, after)


def zb_h1(
    stages: int, micro_batches: int, *, f: float = 1.0, b: float = 1.0, w: float = 1.0
) -> Timetable:
    """Lay out ZB-H1: weights' gradients fill what 1F1B waits, in 1F1B's memory.

    Args:
        stages, micro_batches: p and m.
        f, b, w: seconds of a stage's forward pass, of its input's gradients, of its weights'.
    """
    orders = [_zb_order(stages, micro_batches, stage) for stage in range(stages)]
    return _timed(stages, 1, orders, {"F": f, "B": b, "W": w})


def _zb_order(stages: int, micro_batches: int, stage: int) -> list[tuple[str, int, int]]:
    """Return a stage's passes: 1F1B, where W begins when as many micro-batches are live as stages.

    F x (p - 1 - s), (F B) x (s + 1), (W F B) as long as there are forward passes, then W B in turn.
    """
    order = ["F"] * min(stages - 1 - stage, micro_batches)
    left = {"F": micro_batches - len(order), "B": micro_batches, "W": micro_batches}

    def add(kinds: str) -> None:
        for kind in kinds:
            if left[kind] and (kind != "W" or left["W"] > left["B"]):
                left[kind] -= 1
                order.append(kind)

    for _ in range(stage + 1):
        add("FB" if left["F"] else "")
    while left["F"]:
        add("WFB")
    while left["B"]:
        add("WB")
    add("W" * left["W"])
    counts = dict.fromkeys("FBW", 0)
    numbered = []
    for kind in order:
        numbered.append((kind, counts[kind], 0))
        counts[kind] += 1
    return numbered
