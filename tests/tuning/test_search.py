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
from jaxoverlap.plan.halves import Halves
from jaxoverlap.plan.plan import Decision, Plan, Reason, Skip, Variant
from jaxoverlap.step.options import Options
from jaxoverlap.step.trial import Failure, Trial, Waited
from jaxoverlap.tuning import search as the_search
from jaxoverlap.tuning.candidates import (
    PLAIN,
    RULES,
    Candidate,
    exposed_s,
    moves,
    rows,
    seeds,
    settings,
)
from jaxoverlap.tuning.lagom.granularity import GranularityModel
from jaxoverlap.tuning.search import Search
from jaxoverlap.tuning.target import Ready

BASE = Options(schedule=Scheduler())
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


def plan(*entries: Decision | Skip, **more: Any) -> Plan:
    return Plan(step="step", mesh={"model": 8}, entries=entries, **more)


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
        self.lowered: list[Options | None] = []

    def lower(self, options: Options | None) -> Any:
        self.lowered.append(options)
        if options is None:
            return Ready(SimpleNamespace(result=self.more.get("plain", trial(self.plain_s))), None)  # type: ignore[arg-type]
        entries = [ring(s, str(options.choices.get(s, Variant()))) for s in self.seconds]
        waited = {e.site: self.seconds[e.site][str(e.variant)] for e in entries}
        result = trial(10.0 + sum(waited.values()), waited)
        if [*map(str, options.choices.values())] == ["plain"] * len(entries):
            result = trial(99.0)
        return Ready(SimpleNamespace(result=result), plan(*entries))  # type: ignore[arg-type]


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
    assert best.plan and best.plan.choices == {1: Variant("two_way"), 2: Variant("sliced", 2)}
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
    def lower(options: Options | None) -> Any:
        ready = Step({1: WAYS}).lower(options)
        roomy = options is not None and options.schedule == Scheduler(slack=0.05)
        result = trial(1.0, peak_bytes=79 * GB) if roomy else ready.request.result
        return Ready(SimpleNamespace(result=result), ready.plan)  # type: ignore[arg-type]

    searcher = search(lower, tmp_path)
    assert searcher.run().candidate.name == RULES and "rules, slack 0.05" in names(searcher)


@pytest.mark.parametrize("broken", [PLAIN, "two_way"])
def test_a_candidate_that_fails_is_a_result(tmp_path, broken: str):
    def lower(options: Options | None) -> Any:
        ready = Step({1: WAYS | {"sliced x 2": 1.0}}).lower(options)
        chosen = str(options.choices.get(1, "")) if options else PLAIN
        failed = Failure(why="SIGABRT: Check failed") if chosen == broken else ready.request.result
        return Ready(SimpleNamespace(result=failed), ready.plan)  # type: ignore[arg-type]

    searcher = search(lower, tmp_path)
    best = searcher.run()
    assert best.plan and best.plan.choices == {1: Variant("sliced", 2)}
    assert any(isinstance(t.result, Failure) for t in searcher.tried)


def test_a_rewrite_that_fails_is_a_result_but_not_the_users_own(tmp_path):
    def lower(options: Options | None, broken: Scheduler | Options | None = None) -> Any:
        if options and broken in (options, options.schedule):
            raise RewriteError("no")
        return Step({1: WAYS}).lower(options)

    searcher = search(lambda o: lower(o, Scheduler(slack=0.05)), tmp_path)
    searcher.run()
    assert [t.result for t in searcher.tried if t.candidate.name == "rules, slack 0.05"] == [
        Failure(why="RewriteError: no")
    ]
    with pytest.raises(RewriteError):
        search(lambda o: lower(o, BASE), tmp_path).run()


def test_nothing_compiles(tmp_path):
    def lower(options: Options | None) -> Any:
        return Ready(SimpleNamespace(result=Failure(why="no memory")), None)  # type: ignore[arg-type]

    with pytest.raises(ValueError, match="does not compile: no memory"):
        search(lower, tmp_path).run()


def test_out_of_time_the_first_two_are_still_tried(tmp_path):
    searcher = search(Step({1: WAYS | {"two_way": 1.0}}).lower, tmp_path, deadline=time.monotonic())
    assert searcher.run().candidate.name == RULES
    assert names(searcher) == [PLAIN, RULES] and not searcher.complete


def test_what_was_stopped_leaves_the_search_incomplete(tmp_path):
    def lower(options: Options | None) -> Any:
        ready = Step({1: WAYS}).lower(options)
        slow = options is not None and options.choices == {1: Variant("plain")}
        result = Failure(why="stopped", again=True) if slow else ready.request.result
        return Ready(SimpleNamespace(result=result), ready.plan)  # type: ignore[arg-type]

    searcher = search(lower, tmp_path)
    searcher.run()
    assert not searcher.complete


# -- candidates -----------------------------------------------------------------------------------


def test_seeds_are_what_the_rules_leave_open():
    rules = plan(
        ring(1), left(2), left(3, Reason("no collective")), prefetched=2, xla_options={"a": "1"}
    )
    options_of = {c.name: c.options for c in seeds(BASE, rules)}
    assert set(options_of) == {
        *("no rings", "all rings", "others sliced x 2", "others sliced x 4"),
        "fsdp in rings",
    }
    every = options_of["all rings"]
    assert every and every.choices == {2: Variant("one_way")}
    assert {c.name for c in seeds(Options(), plan(ring(1)))} == {"no rings"}


def test_seeds_for_what_nothing_waits_for_come_last():
    rules = plan(ring(1), left(2))
    for waits, first in ((0.5, "all rings"), (0.001, "no rings")):
        own = Waited("all-gather", "", "gpt.py:2", 0.5, waits)
        given = {n: getattr(trial(1.0), n) for n in Trial.__struct_fields__} | {"waited": (own,)}
        order = [c.name for c in seeds(BASE, rules, Trial(**given))]
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
                "whole rows": 8.0,
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
    assert all(c.options and c.options != base for c in candidates)


def test_whole_plans_are_compiled_only_where_they_may_be_the_fastest(tmp_path):
    def look(options: Options) -> float | None:
        return {None: 8.0, 2: 7.0, 4: 7.2}[options.halves] + (options.unroll == 4)

    step = Step({1: WAYS})
    of_rules = step.lower

    def lower(options: Options | None) -> Any:
        ready = of_rules(options)
        return replace(ready, plan=replaced(ready.plan, halves=HALVES)) if ready.plan else ready

    searcher = search(lower, tmp_path)
    searcher.look = look
    searcher.run()
    assert {"2 parts", "4 parts", "no rings"} <= {*names(searcher)}
    assert not {"whole rows", "2 parts, unrolled 4 times"} & {*names(searcher)}
    looked = {one.candidate.name: one.step_s for one in searcher.looked.values()}
    assert looked["whole rows"] == 8.0 and looked["2 parts, unrolled 4 times"] == 8.0


def test_the_models_plans_are_tried_before_others():
    cuts = [{1: Variant("sliced", 2)}, {1: Variant("one_way", 2)}]
    candidates = seeds(BASE, plan(ring(1)), trial(1.0), cuts)
    assert [c.name for c in candidates] == ["lagom 1", "lagom 2", "no rings"]
    assert [c.options and c.options.choices for c in candidates[:2]] == cuts


def test_settings_are_memory_and_what_xla_merges():
    merges = "xla_gpu_all_gather_combine_threshold_bytes"
    at = Candidate("rules", BASE, {})
    options_of = {
        c.name: c.options for c in settings(at, plan(ring(1), xla_options={"a": "1", merges: "1"}))
    }
    assert set(options_of) == {"rules, slack 0.05", "rules, XLA merges", "rules, merges to 1 GiB"}
    options = [options_of[n] for n in ("rules, XLA merges", "rules, merges to 1 GiB")]
    assert options[0] and options[0].xla_options == {"a": "1"}
    assert options[1] and options[1].xla_options and options[1].xla_options[merges] == str(1 << 30)
    assert settings(Candidate(PLAIN, None, {}), plan()) == []
    assert settings(Candidate("", Options(), {}), plan(ring(1), xla_options={"a": "1"})) == []


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
    at = Candidate(RULES, BASE, {})
    rules = plan(
        ring(1), ring(2, kind="matmul_reduce_scatter"), left(3), left(4, Reason("no collective"))
    )
    result = trial(1.0, {1: 0.1, 2: 0.3, 3: 0.0})
    ways = {1: ("two_way", "one_way x 2"), 2: ("direct", "two_way")}
    order = [first, 3 - first]
    candidates = moves(at, rules, result, set(), model)
    assert [dict(c.changes) for c in candidates] == [{n: Variant.parse(ways[n][0])} for n in order]
    later = moves(at, rules, result, {(2, "direct"), (1, "two_way")}, model)
    assert [dict(c.changes) for c in later] == [{n: Variant.parse(ways[n][1])} for n in order]
    assert later[0].options and later[0].options.choices == later[0].changes


def test_what_is_left_plain_waits_at_its_source_line():
    own = Waited("all-gather", "", "gpt.py:3", 0.5, 0.4)
    result = trial(1.0)
    result = Trial(**{n: getattr(result, n) for n in result.__struct_fields__} | {"waited": (own,)})
    assert exposed_s(left(3), result) == 0.4 and exposed_s(left(4), result) == 0.0
