from __future__ import annotations

import re

import msgspec
import pytest
from hypothesis import given, settings

from jaxoverlap._util.text import human_bytes, table
from jaxoverlap.plan.decisions import NO_RINGS
from jaxoverlap.plan.evaluation import Evaluation
from jaxoverlap.plan.plan import Plan, Reason, Remaining, Skip, Variant
from jaxoverlap.plan.price import Price
from jaxoverlap.plan.table import remaining_lines, skipped_table
from jaxoverlap.plan.trail import Proposed
from tests.support.plans import ALSO_IDLE, IDLE, ODD, OPAQUE, OUT, PLAN, QKV, _plans, _variants

# -- data ---------------------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(_plans)
def test_a_plan_comes_back_from_json(plan: Plan):
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert [type(e) for e in again.entries] == [type(e) for e in plan.entries]
    assert list(again.mesh) == list(plan.mesh)  # the order of the axes is the mesh's
    assert Plan.from_json(plan.to_json().encode()) == plan


def test_the_json_is_what_other_programs_read():
    written = msgspec.json.decode(PLAN.to_json())
    assert written["mesh"] == {"data": 2, "model": 8}
    assert [e["type"] for e in written["entries"]] == [
        "skip", "skip", "skip", "ring", "skip", "ring",
    ]  # fmt: skip
    assert written["entries"][3]["bytes_moved"] == 29_400_000
    assert written["entries"][5]["ring"] == 5
    assert written["entries"][5]["variant"] == {"style": "two_way", "slices": 2}
    assert written["entries"][5]["others"] == ["all_gather over model", "all_reduce over pod"]
    assert written["entries"][1]["why"] == {"code": "no ring", "detail": "dim s has size 30"}


JSON = PLAN.to_json()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "truncated"),
        ("train_step", "malformed"),
        (JSON[:-7], "truncated"),
        (JSON + "}", "trailing"),
        ("[]", "got `array`"),
        ("null", "got `null`"),
        ("{}", "missing required field `step`"),
        (JSON.replace('"mesh"', '"mash"'), r"unknown field `mash`"),
        (JSON.replace('"ring"', '"rung"', 1), r"'rung' - at `\$.entries\[3\].type`"),
        (JSON.replace('"site":3', '"site":"3"'), r"got `str` - at `\$.entries\[3\].site`"),
        (JSON.replace('"model":8', '"model":8.5'), r"got `float` - at `\$.mesh"),
        (
            JSON.replace('"detail":"dim', '"details":"dim'),
            r"unknown field `details` - at `\$.entries\[1\].why`",
        ),
    ],
)
def test_another_text_is_refused_with_the_place(text: str, problem: str):
    for given_text in (text, text.encode()):
        with pytest.raises(ValueError, match=rf"not a plan: .*{problem}.*Plan\.to_json\(\)"):
            Plan.from_json(given_text)


def test_the_two_kinds_of_entries_are_told_apart():
    assert PLAN.decisions == (QKV, OUT)
    assert PLAN.skips == (IDLE, ODD, ALSO_IDLE, OPAQUE)


def test_a_field_that_no_plan_has_is_refused():
    with pytest.raises(ValueError, match="not a plan"):
        Plan.from_json(JSON.replace('"others":', '"otters":'))


# -- how it reads -------------------------------------------------------------------------------


def rows(plan: Plan, *, verbose: bool = False) -> dict[int, str]:
    """Return the lines of the tables that start with a site's number, by that number."""
    lines = re.findall(r"^ +(\d+)  +(\S.*)$", plan.text(verbose=verbose), re.MULTILINE)
    return {int(site): line for site, line in lines}


def test_a_plan_opens_with_its_verdict():
    text = str(PLAN)
    assert text.startswith(
        "train_step on data 2 x model 8: 2 of 6 matmuls become rings by rule; "
        "without prices the gain is not known, and may be a loss\n"
    )
    price = Price(
        plain_s=0.7407,
        plain_exposed_s=0.3,
        step_s=0.4595,
        saved_s={"layouts": 0.268, "halves": 0.0132},
    )
    gains = msgspec.structs.replace(PLAN, price=price)
    took = "740.7 ms -> 459.5 ms (estimated)"
    assert gains.verdict == f"{took}: saved by layouts 268, halves 13.2"
    mixed = msgspec.structs.replace(price, saved_s={"layouts": 0.268, "gathers": -0.000645})
    assert mixed.verdict == f"{took}: saved by layouts 268; lost to gathers 0.645"
    bare = Price(plain_s=0.0594, plain_exposed_s=0.0022, step_s=0.0594)
    nothing = msgspec.structs.replace(PLAN, price=bare)
    assert nothing.verdict == "2.2 of 59.4 ms are exposed: at most 1.04 x to gain (estimated)"
    assert Plan.from_json(gains.to_json()) == gains


def test_every_ring_and_every_waiting_matmul_has_a_row():
    for verbose in (False, True):
        assert list(rows(PLAN, verbose=verbose)) == [3, 5, 1]


def test_equal_rows_are_one_unless_all_are_asked_for():
    """Only the numbers in their reasons differ, as in the layers of an unrolled model."""
    skips = [
        Skip(
            site=n,
            source="gpt.py:81",
            einsum="ab,bc->ac",
            runs=2,
            why=Reason("not ringed", f"its hops take 85 µs, of which {n} µs is exposed"),
        )
        for n in range(8)
    ]
    rings = [msgspec.structs.replace(QKV, site=n, ring=n) for n in (8, 9)]
    other = msgspec.structs.replace(QKV, site=10, ring=10, axis="data")
    plan = Plan(step="s", mesh={"x": 2}, entries=(*skips, *rings, other))
    text = str(plan)
    assert re.search(
        r"^ 0, 1, 2, 3, 4, 5, \.\.\. \(8\)  gpt.py:81  ab,bc->ac +16  not ringed", text, re.M
    )
    assert re.search(r"^ 8, 9  +gpt.py:88  abc,cd->abd +8  model .* 58.8 MB ", text, re.M)
    assert list(rows(plan)) == [10]
    assert list(rows(plan, verbose=True)) == [8, 9, 10, *range(8)]


def test_of_many_collectives_the_largest_are_shown():
    remaining = tuple(
        Remaining(kind="all_gather", axes=("x",), source=f"a.py:{n}", runs=1, bytes_moved=n)
        for n in range(1, 13)
    )
    plan = Plan(step="s", mesh={"x": 2}, entries=(), remaining=remaining)
    assert "a.py:12" in str(plan) and "a.py:4 " not in str(plan)
    assert re.search(r"^ 4 more +10 B$", str(plan), re.M)
    assert "a.py:4 " in plan.text(verbose=True) and "more" not in plan.text(verbose=True)


def test_what_partitions_itself_is_named():
    plan = msgspec.structs.replace(PLAN, partitioning=("custom_partitioning (ops.py:7)",))
    assert (
        "  Not rewritten, as they partition themselves: custom_partitioning (ops.py:7).\n"
        in str(plan)
    )


def test_a_ring_s_row_says_all_of_it():
    cells = re.split(r" {2,}", rows(PLAN)[3])
    assert cells == [
        "gpt.py:88", "abc,cd->abd", "4", "model", "all_gather_matmul", "29.4 MB", "8", "one_way",
    ]  # fmt: skip
    cells = re.split(r" {2,}", rows(PLAN)[5])
    assert cells[:7] == [
        "gpt.py:97", "abc,cd->abd", "1", "data", "matmul_reduce_scatter", "600.0 kB", "2",
    ]  # fmt: skip
    rest = " ".join(str(PLAN).split())  # the last columns may be folded
    for words in ("two_way x 2: data moves most", "all_gather over model", "all_reduce over pod"):
        assert all(word in rest for word in words.split())


def test_a_matmul_that_reads_a_gathered_operand_is_no_ring_and_sends_nothing():
    """Its operand is gathered by a ring that it is not in, or by a gather before all rings."""
    reads = msgspec.structs.replace(
        QKV, site=4, letter="", num_chunks=1, bytes_moved=0, why="reads what ring 3 moved"
    )
    plan = msgspec.structs.replace(PLAN, entries=(QKV, reads))
    assert rows(plan)[4].split("  ")[-1] == "no ring: reads what ring 3 moved"
    assert "0 B" not in str(plan)
    assert "2 matmuls: 1 ringed (29.4 MB sent per device and step), 1 read operands" in str(plan)


def test_a_waiting_matmul_s_row_says_why():
    assert re.split(r" {2,}", rows(PLAN)[1]) == ["gpt.py:81", "ab,bc->ac", "2", "dim s has size 30"]


def test_the_sums_are_those_of_the_entries():
    assert (
        "6 matmuls: 2 ringed (30.0 MB sent per device and step), 1 skipped, 3 without a collective."
    ) in str(PLAN)


def test_idle_matmuls_stand_together_by_reason_where_all_is_asked_for():
    assert PLAN.text(verbose=True).splitlines()[-2:] == [
        "  no collective: 0 (gpt.py:80), 2 (gpt.py:86)",
        "  no collective: auto: 4 (gpt.py:90)",
    ]
    assert "no collective: auto" not in str(PLAN)


def test_a_step_without_matmuls_reads_well():
    text = str(Plan(step="nothing", mesh={"x": 2}, entries=()))
    assert text.startswith("nothing on x 2: 0 of 0 matmuls")
    assert "0 matmuls: 0 ringed, 0 skipped, 0 without a collective." in text


def test_a_long_reason_is_folded_and_not_cut():
    words = [f"word{n}" for n in range(60)]
    plan = Plan(
        step="s",
        mesh={"x": 2},
        entries=(
            Skip(
                site=0,
                source="a.py:1",
                einsum="a,a->",
                runs=1,
                why=Reason("no ring", " ".join(words)),
            ),
        ),
    )
    shown = str(plan).split()
    assert [w for w in shown if w.startswith("word")] == words
    assert max(map(len, str(plan).splitlines())) <= 160


# -- tables and units -----------------------------------------------------------------------------


def test_a_table_shows_its_cells_as_they_are():
    cells = ["[red]x[/red]", "a.py:1: see [0]", "{'x': (1,)}"]
    text = table("bsd,df->bsf [jit]", ["one", "two", "three"], [cells])
    assert text.startswith("bsd,df->bsf [jit]\n")
    assert all(cell in text for cell in cells)
    assert "\x1b" not in text


def test_a_table_draws_no_pictures():
    text = table("step :x:", ["one"], [["gpt.py:100: skipped"]])
    assert text.startswith("step :x:\n")
    assert "gpt.py:100: skipped" in text


def test_numbers_stand_right():
    text = table("t", ["name", "size"], [["a", "1"], ["b", "1000"]], right=["size"])
    lines = text.splitlines()
    (one,) = (line for line in lines if line.split() == ["a", "1"])
    (thousand,) = (line for line in lines if line.split() == ["b", "1000"])
    assert len(one) == len(thousand)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (29_400_000, "29.4 MB"),
        (5_100_000_000, "5.1 GB"),
        (2e12, "2.0 TB"),
        (3e15, "3000.0 TB"),
        (-1500, "-1.5 kB"),
    ],
)
def test_bytes_are_in_decimal_units(count: float, text: str):
    assert human_bytes(count) == text


# -- variants -----------------------------------------------------------------------------------


@given(_variants)
def test_a_variant_reads_as_it_is_written(variant: Variant):
    assert Variant.parse(str(variant)) == variant
    assert msgspec.json.decode(msgspec.json.encode(variant), type=Variant) == variant


def test_how_variants_are_written():
    assert str(Variant()) == "one_way"
    assert str(Variant("direct", 2)) == "direct x 2"
    assert Variant.parse(" two_way x 2 ") == Variant("two_way", 2)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("round", r"variant 'round': expected a style \(one_way, two_way, direct, sliced, plain\)"),
        ("two_way x two", "variant 'two_way x two'.*as in"),
        ("two_way x -1", "variant 'two_way x -1'"),
        ("direct x 0", "0 slices of style direct: expected a whole number, 1 or more"),
        ("sliced", "1 slices of style sliced: expected a whole number, 2 or more"),
    ],
)
def test_a_variant_that_is_none(text: str, problem: str):
    with pytest.raises(ValueError, match=problem):
        Variant.parse(text)


@pytest.mark.parametrize("slices", [0, -1, 1.5, True])
def test_slices_are_whole_and_positive(slices):
    with pytest.raises(ValueError, match=f"{slices!r} slices of style one_way"):
        Variant("one_way", slices)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"style": "one_way", "slices": slices}, Variant)


def skipped(site: int, line: int, reason: Reason = NO_RINGS) -> Skip:
    return Skip(site=site, source=f"gpt.py:{line}", einsum="ab,bc->ac", runs=2, why=reason)


def test_matmuls_that_are_skipped_for_one_reason_are_one_row():
    few = [skipped(site, 80 + site) for site in range(5)]
    other = skipped(5, 99, Reason("not ringed", "its chunks take 9 µs"))
    (shown,) = skipped_table([*few, other, skipped(6, 99, other.why)], verbose=False)
    rows = [line for line in shown.splitlines() if "not ringed" in line]
    assert len(rows) == 2
    assert "gpt.py:80, gpt.py:81, gpt.py:82, 2 more" in rows[0] and " 10 " in rows[0]
    (every,) = skipped_table(few, verbose=True)
    assert every.count("not ringed") == 5


def test_a_plan_without_rings_says_what_they_take_by_the_same_estimate():
    price = Price(plain_s=0.3, plain_exposed_s=0.1, step_s=0.2407, saved_s={"halves": 0.06})
    rings = [
        Proposed(
            stage="rings", edits="3 MakeRing", evaluation=Evaluation(step_s=s), why_not="slower"
        )
        for s in (0.2618, 0.29)
    ]
    refused = Proposed(
        stage="rings", edits="9 MakeRing", evaluation=Evaluation(step_s=0.1, refusal="too large"), why_not="too large"
    )  # fmt: skip
    plan = msgspec.structs.replace(
        PLAN, entries=(skipped(0, 80), skipped(1, 81)), price=price, trail=(*rings, refused)
    )
    assert "not ringed: rings: 261.8 ms, none: 240.7 ms (estimated), so none" in plan.text()
    assert "this plan has no rings" not in plan.text()
    unknown = msgspec.structs.replace(plan, trail=())
    assert "not ringed: this plan has no rings" in unknown.text()


def test_the_largest_collectives_come_first():
    few = [
        Remaining(kind="all_reduce", axes=("data",), source="gpt.py:1", runs=1, bytes_moved=size)
        for size in (5, 900, 70)
    ]
    (shown,) = remaining_lines(few, verbose=True)
    assert [line.split()[-2] for line in shown.splitlines() if "gpt.py" in line] == [
        "900",
        "70",
        "5",
    ]
