"""The ways to compile a step that are raced, by name; a new one is a line of CANDIDATES."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax

import jaxoverlap
from benchmarks.gpu.steps import Built
from jaxoverlap.cost.model import CostModel
from jaxoverlap.flags.published import PUBLISHED, accepted

_AGREE_S = 120.0  # processes that share a machine's cores may decide at very different speeds
PLAIN, DEFAULT = "plain", "default"
NO_RINGS: dict[str, Any] = dict(granularity="plain", layouts=None)


@dataclass(frozen=True)
class Compiled:
    """A compiled candidate.

    Attributes:
        run: takes the step's arguments.
        simulated: seconds by the prices of the wire: of the step, its compute, its communication,
            and what kernels wait; and what has no price.
        taken: what jaxoverlap chose; empty if it had no choice.
    """

    run: Callable[..., Any]
    simulated: dict[str, Any]
    taken: str = ""


def _plain(built: Built, prices: Path) -> Any:
    return built.step.lower(*built.args).compile()


def _published(name: str, built: Built, prices: Path) -> Any:
    options, _ = accepted(name, jax.devices()[0])
    if not options:
        raise ValueError(f"this XLA takes none of the options {name}")
    return built.step.lower(*built.args).compile(compiler_options=options)


def _overlapped(options: dict[str, Any], built: Built, prices: Path) -> Any:
    step: Any = jaxoverlap.overlap(built.step, prices=prices, agree_within_s=_AGREE_S, **options)
    return step.lower(*built.args).compile()


def _asked(**options: Any) -> Callable[[Built, Path], Any]:
    """Return a way that overlap() is asked for, whether or not it is estimated to be faster."""
    return partial(_overlapped, dict(halves=None, never_slower=False) | options)


CANDIDATES: dict[str, Callable[[Built, Path], Any]] = {  # what compiles it for measured prices
    PLAIN: _plain,
    **{f"options {name}": partial(_published, name) for name in PUBLISHED},
    "scheduler pass": _asked(**NO_RINGS),
    "two batch parts": _asked(**NO_RINGS, halves=2),
    "rings": _asked(granularity="two_way"),
    DEFAULT: partial(_overlapped, {}),
}


def compiled(candidate: str, built: Built, prices: Path, cost: CostModel) -> Compiled:
    """Compile a candidate, and simulate it by the prices of the wire.

    Raises:
        Exception: whatever its compilation raises.
    """
    made = CANDIDATES[candidate](built, prices)
    found = jaxoverlap.simulate(made.as_text(), cost)
    simulated = dict(
        step_s=found.step_s,
        compute_s=found.compute_s,
        communication_s=found.communication_s,
        exposed_s=found.exposed_s,
        unknown=list(found.unknown),
    )
    speedup = getattr(made, "speedup", None)
    return Compiled(made, simulated, speedup.name if speedup else "")
