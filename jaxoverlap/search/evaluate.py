"""Evaluate candidates by the estimate: apply their edits, partition the step, price the program."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
from jax.sharding import Mesh

from jaxoverlap._util.ending import check_running
from jaxoverlap.passes.analysis.errors import RewriteError, UserError
from jaxoverlap.passes.analysis.matmul_collectives import permuted_matmuls
from jaxoverlap.passes.analysis.partitioned import Shardings, SpmdProgram
from jaxoverlap.passes.apply import apply
from jaxoverlap.passes.edited import EditedStep
from jaxoverlap.passes.estimation.estimate import Estimate
from jaxoverlap.passes.evaluated import Evaluated, Proposal
from jaxoverlap.passes.halves.body import HostMemoryError
from jaxoverlap.passes.halves.shardings import shardings_of_parts
from jaxoverlap.passes.layouts.memory import estimated_peak_bytes
from jaxoverlap.passes.planning.terms import Terms
from jaxoverlap.passes.registry import PASS_OF
from jaxoverlap.passes.rewriting.pin_results import pinned_results
from jaxoverlap.plan.edits import (
    Edit,
    ShareViews,
    SplitBatch,
    in_order,
)
from jaxoverlap.plan.evaluation import Evaluation
from jaxoverlap.search.candidate import Candidate, only_lay_out
from jaxoverlap.search.search import Stage
from jaxoverlap.step.context import StepContext

_WRONG_PERMUTE_AXES = 3  # XLA loses permutes on meshes of so many axes (docs/upstream.md)


@dataclass(frozen=True)
class _Answer:
    """A step after edits: what XLA's partitioner makes of it, and the estimate."""

    step: EditedStep
    program: SpmdProgram | None = None
    estimate: Estimate | None = None
    evaluation: Evaluation = field(default_factory=Evaluation)


class Evaluator:
    """Evaluates candidates of one step; those with equal edits once."""

    def __init__(self, step: StepContext, terms: Terms):
        self._step, self._terms = step, terms

    def start(self) -> Candidate:
        """Return the step as it is, whose results are pinned to their shardings."""
        step = self._step
        pins = pinned_results(step.params, step.plain.results, step.mesh)
        edits = (*step.edited.edits, *pins)

        def answered() -> _Answer:
            return self._answered(apply(step.edited, pins), step.plain)

        answer = self._once(edits, answered)
        evaluated = self._evaluated(answer, step.plain.shardings, {})
        return Candidate("plain", edits, answer.evaluation, evaluated=evaluated)

    def __call__(self, stage: Stage, parent: Candidate, proposal: Proposal) -> Candidate:
        """Evaluate a proposal of a stage for a candidate.

        Raises:
            RewriteError: if a pass fails.
        """
        check_running()
        gone = proposal.without
        stay = parent.edits if gone is None else [e for e in parent.edits if not gone(e)]
        edits = tuple(in_order([*stay, *proposal.edits]))
        made = Candidate(stage.name, edits, Evaluation(refusal=proposal.why_not), proposal, parent)
        if proposal.why_not:
            return made
        answer = self._once(edits, lambda: self._found(parent.known.step, edits))
        if answer.program is None:
            return replace(made, evaluation=answer.evaluation)
        shardings = self._shardings(answer, parent)
        notes = {**parent.known.notes, **proposal.notes}
        evaluated = self._evaluated(answer, shardings, notes)
        made = replace(made, evaluation=answer.evaluation, evaluated=evaluated)
        if not made.evaluation.refusal and (why := stage.fits(made)):
            made = replace(made, evaluation=msgspec.structs.replace(made.evaluation, refusal=why))
        return made

    def _once(self, edits: Sequence[Edit], find: Callable[[], _Answer]) -> _Answer:
        return self._step.once(("evaluated", tuple(edits)), find)

    def _found(self, before: EditedStep, edits: Sequence[Edit]) -> _Answer:
        """Apply edits and partition the step; a pass may refuse some, and so may XLA."""
        try:
            edited = _applied(self._step.edited, before, edits)
        except (UserError, HostMemoryError) as error:
            return _Answer(before, evaluation=Evaluation(refusal=str(error)))
        try:
            if only_lay_out(edited.edits):
                return self._answered(edited, self._step.partitioned(edited.jaxpr))
            viewed = apply(edited, [ShareViews()])
            return self._answered(edited, self._step.partitioned_after(viewed))
        except RewriteError as error:
            return _Answer(edited, evaluation=Evaluation(refusal=str(error)))

    def _answered(self, edited: EditedStep, program: SpmdProgram) -> _Answer:
        why_not = changed(self._step.plain, program)
        if not why_not and edited.edits and only_lay_out(edited.edits):
            why_not = _wrong_permutes(program, edited.mesh)
        estimate = None if self._step.cost is None else self._step.estimate(program)
        peak_bytes = estimated_peak_bytes(program.module) if estimate else 0
        step_s = estimate and estimate.step_s
        evaluation = Evaluation(step_s=step_s, peak_bytes=peak_bytes, refusal=why_not)
        return _Answer(edited, program, estimate, evaluation)

    def _shardings(self, answer: _Answer, parent: Candidate) -> Mapping[Any, Shardings]:
        """Return the shardings of a candidate's matmuls, as edits of rings number them."""
        assert answer.program is not None
        if only_lay_out(answer.step.edits):
            return answer.program.shardings
        split = next((e for e in answer.step.edits if isinstance(e, SplitBatch)), None)
        before = parent.known
        if split is None or before.step.has(SplitBatch):
            return before.shardings
        cut = answer.step.numbered.jaxpr
        return shardings_of_parts(before.step.jaxpr, cut, before.shardings, split.parts)

    def _evaluated(
        self, answer: _Answer, shardings: Mapping[Any, Shardings], notes: Mapping[type, Any]
    ) -> Evaluated:
        assert answer.program is not None
        step = self._step
        return Evaluated(
            step=answer.step,
            program=answer.program,
            shardings=shardings,
            estimate=answer.estimate,
            terms=self._terms,
            plain=step.plain,
            partition=step.partitioned,
            estimated=step.estimate,
            notes=notes,
            outermost=step.outermost,
        )


def _applied(original: EditedStep, before: EditedStep, edits: Sequence[Edit]) -> EditedStep:
    """Apply edits to a step, of which an earlier candidate may have some already."""
    for stage in reversed(before.stages):
        done = len(stage.edits)
        if done < len(original.edits) or stage.edits != tuple(edits[:done]):
            continue
        same_pass = 0 < done < len(edits) and (
            PASS_OF[type(edits[done])] is PASS_OF[type(edits[done - 1])]
        )
        if not same_pass:
            return apply(stage, edits[done:])
    return apply(original, edits[len(original.edits) :])


def estimated(step: StepContext, edits: Iterable[Edit]) -> float | None:
    """Estimate a step after edits, in seconds; None if its results would be sharded differently.

    Raises:
        UserError, RewriteError: as `apply`, and if XLA does not partition the step.
    """
    program = step.partitioned_after(apply(step.edited, edits))
    return None if changed(step.plain, program) else step.seconds(program)


def changed(plain: SpmdProgram, after: SpmdProgram) -> str:
    """Say how sharding or donation differ from the plain step's; empty if they do not."""
    pairs = zip(plain.results, after.results, strict=True)
    moved = [str(position) for position, (one, other) in enumerate(pairs) if one != other]
    if moved:
        return f"XLA would give result {', '.join(moved[:3])} another sharding"
    lost = {argument for _, argument in plain.donated - after.donated}
    return f"XLA would not donate argument {', '.join(sorted(lost)[:3])}" if lost else ""


def _wrong_permutes(program: SpmdProgram, mesh: Mesh) -> str:
    """Return why XLA would give wrong results on three or more axes (lost permutes); "" if not."""
    if sum(size > 1 for size in mesh.shape.values()) < _WRONG_PERMUTE_AXES:
        return ""
    permuted = list(permuted_matmuls(program.module))
    return f"XLA would permute values next to {len(permuted)} matmuls" if permuted else ""
