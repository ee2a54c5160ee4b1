"""Every public function and command takes a step as users of several libraries write it.

In README's order: overlap, explain, compile, audit, profile; and the commands.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType
from typer.testing import CliRunner

import jaxoverlap
from jaxoverlap.cli.app import app
from tests.support import kinds_of_steps
from tests.support.kinds_of_steps import SUPPORTED, FilterJit, with_equinox, with_nnx
from tests.support.pods import needs_plugin

pytestmark = pytest.mark.filterwarnings("ignore:overlap.. rewrites nothing")
MESH = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
POD = ("--pod", "h100-sxm:1x8", "--mesh", "data=8")
FILE = kinds_of_steps.__name__
COMMANDS = {
    "explain": (),
    "audit": ("--keep-rings",),
    "simulate": ("--plain",),
    "advise": (),
    "tune": ("--budget", "0.1"),
}


def leaves(value: Any) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(value) if hasattr(leaf, "dtype")]


@pytest.fixture(params=SUPPORTED)
def build(request: pytest.FixtureRequest):
    build = SUPPORTED[request.param]
    if build is with_equinox:
        pytest.importorskip("equinox", reason="equinox is not installed (the dev extra)")
    return build


def test_a_step_trains_as_without_overlap(build):
    step, args = build(MESH)
    wanted = leaves((step(*args), args[0] if build is with_nnx else None))
    step, args = build(MESH)
    got = leaves((jaxoverlap.overlap(step)(*args), args[0] if build is with_nnx else None))
    for one, other in zip(got, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)


def test_it_is_explained_traced_and_compiled(build):
    step, args = build(MESH)
    overlapped = jaxoverlap.overlap(step)
    assert overlapped.explain(*args).entries
    assert overlapped.programs(*args)
    assert overlapped.trace(*args) is not None
    compiled = overlapped.lower(*args).compile()
    assert compiled.audit().total.count
    assert jaxoverlap.audit(compiled).total.count
    compiled(*args)


def test_its_plan_is_followed_and_its_compiled_step_simulated(build, tmp_path):
    step, args = build(MESH)
    plan = jaxoverlap.overlap(step).explain(*args)
    plan.write(tmp_path / "plan.json")
    lowered = jaxoverlap.overlap(step, plan=tmp_path / "plan.json").lower(*args)
    assert lowered.plan is not None and lowered.plan.edits == plan.edits
    assert jaxoverlap.simulate(lowered.compile(), "h100-sxm:1x8").step_s > 0


def test_it_is_tuned_by_the_clock(build, tmp_path, monkeypatch):
    for others in ("seeds", "ways"):  # two candidates are enough to see what they are called with
        monkeypatch.setattr(f"jaxoverlap.tuning.by_clock.{others}", lambda *_: [])
    step, args = build(MESH)
    before = leaves(args)
    plan = jaxoverlap.tune(step, args, measure=True, cache=tmp_path, show=False)
    assert plan.measured is not None and plan.measured.plain_step_s > 0
    for one, other in zip(leaves(args), before, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("overlapped", [False, True], ids=["plain", "overlapped"])
def test_it_is_profiled_and_its_arguments_stay(build, overlapped):
    step, args = build(MESH)
    before = leaves(args)
    profile = jaxoverlap.profile(jaxoverlap.overlap(step) if overlapped else step, *args, steps=3)
    assert profile.steps_s
    for one, other in zip(leaves(args), before, strict=True):
        np.testing.assert_array_equal(one, other)


@needs_plugin
@pytest.mark.pods
@pytest.mark.parametrize("build", [name for name in SUPPORTED if name != "partial"], indirect=True)
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_takes_it(build, command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    target = f"{FILE}:{build.__name__}"
    shown = CliRunner().invoke(app, [command, target, *POD, *COMMANDS[command]])
    assert shown.exit_code in (0, 1), shown.output
    assert shown.exception is None or isinstance(shown.exception, SystemExit)


@needs_plugin
@pytest.mark.pods
@pytest.mark.parametrize("build", [name for name in SUPPORTED if name != "partial"], indirect=True)
def test_its_meshes_are_ranked(build):
    words = ("configure", f"{FILE}:{build.__name__}", "--pod", "h100-sxm:1x8", "--over", "data")
    shown = CliRunner().invoke(app, words)
    assert shown.exit_code == 0, shown.output
    assert "data=8" in shown.output and "refused" not in shown.output


def test_a_step_of_an_unknown_library_is_refused_in_a_sentence():
    step = FilterJit(lambda x: x @ x)
    with pytest.raises(ValueError, match=r"FilterJit: expected a function from jax\.jit, nnx\.jit"):
        jaxoverlap.overlap(step)
