"""Report a run's steps on the terminal and as lines of JSON, from process 0 only."""

import json
import math
import time
from pathlib import Path
from typing import Any, Self

import jax
from jax.sharding import Mesh
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import jaxoverlap
from models.config import Run
from models.processes import console
from models.recipe import Recipe

Row = dict[str, float]


class Report:
    """The report of a run: each step's metrics are fetched while the next step runs.

    A row has the step, its metrics, the seconds since the step before was done, the tokens a
    second, and, where the chip is known, the share of its peak in bfloat16 that the model's own
    operations are (MFU). A step that ran a candidate for the clock has "trial": a mean over a run
    leaves its seconds out.
    """

    def __init__(self, recipe: Recipe, config: Run, mesh: Mesh, begin: int):
        self.rows: list[Row] = []
        self._config, self._begin = config, begin
        made = "plain" if config.plain else "by rules" if config.ops else "overlapped"
        made += ", varlen" if getattr(config, "varlen", False) else ""
        self._label = config.local_updates or config.compress or made
        kind = mesh.devices.flat[0].device_kind
        chip = next((c for c in jaxoverlap.chips() if c.device_name == kind), None)
        peak = mesh.size * chip.bf16_flops_per_s if chip else math.nan
        self._peak_s = recipe.model_flops(config, mesh) / peak  # that a step takes at the peak
        self._steps = config.every if config.local_updates else 1  # of a row
        self._waiting: tuple[int, Any, bool] | None = None
        self._file, self._bar, self._since = None, None, time.perf_counter()

    def add(self, index: int, metrics: Any, *, trial: bool = False) -> None:
        """Add the metrics of a step that has started, and report the step before."""
        waiting, self._waiting = self._waiting, (index, metrics, trial)
        if waiting:
            self._tell(*waiting)

    def __enter__(self) -> Self:
        if jax.process_index() == 0:
            self._file = opened(self._config.metrics, self._begin)
            if console.is_terminal:
                columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
                self._bar = Progress(*columns, TimeRemainingColumn(), console=console)
                self._bar.start()
                total, label = self._config.steps, f"{self._label}  compiling"
                self._bar.add_task(label, total=total, completed=self._begin)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None and self._waiting:
                self._tell(*self._waiting)
        finally:
            if self._bar:
                self._bar.stop()
            if self._file:
                self._file.close()

    def _tell(self, index: int, metrics: Any, trial: bool) -> None:
        numbers = {name: float(value) for name, value in metrics.items()}  # waits for that step
        now = time.perf_counter()
        seconds, self._since = (now - self._since) / self._steps, now
        row = {"step": index, **numbers, "seconds": seconds}
        row["tokens_per_s"] = self._config.tokens / seconds
        if trial:
            row["trial"] = 1.0
        if not math.isnan(self._peak_s):
            row["share_of_peak"] = self._peak_s / seconds
        self.rows.append(row)
        if self._file:
            print(json.dumps(row), file=self._file)
        if self._bar:
            text = "  ".join((self._label, f"loss {row['loss']:.3f}", *speed(row)))
            self._bar.update(self._bar.task_ids[0], completed=index + 1, description=text)
        elif not console.quiet:
            print_row(row, self._label, self._config, self._steps)


def opened(path: Path | None, begin: int) -> Any:
    """Open the metrics' file to append to, after removing lines of steps that will be repeated."""
    if path is None:
        return None
    lines = path.read_text().splitlines() if begin and path.exists() else []
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("w", buffering=1)  # a line is on disk when its step is done
    file.writelines(f"{line}\n" for line in lines if json.loads(line)["step"] < begin)
    return file


def speed(row: Row) -> list[str]:
    """Return a step's speed as text."""
    share, trial = row.get("share_of_peak"), row.get("trial")
    more = [*([f"{share:.1%} of peak"] if share else []), *(["trial step"] if trial else [])]
    return [f"{row['tokens_per_s']:,.0f} tokens/s", *more]


def print_row(row: Row, label: str, config: Run, steps: int) -> None:
    taken = int(row["step"]) + 1
    if taken % config.log_every < steps or taken >= config.steps:
        known = {"step", "loss", "seconds", "tokens_per_s", "share_of_peak", "trial"}
        others = [f"{k.replace('_', ' ')} {v:.3f}" for k, v in row.items() if k not in known]
        numbers = (f"loss {row['loss']:.4f}", *others, f"{row['seconds']:.3f} s", *speed(row))
        print(f"{label}  step {taken}/{config.steps}", *numbers, sep="  ", flush=True)
