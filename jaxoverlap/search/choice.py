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
from jaxoverlap._jax.jobs import peak_bytes
from jaxoverlap._util.text import first_line, warn
from jaxoverlap.flags.published import COMPARED, accepted
from jaxoverlap.flags.required import NVLINK_STREAM, SEEN
from jaxoverlap.plan.speedup import CandidateName, Speedup
from jaxoverlap.search.found import found
from jaxoverlap.search.never_slower import (
    DECIDED_WITHIN_S,
    Comparison,
    CompiledStep,
    Unsimulated,
    with_joined,
)
from jaxoverlap.step.context import mesh_of, prepare
from jaxoverlap.step.options import Options
from jaxoverlap.step.pipeline import PassResult
from jaxoverlap.step.processes import handed, processes_of
from jaxoverlap.step.program import StepProgram, arrived, lowered_as, request_of, step_program
from jaxoverlap.step.stages import Compiled, Lowered
from jaxoverlap.step.trial import Failure, Request


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
        return _as_candidate(call, program, candidate, options)

    def lowered(candidate: CandidateName) -> tuple[jax.stages.Lowered, StepProgram]:
        new = program if candidate == "overlapped" else made(candidate)
        return lowered_as(call, new), new

    def request(candidate: CandidateName, compiler_options: Mapping[str, Any] | None) -> Request:
        return request_of(*lowered(candidate), mesh_of(call), cost, compiler_options)

    reorders, close = options.schedule is not None, tuple(program.close)
    return Comparison(rings.step, rings, cost, reorders, close, lowered, request)


def faster(comparison: Comparison, lowered: Lowered, options: dict[str, Any] | None) -> Compiled:
    """Compile a step, or another of its candidates if that is faster by simulation.

    Args:
        comparison: the candidates.
        lowered: the overlapped step.
        options: further compiler options, for all candidates.
    """
    made: dict[CandidateName, Compiled] = {}

    def stage_of(candidate: CandidateName) -> Lowered:
        if candidate == "overlapped":
            return lowered
        other, new = comparison.lowered(candidate)
        return lowered.instead(other, new.plan, new.ordering)

    def compiled(candidate: CandidateName) -> CompiledStep | Unsimulated | Failure:
        try:
            made[candidate] = one = stage_of(candidate).compiled(options)
        except jax.errors.JaxRuntimeError as error:
            return Failure(why=first_line(error))
        peak = peak_bytes(one.memory_analysis())
        return CompiledStep.of(one.as_text() or "", peak, comparison.cost)

    speedup = comparison.decided_here(compiled, options)
    if speedup.taken not in made or speedup.joined:
        best = stage_of(speedup.taken)
        made[speedup.taken] = best.compiled({**speedup.joined, **(options or {})})
    if not speedup.is_overlapped:
        warn(speedup.warning(comparison.step))
    taken = made[speedup.taken]
    taken.speedup, taken.plan = speedup, with_joined(taken.plan, speedup)
    return taken


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
        return replace(program, undecided=False, close={}, speedup=speedup)
    if not speedup.is_overlapped:
        warn(speedup.warning(comparison.step))
    new = program
    if speedup.taken != "overlapped":
        new = _as_candidate(call, program, speedup.taken, options)
    if speedup.joined:
        new = step_program(call, replace(options, plan=with_joined(new.plan, speedup)), found)
    return replace(new, agreement=None, undecided=False, close={}, speedup=speedup)


def _as_candidate(
    call: jits.Call, program: StepProgram, candidate: CandidateName, options: Options
) -> StepProgram:
    """Return the program of another candidate than the overlapped step as estimated best.

    "other rows" and "other loops" are the search's, with another batch split. The others are the
    step without rings, by XLA's defaults; all but "plain" take the scheduler's order and the
    estimated best number of streams.
    """
    if candidate in program.close:
        plan, edited = program.close[candidate]
        return arrived(call, PassResult(plan, prepare(call, options), edited), options)
    rings = program.plan
    assert rings is not None
    plan = rings.left_alone()
    if candidate != "plain":
        names = {setting.name for setting in (*NVLINK_STREAM, *SEEN)}
        more = {n: v for n, v in rings.xla_options.items() if n in names}
        if candidate in COMPARED:
            more |= accepted(candidate, mesh_of(call).devices.flat[0])[0]
        plan = rings.left_alone(rings.schedule, more)
    return step_program(call, replace(options, plan=plan), found)
