"""Compile the best configurations of a model with a trainer's own step, and simulate them.

Each is compiled in a child process: XLA's compiler ends the process where it meets a bug.
"""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

from jaxoverlap._jax.jobs import peak_bytes
from jaxoverlap._util.text import table
from jaxoverlap.cli.shell.target import Target, function
from jaxoverlap.cli.without import DEFAULTS, Without, without
from jaxoverlap.parallelism.configuration import Configuration
from jaxoverlap.parallelism.configure import Configurations
from jaxoverlap.parallelism.model import Transformer
from jaxoverlap.parallelism.search import Scored
from jaxoverlap.step.stages import Compiled


@dataclass(frozen=True)
class Simulated:
    """A configuration with the simulated time and the memory of its compiled step.

    Attributes:
        scored: the configuration, with what the form predicts.
        simulated_s: seconds of the overlapped step by simulation of XLA's schedule, or of the
            fastest set of options where nothing is overlapped; None: failed.
        simulated_bytes: bytes of a device by XLA's memory analysis; None: failed.
        plain_s: seconds of the same step without overlap, by XLA's defaults; None if unknown.
        failed: the error that building or compiling ended with; "" if it did not.
    """

    scored: Scored
    simulated_s: float | None = None
    simulated_bytes: float | None = None
    plain_s: float | None = None
    failed: str = ""

    @property
    def facts(self) -> dict[str, Any]:
        """Return what compiling added to the form's prediction."""
        return {name: value for name, value in vars(self).items() if name != "scored"}


def simulate_best(
    found: Configurations, count: int, trainer: str, progress: Callable[[str], None]
) -> list[Simulated]:
    """Compile the first `count` configurations; return all, the fastest by simulation first.

    What does not fit in the chip's memory by XLA's analysis comes after what does.

    Args:
        found: the form's ranking.
        count: how many to compile.
        trainer: MODULE:FUNCTION, a function of (model, configuration, order of the axes, global
            batch, name of the pod) that gives (step, args), as `models.configured:build`.
        progress: called with a line before each compile, and after it.
    """
    function(trainer)  # a name that leads nowhere is told before anything is compiled
    tried = []
    for number, scored in enumerate(found[:count], 1):
        progress(f"compiling {number} of {min(count, len(found))}: {scored.shown}")
        tried.append(_in_child(trainer, found, scored))
        last = tried[-1]
        took = f"{last.simulated_s:.3g} s" if last.simulated_s is not None else last.failed
        progress(f"    predicted {scored.step_s:.3g} s, simulated {took}")
    budget = found.cluster.chip.memory_bytes

    def rank(one: Simulated) -> tuple[bool, float]:
        seconds = math.inf if one.simulated_s is None else one.simulated_s
        return (one.simulated_bytes or 0.0) > budget, seconds

    return sorted(tried, key=rank) + [Simulated(scored) for scored in found[count:]]


def _in_child(trainer: str, found: Configurations, scored: Scored) -> Simulated:
    arguments = (trainer, found.model, scored.configuration, scored.placement.order)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        try:
            result = pool.submit(simulate_one, *arguments, found.global_batch, str(found.cluster))
            return Simulated(scored, *result.result())
        except Exception as error:  # one that fails is a row of the table, with its reason
            reason = str(error).splitlines() or [""]
            return Simulated(scored, failed=f"{type(error).__name__}: {reason[0]}")


def simulate_one(
    trainer: str,
    model: Transformer,
    configuration: Configuration,
    order: tuple[str, ...],
    global_batch: int,
    pod: str,
) -> tuple[float, float, float | None]:
    """Compile one configuration's step.

    Returns:
        Its simulated seconds, its peak bytes per device, and the seconds by XLA's defaults.
    """
    built = _target(trainer, model, configuration, order, global_batch, pod)
    if configuration.overlap:
        compiled = built.compile()
        return *simulated_costs(compiled, pod), compiled.speedup and compiled.speedup.plain_s
    found = without(built, str(configuration))
    if found.step_s is None:
        raise ValueError(str(found))
    return found.step_s, found.peak_bytes, found.seconds.get(DEFAULTS)


def simulated_without(
    found: Configurations, trainer: str, compiled: list[Simulated]
) -> Without | None:
    """Return the fastest that compiles without overlap; None where the ranking is without.

    That is the form's choice, by XLA's defaults or published options; or one of the configurations
    that were compiled overlapped, if XLA's defaults are faster there.
    """
    if (best := found.without) is None:
        return None
    config, order = best.configuration, best.placement.order
    built = _target(trainer, found.model, config, order, found.global_batch, str(found.cluster))
    chosen = without(built, best.shown)
    others = [
        Without(one.scored.shown, {DEFAULTS: one.plain_s}, {}, 0)
        for one in compiled
        if one.plain_s is not None
    ]
    return min(chosen, *others, key=lambda one: one.step_s or math.inf) if others else chosen


def _target(
    trainer: str,
    model: Transformer,
    configuration: Configuration,
    order: tuple[str, ...],
    global_batch: int,
    pod: str,
) -> Target:
    build: Callable[..., Any] = function(trainer)
    step, args = build(model, configuration, order, global_batch, pod)
    return Target(step, tuple(args), pod)


def simulated_costs(compiled: Compiled, pod: str) -> tuple[float, float]:
    """Return a compiled step's simulated seconds, and peak bytes by XLA's memory analysis."""
    memory = compiled.memory_analysis()
    assert memory is not None
    return compiled.simulate(pod).step_s, peak_bytes(memory)


def shown_if(value: float | None, form: str, times: float = 1.0) -> str:
    """Format a number so many times as large; nothing if there is none."""
    return "" if value is None else format(value * times, form)


def shown(simulated: list[Simulated]) -> str:
    """Format the compiled configurations as a table of predicted and simulated time and memory."""
    done = [one for one in simulated if one.simulated_s is not None or one.failed]
    rows = [
        (
            str(number),
            one.scored.shown,
            f"{one.scored.step_s:.3g}",
            shown_if(one.simulated_s, ".3g"),
            f"{one.scored.memory.total / 1e9:.1f}",
            shown_if(one.simulated_bytes, ".1f", 1e-9),
        )
        for number, one in enumerate(done, 1)
    ]
    columns = ("", "configuration", "predicted s", "simulated s", "GB", "GB, compiled")
    lines = [
        table("Compiled for the pod, fastest first", columns, rows, right=columns[2:]).rstrip()
    ]
    lines += [f"failed: {one.scored.shown}: {one.failed}" for one in done if one.failed]
    seconds = [one.simulated_s for one in done if one.simulated_s is not None]
    if len(seconds) > 1:
        lines.append(f"The answer is 1; 2 takes {seconds[1] / seconds[0] - 1:+.1%} by simulation.")
    return "\n".join(lines)
