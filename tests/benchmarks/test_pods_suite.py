"""benchmarks/pods judges its rows, survives children that die, and runs one small step."""

from __future__ import annotations

import dataclasses
import itertools
import stat
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import jaxoverlap
from benchmarks.children import dealt, done, in_child, kernels
from benchmarks.plain_gpt import Sizes, plain_mlp
from benchmarks.pods import rows as r
from benchmarks.pods.child import measure
from benchmarks.pods.hand_ring import hand_mlp
from benchmarks.pods.names import (
    HALVES,
    HALVES_RINGS,
    OVERLAPPED,
    PLAIN,
    PRESET_ROWS,
    ROWS,
    RULES,
    SCHEDULED,
)
from benchmarks.pods.suite import ALL, BY_PROCESS, STEPS, Step
from jaxoverlap.flags.published import PUBLISHED, accepted
from jaxoverlap.hardware.cluster import parse_cluster
from jaxoverlap.simulation.replay import UNKNOWN_TRIPS
from tests.support.pods import marked
from tests.support.pods import pytestmark as pods


def row(name: str, step_s: float, exposed_s: float, **more: Any) -> dict[str, Any]:
    compute_s = step_s - exposed_s
    seconds = dict(step_s=step_s, exposed_s=exposed_s, compute_s=compute_s, slowdown_s=0.0)
    links = dict(link_s={"NVLink": 1.0, "network": 0.5}, communication_s=1.5, bound_s=compute_s)
    memory = dict(peak_bytes=10**9, temp_bytes=5 * 10**8, chip_bytes=8 * 10**10)
    compiled = dict(compile_s=9.0, compile_cpu_s=8.0, unknown={})
    return {
        "step": "one",
        "pod": "h100-sxm:2x8",
        "row": name,
        **seconds,
        **links,
        **memory,
        **compiled,
        **more,
    }


def suite(**scheduled: Any) -> list[dict[str, Any]]:
    """Return a step's rows; `scheduled` changes the last."""
    presets = [row(name, 14.5 + i, 4.5 + i) for i, name in enumerate(PRESET_ROWS)]
    mine = row(SCHEDULED, 10.5, 0.5) | scheduled
    return [row(PLAIN, 14, 4), *presets, row(OVERLAPPED, 11, 1), mine]


def shortfalls(rows: list[dict[str, Any]]) -> str:
    return "\n".join(r.verdicts(rows)[1])


# -- verdicts -------------------------------------------------------------------------------------


def test_a_good_suite_has_no_shortfall():
    said, short = r.verdicts(suite())
    assert not short
    assert said == [
        "one: 1.048 times as fast as the best of the others, overlapped",
        "one: 500.0 ms exposed, 0.12 of plain's",
        "one: 1.00 times plain's peak memory",
        "one: the pass takes 500.0 ms off (4.5%), exposed 1000.0 → 500.0 ms",
    ]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"step_s": 11.01}, "0.999 times as fast as the best of the others, overlapped"),
        ({"exposed_s": 1.01}, "1010.0 ms exposed, 0.25 of plain's"),
        ({"peak_bytes": 1_160_000_000}, "1.16 times plain's peak memory"),
    ],
)
def test_each_shortfall_is_named(changes: dict[str, float], expected: str):
    assert shortfalls(suite(**changes)) == f"one: {expected}"


def test_a_preset_counts_among_the_others():
    rows = suite()
    rows[1]["step_s"] = 10.0
    assert PRESET_ROWS[0] in shortfalls(rows)


def test_what_two_simulations_cannot_tell_apart_is_no_shortfall():
    assert not shortfalls(suite(step_s=11 * (1 + 0.9e-4)))


def test_where_the_link_is_busier_than_the_kernels_a_quarter_is_not_asked():
    rows = suite(exposed_s=2.0, compute_s=8.5)
    assert "2000.0 ms exposed" in shortfalls(rows)
    for one in rows:
        one["link_s"] = {"NVLink": 10.0, "network": 0.5}
    said, short = r.verdicts(rows)
    assert not short
    assert any("the busiest link leaves 1500.0 ms exposed at least" in line for line in said)


def test_a_row_that_sends_more_is_not_excused_by_it():
    rows = suite(exposed_s=2.0, compute_s=8.5, link_s={"NVLink": 10.0, "network": 0.5})
    assert "2000.0 ms exposed" in shortfalls(rows)


def test_where_barriers_suffice_it_says_so():
    said, _ = r.verdicts(suite(step_s=11.0))
    assert said[-1] == "one: barriers suffice: the pass finds nothing faster"


# -- rows -----------------------------------------------------------------------------------------


def test_of_the_presets_the_best_is_shown():
    names = [row["row"] for row in r.shown(r.of_step(suite(), "one"))]
    assert names == [PLAIN, r.BEST_PRESET, OVERLAPPED, SCHEDULED]
    assert r.shown(r.of_step(suite(), "one"))[1]["preset"] == PRESET_ROWS[0].removeprefix("plain, ")


def test_a_row_that_failed_is_shown_and_named():
    rows = suite()
    rows[1] = {"step": "one", "row": PRESET_ROWS[0], "error": "SIGABRT: F0000 no"}
    assert [row["row"] for row in r.shown(r.of_step(rows, "one"))][1:3] == [
        r.BEST_PRESET,
        PRESET_ROWS[0],
    ]
    said, short = r.verdicts(rows)
    assert said[0] == f"one, {PRESET_ROWS[0]}: SIGABRT: F0000 no" and not short
    assert r.table(rows).row_count == 5


def test_a_step_of_which_only_a_part_was_simulated_is_not_compared():
    rows = suite()
    rows[1] |= {"step_s": 1.0, "unknown": {UNKNOWN_TRIPS: 2}}
    said, short = r.verdicts(rows)
    assert said[0].startswith(f"one, {PRESET_ROWS[0]}: while without a known trip count")
    assert not short and r.best_preset(r.of_step(rows, "one")) == rows[2]


@pytest.mark.parametrize("name", [PLAIN, OVERLAPPED, SCHEDULED])
def test_without_these_rows_a_step_falls_short(name: str):
    rows = [one | {"error": "SIGABRT: no"} if one["row"] == name else one for one in suite()]
    assert shortfalls(rows) == f"one, {name}: SIGABRT: no"


def test_what_does_not_fit_says_so():
    big = row(PLAIN, 1.0, 0.5, peak_bytes=9 * 10**10, unknown={"strange": 3})
    assert r.notes(big) == ["does not fit in 80 GB", "unknown: strange"]


def test_the_suite_has_what_it_promises():
    assert len(STEPS) >= 8
    chips = {step.pod.split(":")[0] for step in STEPS.values()}
    assert chips == {"h100-sxm", "a100-sxm-80", "gb200"}
    for size, name in ((8, "8"), (64, "64"), (512, "512")):
        for kind in ("7b", "70b"):
            of_size = [s for n, s in STEPS.items() if n.startswith(kind) and n.endswith(f"-{name}")]
            assert of_size and all(parse_cluster(s.pod).num_devices == size for s in of_size)
    for step in STEPS.values():
        assert set(ROWS) <= set(step.rows)
        assert np.prod(list(step.axes.values())) == parse_cluster(step.pod).num_devices
        assert step.gpt or step.model in ("moe", "vit", "long_context")


def test_each_step_has_a_layout_with_a_process_for_each_gpu():
    assert list(ALL) == [n for name in STEPS for n in (name, f"{name}, a process a GPU")]
    for name, step in BY_PROCESS.items():
        cluster, host = parse_cluster(step.pod), STEPS[name.partition(",")[0]]
        assert cluster.gpus_per_process == 1
        assert dataclasses.replace(cluster, processes_per_host=1) == parse_cluster(host.pod)
        assert step.rows == (PLAIN, RULES, OVERLAPPED, SCHEDULED, HALVES, HALVES_RINGS)
        assert step.axes == host.axes


def test_hops_of_nccls_may_leave_more_exposed():
    rows = suite(exposed_s=2.5, compute_s=8.0)
    assert "exposed, 0.62 of plain's" in shortfalls(rows)
    by_process = [one | {"pod": "h100-sxm:2x8/8"} for one in rows]
    assert not shortfalls(by_process)
    slow = suite(step_s=14.2, exposed_s=2.5, compute_s=8.0)
    assert "as fast as the best of the others" in shortfalls(
        [one | {"pod": "h100-sxm:2x8/8"} for one in slow]
    )


# -- children -------------------------------------------------------------------------------------


def python_that(tmp_path: Path, does: str) -> str:
    """Return an interpreter that does this, whatever it is given."""
    script = tmp_path / "python"
    script.write_text(f"#!{sys.executable}\nimport os, sys, time\n{does}\n")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return str(script)


@pytest.mark.parametrize(
    ("does", "error"),
    [
        (
            "print('F0101 10:00:00 1 all_reduce.cc:10] no such thing\\nE0101 more', "
            "file=sys.stderr, flush=True); os.abort()",
            "SIGABRT: F0101 10:00:00 1 all_reduce.cc:10] no such thing",
        ),
        ("os.kill(os.getpid(), 9)", "SIGKILL: it said nothing"),
        ("raise ValueError('no mesh')", "exit 1: ValueError: no mesh"),
    ],
)
def test_a_child_that_dies_is_a_row(tmp_path: Path, does: str, error: str):
    assert in_child("benchmarks.pods", python=python_that(tmp_path, does)) == {"error": error}


def test_steps_for_one_chip_share_their_kernels_in_each_lane():
    wanted = [(step, row) for step in STEPS for row in STEPS[step].rows]
    lanes = dealt(wanted, 2)
    assert sorted(lanes[0] + lanes[1]) == sorted(wanted)
    of = [{step for step, _ in lane} for lane in lanes]
    assert not of[0] & of[1] and abs(len(lanes[0]) - len(lanes[1])) <= 2
    kernels_of = kernels(lanes, {name: step.pod for name, step in STEPS.items()})
    for one, other in itertools.combinations(STEPS, 2):
        alike = parse_cluster(STEPS[one].pod).chip == parse_cluster(STEPS[other].pod).chip
        together = any({one, other} <= lane for lane in of)
        assert (kernels_of[one] is kernels_of[other]) == (alike and together)


def test_rows_come_as_they_are_finished():
    wanted = [("one", PLAIN), ("two", PLAIN), ("three", PLAIN)]
    row_of = dict(done(wanted, 2, lambda job: {"error": job[0]}))
    assert row_of == {job: {"error": job[0]} for job in wanted}


# -- a step ---------------------------------------------------------------------------------------


def test_the_hand_ring_computes_the_plain_mlp():
    mesh = jax.make_mesh((2, 4), ("fsdp", "tp"), (AxisType.Auto,) * 2)
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = ((4, 16, 8), (8, 32), (32, 8))
    args = [jax.random.normal(k, s) / 4 for k, s in zip(keys, shapes, strict=True)]

    def gradients(mlp):
        def loss(*args):
            return jnp.sum(jnp.sin(mlp(*args, lambda x, _: x)))

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(*args)

    by_hand, plain = (jax.tree.leaves(gradients(m)) for m in (hand_mlp(mesh), plain_mlp))
    for a, b in zip(by_hand, plain, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


SMALL = Step(
    "h100-sxm:1x2",
    {"fsdp": 1, "tp": 2},
    Sizes(layers=2, hidden=256, heads=2, mlp=512, vocab=512, batch=2, sequence=256),
)


@marked(pods)
@pytest.mark.parametrize("name", [PLAIN, SCHEDULED])
def test_a_small_step_becomes_a_row(name: str):
    measured_row = measure(SMALL, name)
    assert measured_row["step_s"] >= measured_row["bound_s"] > 0 and not measured_row["unknown"]
    parts = measured_row["compute_s"] + measured_row["slowdown_s"] + measured_row["exposed_s"]
    assert measured_row["step_s"] == pytest.approx(parts)
    assert 0 < measured_row["temp_bytes"] < measured_row["peak_bytes"] < measured_row["chip_bytes"]
    assert ("pass_s" in measured_row) == (name == SCHEDULED)
    assert bool(measured_row["by_line"]) == (name == PLAIN)


@marked(pods)
def test_a_preset_leaves_out_what_xla_refuses():
    device = jaxoverlap.pod_mesh("h100-sxm:1x2", {"x": 2}).devices.flat[0]
    for name, published in PUBLISHED.items():
        options, refused = accepted(name, device)
        assert set(published.options) - set(options) == set(refused)
    assert accepted("gpu-recipes", device)[1] == ("xla_gpu_graph_level",)
