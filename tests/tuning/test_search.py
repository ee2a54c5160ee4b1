"""The search for a plan runs on made-up results, with no compiler."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from msgspec.structs import replace as replaced

from jaxoverlap.passes.analysis.errors import RewriteError
from jaxoverlap.passes.scheduling.scheduler import Scheduler
from jaxoverlap.plan.edits import (
    EarlyMove,
    EditedMatmul,
    GatherAhead,
    MakeRing,
    ReadGathered,
    SplitBatch,
)
from jaxoverlap.plan.evaluation import Evaluation, Times, Waited
from jaxoverlap.plan.plan import Decision, Plan, Reason, Schedule, Skip, Variant
from jaxoverlap.plan.trail import Proposed
from jaxoverlap.search import compiled
from jaxoverlap.search.candidate import Candidate
from jaxoverlap.search.compiled import Compiler
from jaxoverlap.step.options import Options
from jaxoverlap.step.trial import refused
from jaxoverlap.tuning.candidates import (
    PLAIN,
    RULES,
    exposed_s,
    moves,
    rows,
    seeds,
    settings,
    with_variants,
)
from jaxoverlap.tuning.lagom.granularity import GranularityModel
from jaxoverlap.tuning.search import TuningSearch

BASE = Options(schedule=Scheduler())
ONE_WAY = Variant()
SCHEDULE = Schedule(slack=0.02, in_flight=4)
SLACK = replaced(SCHEDULE, slack=0.05)
GB = 10**9


def ring(site: int, variant: str = "one_way", kind: str = "all_gather_matmul") -> Decision:
    return Decision(
        site=site,
        ring=site,
        source=f"gpt.py:{site}",
        einsum="ab,bc->ac",
        kind=kind,
        axis="model",
        letter="a",
        num_chunks=8,
        bytes_moved=1,
        runs=1,
        variant=Variant.parse(variant),
    )


DEAR = Reason("not ringed", "its hops take 2 µs")


def left(site: int, why: Reason = DEAR) -> Skip:
    return Skip(site=site, source=f"gpt.py:{site}", einsum="ab,bc->ac", runs=1, why=why)


def edit(site: int, variant: Variant = ONE_WAY) -> MakeRing:
    return MakeRing(
        kind="all_gather", axis="model", variant=variant, matmuls=(EditedMatmul(site=site),)
    )


def plan(*entries: Decision | Skip, **more: Any) -> Plan:
    edits = tuple(edit(e.site, e.variant) for e in entries if isinstance(e, Decision))
    return Plan(step="step", mesh={"model": 8}, entries=entries, edits=edits, **more)


def ways_of(source: Plan | None) -> dict[int, Variant]:
    return {ring.site: ring.variant for ring in source.rings} if source else {}


def times(step_s: float, waited: dict[int, float] | None = None) -> Times:
    return Times(
        step_s=step_s,
        compute_s=step_s,
        communication_s=0.0,
        exposed_s=0.0,
        bound_s=step_s,
        hops=7,
        hops_covered=7,
        waited=tuple(
            Waited("collective-permute", f"all_gather_matmul.{site}", f"gpt.py:{site}", s, s)
            for site, s in (waited or {}).items()
        ),
    )


def answer(
    step_s: float, waited: dict[int, float] | None = None, peak_bytes: int = GB
) -> Evaluation:
    of_step = times(step_s, waited)
    return Evaluation(step_s=step_s, peak_bytes=peak_bytes, by="compiled", times=of_step)


def decide(name: str, options: Options) -> Candidate:
    """Decide on a made-up step: its plan is named after the options."""
    return Candidate.planned(name, plan(ring(99, "two_way"), ring(len(name))))


class Step:
    """A made-up step with two rings, and seconds by what is chosen for each."""

    def __init__(self, seconds: dict[int, dict[str, float]], plain_s: float = 90.0):
        self.seconds, self.plain_s = seconds, plain_s

    def decide(self, name: str, options: Options) -> Candidate:
        rings = [ring(site) for site in self.seconds]
        return Candidate.planned(name, plan(*rings, schedule=SCHEDULE))

    def lower(self, one: Candidate) -> Any:
        """Return what a child would answer in place of its request."""
        if one.plan is None:
            return answer(self.plain_s), None
        ways = ways_of(one.plan)
        waited = {s: self.seconds[s][str(ways.get(s, "plain"))] for s in self.seconds}
        result = answer(10.0 + sum(waited.values()), waited) if ways else answer(99.0)
        entries = [ring(s, str(ways[s])) if s in ways else left(s) for s in self.seconds]
        return result, plan(*entries, schedule=one.plan.schedule)


WAYS = dict.fromkeys(("two_way", "one_way", "one_way x 2", "sliced x 2", "plain"), 5.0)


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch):
    monkeypatch.setattr(compiled, "attempt", lambda answer, kept, timeout_s, kernels: answer)


def search(
    step: Step,
    tmp_path: Any,
    *,
    lower: Callable | None = None,
    memory_bytes: int = 80 * GB,
    deadline: float = math.inf,
) -> TuningSearch:
    compiler = Compiler(lower or step.lower, tmp_path, 60.0, workers=2)
    return TuningSearch(step.decide, lambda plan: None, compiler, BASE, memory_bytes, deadline)


def names(searcher: TuningSearch) -> list[str]:
    return [one.stage for one in searcher.tried]


def test_moves_that_help_are_put_together(tmp_path):
    step = Step({1: WAYS | {"two_way": 1.0}, 2: WAYS | {"sliced x 2": 2.0}})
    searcher = search(step, tmp_path)
    best = searcher.run()
    assert best.plan and ways_of(best.plan) == {1: Variant("two_way"), 2: Variant("sliced", 2)}
    assert best.seconds == 13.0 and searcher.complete


def test_the_best_so_far_is_told_whenever_it_is_another(tmp_path):
    so_far = list[Candidate]()
    step = Step({1: WAYS | {"two_way": 1.0}, 2: WAYS | {"sliced x 2": 2.0}})
    searcher = search(step, tmp_path)
    searcher.so_far = so_far.append
    best = searcher.run()
    assert so_far[0].stage in (PLAIN, RULES) and so_far[-1].stage == best.stage
    seconds = [one.seconds for one in so_far]
    assert len(so_far) > 1 and seconds == sorted(seconds, reverse=True)


def test_one_ring_is_tried_in_each_way_at_most_once(tmp_path):
    step = Step({site: WAYS for site in range(1, 6)})
    searcher = search(step, tmp_path)
    assert searcher.run().stage == RULES
    assert len(names(searcher)) == len(set(names(searcher)))
    assert len(searcher.tried) <= 8 + 5 * 4  # seeds, settings, and the other ways of each ring


def test_the_same_again(tmp_path):
    step = Step({1: WAYS | {"plain": 3.0}, 2: WAYS | {"two_way": 2.0}})
    first, second = search(step, tmp_path), search(step, tmp_path)
    assert first.run().stage == second.run().stage and names(first) == names(second)


def test_the_step_as_it_is_wins_where_nothing_is_faster(tmp_path):
    assert search(Step({1: WAYS}, plain_s=9.0), tmp_path).run().stage == PLAIN


def test_what_does_not_fit_is_not_taken(tmp_path):
    step = Step({1: WAYS})

    def lower(one: Candidate) -> Any:
        result, followed = step.lower(one)
        roomy = one.plan is not None and one.plan.schedule == SLACK
        return answer(1.0, peak_bytes=79 * GB) if roomy else result, followed

    searcher = search(step, tmp_path, lower=lower)
    assert searcher.run().stage == RULES and "rules, slack 0.05" in names(searcher)


@pytest.mark.parametrize("broken", [PLAIN, "two_way"])
def test_a_candidate_that_fails_is_a_result(tmp_path, broken: str):
    step = Step({1: WAYS | {"sliced x 2": 1.0}})

    def lower(one: Candidate) -> Any:
        result, followed = step.lower(one)
        chosen = str(ways_of(one.plan).get(1, "")) if one.plan else PLAIN
        return refused("SIGABRT: Check failed") if chosen == broken else result, followed

    searcher = search(step, tmp_path, lower=lower)
    best = searcher.run()
    assert best.plan and ways_of(best.plan) == {1: Variant("sliced", 2)}
    assert any(one.evaluation.refusal for one in searcher.tried)


def test_a_rewrite_that_fails_is_a_result_but_not_the_users_own(tmp_path):
    step = Step({1: WAYS})

    def lower(one: Candidate) -> Any:
        if one.plan and one.plan.schedule == SLACK:
            raise RewriteError("no")
        return step.lower(one)

    searcher = search(step, tmp_path, lower=lower)
    searcher.run()
    answers = [one.evaluation for one in searcher.tried if one.stage == "rules, slack 0.05"]
    assert answers == [refused("RewriteError: no")]

    def fails(name: str, options: Options) -> Candidate:
        raise RewriteError("no")

    step.decide = fails
    with pytest.raises(RewriteError):
        search(step, tmp_path).run()


def test_nothing_compiles(tmp_path):
    lower = lambda one: (refused("no memory"), None)  # noqa: E731
    with pytest.raises(ValueError, match="does not compile: no memory"):
        search(Step({1: WAYS}), tmp_path, lower=lower).run()


def test_out_of_time_the_first_two_are_still_tried(tmp_path):
    step = Step({1: WAYS | {"two_way": 1.0}})
    decided, decide = list[str](), step.decide
    step.decide = lambda name, options: decided.append(name) or decide(name, options)

    def lower(one: Candidate) -> Any:
        result, followed = step.lower(one)
        return result, followed and replaced(followed, trail=(ESTIMATED,))

    searcher = search(step, tmp_path, lower=lower, deadline=time.monotonic())
    assert searcher.run().stage == RULES
    assert names(searcher) == [PLAIN, RULES] and not searcher.complete
    assert decided == [RULES], "no other options are decided by"


def test_what_was_stopped_leaves_the_search_incomplete(tmp_path):
    step = Step({1: WAYS})

    def lower(one: Candidate) -> Any:
        result, followed = step.lower(one)
        slow = one.plan is not None and not one.plan.rings
        return refused("stopped", again=True) if slow else result, followed

    searcher = search(step, tmp_path, lower=lower)
    searcher.run()
    assert not searcher.complete


# -- candidates -----------------------------------------------------------------------------------


def every(*sites: int) -> GranularityModel:
    """Return a model that knows rings at these sites, and nothing of their prices."""
    return GranularityModel(every=plan(*map(ring, sites)))


def test_seeds_are_what_the_rules_leave_open():
    rules = plan(ring(1), left(2), left(3, Reason("no collective")), xla_options={"a": "1"})
    rules = replaced(rules, edits=(*rules.edits, GatherAhead()))
    source_of = {c.stage: c.plan for c in seeds(BASE, rules, decide, model=every(1, 2))}
    assert set(source_of) == {
        *("no rings", "all rings", "others sliced x 2", "others sliced x 4"),
        "fsdp in rings",
    }
    assert ways_of(source_of["all rings"]) == {1: Variant(), 2: Variant("one_way")}
    assert ways_of(source_of["others sliced x 4"]) == {1: Variant(), 2: Variant("sliced", 4)}
    assert ways_of(source_of["no rings"]) == {}
    assert {c.stage for c in seeds(Options(), plan(ring(1)), decide)} == {"no rings"}


def test_a_plan_in_other_ways_keeps_what_its_matmuls_still_read():
    moved = EarlyMove(
        operand=1, kind="all_gather", axis="data", before=((),), after=((),), bytes_moved=1
    )
    reads = [
        ReadGathered(matmul=EditedMatmul(site=5), rings=(1,)),
        ReadGathered(matmul=EditedMatmul(site=6, moves=(moved,)), rings=(1,)),
        ReadGathered(matmul=EditedMatmul(site=7), rings=(2,)),
    ]
    rules = replaced(plan(ring(1), ring(2)), edits=(edit(1), edit(2), *reads, GatherAhead()))
    fewer = with_variants(rules, {1: Variant("plain")})
    assert [str(e) for e in fewer.edits] == [
        "ring of all_gather over model, one_way: matmuls 2",
        "matmul 6 reads what the all_gather on data moved",
        "matmul 7 reads what ring 2 moved",
        "gather weights of scans a step of the scan ahead",
        "leave out dims of size 1 once for all matmuls that read a value",
    ]
    more = with_variants(rules, {5: Variant("two_way"), 2: Variant("sliced", 2)}, {5: edit(5)})
    assert ways_of(more) == {1: Variant(), 2: Variant("sliced", 2), 5: Variant("two_way")}
    assert [e.matmul.site for e in more.edits if isinstance(e, ReadGathered)] == [6, 7]
    shared = replaced(edit(5), matmuls=(EditedMatmul(site=5), EditedMatmul(site=2)))
    assert 5 not in ways_of(with_variants(rules, {5: Variant()}, {5: shared})), "ring 2 has it"


def test_seeds_for_what_nothing_waits_for_come_last():
    rules = plan(ring(1), left(2))
    for waits, first in ((0.5, "all rings"), (0.001, "no rings")):
        own = Waited("all-gather", "", "gpt.py:2", 0.5, waits)
        given = replaced(times(1.0), waited=(own,))
        order = [c.stage for c in seeds(BASE, rules, decide, given, every(2))]
        assert order[0] == first and len(order) == 4


SPLIT = SplitBatch(site=0, operand=0, dim=0, parts=2, unroll=2)
ESTIMATED = Proposed(stage="batch split", evaluation=Evaluation(step_s=7.0))
REFUSED = Proposed(stage="batch split", evaluation=Evaluation(refusal="no dim"), why_not="no dim")


@pytest.mark.parametrize(
    ("trail", "edits", "base", "expected"),
    [
        ((), (), BASE, set()),
        ((REFUSED,), (), BASE, set()),
        (
            (ESTIMATED,),
            (SPLIT,),
            replace(BASE, halves=2, unroll=2),
            {"no batch split", "2 parts", "2 parts, unrolled 4 times", "4 parts"},
        ),
        (
            (ESTIMATED,),
            (),
            replace(BASE, halves=None),
            {"2 parts", "2 parts, unrolled 2 times", "4 parts", "2 parts, unrolled 4 times"},
        ),
    ],
)
def test_rows_are_cut_in_other_ways_where_they_can_be(trail, edits, base, expected):
    given = list[Options]()

    def decided(name: str, options: Options) -> Candidate:
        given.append(options)
        return decide(name, options)

    rules = plan(ring(1), trail=trail)
    candidates = [*rows(base, replaced(rules, edits=(*edits, *rules.edits)), decided)]
    assert {c.stage for c in candidates} == expected
    assert len(given) == len(expected) and base not in given


def test_whole_plans_are_compiled_only_where_they_may_be_the_fastest(tmp_path):
    class Parts(Step):
        """A step whose batch can be split, with estimates of how."""

        def decide(self, name: str, options: Options) -> Candidate:
            step_s = {None: 8.0, 2: 7.0, 4: 7.2, "auto": 7.0}[options.halves]
            step_s += options.unroll == 4
            number = 1 + len(split)
            split.append(name)
            mark = replaced(edit(1), written=number)
            split_plan = plan(ring(1), schedule=SCHEDULE, trail=(ESTIMATED,))
            split_plan = replaced(split_plan, edits=(SPLIT, mark))
            return Candidate.planned(name, split_plan, evaluation=Evaluation(step_s=step_s))

        def lower(self, one: Candidate) -> Any:
            result, followed = super().lower(one)
            if followed is None:
                return result, None
            edits = (SPLIT, *followed.edits)
            return result, replaced(followed, trail=(ESTIMATED,), edits=edits)

    split: list[str] = []
    searcher = search(Parts({1: WAYS}), tmp_path)
    searcher.run()
    assert {"2 parts", "4 parts", "no rings"} <= {*names(searcher)}
    assert not {"no batch split", "2 parts, unrolled 4 times"} & {*names(searcher)}
    known = {one.stage: one.seconds for one in searcher.estimated.values()}
    assert known["no batch split"] == 8.0 and known["2 parts, unrolled 4 times"] == 8.0


class Cuts(GranularityModel):
    """A model that has found two plans."""

    def plans(self, count: int) -> list[dict[int, Variant]]:
        return [{1: Variant("sliced", 2)}, {1: Variant("one_way", 2)}][:count]


def test_the_models_plans_are_tried_before_others():
    model = Cuts(every=plan(ring(1)))
    candidates = [*seeds(BASE, plan(ring(1)), decide, times(1.0), model)]
    assert [c.stage for c in candidates] == ["lagom 1", "lagom 2", "no rings"]
    assert [ways_of(c.plan) for c in candidates[:2]] == model.plans(2)


def test_settings_are_memory_and_what_xla_merges():
    merges = "xla_gpu_all_gather_combine_threshold_bytes"
    rules = plan(ring(1), xla_options={"a": "1", merges: "1"}, schedule=SCHEDULE)
    plans = {c.stage: c.plan for c in settings(Candidate.planned("rules", rules))}
    assert set(plans) == {"rules, slack 0.05", "rules, XLA merges", "rules, merges to 1 GiB"}
    assert plans["rules, slack 0.05"] == replaced(rules, schedule=SLACK)
    options = [plans[n].xla_options for n in ("rules, XLA merges", "rules, merges to 1 GiB")]
    assert options[0] == {"a": "1"} and options[1][merges] == str(1 << 30)
    assert settings(Candidate.planned("rules", plan(ring(1), xla_options={"a": "1"}))) == []


def test_the_best_two_plans_are_tried_with_other_settings(tmp_path):
    searcher = search(Step({1: WAYS | {"plain": 5.0}}), tmp_path)
    searcher.run()
    assert [n for n in names(searcher) if ", " in n] == [
        "rules, slack 0.05",
        "no rings, slack 0.05",
    ]


class Model(GranularityModel):
    """A model with made-up H by ring."""

    def lost_per_second(self, number: int, now: Variant, to: Variant, waited_s: float) -> float:
        return {1: 0.1, 2: 0.2}.get(number, math.inf)


@pytest.mark.parametrize(("model", "first"), [(GranularityModel(), 2), (Model(), 1)])
def test_moves_begin_with_the_smallest_h_then_where_the_step_waits_longest(model, first: int):
    rules = plan(
        ring(1), ring(2, kind="matmul_reduce_scatter"), left(3), left(4, Reason("no collective"))
    )
    result = times(1.0, {1: 0.1, 2: 0.3, 3: 0.0})
    ways = {1: ("two_way", "one_way x 2"), 2: ("direct", "two_way")}
    order = [first, 3 - first]
    candidates = moves(rules, result, set(), model)
    assert [dict(c.changes) for c in candidates] == [{n: Variant.parse(ways[n][0])} for n in order]
    later = moves(rules, result, {(2, "direct"), (1, "two_way")}, model)
    assert [dict(c.changes) for c in later] == [{n: Variant.parse(ways[n][1])} for n in order]
    moved = later[0]
    assert ways_of(moved.plan) == ways_of(rules) | dict(moved.changes)


def test_what_is_left_plain_waits_at_its_source_line():
    own = Waited("all-gather", "", "gpt.py:3", 0.5, 0.4)
    result = replaced(times(1.0), waited=(own,))
    assert exposed_s(left(3), result) == 0.4 and exposed_s(left(4), result) == 0.0
