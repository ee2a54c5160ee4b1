"""The stages of a search: what is proposed, in which order, and what it has to gain."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

from jaxoverlap.passes.analysis.jaxprs import bodies
from jaxoverlap.passes.evaluated import Evaluated, Proposal
from jaxoverlap.passes.halves.propose import propose_parts, propose_unrolled
from jaxoverlap.passes.layouts import columns, loop_weights
from jaxoverlap.passes.layouts.propose import (
    propose_fewer,
    propose_lookups,
    propose_mixes,
    propose_neighbours,
    propose_starts,
    propose_without_own,
)
from jaxoverlap.passes.planning.terms import Terms
from jaxoverlap.passes.registry import PASSES, RegisteredPass
from jaxoverlap.passes.rewriting import per_shard
from jaxoverlap.passes.rewriting.propose import propose_ahead, propose_by_bytes, propose_rings
from jaxoverlap.plan.edits import LAYOUTS, SplitBatch, SumLate
from jaxoverlap.plan.limits import (
    FEW_CANDIDATES,
    GAIN,
    LAYOUT_EQUATIONS,
    LAYOUT_STEP,
    MOSTLY_WAITS,
    RIVAL_LAYOUT,
    RIVAL_LAYOUTS,
    UNROLL,
)
from jaxoverlap.search.candidate import Candidate
from jaxoverlap.search.memory import ahead_fits, layout_fits, split_fits, unrolled_fits
from jaxoverlap.search.search import ANYWAY, Budget, Propose, Stage
from jaxoverlap.step.context import StepContext
from jaxoverlap.step.options import Options

TRANSFORMS, COLUMNS, STARTS, LOOKUPS, NEIGHBOURS, MIXES, OWN, LOOPS, FEWER = (
    *(
        "transforms per shard",
        "columns interleaved",
        "layouts",
        "lookups",
        "their neighbours",
        "lines of other layouts",
    ),
    *("pins that XLA chooses too", "weights of loops", "pins that are not needed"),
)
GIVEN, SPLIT, UNROLLED, AHEAD, RINGS = (
    *("the given layout", "batch split", "scans unrolled", "gathers ahead of parts", "rings"),
)
_MAY_BE_SLOWER = 1 - RIVAL_LAYOUT  # by as much at first, of what rings or parts make faster


def stages_of(step: StepContext, options: Options, terms: Terms) -> tuple[Stage, ...]:
    """Return the stages of the search for a step, as its cluster and the user's options have them.

    Args:
        step: the step.
        options: the user's options.
        terms: the terms to decide by.
    """
    by_price = terms.prices is not None and options.chooses
    return (
        *_of_layouts(step, options),
        *_of_parts(step, options, by_price=by_price),
        *_of_rings(step, options, by_price=by_price),
        *_of_passes(options, by_price=by_price),
    )


def _of_layouts(step: StepContext, options: Options) -> Iterator[Stage]:
    """Yield the stages that choose layouts; a step on an explicit mesh states its own."""
    if step.explicit:
        return
    if (pins := options.pins) is not None:
        yield Stage(GIVEN, lambda _: [Proposal(pins)] if pins else [], ANYWAY)
        return
    if (mode := options.layouts) is None or step.cost is None:
        return
    thorough, most = mode != "repair", LAYOUT_EQUATIONS[mode] // _num_equations(step)
    budget = Budget(most)
    fits = functools.partial(layout_fits, step.cost)
    layout = functools.partial(Stage, fits=fits, budget=budget)
    estimate = step.estimate(step.plain)
    waits = estimate.exposed_s > MOSTLY_WAITS * estimate.step_s
    gain = _MAY_BE_SLOWER if thorough or waits else GAIN
    yield layout(TRANSFORMS, per_shard.propose)
    # Under another layout than XLA's they may gain what they do not here.
    yield layout(COLUMNS, columns.propose, _MAY_BE_SLOWER, rivals=1)
    yield layout(STARTS, propose_starts, gain, rivals=RIVAL_LAYOUTS[mode])
    yield layout(LOOKUPS, propose_lookups, LAYOUT_STEP, expands=1)
    yield layout(NEIGHBOURS, propose_neighbours, LAYOUT_STEP, takes="first", expands=1)
    yield layout(MIXES, propose_mixes, LAYOUT_STEP, takes="each", expands=1)
    yield layout(OWN, propose_without_own, -LAYOUT_STEP)
    yield layout(LOOPS, loop_weights.propose)
    if mode == "advise":
        yield Stage(
            *(FEWER, propose_fewer, -LAYOUT_STEP),
            fits=fits,
            takes="each",
            expands=1,
            budget=Budget(most),
        )
    yield from (_stage(one, fits) for one in PASSES if one.propose and _before_split(one))


def _of_parts(step: StepContext, options: Options, *, by_price: bool) -> Iterator[Stage]:
    """Yield the stages that split the batch, as the user says or if it is faster."""
    if isinstance(options.halves, int):
        yield Stage(SPLIT, functools.partial(propose_parts, options.halves), ANYWAY)
        if options.unroll > 1:
            yield Stage(UNROLLED, functools.partial(propose_unrolled, options.unroll), ANYWAY)
    elif options.halves == "auto" and by_price:
        assert step.cost is not None
        two, unrolled = (
            functools.partial(propose_parts, 2),
            functools.partial(propose_unrolled, UNROLL),
        )
        fits = functools.partial(unrolled_fits, step.cost)
        yield Stage(SPLIT, two, _MAY_BE_SLOWER, functools.partial(split_fits, step.cost), rivals=1)
        yield Stage(UNROLLED, unrolled, _MAY_BE_SLOWER, fits, rivals=1)
        # Gathers ahead alone risk nothing.
        fits = functools.partial(ahead_fits, step.cost)
        yield Stage(AHEAD, _if(propose_ahead, split=True), 0, fits, ties=True)


def _of_rings(step: StepContext, options: Options, *, by_price: bool) -> Iterator[Stage]:
    if not by_price:
        yield Stage(RINGS, functools.partial(propose_by_bytes, options.layers_ahead), ANYWAY)
        return
    assert step.cost is not None
    propose = _if(propose_rings, split=False) if options.halves == "auto" else propose_rings
    fits = functools.partial(ahead_fits, step.cost)
    yield Stage(RINGS, propose, fits=fits, ties=True, first=FEW_CANDIDATES, narrows=True)


def _of_passes(options: Options, *, by_price: bool) -> Iterator[Stage]:
    """Yield the stages of passes that work after rings and after the batch split."""
    for one in PASSES:
        if one.propose is None or _before_split(one):
            continue
        if options.late_sums and SumLate in one.edits:
            yield Stage(one.name, one.propose, ANYWAY)
        elif by_price:
            yield _stage(one)


def _stage(one: RegisteredPass, fits: Callable[[Candidate], str] = lambda made: "") -> Stage:
    assert one.propose is not None
    return Stage(one.name, one.propose, one.gain, fits, ties=True)


def _before_split(one: RegisteredPass) -> bool:
    """Return whether edits of a pass come before a batch split, and before rings."""
    return any(kind in LAYOUTS for kind in one.edits)


def _if(propose: Propose, *, split: bool) -> Propose:
    """Return proposals for steps whose batch is split, or for the others only."""

    def proposals(step: Evaluated) -> Iterator[Proposal]:
        if step.step.has(SplitBatch) == split:
            yield from propose(step)

    return proposals


def _num_equations(step: StepContext) -> int:
    return sum(len(body.eqns) for body in bodies(step.jaxpr)) or 1


LAYOUT_STAGES = (
    *(GIVEN, TRANSFORMS, COLUMNS, STARTS, LOOKUPS, NEIGHBOURS, MIXES, OWN, LOOPS, FEWER),
    *(one.name for one in PASSES if one.propose and _before_split(one)),
)
