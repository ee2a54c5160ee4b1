"""Predict a step's seconds on the hosts of a lab, before it is compiled."""

from __future__ import annotations

from typing import Any

from jax.sharding import Mesh

from jaxoverlap.cost.model import CostModel
from jaxoverlap.passes.analysis.flatten import flatten
from jaxoverlap.passes.analysis.partitioned import partitioned
from jaxoverlap.passes.estimation.estimate import estimate


def predicted_s(
    step: Any, args: tuple[Any, ...], mesh: Mesh, cost: CostModel, *, plain: bool = False
) -> float:
    """Estimate the seconds of a step by its partitioned program, as overlap() decides by.

    Args:
        step: a jitted step, or one from `jaxoverlap.overlap`.
        args: its arguments.
        mesh: its mesh.
        cost: the measured prices.
        plain: whether it is compiled without the options of an overlapped step.
    """
    traced = step.trace(*args)
    program = partitioned(
        traced, flatten(traced.jaxpr), mesh, ask=False, options={} if plain else None
    )
    return estimate(program.module, cost).step_s
