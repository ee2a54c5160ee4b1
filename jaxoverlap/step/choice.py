"""Choose between a rewritten step and the same step without rings, which are both compiled.

`never_slower.py` compares the compiled steps.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import msgspec

from jaxoverlap._jax import jits
from jaxoverlap._util.text import warn
from jaxoverlap.plan.plan import Plan
from jaxoverlap.plan.speedup import Speedup, Way
from jaxoverlap.step.context import mesh_of
from jaxoverlap.step.never_slower import DECIDED_WITHIN_S, Rival
from jaxoverlap.step.pipeline import Options
from jaxoverlap.step.processes import handed, processes_of
from jaxoverlap.step.program import StepProgram, following, lowered_as, request_of, step_program
from jaxoverlap.step.trial import Request


def rival_of(
    jitted: Any, call: jits.Call, args: tuple, kwargs: dict, program: StepProgram, options: Options
) -> Rival:
    """Return the ways to compile an undecided step, with rings and without, to compare.

    Args:
        jitted, call, args, kwargs, options: the arguments that it was rewritten with.
    """
    assert program.plan is not None and program.cost is not None
    rings, cost, traced = program.plan, program.cost, jitted.trace(*args, **kwargs)

    @functools.cache
    def made(way: Way) -> StepProgram:
        return _without_rings(jitted, call, args, kwargs, rings, way, options)

    def lowered(way: Way) -> tuple[jax.stages.Lowered, StepProgram]:
        new = program if way == "overlapped" else made(way)
        return lowered_as(traced, new), new

    def request(way: Way, compiler_options: Mapping[str, Any] | None) -> Request:
        return request_of(*lowered(way), mesh_of(call), cost, compiler_options)

    return Rival(rings.step, rings, cost, options.schedule is not None, lowered, request)


def decided(
    jitted: Any, call: jits.Call, args: tuple, kwargs: dict, program: StepProgram, options: Options
) -> StepProgram:
    """Return the faster of an undecided step with rings and without, for GPUs that are here.

    Children compile both for the GPUs' description before this process compiles either; if there
    are many processes, the children of process 0 do so for all.
    """
    rival = rival_of(jitted, call, args, kwargs, program, options)
    said = handed(
        lambda: msgspec.json.encode(rival.decided_in_children()).decode(),
        "choice between rings and none",
        processes_of(mesh_of(call)),
        within_s=DECIDED_WITHIN_S,
    )
    speedup = msgspec.json.decode(said, type=Speedup)
    if speedup.taken == "overlapped":
        return replace(program, undecided=False, speedup=speedup)
    warn(speedup.warning(rival.step))
    new = _without_rings(jitted, call, args, kwargs, rival.plan, speedup.taken, options)
    return replace(new, stand=None, speedup=speedup)


def _without_rings(
    jitted: Any,
    call: jits.Call,
    args: tuple,
    kwargs: dict,
    rings: Plan,
    way: Way,
    options: Options,
) -> StepProgram:
    """Return a step without rings, by XLA's defaults; "reordered" takes the scheduler's order."""
    plan = rings.left_alone(rings.schedule if way == "reordered" else None)
    return step_program(jitted, call, args, kwargs, following(plan, options))
