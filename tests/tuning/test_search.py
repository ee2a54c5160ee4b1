"""The search for a plan runs on made-up results, with no compiler."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace as replaced

from jaxoverlap.passes.analysis.errors import RewriteError
from jaxoverlap.passes.scheduling.scheduler import Scheduler
from jaxoverlap.plan.edits import EarlyMove, EditedMatmul, GatherAhead, MakeRing, ReadGathered
from jaxoverlap.plan.halves import Halves
from jaxoverlap.plan.plan import Decision, Plan, Reason, Schedule, Skip, Variant
from jaxoverlap.step.options import Options
from jaxoverlap.step.trial import Failure, Trial, Waited
from jaxoverlap.tuning import search as the_search
from jaxoverlap.tuning.candidates import (
    PLAIN,
    RULES,
    TuningCandidate,
    exposed_s,
    moves,
    rows,
    seeds,
    settings,
    with_variants,
)
from jaxoverlap.tuning.lagom.granularity import GranularityModel
from jaxoverlap.tuning.search import Search
from jaxoverlap.tuning.target import Ready

BASE = Options(schedule=Scheduler())
ONE_WAY = Variant()
SCHEDULE = Schedule(slack=0.02, in_flight=4)
SLACK = replaced(SCHEDULE, slack=0.05)
Source = Options | Plan | None
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


def ways_of(source: Source) -> dict[int, Variant]:
    return {ring.site: ring.variant for ring in source.rings} if isinstance(source, Plan) else {}


def trial(step_s: float, waited: dict[int, float] | None = None, peak_bytes: int = GB) -> Trial:
    return Trial(
        step_s=step_s,
        compute_s=step_s,
        communication_s=0.0,
        exposed_s=0.0,
        bound_s=step_s,
        peak_bytes=peak_bytes,
        hops=7,
        hops_covered=7,
        waited=tuple(
            Waited("collective-permute", f"all_gather_matmul.{site}", f"gpt.py:{site}", s, s)
            for site, s in (waited or {}).items()
        ),
    )


class Step:
    """A made-up step with two rings, and seconds by what is chosen for each."""

    def __init__(self, seconds: dict[int, dict[str, float]], plain_s: float = 90.0, **more: Any):
        self.seconds, self.plain_s, self.more = seconds, plain_s, more
        self.lowered: list[Source] = []

    def lower(self, source: Source) -> Any:
        self.lowered.append(source)
        if source is None:
            return Ready(SimpleNamespace(result=self.more.get("plain", trial(self.plain_s))), None)  # type: ignore[arg-type]
        ways, schedule = dict.fromkeys(self.seconds, Variant()), SCHEDULE
        if isinstance(source, Plan):
            ways, schedule = ways_of(source), source.schedule
        waited = {s: self.seconds[s][str(ways.get(s, "plain"))] for s in self.seconds}
        result = trial(10.0 + sum(waited.values()), waited) if ways else trial(99.0)
        entries = [ring(s, str(ways[s])) if s in ways else left(s) for s in self.seconds]
        return Ready(SimpleNamespace(result=result), plan(*entries, schedule=schedule))  # type: ignore[arg-type]


WAYS = dict.fromkeys(("two_way", "one_way", "one_way x 2", "sliced x 2", "plain"), 5.0)


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch):
    monkeypatch.setattr(
        the_search, "attempt", lambda request, kept, timeout_s, kernels: request.result
    )


def search(
    lower: Callable, tmp_path: Any, *, memory_bytes: int = 80 * GB, deadline: float = math.inf
) -> Search:
    return Search(lower, BASE, tmp_path, memory_bytes, deadline, workers=2)


def names(searcher: Search) -> list[str]:
    return [t.candidate.name for t in searcher.tried]


def test_moves_that_help_are_put_together(tmp_path):
    step = Step({1: WAYS | {"two_way": 1.0}, 2: WAYS | {"sliced x 2": 2.0}})
    searcher = search(step.lower, tmp_path)
    best = searcher.run()
    assert best.plan and ways_of(best.plan) == {1: Variant("two_way"), 2: Variant("sliced", 2)}
    assert isinstance(best.result, Trial) and best.result.step_s == 13.0 and searcher.complete


def test_one_ring_is_tried_in_each_way_at_most_once(tmp_path):
    step = Step({site: WAYS for site in range(1, 6)})
    searcher = search(step.lower, tmp_path)
    searcher.run()
    assert searcher.best.candidate.name == RULES
    assert len(names(searcher)) == len(set(names(searcher)))
    assert len(searcher.tried) <= 8 + 5 * 4  # seeds, settings, and the other ways of each ring


def test_the_same_again(tmp_path):
    step = Step({1: WAYS | {"plain": 3.0}, 2: WAYS | {"two_way": 2.0}})
    first, second = search(step.lower, tmp_path), search(step.lower, tmp_path)
    assert first.run().candidate == second.run().candidate and names(first) == names(second)


def test_the_step_as_it_is_wins_where_nothing_is_faster(tmp_path):
    searcher = search(Step({1: WAYS}, plain_s=9.0).lower, tmp_path)
    assert searcher.run().candidate.name == PLAIN


def test_what_does_not_fit_is_not_taken(tmp_path):
    def lower(source: Source) -> Any:
        ready = Step({1: WAYS}).lower(source)
        roomy = isinstance(source, Plan) and source.schedule == SLACK
        result = trial(1.0, peak_bytes=79 * GB) if roomy else ready.request.result
        return Ready(SimpleNamespace(result=result), ready.plan)  # type: ignore[arg-type]

    searcher = search(lower, tmp_path)
    assert searcher.run().candidate.name == RULES and "rules, slack 0.05" in names(searcher)


@pytest.mark.parametrize("broken", [PLAIN, "two_way"])
def test_a_candidate_that_fails_is_a_result(tmp_path, broken: str):
    def lower(source: Source) -> Any:
        ready = Step({1: WAYS | {"sliced x 2": 1.0}}).lower(source)
        chosen = str(ways_of(source).get(1, "")) if source else PLAIN
        failed = Failure(why="SIGABRT: Check failed") if chosen == broken else ready.request.result
        return Ready(SimpleNamespace(result=failed), ready.plan)  # type: ignore[arg-type]

    searcher = search(lower, tmp_path)
    best = searcher.run()
    assert best.plan and ways_of(best.plan) == {1: Variant("sliced", 2)}
    assert any(isinstance(t.result, Failure) for t in searcher.tried)


def test_a_rewrite_that_fails_is_a_result_but_not_the_users_own(tmp_path):
    def lower(source: Source, broken: Schedule | Options | None = None) -> Any:
        if source and broken in (source, source.schedule):
            raise RewriteError("no")
        return Step({1: WAYS}).lower(source)

    searcher = search(lambda o: lower(o, SLACK), tmp_path)
    searcher.run()
    assert [t.result for t in searcher.tried if t.candidate.name == "rules, slack 0.05"] == [
        Failure(why="RewriteError: no")
    ]
    with pytest.raises(RewriteError):
        search(lambda o: lower(o, BASE), tmp_path).run()


def test_nothing_compiles(tmp_path):
    def lower(source: Source) -> Any:
        return Ready(SimpleNamespace(result=Failure(why="no memory")), None)  # type: ignore[arg-type]

    with pytest.raises(ValueError, match="does not compile: no memory"):
        search(lower, tmp_path).run()


def test_out_of_time_the_first_two_are_still_tried(tmp_path):
    searcher = search(Step({1: WAYS | {"two_way": 1.0}}).lower, tmp_path, deadline=time.monotonic())
    assert searcher.run().candidate.name == RULES
    assert names(searcher) == [PLAIN, RULES] and not searcher.complete


def test_what_was_stopped_leaves_the_search_incomplete(tmp_path):
    def lower(source: Source) -> Any:
        ready = Step({1: WAYS}).lower(source)
        slow = isinstance(source, Plan) and not source.rings
        result = Failure(why="stopped", again=True) if slow else ready.request.result
        return Ready(SimpleNamespace(result=result), ready.plan)  # type: ignore[arg-type]

    searcher = search(lower, tmp_path)
    searcher.run()
    assert not searcher.complete


# -- candidates -----------------------------------------------------------------------------------


def every(*sites: int) -> GranularityModel:
    """Return a model that knows rings at these sites, and nothing of their prices."""
    return GranularityModel(every=plan(*map(ring, sites)))


def test_seeds_are_what_the_rules_leave_open():
    rules = plan(
        ring(1), left(2), left(3, Reason("no collective")), prefetched=2, xla_options={"a": "1"}
    )
    source_of = {c.name: c.source for c in seeds(BASE, rules, model=every(1, 2))}
    assert set(source_of) == {
        *("no rings", "all rings", "others sliced x 2", "others sliced x 4"),
        "fsdp in rings",
    }
    assert ways_of(source_of["all rings"]) == {1: Variant(), 2: Variant("one_way")}
    assert ways_of(source_of["others sliced x 4"]) == {1: Variant(), 2: Variant("sliced", 4)}
    assert ways_of(source_of["no rings"]) == {}
    assert {c.name for c in seeds(Options(), plan(ring(1)))} == {"no rings"}


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
        given = {n: getattr(trial(1.0), n) for n in Trial.__struct_fields__} | {"waited": (own,)}
        order = [c.name for c in seeds(BASE, rules, Trial(**given), every(2))]
        assert order[0] == first and len(order) == 4


HALVES = Halves(parts=2, unroll=2, whole_s=8.0, step_s=7.0)


@pytest.mark.parametrize(
    ("halves", "base", "expected"),
    [
        (None, BASE, {}),
        (Halves(parts=2, why_not="mesh axes tp are explicit"), BASE, {}),
        (
            HALVES,
            replace(BASE, halves=2, unroll=2),
            {
                "no batch split": 8.0,
                "2 parts": None,
                "2 parts, unrolled 4 times": None,
                "4 parts": None,
            },
        ),
        (
            Halves(parts=2, whole_s=7.0, step_s=8.0, why_not="the step is faster with whole rows"),
            replace(BASE, halves=None),
            {n: None for n in ("2 parts", "2 parts, unrolled 2 times", "4 parts")}
            | {"2 parts, unrolled 4 times": None},
        ),
    ],
)
def test_rows_are_cut_in_other_ways_where_they_can_be(halves, base, expected):
    candidates = rows(base, plan(ring(1), halves=halves))
    assert {c.name: c.step_s for c in candidates} == expected
    assert all(c.source and c.source != base for c in candidates)


def test_whole_plans_are_compiled_only_where_they_may_be_the_fastest(tmp_path):
    def look(source: Options | Plan) -> float | None:
        if isinstance(source, Plan):
            return 7.0
        return {None: 8.0, 2: 7.0, 4: 7.2}[source.halves] + (source.unroll == 4)

    step = Step({1: WAYS})
    of_rules = step.lower

    def lower(source: Source) -> Any:
        ready = of_rules(source)
        return replace(ready, plan=replaced(ready.plan, halves=HALVES)) if ready.plan else ready

    searcher = search(lower, tmp_path)
    searcher.look = look
    searcher.run()
    assert {"2 parts", "4 parts", "no rings"} <= {*names(searcher)}
    assert not {"no batch split", "2 parts, unrolled 4 times"} & {*names(searcher)}
    looked = {one.name: one.step_s for one in searcher.looked.values()}
    assert looked["no batch split"] == 8.0 and looked["2 parts, unrolled 4 times"] == 8.0


class Cuts(GranularityModel):
    """A model that has found two plans."""

    def plans(self, count: int) -> list[dict[int, Variant]]:
        return [{1: Variant("sliced", 2)}, {1: Variant("one_way", 2)}][:count]


def test_the_models_plans_are_tried_before_others():
    model = Cuts(every=plan(ring(1)))
    candidates = seeds(BASE, plan(ring(1)), trial(1.0), model)
    assert [c.name for c in candidates] == ["lagom 1", "lagom 2", "no rings"]
    assert [ways_of(c.source) for c in candidates[:2]] == model.plans(2)


def test_settings_are_memory_and_what_xla_merges():
    merges = "xla_gpu_all_gather_combine_threshold_bytes"
    at = TuningCandidate("rules", BASE)
    rules = plan(ring(1), xla_options={"a": "1", merges: "1"}, schedule=SCHEDULE)
    plans = {c.name: c.source for c in settings(at, rules)}
    assert set(plans) == {"rules, slack 0.05", "rules, XLA merges", "rules, merges to 1 GiB"}
    assert plans["rules, slack 0.05"] == replaced(rules, schedule=SLACK)
    options = [plans[n].xla_options for n in ("rules, XLA merges", "rules, merges to 1 GiB")]
    assert options[0] == {"a": "1"} and options[1][merges] == str(1 << 30)
    assert settings(at, plan(ring(1), xla_options={"a": "1"})) == []


def test_the_best_two_plans_are_tried_with_other_settings(tmp_path):
    searcher = search(Step({1: WAYS | {"plain": 5.0}}).lower, tmp_path)
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
    result = trial(1.0, {1: 0.1, 2: 0.3, 3: 0.0})
    ways = {1: ("two_way", "one_way x 2"), 2: ("direct", "two_way")}
    order = [first, 3 - first]
    candidates = moves(rules, result, set(), model)
    assert [dict(c.changes) for c in candidates] == [{n: Variant.parse(ways[n][0])} for n in order]
    later = moves(rules, result, {(2, "direct"), (1, "two_way")}, model)
    assert [dict(c.changes) for c in later] == [{n: Variant.parse(ways[n][1])} for n in order]
    moved = later[0]
    assert ways_of(moved.source) == ways_of(rules) | dict(moved.changes)


def test_what_is_left_plain_waits_at_its_source_line():
    own = Waited("all-gather", "", "gpt.py:3", 0.5, 0.4)
    result = trial(1.0)
    result = Trial(**{n: getattr(result, n) for n in result.__struct_fields__} | {"waited": (own,)})
    assert exposed_s(left(3), result) == 0.4 and exposed_s(left(4), result) == 0.0
