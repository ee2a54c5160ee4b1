"""Counts, warnings and install hints tell a newcomer what happened."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

import jaxoverlap
from jaxoverlap.cli.doctor import plugins
from jaxoverlap.plan.plan import Plan, Schedule
from jaxoverlap.plan.table import count_line
from jaxoverlap.step.notices import not_rewritten
from tests.support.plans import IDLE, ODD, QKV

ROOT = Path(__file__).parents[1]


def test_matmuls_that_read_weights_gathered_ahead_are_no_rings():
    """They were counted as "40 ringed (0 B sent per device and step)"."""
    reader = msgspec.structs.replace(QKV, num_chunks=1, bytes_moved=0)
    line = count_line([reader, reader, ODD, IDLE])
    assert line == (
        "4 matmuls: 0 ringed, 2 read operands gathered ahead, 1 skipped, 1 without a collective."
    )
    assert "1 ringed (29.4 MB sent per device and step)" in count_line([QKV, reader])


@pytest.mark.parametrize(
    ("options", "schedule", "says"),
    [
        ({}, None, "overlap() rewrites nothing in step; explain()"),
        ({"xla_a": "1"}, None, "overlap() rewrites nothing in step and adds XLA options only; "),
        (
            {"xla_a": "1"},
            Schedule(slack=0.02, in_flight=8),
            "nothing in step and adds XLA options and the scheduler pass only; ",
        ),
    ],
)
def test_a_step_that_is_faster_without_a_rewrite_is_not_said_to_be_unchanged(
    options, schedule, says
):
    plan = Plan(step="step", mesh={}, entries=(ODD, IDLE), xla_options=options, schedule=schedule)
    text = not_rewritten("step", plan).text
    assert says in text and "changes nothing" not in text
    assert text.splitlines()[1:] == [
        "  1 matmuls: dim s has size 30",
        "  1 matmuls: no collective",
    ]


def test_the_command_says_to_install_from_the_checkout():
    """The package is on no index, where `pip install 'jaxoverlap[pods]'` would look for it."""
    (finding,) = plugins({"jax": jaxoverlap.__version__})
    assert "pip install '.[pods]' in the checkout" in finding.found
    for file in (ROOT / "jaxoverlap" / "cli").rglob("*.py"):
        assert "install 'jaxoverlap[" not in file.read_text(), file
