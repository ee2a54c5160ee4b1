"""Choose between a rewritten step and the same step without rings, which are both compiled.

`never_slower.py` says which candidates there are, `compiled.py` compiles them in children.
"""

from __future__ import annotations

import contextlib
import contextvars
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
from jaxoverlap._util import progress
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
from jaxoverlap.search.search import ranked, search_compiled
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

Compile = Callable[[Sequence[Candidate]], list[Candidate]]
"""Compiles candidates, and returns them with their evaluations."""
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

    def keeping_less(self, compiled: Compile) -> CompiledChoice | None:
        """Return the choice with fewer residuals, if a step needs more than `memory=` states.

        Args:
            compiled: compiles candidates.
        """
        if self.options.memory is None:
            return None
        assert self.program.cost is not None and self.program.plan is not None
        most = most_bytes(self.options, self.program.cost.cluster)
        (overlapped,) = compiled([self.candidates().candidates["overlapped"]])
        if (peak_bytes := overlapped.evaluation.peak_bytes) <= most:
            return None
        if (less := self._saving(peak_bytes - most)) is not None:
            warn(
                f"{self.program.plan.step} needs {human_bytes(peak_bytes)} as compiled, of "
                f"{human_bytes(most)} that memory= states: it keeps less"
            )
        return less

    def leaving_room(
        self, compare: NeverSlower, rows: Sequence[Candidate]
    ) -> CompiledChoice | None:
        """Return the choice with fewer residuals, if the fastest candidate then fits, and pays.

        Published options take memory for what they send early. The residuals are chosen before.

        Args:
            compare, rows: the candidates of this choice, and those that were compiled.
        """
        if self.options.memory is None or (larger := compare.too_large(rows)) is None:
            return None
        return self._saving(larger.evaluation.peak_bytes - compare.most_bytes)

    def _saving(self, missing: float) -> CompiledChoice | None:
        """Return the choice with residuals of so many bytes less; None where there are none."""
        assert self.program.plan is not None
        less = self.with_room(room_left(self.program.plan.edits, missing))
        same = less.program.plan is None or less.program.plan.edits == self.program.plan.edits
        return None if same else less

    def with_room(self, room: int | None) -> CompiledChoice:
        """Return the choice for a step that keeps at most so many bytes more than as written."""
        if room == self.options.room:
            return self
        options = replace(self.options, room=room)
        return CompiledChoice(self.call, step_program(self.call, options, found), options)

    def check(self, needed: int) -> None:
        """Refuse a compiled step that needs more memory than `memory=` states.

        Args:
            needed: the bytes that it needs.

        Raises:
            UserError: if it does not fit.
        """
        if self.options.memory is None or self.program.cost is None:
            return
        most = most_bytes(self.options, self.program.cost.cluster)
        if needed > most:
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

    def instead_of(self, lowered: Lowered) -> Lowered:
        """Return this choice's overlapped step, lowered as that of another choice was."""
        other, new = self.lowered(self.candidates().candidates["overlapped"])
        return lowered.instead(other, new.plan, new.ordering)

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


@dataclass(frozen=True)
class Compared:
    """Compiled candidates of a step.

    Attributes:
        choice: the choice that they are of.
        compare: what makes an answer of them.
        rows: the candidates.
    """

    choice: CompiledChoice
    compare: NeverSlower
    rows: Sequence[Candidate]

    @functools.cached_property
    def taken(self) -> Candidate:
        """The fastest candidate that fits."""
        return self.compare.taken(self.rows)


def compared(choice: CompiledChoice, compiler_of: Callable[[CompiledChoice], Compile]) -> Compared:
    """Compile the candidates of a step; with fewer residuals too, where they leave too little room.

    Args:
        choice: the choice among its candidates.
        compiler_of: returns what compiles candidates of a choice.
    """
    compiled = compiler_of(choice)
    if (less := choice.keeping_less(compiled)) is not None:
        return compared(less, compiler_of)
    compare = choice.candidates()
    done = Compared(choice, compare, search_compiled(compare.stages, compiled))
    if (less := choice.leaving_room(compare, done.rows)) is None:
        return done
    other = compared(less, compiler_of)
    best = ranked((done.taken, other.taken), compare.most_bytes)[0]
    return other if best is other.taken else done


class _Here:
    """Compiles candidates in this process and in children.

    This process compiles the overlapped step, and the original one in another order, as one of the
    two is mostly taken; children compile the others.
    """

    def __init__(self, choice: CompiledChoice, lowered: Lowered, options: dict[str, Any] | None):
        self._choice, self._lowered, self._options = choice, lowered, options
        # A core is this process's; a child that is ready compiles two while another one starts.
        self._children = choice.compiler(max(1, MOST_WORKERS - 1), options)
        self._made: dict[str, Compiled] = {}

    def __call__(self, batch: Sequence[Candidate]) -> list[Candidate]:
        """Compile and evaluate candidates."""
        first, *others = batch
        if first.stage not in ("overlapped", "reordered") or first.parent is not None:
            return self._children.evaluated(batch)
        with ThreadPoolExecutor(1) as pool:
            inside = contextvars.copy_context()  # of the line that shows what is compiled
            in_children = pool.submit(inside.run, self._children.evaluated, others)
            return [self._evaluated(first), *in_children.result()]

    def compiled(self, candidate: Candidate) -> Compiled:
        """Return the compiled program of a candidate; one of this process is compiled once."""
        if candidate.parent is not None:
            return self._stage(candidate).compiled(self._options)
        if candidate.stage not in self._made:
            self._made[candidate.stage] = self._stage(candidate).compiled(self._options)
        return self._made[candidate.stage]

    def _stage(self, candidate: Candidate) -> Lowered:
        if candidate.parent is None and candidate.stage == "overlapped":
            return self._lowered
        other, new = self._choice.lowered(candidate)
        return self._lowered.instead(other, new.plan, new.ordering)

    def _evaluated(self, candidate: Candidate) -> Candidate:
        try:
            one = self.compiled(candidate)
            progress.counting()(candidate.stage)
        except jax.errors.JaxRuntimeError as error:
            return replace(candidate, evaluation=refused(first_line(error)))
        text, cost = one.as_text() or "", self._choice.program.cost
        assert cost is not None
        answer = evaluated(text, peak_bytes(one.memory_analysis()), cost)
        return replace(candidate, evaluation=answer, plan=one.plan, text=lambda: text)


def faster(choice: CompiledChoice, lowered: Lowered, options: dict[str, Any] | None) -> Compiled:
    """Compile a step, or another of its candidates if that is faster by simulation.

    Args:
        choice: the choice among its candidates.
        lowered: the overlapped step.
        options: further compiler options of the user, for all candidates.
    """
    here: dict[int | None, _Here] = {}

    def compiler_of(one: CompiledChoice) -> Compile:
        stage = lowered if one is choice else one.instead_of(lowered)
        return here.setdefault(one.options.room, _Here(one, stage, options))

    done = compared(choice, compiler_of)
    done.choice.check(done.taken.evaluation.peak_bytes)
    best = here[done.choice.options.room].compiled(done.taken)
    best.speedup = done.compare.speedup(done.rows)
    if not best.speedup.is_overlapped:
        warn(best.speedup.warning(done.compare.plan.step))
    return best


def checked(choice: CompiledChoice, lowered: Lowered, options: dict[str, Any] | None) -> Compiled:
    """Compile a step that is not compared with others; with fewer residuals, if it does not fit.

    Raises:
        UserError: if it needs more memory than `memory=` states however little it keeps.
    """
    here = _Here(choice, lowered, options)
    if (less := choice.keeping_less(here)) is not None:
        return checked(less, less.instead_of(lowered), options)
    compiled = here.compiled(choice.candidates().candidates["overlapped"])
    choice.check(peak_bytes(compiled.memory_analysis()))
    return compiled


def decided(choice: CompiledChoice) -> StepProgram:
    """Return the fastest candidate of an undecided step, for GPUs that are present.

    Children compile all candidates for the GPUs' description before this process compiles any; if
    there are many processes, the children of process 0 do so for all.

    Args:
        choice: the choice among its candidates.
    """

    def speedup_here() -> str:
        done = compared(choice, lambda one: one.compiler().evaluated)
        done.choice.check(done.taken.evaluation.peak_bytes)
        speedup = done.compare.speedup(done.rows)
        return msgspec.json.encode(
            msgspec.structs.replace(speedup, room=done.choice.options.room)
        ).decode()

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
