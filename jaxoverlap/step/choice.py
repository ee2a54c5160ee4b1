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
from jaxoverlap.flags.published import COMPARED, accepted
from jaxoverlap.flags.required import NVLINK_STREAM, SEEN
from jaxoverlap.plan.plan import Plan
from jaxoverlap.plan.speedup import CandidateName, Speedup
from jaxoverlap.step.context import mesh_of
from jaxoverlap.step.never_slower import DECIDED_WITHIN_S, Comparison, with_joined
from jaxoverlap.step.options import Options
from jaxoverlap.step.processes import handed, processes_of
from jaxoverlap.step.program import StepProgram, lowered_as, request_of, step_program
from jaxoverlap.step.trial import Request


def comparison_of(call: jits.Call, program: StepProgram, options: Options) -> Comparison:
    """Return the candidates for an undecided step: overlapped, and the original one variously.

    Args:
        call, options: those that it was rewritten with.
        program: the step.
    """
    assert program.plan is not None and program.cost is not None
    rings, cost = program.plan, program.cost

    @functools.cache
    def made(candidate: CandidateName) -> StepProgram:
        return _as_candidate(call, rings, candidate, options)

    def lowered(candidate: CandidateName) -> tuple[jax.stages.Lowered, StepProgram]:
        new = program if candidate == "overlapped" else made(candidate)
        return lowered_as(call, new), new

    def request(candidate: CandidateName, compiler_options: Mapping[str, Any] | None) -> Request:
        return request_of(*lowered(candidate), mesh_of(call), cost, compiler_options)

    reorders, auto = options.schedule is not None, options.halves == "auto"
    return Comparison(rings.step, rings, cost, reorders, auto, lowered, request)


def decided(call: jits.Call, program: StepProgram, options: Options) -> StepProgram:
    """Return the fastest candidate of an undecided step, for GPUs that are present.

    Children compile both for the GPUs' description before this process compiles either; if there
    are many processes, the children of process 0 do so for all.
    """
    comparison = comparison_of(call, program, options)
    said = handed(
        lambda: msgspec.json.encode(comparison.decided_in_children()).decode(),
        "choice between rings and none",
        processes_of(mesh_of(call)),
        within_s=DECIDED_WITHIN_S,
    )
    speedup = msgspec.json.decode(said, type=Speedup)
    if speedup.taken == "overlapped" and not speedup.joined:
        return replace(program, undecided=False, speedup=speedup)
    if not speedup.is_overlapped:
        warn(speedup.warning(comparison.step))
    new = program
    if speedup.taken != "overlapped":
        new = _as_candidate(call, comparison.plan, speedup.taken, options)
    if speedup.joined:
        new = step_program(call, replace(options, plan=with_joined(new.plan, speedup)))
    return replace(new, agreement=None, speedup=speedup)


def _as_candidate(
    call: jits.Call, rings: Plan, candidate: CandidateName, options: Options
) -> StepProgram:
    """Return the program of another candidate than the overlapped step as estimated best.

    "other rows" splits the batch where the estimate does not, or the other way round; "other loops"
    unrolls scans so. The others are the step without rings, by XLA's defaults; all but "plain" take
    the scheduler's order and the estimated best number of streams.
    """
    if candidate == "other rows":
        assert rings.halves is not None
        parts = None if rings.cut else rings.halves.parts
        other = replace(options, halves=parts, unroll=rings.halves.unroll)
        return step_program(call, other)
    if candidate == "other loops":
        assert rings.cut is not None and rings.cut.other_unroll is not None
        other = replace(options, halves=rings.cut.parts, unroll=rings.cut.other_unroll)
        return step_program(call, other)
    plan = rings.left_alone()
    if candidate != "plain":
        names = {setting.name for setting in (*NVLINK_STREAM, *SEEN)}
        more = {n: v for n, v in rings.xla_options.items() if n in names}
        if candidate in COMPARED:
            more |= accepted(candidate, mesh_of(call).devices.flat[0])[0]
        plan = rings.left_alone(rings.schedule, more)
    return step_program(call, replace(options, plan=plan))
