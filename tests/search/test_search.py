"""The search keeps what gains, and asks for no more than it has to."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from jaxoverlap.passes.evaluated import Proposal
from jaxoverlap.plan.decisions import Variant
from jaxoverlap.plan.edits import EditedMatmul, MakeRing, Pin, SplitBatch
from jaxoverlap.plan.evaluation import Evaluation
from jaxoverlap.search.candidate import Candidate
from jaxoverlap.search.found import _close
from jaxoverlap.search.search import ANYWAY, Budget, Stage, Trail, search

RING = MakeRing(kind="all_gather", axis="a", variant=Variant(), matmuls=(EditedMatmul(site=0),))
HALVES = SplitBatch(site=0, operand=0, dim=0, parts=2)


def pin(site: int) -> Pin:
    return Pin(site=site, spec=())


class Machine:
    """A machine that knows how long a step takes with each set of edits.

    Attributes:
        asked: the sets that it was asked about.
    """

    def __init__(self, seconds: Callable[[frozenset], float], refused: Mapping[Any, str] = {}):
        self.asked: list[frozenset] = []
        self._seconds, self._refused = seconds, refused

    def candidate(self, stage: str, edits: tuple, *args: Any) -> Candidate:
        refusal = next((why for edit, why in self._refused.items() if edit in edits), "")
        answer = Evaluation(step_s=self._seconds(frozenset(edits)), refusal=refusal)
        known: Any = types.SimpleNamespace(edits=edits)
        return Candidate(stage, edits, answer, *args, evaluated=known)

    def __call__(self, stage: Stage, parent: Candidate, proposal: Proposal) -> Candidate:
        stay = [e for e in parent.edits if not (proposal.without and proposal.without(e))]
        edits = (*stay, *proposal.edits)
        self.asked.append(frozenset(edits))
        made = self.candidate(stage.name, edits, proposal, parent)
        if why := stage.fits(made):
            made = Candidate(stage.name, edits, Evaluation(refusal=why), proposal, parent)
        return made

    def search(self, *stages: Stage) -> Trail:
        return search(self.candidate("plain", ()), stages, self)


def proposing(*edits: Any) -> Callable[[Any], list[Proposal]]:
    """Propose each edit by itself, for a step that does not have it."""
    return lambda step: [Proposal((edit,)) for edit in edits if edit not in step.edits]


def saving(**by_name: float) -> Callable[[frozenset], float]:
    """Take 10 s, less what the pins (p0, p1, ...), the ring and the halves save."""
    named = {"ring": RING, "halves": HALVES}

    def seconds(edits: frozenset) -> float:
        known = {named.get(name) or pin(int(name[1:])): s for name, s in by_name.items()}
        return 10.0 - sum(s for edit, s in known.items() if edit in edits)

    return seconds


def test_the_best_proposal_is_taken_and_the_trail_has_all():
    trail = Machine(saving(p0=1, p1=2)).search(Stage("pins", proposing(pin(0), pin(1), pin(2))))
    assert trail.taken.edits == (pin(1),)
    assert [row.stage for row in trail.rows] == ["plain", "pins", "pins", "pins"]
    assert [row.seconds for row in trail.rows] == [10, 9, 8, 10]
    assert [row.edits for row in trail.taken.line] == [(), (pin(1),)]


@pytest.mark.parametrize("saved", [0.05, 0.0, -1.0])
def test_nothing_is_taken_that_gains_too_little(saved: float):
    machine = Machine(saving(p0=saved))
    assert machine.search(Stage("pins", proposing(pin(0)))).taken.edits == ()
    anyway = machine.search(Stage("pins", proposing(pin(0)), ANYWAY))
    assert anyway.taken.edits == (pin(0),)


def test_what_is_refused_is_not_taken_and_the_trail_says_why():
    machine = Machine(saving(p0=5, p1=1), {pin(0): "XLA would give result 0 another sharding"})
    trail = machine.search(Stage("pins", proposing(pin(0), pin(1))))
    assert trail.taken.edits == (pin(1),)
    assert trail.rows[1].evaluation.refusal == "XLA would give result 0 another sharding"
    assert trail.rows[1].evaluation.step_s == 5
    large = Stage("pins", proposing(pin(0)), fits=lambda made: "it needs 90 GB")
    (row,) = Machine(saving(p0=5)).search(large).of("pins")
    assert row.evaluation.refusal == "it needs 90 GB"


def test_of_equal_estimates_the_first_is_taken():
    proposals = proposing(pin(0), pin(1), pin(2))
    machine = Machine(saving(p0=1.95, p1=2, p2=0.5))
    assert machine.search(Stage("rings", proposals, ties=True)).taken.edits == (pin(0),)
    assert machine.search(Stage("rings", proposals)).taken.edits == (pin(1),)


def test_the_first_that_gains_is_gone_on_from():
    """A step of a climb: proposals are made anew for the step that gained."""
    trail = Machine(saving(p0=0, p1=1, p2=2)).search(
        Stage("neighbours", proposing(pin(0), pin(1), pin(2)), takes="first")
    )
    assert set(trail.taken.edits) == {pin(1), pin(2)}


def test_each_that_gains_is_added_to_those_before():
    trail = Machine(saving(p0=1, p1=-1, p2=2)).search(
        Stage("lines", proposing(pin(0), pin(1), pin(2)), takes="each")
    )
    assert trail.taken.edits == (pin(0), pin(2))


def test_pins_that_are_not_needed_go():
    """Two of five pins are needed: edits may be left out, at no gain."""

    def fewer(step: Any) -> list[Proposal]:
        return [Proposal((), lambda edit, gone=gone: edit == gone) for gone in step.edits]

    pins = tuple(map(pin, range(5)))
    trail = Machine(saving(p1=3, p4=2)).search(
        Stage("pins", lambda step: [Proposal(pins)]),
        Stage("fewer", fewer, -0.002, takes="each"),
    )
    assert trail.taken.edits == (pin(1), pin(4))


def test_evaluations_are_limited():
    machine = Machine(saving(p0=1, p1=2))
    budget = Budget(1)
    stages = [Stage(name, proposing(pin(0), pin(1)), budget=budget) for name in ("one", "other")]
    assert machine.search(*stages).taken.edits == (pin(0),)
    assert machine.asked == [{pin(0)}]


def test_a_rival_stays_beside_and_may_win_with_rings():
    """The second best layout is the better one once its collectives are in rings."""

    def seconds(edits: frozenset) -> float:
        base = {pin(0): 8.0, pin(1): 8.5}
        step_s = min((s for edit, s in base.items() if edit in edits), default=10.0)
        return step_s - (2 if RING in edits and pin(1) in edits else 0)

    machine = Machine(seconds)
    layouts = Stage("layouts", proposing(pin(0), pin(1), pin(2)), rivals=2)
    trail = machine.search(layouts, Stage("rings", proposing(RING)))
    assert trail.taken.edits == (pin(1), RING)
    alone = Stage("layouts", proposing(pin(0), pin(1), pin(2)))
    assert machine.search(alone, Stage("rings", proposing(RING))).taken.edits == (pin(0),)


def test_a_layout_that_is_much_slower_is_no_rival():
    machine = Machine(saving(p0=4, p1=1))
    trail = machine.search(Stage("layouts", proposing(pin(0), pin(1)), rivals=2))
    assert [row.edits for row in trail.left] == [(), (pin(0),)]


def test_a_split_has_to_gain_and_with_rings_beside_it_less():
    stage = Stage("split", proposing(HALVES), -0.15, rivals=1)
    assert Machine(saving(halves=0.05)).search(stage).taken.edits == ()
    assert Machine(saving(halves=0.2)).search(stage).taken.edits == (HALVES,)
    only_whole = Stage("rings", lambda step: [] if HALVES in step.edits else [Proposal((RING,))])
    trail = Machine(saving(halves=0.55, ring=0.5)).search(stage, only_whole)
    assert trail.taken.edits == (HALVES,)


@pytest.mark.parametrize(("saved", "is_taken"), [(0.07, False), (0.09, True)])
def test_unrolled_scans_have_to_gain_for_the_memory_that_they_take(saved: float, is_taken: bool):
    unrolled = SplitBatch(site=0, operand=0, dim=0, parts=2, unroll=2)
    seconds = {(): 12.0, (HALVES,): 10.0, (unrolled,): 10.0 - saved}
    machine = Machine(lambda edits: seconds[tuple(edits)])
    left = [machine.candidate("stage", edits) for edits in seconds]
    assert Trail(list(left), left).taken.has(SplitBatch)
    assert (Trail(list(left), left).taken.edits == (unrolled,)) == is_taken


def test_a_candidate_that_has_fallen_behind_gets_few_proposals():
    rings = proposing(RING, *map(pin, range(5)))
    whole = Stage("rings", lambda s: [] if HALVES in s.edits else rings(s), first=2)
    split = Stage("split", proposing(HALVES), -0.15, rivals=1)
    behind = Machine(saving(halves=4, ring=1)).search(split, whole)
    assert sum(1 for _ in behind.of("rings")) == 2
    close = Machine(saving(halves=1.2, ring=1)).search(split, whole)
    assert sum(1 for _ in close.of("rings")) == 6


def test_the_best_of_each_kind_goes_on():
    split = Stage("split", proposing(HALVES), -0.15, rivals=1)
    layouts = Stage("layouts", proposing(pin(0)), rivals=1)
    narrow = Stage("rings", proposing(), narrows=True)
    trail = Machine(saving(p0=1, halves=0.3)).search(layouts, split, narrow)
    assert [set(row.edits) for row in trail.left] == [{pin(0)}, {pin(0), HALVES}]
    behind = Machine(saving(p0=1, halves=3)).search(layouts, split, narrow)
    assert [set(row.edits) for row in behind.left] == [{pin(0), HALVES}]


@pytest.mark.parametrize(
    ("unsplit_s", "unrolled_s", "close"),
    [
        (9.5, 9.1, {"other rows", "other loops"}),
        (9.5, 8.9, {"other loops"}),
        (9.5, 9.2, {"other rows"}),
        (9.7, 9.2, set()),
    ],
)
def test_what_the_estimate_hardly_tells_apart_is_compiled(
    unsplit_s: float, unrolled_s: float, close: set[str]
):
    """The split step takes 9 s: others within 6% are close to it, unrolled ones within 1.5%."""
    unrolled = SplitBatch(site=0, operand=0, dim=0, parts=2, unroll=2)
    seconds = {(): unsplit_s, (HALVES,): 9.0, (unrolled,): unrolled_s}
    machine = Machine(lambda edits: seconds[tuple(edits)])
    left = [machine.candidate("stage", edits) for edits in seconds]
    found = _close(Trail(list(left), left))
    assert found.keys() == close
    assert all(name == "other rows" or one.has(SplitBatch) for name, one in found.items())
