"""The fastest way to compile a step is taken: by numbers, on devices that are here, for pods."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoverlap
from jaxoverlap.cost.find import cost_model
from jaxoverlap.cost.groups import Group
from jaxoverlap.flags.published import COMPARED
from jaxoverlap.flags.required import MOST_GATHERED, SEEN
from jaxoverlap.plan.edits import ShareViews, SplitBatch
from jaxoverlap.plan.evaluation import Evaluation, Times
from jaxoverlap.plan.plan import Decision, Plan, Predictions
from jaxoverlap.plan.price import Price
from jaxoverlap.plan.speedup import Speedup
from jaxoverlap.search import compiled as compiled_stage
from jaxoverlap.search import never_slower
from jaxoverlap.search.candidate import Candidate
from jaxoverlap.search.choice import compared
from jaxoverlap.search.compiled import Compiler, writable
from jaxoverlap.search.joining import SCATTERS, joining
from jaxoverlap.search.never_slower import NeverSlower, predicted
from jaxoverlap.search.search import search_compiled
from jaxoverlap.simulation.slower_rules import lost
from jaxoverlap.simulation.timeline import Event, Timeline
from jaxoverlap.step import trial
from jaxoverlap.step.trial import refused
from tests.support.megatron import megatron
from tests.support.pods import pytestmark as pods

POD = "h100-sxm:1x8"
GB = 10**9
NOTHING = """HloModule jit_step, is_scheduled=true, num_partitions=8

ENTRY %main (x: f32[]) -> f32[] {
  ROOT %x = f32[] parameter(0)
}
"""


def made(
    step_s: float, gigabytes: float = 10, loops: int = 0, compute_s: float = 1e9
) -> Evaluation:
    """A compiled step; of the plain one with nothing left to gain, unless `compute_s` says so."""
    parts = dict.fromkeys(("communication_s", "exposed_s", "bound_s"), 0.0)
    unknown = {"while without a known trip count": loops} if loops else {}
    times = Times(step_s=step_s, compute_s=compute_s, unknown=unknown, **parts)
    size = round(gigabytes * GB)
    return Evaluation(step_s=step_s, peak_bytes=size, by="compiled", times=times)


def unsimulated(why: str) -> Evaluation:
    return Evaluation(peak_bytes=GB, refusal=why, by="compiled")


def plan_of(*decisions: Decision) -> Plan:
    return Plan(step="train_step", mesh={"tp": 8}, entries=decisions)


def ring(site: int, source: str, kind: str = "all_gather_matmul", ring: int | None = None):
    return Decision(
        site=site,
        ring=site if ring is None else ring,
        source=source,
        einsum="ab,bc->ac",
        kind=kind,
        axis="tp",
        letter="a",
        num_chunks=8,
        bytes_moved=1,
        runs=1,
    )


def comparison(
    answers: Mapping[str, Any], plan: Plan | None = None, *, reorders: bool = True
) -> NeverSlower:
    """Return a comparison whose candidates are those that there are answers for."""
    plan = plan or plan_of()
    names = (*answers, *{"overlapped", "plain", "reordered", *COMPARED}.difference(answers))
    return NeverSlower(
        {name: Candidate.planned(name, plan) for name in names},
        cost_model(POD),
        reorders=reorders,
        most_bytes=cost_model(POD).cluster.chip.memory_bytes,
    )


def chosen(
    answers: Mapping[str, Any],
    plan: Plan | None = None,
    *,
    reorders: bool = True,
    joined: Any = lambda one: None,
) -> Speedup:
    """Choose on an H100's 84.9 GB by such answers; what has none is not to be compiled.

    Args:
        answers: the answers by name.
        plan: the plan of the overlapped step.
        reorders: whether the original step may be reordered.
        joined: answers for a candidate with options that join its collectives.
    """

    def compiled(batch: Any) -> list[Candidate]:
        return [
            replace(
                one,
                evaluation=answers[one.stage] if one.parent is None else joined(one),
                text=lambda: NOTHING,
            )
            for one in batch
        ]

    compare = comparison(answers, plan, reorders=reorders)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NeverSlower, "_lost", lambda *_: "")
        return compare.speedup(search_compiled(compare.stages, compiled))


def among(plain: Any, rings: Any, reordered: Any = None) -> Speedup:
    """Choose among two or three; whether the third is compiled at once makes no difference."""
    answers = {"overlapped": rings, "plain": plain}
    late = chosen(answers | {"reordered": reordered}, reorders=reordered is not None)
    if reordered is not None and late.taken != "overlapped":
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(NeverSlower, "is_close", True)
            assert chosen(answers | {"reordered": reordered}) == late
    return late


# -- the choice -----------------------------------------------------------------------------------

NO = refused("SIGABRT: the check")
CHOICES = {
    "rings are faster": (made(2), made(1), None, "overlapped", 1),
    "as fast": (made(1), made(1), None, "overlapped", 1),
    "plain is faster": (made(1), made(2), None, "plain", 1),
    "plain is faster in another order": (made(2), made(3), made(1), "reordered", 1),
    "in that as fast": (made(2), made(3), made(2), "reordered", 2),
    "another order is slower": (made(2), made(3), made(2.1), "plain", 2),
    "another order is too large": (made(2), made(3), made(1, 90), "plain", 2),
    "another order does not compile": (made(2), made(3), NO, "plain", 2),
    "rings are too large": (made(2, 70), made(1, 90), None, "plain", 2),
    "plain is too large": (made(1, 90), made(2, 70), None, "overlapped", 2),
    "both are too large": (made(2, 90), made(1, 91), None, "overlapped", 1),
    "rings do not compile": (made(2), NO, made(1), "reordered", 1),
    "rings cannot be simulated": (made(1), unsimulated("odd"), None, "overlapped", None),
    "neither compiles": (NO, NO, None, "overlapped", None),
    "loops of both turn unknown times": (made(1, loops=1), made(2, loops=1), None, "plain", 1),
}


@pytest.mark.parametrize(
    ("plain", "rings", "other", "taken", "step_s"), CHOICES.values(), ids=CHOICES
)
def test_the_fastest_that_fits_is_taken(plain, rings, other, taken: str, step_s: float | None):
    speedup = among(plain, rings, other)
    assert (speedup.taken, speedup.step_s) == (taken, step_s)
    if not plain.refusal and step_s:
        assert speedup.plain_s == plain.step_s


@pytest.mark.parametrize(
    ("options", "larger"),
    [(made(0.5, 90), True), (made(0.5, 80), False), (made(0.999, 90), False), (NO, False)],
)
def test_what_is_faster_and_too_large_is_known(options: Any, larger: bool):
    compare = comparison({"overlapped": made(1), "plain": made(2)})
    answers = {"overlapped": made(1), "plain": made(2), COMPARED[0]: options}
    rows = [
        replace(compare.candidates[name], evaluation=answer) for name, answer in answers.items()
    ]
    found = compare.too_large(rows)
    assert (found.stage if found else None) == (COMPARED[0] if larger else None)


def test_the_scheduler_pass_alone_is_taken_where_it_beats_a_step_that_beats_plain():
    """As in a contrastive step whose parts are joined for the softmax over the global batch."""
    answers = {"overlapped": made(0.0474), "plain": made(0.0477), "reordered": made(0.0415)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NeverSlower, "is_close", True)
        speedup = chosen(answers)
    assert (speedup.taken, speedup.step_s) == ("reordered", 0.0415)
    assert str(speedup) == (
        "plain 47.7 ms -> scheduler pass alone 41.5 ms, 1.15 x (overlapped 47.4 ms)"
    )


def test_an_original_step_that_ends_xla_is_compiled_without_its_own_kernels():
    """Triton's kernel for a small all-reduce ends XLA for some steps."""
    options: list[Mapping[str, str]] = []

    def compiled(batch: Any) -> list[Candidate]:
        done = []
        for one in batch:
            plain = one.stage == "plain"
            options.extend([one.plan.xla_options] if plain else [])
            answer = NO if plain and not one.plan.xla_options else made(2 if plain else 1)
            done.append(replace(one, evaluation=answer))
        return done

    compare = comparison({}, reorders=False)
    speedup = compare.speedup(search_compiled(compare.stages, compiled))
    assert (speedup.taken, speedup.plain_s, speedup.step_s) == ("overlapped", 2, 1)
    assert options == [{}, {setting.name: setting.value for setting in SEEN}]


JOINED = ({"gathers": "2"}, {"gathers": "4"})


@pytest.mark.parametrize(
    ("rings", "joined_s", "taken", "joined"),
    [
        (made(3, compute_s=1), (2.5, 2.2), "overlapped", JOINED[1]),
        (made(3, compute_s=1), (2.2, 2.5), "overlapped", JOINED[0]),
        (made(3, compute_s=1), (3.0, 3.5), "overlapped", {}),
        (made(9, compute_s=1), (3.5, 3.2), "reordered", JOINED[1]),
        (made(1.01, compute_s=1), None, "overlapped", {}),
    ],
    ids=["the second", "the first", "not faster", "of the original step", "nothing exposed"],
)
def test_collectives_are_joined_where_that_is_faster(rings, joined_s, taken, joined):
    """On top of the fastest candidate so far; published options are slower here."""

    def of_joined(one: Candidate) -> Evaluation:
        assert joined_s is not None and one.stage == taken and one.plan is not None
        return made(joined_s[JOINED.index(dict(one.plan.xla_options))], compute_s=1)

    options = dict.fromkeys(COMPARED, made(8, compute_s=1)) if joined_s else {}
    both = {"plain": made(5, compute_s=1), "reordered": made(4, compute_s=1)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NeverSlower, "is_close", True)
        patch.setattr(never_slower, "joining", lambda *_: JOINED)
        speedup = chosen({"overlapped": rings, **both, **options}, joined=of_joined)
    assert (speedup.taken, speedup.joined) == (taken, joined)
    assert ("collectives joined" in str(speedup)) == bool(joined)


GATHER = (
    "  %g.{n} = (bf16[{part},4096], bf16[4096,4096]) all-gather-start(%w.{n}), channel_id={n}, "
    "replica_groups=[1,64]<=[64], dimensions={{0}}, use_global_device_ids=true\n"
    "  %d.{n} = bf16[4096,4096] all-gather-done(%g.{n})\n"
)


def test_sizes_of_joined_collectives_are_those_that_hide_latency():
    """Twice and four times the bytes of a latency; of the sums a device's part."""
    names = range(1, 9)
    weights = ", ".join(f"w.{n}: bf16[64,4096]" for n in names)
    values = "".join(f"  %w.{n} = bf16[64,4096] parameter({n - 1})\n" for n in names)
    values += "".join(GATHER.format(n=n, part=64) for n in names)
    text = (
        f"HloModule jit_step, is_scheduled=true, num_partitions=64\n\nENTRY %main ({weights}) -> "
        f"bf16[4096,4096] {{\n{values}  ROOT %out = bf16[4096,4096] add(%d.1, %d.8)\n}}\n"
    )
    cost = cost_model("h100-sxm:8x8")
    smaller, larger = joining(text, cost, {})
    sizes = [int(options[MOST_GATHERED]) for options in (smaller, larger)]
    assert sizes[1] / sizes[0] == pytest.approx(2, rel=1e-6)
    assert [int(options[SCATTERS]) for options in (smaller, larger)] == [n // 64 for n in sizes]
    group = Group(64, 8)
    small_s, large_s = (cost.collective_s("all-gather", b, group) for b in (1 << 20, 1 << 30))
    latency_s = small_s - (large_s - small_s) / 1023
    joined_s = cost.collective_s("all-gather", sizes[0], group)
    assert joined_s == pytest.approx(3 * latency_s, rel=0.2)
    assert joining(text.replace("all-gather", "all-to-all"), cost, {}) == []
    large = text.replace("4096,4096]", "65536,4096]").replace("[64,4096]", "[1024,4096]")
    assert joining(large, cost, {}) == [], "two are larger than what would be joined"


@pytest.mark.parametrize(
    ("cut", "said"),
    [
        (True, "plain 197.0 ms -> overlapped 67.3 ms, 2.93 x (batch split 68.9 ms)"),
        (False, "plain 197.0 ms -> overlapped 67.3 ms, 2.93 x (batch not split 68.9 ms)"),
    ],
)
def test_the_other_batch_split_is_taken_where_it_is_faster(cut: bool, said: str):
    split = SplitBatch(site=0, operand=0, dim=0, parts=2)
    plan = msgspec.structs.replace(plan_of(), edits=(split,) if cut else ())
    answers = {"overlapped": made(0.0689), "plain": made(0.197), "other rows": made(0.0673)}
    answers["reordered"] = made(0.19)
    speedup = chosen(answers, plan)
    assert speedup.taken == "other rows" and speedup.is_overlapped
    assert str(speedup) == said


@pytest.mark.parametrize(
    ("unroll", "said"), [(1, "(scans not unrolled 68.9 ms)"), (2, "(scans unrolled 68.9 ms)")]
)
def test_the_other_unrolling_is_taken_where_it_is_faster(unroll: int, said: str):
    split = SplitBatch(site=0, operand=0, dim=0, parts=2, unroll=unroll)
    plan = msgspec.structs.replace(plan_of(), edits=(split,))
    answers = {"overlapped": made(0.0689), "plain": made(0.197), "other loops": made(0.0673)}
    answers["reordered"] = made(0.19)
    speedup = chosen(answers, plan)
    assert speedup.taken == "other loops" and speedup.is_overlapped
    assert said in str(speedup)


@pytest.mark.parametrize(
    ("o1_s", "recipes_s", "taken", "said"),
    [
        (0.373, 0.4, "O1", "plain 490.0 ms -> published options O1 373.0 ms, 1.31 x (overlapped 391.0 ms)"),
        (0.4, 0.38, "gpu-recipes", "of gpu-recipes 380.0 ms, 1.29 x (overlapped 391.0 ms)"),
        (0.4, 0.395, "overlapped", "plain 490.0 ms -> overlapped 391.0 ms, 1.25 x"),
    ],
)  # fmt: skip
def test_published_options_are_compiled_where_something_is_left_to_gain(
    o1_s: float, recipes_s: float, taken: str, said: str
):
    both = {"overlapped": made(0.391), "plain": made(0.49, compute_s=0.33)}
    speedup = chosen({**both, "O1": made(o1_s), "gpu-recipes": made(recipes_s)})
    assert speedup.taken == taken and said in str(speedup)


def test_published_options_are_not_compiled_where_kernels_are_all_that_is_left():
    both = {"overlapped": made(0.339), "plain": made(0.49, compute_s=0.33)}
    assert chosen(both).taken == "overlapped"


@pytest.mark.parametrize(
    ("step_s", "changes", "reorders", "close"),
    [
        (0.99, True, True, True),
        (0.86, True, True, True),
        (0.78, True, True, True),
        (0.49, True, True, False),
        (0.99, False, True, False),
        (0.99, True, False, False),
    ],
)
def test_the_scheduler_pass_alone_is_compiled_where_it_may_be_as_fast(
    step_s: float, changes: bool, reorders: bool, close: bool
):
    price = Price(plain_s=1.0, plain_exposed_s=0.5, step_s=step_s)
    plan = plan_of(ring(0, "a.py:1")) if changes else plan_of()
    edits = (ShareViews(),) if changes else ()
    plan = msgspec.structs.replace(plan, price=price, edits=edits)
    assert comparison({}, plan, reorders=reorders).is_close == close


@pytest.mark.parametrize(
    ("plain", "rings", "why"),
    [
        (NO, made(1), "plain was not compiled: SIGABRT: the check"),
        (
            made(1),
            unsimulated("a collective is never waited for"),
            "not compared with plain: a coll",
        ),
        (made(1), made(2, loops=1), "plain was not compared: XLA says of only one of the two"),
    ],
)
def test_what_cannot_be_compared_keeps_its_rings_and_says_so(plain, rings, why: str):
    speedup = among(plain, rings)
    assert speedup.taken == "overlapped" and speedup.plain_s is None
    assert speedup.why.startswith(why) and why in str(speedup)


# -- what is said ---------------------------------------------------------------------------------

SAID = {
    "plain 10.2 ms -> overlapped 9.4 ms, 1.09 x": among(made(0.0102), made(0.0094)),
    "plain 10.2 ms -> scheduler pass alone 9.9 ms, 1.03 x (overlapped 12.1 ms)": among(
        made(0.0102), made(0.0121), made(0.0099)
    ),
    "plain 10.2 ms -> as it is 10.2 ms, 1.00 x (overlapped 9.4 ms and 90.0 GB of a device's 84.9 GB)": among(
        made(0.0102), made(0.0094, 90)
    ),
    "plain 0.5 ms -> overlapped 0.25 ms, 2.00 x": among(made(0.0005), made(0.00025)),
    "overlapped 9.4 ms (plain was not compiled: SIGABRT: the check)": among(NO, made(0.0094)),
    "overlapped (plain was not compiled: SIGABRT: the check)": among(NO, NO),
    "plain 10.2 ms -> as it is 10.2 ms, 1.00 x (overlapped it does not compile: SIGABRT: the check)": among(
        made(0.0102), NO
    ),
}  # fmt: skip


@pytest.mark.parametrize(("said", "speedup"), SAID.items(), ids=map(str, range(len(SAID))))
def test_one_sentence(said: str, speedup: Speedup):
    assert str(speedup) == said
    assert msgspec.json.decode(msgspec.json.encode(speedup), type=Speedup) == speedup


def test_the_warning_names_what_lost():
    speedup = msgspec.structs.replace(
        among(made(0.0102), made(0.0121), made(0.0099)), lost="12 rings (+1.9 ms of compute)"
    )
    assert speedup.warning("train_step") == (
        "train_step runs with the scheduler pass alone, which takes 9.9 ms by simulation (plain "
        "10.2 ms; overlapped 12.1 ms). What lost: 12 rings (+1.9 ms of compute). "
        "overlap(never_slower=False) keeps the overlapped step"
    )


def timeline(*events: tuple[str, str, float]) -> Timeline:
    """Return a timeline of events of a kind, from a line, for so long."""
    kernels = [
        Event("compute", kind, "i", "main", 0.0, seconds, seconds, 1, source)
        for kind, source, seconds in events
    ]
    return Timeline("step", 1.0, tuple(kernels), ())


def test_rules_that_lost_are_named_with_what_they_cost():
    """Lines a and b have rings of one rule, c of two; d has none, and e gains."""
    plan = plan_of(
        ring(0, "a.py:1"),
        ring(1, "a.py:1", ring=0),
        ring(2, "b.py:1"),
        ring(3, "c.py:1"),
        ring(4, "c.py:1", "matmul_reduce_scatter"),
        ring(5, "e.py:1", "all_to_all_matmul"),
    )
    plain = timeline(
        *(("matmul", f"{name}.py:1", 0.001) for name in "abcde"), ("wait", "a.py:1", 0.001)
    )
    overlapped = timeline(
        ("matmul", "a.py:1", 0.003),
        ("memory", "b.py:1", 0.002),
        ("matmul", "c.py:1", 0.0015),
        ("wait", "c.py:1", 0.0005),
        ("matmul", "d.py:1", 0.001),
        ("wait", "d.py:1", 0.0009),
        ("collective", "d.py:1", 0.5),
    )
    assert lost(plan, overlapped, plain) == (
        "2 all_gather_matmul rings on tp (+3.0 ms of compute, -1.0 ms exposed); 2 rings: "
        "all_gather_matmul on tp, matmul_reduce_scatter on tp (+0.5 ms of compute, +0.5 ms "
        "exposed); what has no ring, most at d.py:1 (+0.0 ms of compute, +0.9 ms exposed)"
    )
    assert lost(plan, plain, overlapped).startswith("1 all_to_all_matmul ring on tp (+1.0 ms")
    assert lost(plan, plain, plain) == ""


def test_a_tuned_plan_says_it():
    seconds = dict.fromkeys(("compute_s", "communication_s", "exposed_s", "bound_s"), 0.0)
    said = Predictions(**seconds, step_s=1.0, peak_bytes=1, plain_step_s=2.0, plain_peak_bytes=1)
    plan = msgspec.structs.replace(plan_of(), predictions=said)
    assert (
        str(predicted(plan)) == "plain 2000.0 ms -> overlapped 1000.0 ms, 2.00 x (as the plan says)"
    )
    left = predicted(msgspec.structs.replace(plan, plain=True))
    assert left is not None and left.taken == "plain"
    alone = msgspec.structs.replace(said, plain_step_s=None)
    assert predicted(msgspec.structs.replace(plan, predictions=alone)) is None
    assert predicted(plan_of()) is predicted(None) is None


def test_overlap_refuses_what_is_neither():
    with pytest.raises(ValueError, match="never_slower='yes': expected True or False"):
        jaxoverlap.overlap(lambda x: x, never_slower="yes")  # type: ignore[call-overload]


# -- children -------------------------------------------------------------------------------------


def test_what_a_child_finds_is_kept_where_it_can_be(monkeypatch, tmp_path):
    kept = tmp_path / "cache" / "trials"
    assert writable(kept) == kept and kept.is_dir()
    other = writable(Path("/proc/none"))
    assert other.is_dir() and "jaxoverlap-" in other.name


def test_a_child_that_cannot_be_started_is_an_answer(monkeypatch, tmp_path):
    def attempted(*_):
        raise OSError("no space left")

    monkeypatch.setattr(compiled_stage, "attempt", attempted)
    lower: Any = lambda one: (SimpleNamespace(key="k"), one.plan)  # noqa: E731
    (answer,) = Compiler(lower, tmp_path, 60).evaluated([Candidate.planned("a", plan_of())])
    assert answer.evaluation == refused("OSError: no space left", again=True)


def test_a_result_without_its_schedule_is_tried_again(monkeypatch, tmp_path):
    """A loss is explained from the schedule, so a result without one is of no use."""
    job = trial.jobs.Job(b"", b"", "cpu", (0,))
    request = trial.Request(job, cost_model(POD), None)
    known = made(1.0)
    (tmp_path / f"{request.key}.json").write_bytes(msgspec.json.encode(known))
    anew = made(2.0)
    monkeypatch.setattr(trial, "_in_child", lambda *_: anew)
    assert trial.attempt(request, tmp_path, 60) == anew
    (tmp_path / f"{request.key}.hlo.gz").write_bytes(b"")
    monkeypatch.setattr(trial, "_in_child", None)
    assert trial.attempt(request, tmp_path, 60) == anew


# -- on GPUs that are here: CPU devices that pass for some --------------------------------------------

MESH = jax.make_mesh((8,), ("tp",), axis_types=(AxisType.Auto,))
ROWS, COLUMNS = NamedSharding(MESH, P("tp")), NamedSharding(MESH, P(None, "tp"))
X = np.arange(16 * 16, dtype=np.float32).reshape(16, 16) % 7
W = np.arange(16 * 16, dtype=np.float32).reshape(16, 16) % 5


def product(x, w):
    return x @ w


def product_with_print(x, w):
    jax.debug.callback(lambda total: None, x.sum())
    return x @ w


def on_gpus(function: Any = product, **options: Any) -> jaxoverlap.Overlapped:
    """Return a step that gathers its rows, and needs a ring whatever that costs."""
    jitted = jax.jit(function, in_shardings=(ROWS, COLUMNS), out_shardings=COLUMNS)
    return jaxoverlap.overlap(jitted, cluster=POD, schedule=None, granularity="one_way", **options)


@pytest.fixture
def children(monkeypatch) -> tuple[dict[str, Evaluation], list[str]]:
    """Stand in for children: return their seconds, to be filled in, and what they compiled."""
    by_way: dict[str, Evaluation] = {}
    asked: list[str] = []

    def attempted(request: trial.Request, *_: Any) -> Evaluation:
        candidate = "overlapped" if b"permute" in request.job.module else "plain"
        asked.append(candidate)
        return by_way[candidate]

    monkeypatch.setattr("jaxoverlap.step.program.is_gpu", lambda mesh: True)
    monkeypatch.setattr("jaxoverlap.hardware.pods.compiler_options", dict)
    monkeypatch.setattr(compiled_stage, "attempt", attempted)
    monkeypatch.setattr(NeverSlower, "_lost", lambda *_: "1 ring")
    return by_way, asked


def is_ringed(step: Any) -> bool:
    return "collective-permute" in step.lower(X, W).compile().as_text()


@pytest.mark.parametrize("first", ["call", "lower"])
def test_a_step_that_loses_is_left_alone_once_and_for_all(children, first: str):
    by_way, asked = children
    by_way |= dict(plain=made(1), overlapped=made(2))
    step = on_gpus()
    with pytest.warns(UserWarning, match="product runs as it is, which takes") as warned:
        got = step(X, W) if first == "call" else step.lower(X, W).compile()(X, W)
    assert [w.filename for w in warned] == [__file__]
    np.testing.assert_array_equal(got, X @ W)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        np.testing.assert_array_equal(step(X, W), X @ W)
        compiled = step.lower(X, W).compile()
    assert sorted(asked) == ["overlapped", "plain"]
    assert "collective-permute" not in compiled.as_text() and "all-gather" in compiled.as_text()
    assert compiled.plan.plain and not compiled.plan.decisions
    assert step.explain(X, W).plain
    assert str(compiled) == (
        "product: plain 1000.0 ms -> as it is 1000.0 ms, 1.00 x (overlapped 2000.0 ms)"
    )
    assert str(compiled.audit()).endswith(str(compiled.speedup))


def test_a_step_that_wins_keeps_its_rings(children):
    by_way, asked = children
    by_way |= dict(plain=made(2), overlapped=made(1))
    step = on_gpus()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        np.testing.assert_array_equal(step(X, W), X @ W)
    assert is_ringed(step) and sorted(asked) == ["overlapped", "plain"]
    assert step.lower(X, W).compile().speedup.times == 2


def test_a_step_that_calls_back_is_not_compared(children):
    _, asked = children
    step = on_gpus(product_with_print)
    np.testing.assert_array_equal(step(X, W), X @ W)
    compiled = step.lower(X, W).compile()
    assert not asked and is_ringed(step)
    assert "plain was not compiled: the step calls back into Python" in str(compiled)


def test_nothing_is_compared_where_that_is_not_wanted(children):
    _, asked = children
    assert is_ringed(on_gpus(never_slower=False))
    plan = on_gpus().explain(X, W)
    assert is_ringed(jaxoverlap.overlap(on_gpus()._fn, plan=plan))
    step = on_gpus()
    outer = jax.jit(lambda x, w: step(x, w) + 1)
    np.testing.assert_array_equal(outer(X, W), X @ W + 1)
    assert "ppermute" in str(step.trace(X, W).jaxpr)
    assert not asked


def test_a_program_that_xla_refuses_is_not_taken(children):
    by_way, _ = children
    by_way |= dict(plain=made(1), overlapped=refused("INTERNAL: no layout"))
    with pytest.warns(UserWarning, match="overlapped it does not compile: INTERNAL: no layout"):
        got = on_gpus()(X, W)
    np.testing.assert_array_equal(got, X @ W)


def test_process_0_chooses_for_all(children, monkeypatch):
    """This is another process: it compiles no candidates, and does as it is told."""
    _, asked = children
    told = Speedup(taken="plain", step_s=1.0, plain_s=1.0, overlapped_s=2.0, why="with rings 2 s")
    given: list[Any] = []

    def handed(make, what: str, processes: tuple[int, ...], *, within_s: float) -> str:
        given.append((what, processes))
        return msgspec.json.encode(told).decode()

    monkeypatch.setattr("jaxoverlap.search.choice.handed", handed)
    for module in ("step.program", "search.choice"):
        monkeypatch.setattr(f"jaxoverlap.{module}.processes_of", lambda mesh: (0, 1))
    monkeypatch.setattr("jaxoverlap.step.program.meet", lambda agreement, within_s: True)
    step = on_gpus()
    with pytest.warns(UserWarning, match="product runs as it is, which takes"):
        np.testing.assert_array_equal(step(X, W), X @ W)
    assert not is_ringed(step) and not asked
    assert given == [("choice between rings and none", (0, 1))]


# -- for pods -------------------------------------------------------------------------------------


def small(**options: Any) -> tuple[jaxoverlap.Overlapped, tuple[Any, ...]]:
    """Return a matmul whose sum is wanted whole, in a ring whatever that costs."""
    mesh = jaxoverlap.pod_mesh(POD, {"tp": 8})
    at = {name: NamedSharding(mesh, P(*spec)) for name, spec in SPECS.items()}
    args = (
        jax.ShapeDtypeStruct((1024, 4096), jnp.bfloat16, sharding=at["x"]),
        jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16, sharding=at["w"]),
    )
    step = jax.jit(product, out_shardings=at["out"])
    return jaxoverlap.overlap(step, cluster=POD, granularity="one_way", **options), args


SPECS: Mapping[str, tuple[str | None, ...]] = {"x": (None, "tp"), "w": ("tp",), "out": ()}


class TestPods:
    pytestmark = pods

    def test_rings_that_lose_are_left_out(self, monkeypatch, tmp_path):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        step, args = small()
        lowered = step.lower(*args)
        assert [d.kind for d in lowered.plan.decisions] == ["matmul_all_reduce"]
        with pytest.warns(UserWarning, match="What lost: 1 matmul_all_reduce ring on tp") as warned:
            compiled = lowered.compile()
        assert [w.filename for w in warned] == [__file__]
        said = compiled.speedup
        assert said.taken == "reordered" and said.plain_s < said.overlapped_s
        assert compiled.simulate().step_s == said.step_s <= said.plain_s
        assert compiled.plan.plain and compiled.plan.schedule
        assert not compiled.audit().hops.count and str(compiled.audit()).endswith(str(said))
        assert str(said) in str(compiled.simulate())

        monkeypatch.setattr(trial, "_in_child", None)  # what it found is kept
        with pytest.warns(UserWarning, match="product runs with the scheduler pass alone"):
            assert step.lower(*args).compile().speedup == said
        kept = small(never_slower=False)[0].lower(*args).compile()
        assert kept.speedup is None and kept.audit().hops.count
        assert kept.simulate().step_s == said.overlapped_s

        as_planned = jaxoverlap.overlap(step._fn, plan=compiled.plan).lower(*args).compile()
        assert as_planned.simulate().step_s == said.step_s

    def test_rings_that_win_are_kept(self, tmp_path, monkeypatch):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        jitted, args = megatron(jaxoverlap.pod_mesh(POD, {"tp": 8}))
        step = jaxoverlap.overlap(jitted, cluster=POD)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            compiled = step.lower(*args).compile()
        said = compiled.speedup
        assert said.taken == "overlapped" and said.times > 1 and not said.why
        assert str(compiled) == f"step: {said}"
        assert compiled.simulate("h100-sxm:1x8").speedup == said
        assert compiled.simulate(replace(cost_model(POD))).speedup is None
        compiled.simulate().to_html(tmp_path / "step.html")
        assert "overlapped" in (tmp_path / "step.html").read_text().split("</title>")[0]


@dataclass
class Choice:
    """A choice among candidates with such answers, and the one that keeps less."""

    answers: Mapping[str, Any]
    less: Choice | None = None

    def keeping_less(self, compiled: Any) -> None:
        return None

    def candidates(self) -> NeverSlower:
        return comparison(self.answers)

    def leaving_room(self, compare: NeverSlower, rows: Any) -> Choice | None:
        return self.less if compare.too_large(rows) else None


@pytest.mark.parametrize(
    ("with_less", "taken"), [(made(0.6, 80), COMPARED[0]), (made(1.5), "overlapped")]
)
def test_residuals_leave_room_for_options_that_are_faster(with_less: Any, taken: str):
    plain = {"overlapped": made(1), "plain": made(2, compute_s=0.4)}
    choice: Any = Choice(
        plain | dict.fromkeys(COMPARED, made(0.5, 90)),
        Choice(plain | dict.fromkeys(COMPARED, with_less)),
    )

    def compiler_of(one: Any) -> Any:
        answers = {"reordered": NO} | one.answers
        return lambda batch: [replace(row, evaluation=answers[row.stage]) for row in batch]

    done = compared(choice, compiler_of)
    assert done.taken.stage == taken
    assert done.choice is (choice.less if taken == COMPARED[0] else choice)
