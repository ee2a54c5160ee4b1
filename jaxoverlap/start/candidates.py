"""Find the few programs of a step that are worth a trial, as plans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec

from jaxoverlap._jax import jits
from jaxoverlap.flags.published import COMPARED
from jaxoverlap.plan.plan import Plan
from jaxoverlap.search.candidate import Candidate
from jaxoverlap.search.choice import CompiledChoice
from jaxoverlap.search.found import found
from jaxoverlap.search.search import ranked, search_compiled
from jaxoverlap.start.record import PLAIN
from jaxoverlap.step.context import prepare
from jaxoverlap.step.options import Options
from jaxoverlap.step.program import step_program
from jaxoverlap.tuning.target import TuningTarget
from jaxoverlap.tuning.tune import Tuning, worth_a_trial

_TUNED = 8  # programs of a tuning that have a trial; each is compiled here, and takes its memory


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """A program of a step that is worth a trial.

    Attributes:
        name: its name.
        plan: the plan to follow.
        simulated_s: the seconds that the simulation gives; None where there is none.
    """

    name: str
    plan: Plan
    simulated_s: float | None = None


class Offers(msgspec.Struct, frozen=True, kw_only=True):
    """Holds the programs that a search offers, or why there is nothing to try.

    Attributes:
        offers: the programs, the best by simulation or estimate first.
        why: why there is none; empty if there is one.
        notice: what the step loses as it is written; empty if it loses little.
    """

    offers: tuple[Offer, ...] = ()
    why: str = ""
    notice: str = ""


def offers_of(call: jits.Call, options: Options) -> Offers:
    """Search for programs of a step that are worth a trial.

    On GPUs with prices candidates are compiled in children and simulated; offered are the fastest,
    and the fastest of each kind: overlapped, overlapped without a batch split, the scheduler pass
    alone, published options. Elsewhere the overlapped step is, and where another batch split is
    estimated to be close, that too.

    A program with a stream of its own for NVLink is not offered: one that hangs would take the
    training with it.

    Raises:
        UserError, RewriteError: as `step_program`.
    """
    options = replace(options, streams="one", on_error="raise", by_rule=True)
    program = step_program(call, options, found)
    if program.plan is None:
        return Offers(why=str(program.error))
    notice = program.notice.text if program.notice else ""
    if program.undecided:
        offers, refusals = _simulated(CompiledChoice(call, program, options))
    else:
        plans = {"overlapped": program.plan, **{n: plan for n, (plan, _) in program.close.items()}}
        offers = [Offer(name=n, plan=plan) for n, plan in plans.items() if _does_something(plan)]
        refusals = ""
    if not offers:
        return Offers(why=refusals or notice or "overlap() changes nothing in it")
    return Offers(offers=tuple(offers), notice=notice if program.plan.edits else "")


def tuned_offers_of(call: jits.Call, options: Options, tuning: Tuning) -> Offers:
    """Search as `tune` does for programs of a step that are worth a trial: the fastest eight.

    Raises:
        UserError, RewriteError: as `step_program`.
    """
    options = replace(options, streams="one", on_error="raise", by_rule=True)
    target = TuningTarget(call, prepare(call, options), options)
    few = list[Offer]()
    for row in worth_a_trial(target, tuning):
        one = _offer(row)
        if _does_something(one.plan) and all(_program(one) != _program(other) for other in few):
            few.append(one)
    return Offers(offers=tuple(few[:_TUNED]), why="" if few else "the tuning found nothing else")


def _simulated(choice: CompiledChoice) -> tuple[list[Offer], str]:
    """Compile and simulate candidates; return the fastest of each kind, and why others are refused.

    What `never_slower` leaves out by simulation is compiled too: a simulation that prefers rings
    clearly has been wrong about a step for which the scheduler pass alone was the fastest.
    """
    compare, compiler = choice.candidates(), choice.compiler()
    rows = search_compiled(compare.stages, compiler.evaluated)
    names = {row.stage for row in rows}
    kinds = ("reordered", *COMPARED) if compare.reorders else ()
    more = [compare.candidates[name] for name in kinds if name not in names]
    if compare.plan.split and all(row.plan and row.plan.split for row in rows if _overlaps(row)):
        whole = step_program(choice.call, replace(choice.options, halves=None), found).plan
        more += [Candidate.planned("no batch split", whole)] if whole else []
    rows += compiler.evaluated(more)
    others = [row for row in rows if row.stage != PLAIN and row.plan]
    # The clock needs no simulation; what XLA does not compile in a child is not compiled here.
    may = [row for row in others if not row.evaluation.refusal or row.evaluation.peak_bytes]
    best = ranked(may, compare.cost.cluster.chip.memory_bytes)
    refusals = [f"{row.stage}: {row.evaluation.refusal}" for row in others]
    return [*map(_offer, few_of(best))], "; ".join(refusals)


def few_of(best: Sequence[Candidate]) -> list[Candidate]:
    """Return the fastest candidate and the fastest of each kind, each once.

    Args:
        best: the candidates, the fastest first.
    """
    kinds: tuple[Callable[[Candidate], bool], ...] = (
        lambda row: True,
        _overlaps,
        lambda row: _overlaps(row) and not (row.plan and row.plan.split),
        lambda row: row.stage == "reordered",
        lambda row: row.stage in COMPARED,
    )
    few = (next(filter(kind, best), None) for kind in kinds)
    return [row for row in dict.fromkeys(few) if row is not None]


def _overlaps(row: Candidate) -> bool:
    """Return whether a candidate edits the step."""
    return row.plan is not None and bool(row.plan.edits)


def _offer(row: Candidate) -> Offer:
    assert row.plan is not None
    name = row.stage + ", collectives joined" * (row.parent is not None)
    return Offer(name=name, plan=row.plan, simulated_s=row.evaluation.step_s)


def _program(offer: Offer) -> tuple[object, ...]:
    """Return what makes the program of an offer."""
    return offer.plan.edits, offer.plan.xla_options, offer.plan.schedule


def _does_something(plan: Plan) -> bool:
    """Return whether a plan gives another program than the original step."""
    return bool(plan.edits or plan.xla_options or plan.schedule)
