"""Compile drawn steps for H100s that are not there: overlap() raises nothing where plain compiles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

import jaxoverlap
from jaxoverlap.hardware.pods import compiler_options
from tests.differential.case import Case, draw
from tests.differential.plans import REFUSALS
from tests.differential.training import Program
from tests.differential.world import World


def refused_on_pods(
    seeds: range, *, among: Sequence[Callable[[World], Program]] = (), **options: Any
) -> dict[int, str]:
    """Return by seed the error that overlap() raises where the plain step compiles, if any.

    Args:
        seeds: the seeds.
        among: the programs to draw from.
        options: of `overlap`.
    """
    found = {}
    for seed in seeds:
        case = draw(seed, among=among, pod=True)
        try:
            _lowered(case, case.fn).compile(compiler_options())
        except (*REFUSALS, jax.errors.JaxRuntimeError):
            continue  # JAX or XLA has no program for the plain step
        try:
            _lowered(case, jaxoverlap.overlap(case.fn, **options)).compile()
        except Exception as error:
            found[seed] = f"{case.name}: {type(error).__name__}: {error}"
    jax.clear_caches()
    return found


def _lowered(case: Case, fn: Any) -> Any:
    """Lower the first call of a step."""
    return case.call(fn.lower, case.first_state(), 0)[0]
