"""Choose between a rewritten step and the same step without rings, which are both compiled.

`never_slower.py` says which candidates there are, `compiled.py` compiles them in children.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import msgspec

from jaxoverlap._jax import jits
from jaxoverlap._jax.jobs import peak_bytes
from jaxoverlap._util.files import kept_folder
from jaxoverlap._util.text import first_line, human_bytes, warn
from jaxoverlap.flags import is_gpu
from jaxoverlap.flags.published import COMPARED, accepted
from jaxoverlap.flags.required import NVLINK_STREAM, SEEN
from jaxoverlap.passes.analysis.errors import UserError
from jaxoverlap.plan.edits import Recompute
from jaxoverlap.plan.plan import Plan
from jaxoverlap.plan.speedup import CandidateName, Speedup
from jaxoverlap.search.candidate import Candidate
from jaxoverlap.search.compiled import MOST_WORKERS, Compiler, writable
from jaxoverlap.search.found import found
from jaxoverlap.search.kept import most_bytes, room_left
from jaxoverlap.search.never_slower import NeverSlower
from jaxoverlap.search.search import search_compiled
from jaxoverlap.step.context import StepContext, mesh_of, prepare
from jaxoverlap.step.options import Options, memory_text
from jaxoverlap.step.pipeline import PassResult
from jaxoverlap.step.processes import handed, processes_of
from jaxoverlap.step.program import (
    StepProgram,
    arrived,
    as_it_is,
    lowered_as,
    request_of,
    step_program,
)
from jaxoverlap.step.stages import Compiled, Lowered
from jaxoverlap.step.trial import Request, attempt, evaluated, refused

_TIMEOUT_S = 3600.0  # of a child; what takes as long is stuck
_DECIDED_WITHIN_S = 3 * _TIMEOUT_S  # three rounds of children, those of a round at a time


@dataclass(frozen=True)
class CompiledChoice:
    """The choice among the candidates of an undecided step.

    Attributes:
        call, options: those that it was rewritten with.
        program: the step.
    """

    call: jits.Call
    program: StepProgram
    options: Options

    def candidates(self) -> NeverSlower:
        """Return the overlapped step as estimated best, and what it is compared with.

        "other rows" and "other loops" are the search's, with another batch split. The others are
        the step without rings, by XLA's defaults; all but "plain" take the scheduler's order and
        the estimated best number of streams.
        """
        rings, cost = self.program.plan, self.program.cost
        assert rings is not None and cost is not None
        names = {setting.name for setting in (*NVLINK_STREAM, *SEEN)}
        streams = {n: v for n, v in rings.xla_options.items() if n in names}
        device = mesh_of(self.call).devices.flat[0]
        plans: dict[CandidateName, Plan] = {
            "overlapped": rings,
            **{name: plan for name, (plan, _) in self.program.close.items()},
            "reordered": rings.left_alone(rings.schedule, streams, keeps=True),
            "plain": rings.left_alone(),
        }
        for name in COMPARED:
            options = streams | accepted(name, device)[0]
            plans[name] = rings.left_alone(rings.schedule, options, keeps=True)
        made = {name: Candidate.planned(name, plan) for name, plan in plans.items()}
        most = most_bytes(self.options, cost.cluster)
        return NeverSlower(made, cost, reorders=self.options.schedule is not None, most_bytes=most)

    def keeping_less(self, compiled: Callable[[Candidate], Candidate]) -> CompiledChoice | None:
        """Return the choice with fewer residuals, if a step needs more than `memory=` states.

        Args:
            compiled: compiles a candidate.
        """
        if self.options.memory is None:
            return None
        assert self.program.cost is not None and self.program.plan is not None
        most = most_bytes(self.options, self.program.cost.cluster)
        overlapped = compiled(self.candidates().candidates["overlapped"])
        if (peak_bytes := overlapped.evaluation.peak_bytes) <= most:
            return None
        less = self.with_room(room_left(self.program.plan.edits, peak_bytes - most))
        if less.program.plan is None or less.program.plan.edits == self.program.plan.edits:
            return None
        warn(
            f"{self.program.plan.step} needs {human_bytes(peak_bytes)} as compiled, of "
            f"{human_bytes(most)} that memory= states: it keeps less"
        )
        return less

    def compiled_in_child(self, candidate: Candidate) -> Candidate:
        """Compile a candidate in a child."""
        (one,) = self.compiler().evaluated([candidate])
        return one

    def with_room(self, room: int | None) -> CompiledChoice:
        """Return the choice for a step that keeps at most so many bytes more than as written."""
        if room == self.options.room:
            return self
        options = replace(self.options, room=room)
        return CompiledChoice(self.call, step_program(self.call, options, found), options)

    def check(self, taken: Candidate) -> None:
        """Refuse a compiled step that needs more memory than `memory=` states.

        Args:
            taken: the candidate that is taken: one that fits, if any does that can be simulated.

        Raises:
            UserError: if it does not fit.
        """
        if self.options.memory is None or self.program.cost is None:
            return
        most = most_bytes(self.options, self.program.cost.cluster)
        if (needed := taken.evaluation.peak_bytes) > most:
            raise UserError(
                f"memory={memory_text(self.options.memory)}: a device needs {human_bytes(needed)}, "
                f"{human_bytes(needed - most)} too many, although {self._least()}. Shard over more "
                "devices, or compute the gradient in micro-batches"
            )

    def _least(self) -> str:
        """Say what was done so that the step needs little memory."""
        edits = self.program.plan.edits if self.program.plan else ()
        if any(isinstance(edit, Recompute) for edit in edits):
            return "its layers are recomputed"
        return "nothing is kept that can be recomputed by layers"

    def program_of(self, candidate: Candidate) -> StepProgram:
        """Return the program of a candidate."""
        own = candidate.stage if candidate.parent is None else ""
        if own == "overlapped":
            return self.program
        for name, (plan, edited) in self.program.close.items():
            if own == name:
                done = PassResult(plan, prepare(self.call, self.options), edited)
                return arrived(self.call, done, self.options)
        return step_program(self.call, replace(self.options, plan=candidate.plan), found)

    def lowered(self, candidate: Candidate) -> tuple[jax.stages.Lowered, StepProgram]:
        """Lower a candidate."""
        new = self.program_of(candidate)
        return lowered_as(self.call, new), new

    def compiler(
        self, workers: int = MOST_WORKERS, options: Mapping[str, Any] | None = None
    ) -> Compiler:
        """Return what compiles candidates in children, all with further options of the user."""

        def lower(candidate: Candidate) -> tuple[Request, Plan | None]:
            stage, new = self.lowered(candidate)
            assert self.program.cost is not None
            request = request_of(stage, new, mesh_of(self.call), self.program.cost, options)
            return request, new.plan

        return Compiler(lower, writable(_kept()), _TIMEOUT_S, workers=workers)


def found_to_compile(step: StepContext, options: Options) -> PassResult:
    """Search as `found`, while a child compiles the original step, which is compared afterwards.

    Raises:
        RewriteError, ValueError: as `found`.
    """
    compares = options.never_slower and options.plan is None and is_gpu(step.mesh)
    if compares and step.cost is not None and not processes_of(step.mesh):
        mesh = mesh_of(step.call)
        plain = as_it_is(step.call, mesh)
        stage = lowered_as(step.call, plain)
        with contextlib.suppress(ValueError):  # no child can compile it, as the comparison will say
            request = request_of(stage, plain, mesh, step.cost)
            arguments = (request, writable(_kept()), _TIMEOUT_S)
            threading.Thread(target=attempt, args=arguments, daemon=True).start()
    return found(step, options)


def _kept() -> Path:
    return kept_folder() / "trials"


def faster(choice: CompiledChoice, lowered: Lowered, options: dict[str, Any] | None) -> Compiled:
    """Compile a step, or another of its candidates if that is faster by simulation.

    This process compiles the overlapped step, and the original one in another order, as one of the
    two is mostly taken; children compile the others.

    Args:
        choice: the choice among its candidates.
        lowered: the overlapped step.
        options: further compiler options of the user, for all candidates.
    """
    # A core is this process's; a child that is ready compiles two while another one starts.
    compare, compiler = choice.candidates(), choice.compiler(max(1, MOST_WORKERS - 1), options)
    made: dict[str, Compiled] = {}
    first = functools.cache(lambda: lowered.compiled(options))

    def stage_of(candidate: Candidate) -> Lowered:
        if candidate.parent is None and candidate.stage == "overlapped":
            return lowered
        other, new = choice.lowered(candidate)
        return lowered.instead(other, new.plan, new.ordering)

    def here(candidate: Candidate) -> Candidate:
        try:
            own = candidate.stage == "overlapped" and candidate.parent is None
            one = first() if own else stage_of(candidate).compiled(options)
            made[candidate.stage] = one
        except jax.errors.JaxRuntimeError as error:
            return replace(candidate, evaluation=refused(first_line(error)))
        text = one.as_text() or ""
        answer = evaluated(text, peak_bytes(one.memory_analysis()), compare.cost)
        return replace(candidate, evaluation=answer, plan=one.plan, text=lambda: text)

    def compiled(batch: Sequence[Candidate]) -> list[Candidate]:
        first, *others = batch
        if first.stage not in ("overlapped", "reordered"):
            return compiler.evaluated(batch)
        with ThreadPoolExecutor(1) as pool:
            in_children = pool.submit(compiler.evaluated, others)
            return [here(first), *in_children.result()]

    if (less := choice.keeping_less(here)) is not None:
        other, new = less.lowered(less.candidates().candidates["overlapped"])
        return faster(less, lowered.instead(other, new.plan, new.ordering), options)
    rows = search_compiled(compare.stages, compiled)
    taken, speedup = compare.taken(rows), compare.speedup(rows)
    choice.check(taken)
    best = made.get(taken.stage) if taken.parent is None else None
    if best is None:
        best = stage_of(taken).compiled(options)
    if not speedup.is_overlapped:
        warn(speedup.warning(compare.plan.step))
    best.speedup = speedup
    return best


def decided(choice: CompiledChoice) -> StepProgram:
    """Return the fastest candidate of an undecided step, for GPUs that are present.

    Children compile all candidates for the GPUs' description before this process compiles any; if
    there are many processes, the children of process 0 do so for all.

    Args:
        choice: the choice among its candidates.
    """

    def speedup_here() -> str:
        now = choice
        while less := now.keeping_less(now.compiled_in_child):
            now = less
        compare = now.candidates()
        rows = search_compiled(compare.stages, now.compiler().evaluated)
        now.check(compare.taken(rows))
        speedup = msgspec.structs.replace(compare.speedup(rows), room=now.options.room)
        return msgspec.json.encode(speedup).decode()

    said = handed(
        speedup_here,
        "choice between rings and none",
        processes_of(mesh_of(choice.call)),
        within_s=_DECIDED_WITHIN_S,
    )
    speedup = msgspec.json.decode(said, type=Speedup)
    choice = choice.with_room(speedup.room)
    compare = choice.candidates()
    if not speedup.is_overlapped:
        warn(speedup.warning(compare.plan.step))
    taken = compare.candidates[speedup.taken]
    new = choice.program_of(taken)
    if speedup.joined and new.plan is not None:
        more = {**new.plan.xla_options, **speedup.joined}
        joined = msgspec.structs.replace(new.plan, xla_options=more)
        new = choice.program_of(Candidate.planned(speedup.taken, joined, parent=taken))
    return replace(new, agreement=None, undecided=False, close={}, speedup=speedup)
