"""Pages hold the tables that the rows give, and the questions are answered by their best rows."""

from __future__ import annotations

import pytest

from benchmarks import questions, report
from benchmarks.pods.questions import ASKED_ROWS, MESH_STEPS, QUESTIONS, mesh_name, named
from benchmarks.pods.suite import DEFAULT, PLAIN

QUESTION = "7B, 64 H100, batch 64"
GB = 10**9


def test_every_page_has_the_tables_of_its_rows():
    """`python -m benchmarks.report` writes them."""
    assert [page.name for page, _ in report.pages_that_differ()] == []


def test_a_table_is_put_between_its_marks():
    text = "before\n<!-- table: a b -->\nold\n<!-- end table -->\nafter\n"
    new = report.filled(text, {"a b": lambda: "| new |"})
    assert new == "before\n<!-- table: a b -->\n\n| new |\n\n<!-- end table -->\nafter\n"
    assert report.filled(new, {"a b": lambda: "| new |"}) == new
    with pytest.raises(ValueError, match="table a b: expected one of c"):
        report.filled(text, {"c": str})


def row(axes: dict[str, int], kind: str, step_s: float, **more):
    made = {"step": named(QUESTION, axes), "row": kind, "step_s": step_s, "unknown": []}
    return made | {"peak_bytes": 10 * GB, "chip_bytes": 80 * GB} | more


def test_the_best_without_and_with_are_over_all_meshes_that_fit():
    whole, within = {"fsdp": 64, "tp": 1}, {"fsdp": 8, "tp": 8}
    rows = [
        row(whole, PLAIN, 0.665),
        row(whole, "plain, O1", 0.571),
        row(whole, "plain, gpu-recipes", 0.5, peak_bytes=90 * GB),
        row(whole, "plain, collective matmul", 0.1, unknown=["while without a known trip count"]),
        row(whole, DEFAULT, 0.574),
        row(within, PLAIN, 0.914),
        row(within, DEFAULT, 0.7),
        {"step": named(QUESTION, within), "row": "plain, O1", "error": "stopped after 300 s"},
    ]
    without, overlapped = questions.answers(rows)[QUESTION]
    assert without == ("fsdp 64", "O1", 571.0)
    assert overlapped == ("fsdp 64", "overlapped", 574.0)
    assert questions.table(rows) == [
        (QUESTION, "fsdp 64, O1", "571", "fsdp 64, overlapped", "574", "0.99")
    ]
    rows[4]["taken"] = "O1"
    assert questions.table(rows)[0][3] == "fsdp 64, O1 and the scheduler pass"
    assert questions.summary(rows) == [
        f"0.99 times as fast in geometric mean over 1 questions; the least is 0.99 ({QUESTION})"
    ]
    assert questions.without_figure(rows).count("No figure") == 1
    assert "O1 (stopped after 300 s)" in questions.without_figure(rows)
    assert questions.without_figure(rows[:1]) == ""
    assert questions.summary([]) == ["no question has both answers yet"]


def test_questions_have_the_meshes_whose_batch_divides():
    assert [mesh_name(axes) for axes in QUESTIONS[QUESTION].meshes] == [
        "fsdp 64", "fsdp 32 x tp 2", "fsdp 16 x tp 4", "fsdp 8 x tp 8",
    ]  # fmt: skip
    outnumbered = QUESTIONS["70B, 1024 H100, 4M tokens"].meshes
    assert all(axes["tp"] > 1 and 512 % axes["fsdp"] == 0 for axes in outnumbered)
    assert len(MESH_STEPS) == sum(len(q.meshes) for q in QUESTIONS.values())
    assert len(ASKED_ROWS) == 5
