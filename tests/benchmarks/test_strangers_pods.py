"""benchmarks/strangers/pods judges rows of published steps; none of the strangers is needed."""

import math

import pytest

from benchmarks.drawn.rows import OVERLAPPED, PLAIN, compared
from benchmarks.drawn.steps import step_of
from benchmarks.strangers.cases import CASES
from benchmarks.strangers.pod_steps import POD_STEPS
from benchmarks.strangers.pods import COLUMNS, cells, verdicts
from jaxoverlap.hardware.cluster import parse_cluster

_PLAIN = {
    "row": PLAIN, "unknown": {}, "step_s": 0.13, "compute_s": 0.09, "exposed_s": 0.03, "bound_s": 0.1,
    "peak_bytes": 20e9, "compile_s": 10.0,
}  # fmt: skip


def steps(*plain_and_mine, **more):
    """Compare steps of so many seconds; the overlapped ones differ from plain in `more` too."""
    rows = []
    for i, (plain_s, mine_s) in enumerate(plain_and_mine):
        at = {"step": f"theirs {i}"}
        rows.append(_PLAIN | at | {"step_s": plain_s})
        rows.append(_PLAIN | at | {"row": OVERLAPPED, "step_s": mine_s} | more)
    return compared(rows)


def test_every_trainer_stands_on_every_mesh_that_it_knows():
    assert len(POD_STEPS) == 19
    for name, step in POD_STEPS.items():
        assert math.prod(step.axes.values()) == parse_cluster(step.pod).num_devices
        assert step.stranger in {case.name for case in CASES}
        assert step_of(name) is step


def test_a_step_near_plains_bound_falls_short_of_nothing():
    said, short = verdicts(steps((0.13, 0.105)))
    assert not short
    assert said == ["1.238 times as fast in geometric mean over the 1 that expose a fifth"]


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ({"step_s": 0.1101}, "theirs 0: 1.101 times plain's bound"),
        ({"peak_bytes": 24e9}, "theirs 0: 1.200 times plain's peak memory"),
        ({"compile_s": 31.0}, "theirs 0: 3.100 times plain's compile time"),
    ],
)
def test_what_a_step_takes_too_much_of_is_named(more, line):
    assert line in verdicts(steps((0.14, 0.105), **more))[1]


def test_a_gain_is_asked_in_the_mean_of_steps_that_wait_much():
    line = "1.180 times as fast in geometric mean over the 2 that expose a fifth"
    assert verdicts(steps((0.13, 0.11), (0.1294, 0.1098)))[1] == [line]
    assert verdicts(steps((0.2, 0.109)))[0] == []  # waits for 0.03 of 0.2 s


def test_a_step_that_failed_says_why():
    (one,) = compared([_PLAIN | {"step": "theirs", "error": "exit -6: no"}])
    assert verdicts([one])[1] == ["theirs, plain: exit -6: no"]
    assert cells(one) == ("",) * len(COLUMNS)


def test_cells_say_what_was_done():
    (one,) = steps((0.13, 0.105), parts=2, unroll=2, rings=3)
    assert dict(zip(COLUMNS, cells(one), strict=True)) == {
        "plain ms": "130.0", "overlapped": "105.0", "times": "1.238", "of plain's bound": "1.050",
        "compute": "90.0 → 90.0", "exposed": "30.0 → 30.0", "peak GB": "20.0 → 20.0",
        "compile s": "10.0 → 10.0", "decided": "2 parts, unrolled 2, 3 rings",
    }  # fmt: skip
