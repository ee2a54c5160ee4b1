"""A user's own step over the meshes that its builder takes."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from typer.testing import CliRunner

from jaxoverlap.cli.app import app
from jaxoverlap.cli.configure_step import rank, shown, target_on
from jaxoverlap.cli.without import without
from jaxoverlap.plan.evaluation import Evaluation
from tests.support.pods import pytestmark  # noqa: F401 - it marks the tests of this file

STEP = f"{__name__}:build"


def build(mesh):
    """A matmul whose batch is over data and whose columns are over model; 8 columns' worth."""
    if mesh.shape["model"] > 4:
        raise ValueError("columns go over at most 4")

    def like(spec, *shape):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))

    def step(weights, x):
        return jax.grad(lambda w: jnp.sum((x @ w).astype(jnp.float32) ** 2))(weights)

    return jax.jit(step), (like(P(None, "model"), 2048, 8192), like(P("data", None), 8192, 2048))


def test_meshes_are_ranked_and_refusals_told():
    ranked = rank(STEP, "h100-sxm:1x8", ["data", "model"], compiled=1)
    taken = [one for one in ranked if not one.refused]
    assert [one.estimated_s for one in taken] == sorted(one.estimated_s for one in taken)
    assert len(taken) == 3
    assert taken[0].simulated_s and taken[0].simulated_bytes
    assert taken[1].simulated_s is None
    text = shown(ranked, "h100-sxm:1x8")
    assert "columns go over at most 4" in text
    assert "data=2 model=4" in text


def test_a_builder_that_takes_no_mesh_is_told():
    with pytest.raises(ValueError, match="takes no mesh of data, other"):
        rank(f"{__name__}:no_mesh", "h100-sxm:1x8", ["data", "other"], compiled=0)


def no_mesh(mesh):
    raise ValueError(f"no mesh of {tuple(mesh.shape)} will do")


def some_raise(mesh):
    """A builder that fails on some meshes as real ones do: not by a ValueError."""
    if mesh.shape["model"] == 8:
        return {}["no such key"]
    if mesh.shape["model"] == 4:
        return jax.jit(lambda x: x @ x), (
            jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=at(mesh)),
        )
    return build(mesh)


def at(mesh):
    return NamedSharding(mesh, P())


def test_one_mesh_that_raises_does_not_end_the_ranking():
    ranked = rank(f"{__name__}:some_raise", "h100-sxm:1x8", ["data", "model"], compiled=0)
    reasons = {one.axes["model"]: one.refused for one in ranked if one.refused}
    assert sorted(reasons) == [4, 8]
    assert reasons[8] == "KeyError: 'no such key'"
    assert reasons[4].startswith("TypeError: dot_general")
    assert "KeyError: 'no such key'" in shown(ranked, "h100-sxm:1x8")


@pytest.mark.parametrize("over", ["data,data", "", "data,", "a b"])
def test_axes_have_a_name_each(over):
    with pytest.raises(ValueError, match="expected the names of axes, each once"):
        rank(STEP, "h100-sxm:1x8", over.split(","), compiled=0)


@pytest.mark.parametrize(
    "option",
    [["--global-batch", "8"], ["--sequence", "8"], ["--axes", "model=8"], ["--plain"],
     ["--keep", "3"], ["--picture", "picture.png"]],
)  # fmt: skip
def test_options_of_a_model_are_refused_beside_over(option):
    command = ["configure", STEP, "--pod", "h100-sxm:1x8", "--over", "data,model", *option]
    run = CliRunner().invoke(app, command)
    assert run.exit_code == 2
    assert f"{option[0]}: for a model by name" in run.stderr


def test_a_model_of_unknown_fields_is_refused(tmp_path):
    path = tmp_path / "model.json"
    path.write_text('{"name": "a", "layers": 2, "hidden": 64, "heads": 4, "kv_headz": 2}')
    command = ["configure", str(path), "--pod", "h100-sxm:1x8", "--global-batch", "8"]
    run = CliRunner().invoke(app, command)
    assert run.exit_code == 2
    assert "kv_headz" in run.stderr


def test_the_baseline_is_the_fastest_options_on_the_fastest_mesh():
    """The baseline is README's: by XLA's defaults, O1 or gpu-recipes, without a pass of this library."""
    words = ("simulate", STEP, "--pod", "h100-sxm:1x8", "--mesh", "data=8,model=1", "--without")
    shown = CliRunner().invoke(app, words)
    assert shown.exit_code == 0, shown.output
    said = re.search(r"without jaxoverlap: (\S+) ms on data=2 model=4 by (.*)\n", shown.stdout)
    assert said, shown.stdout
    assert all(name in said[2] for name in ("XLA's defaults", "O1", "gpu-recipes"))
    seconds = [float(said[1]), *map(float, re.findall(r"(\S+) ms", said[2]))]
    assert len(seconds) == 3 and seconds == sorted(seconds)
    assert re.search(r"with it: \S+ ms on data=8 model=1, 0\.\d+ x\n", shown.stdout)


def test_a_set_of_options_that_xla_refuses_has_no_figure(monkeypatch):
    """The others do; a baseline without any figure says so."""
    answers = iter([Evaluation(refusal="SIGABRT: a check"), *[Evaluation(refusal="no")] * 2])
    monkeypatch.setattr("jaxoverlap.cli.without.attempt", lambda *_: next(answers))
    least = without(target_on(STEP, "h100-sxm:1x8", {"data": 8, "model": 1}), "data=8 model=1")
    assert least.step_s is None and len(least.refused) == 3
    assert "no figure" in least.compared("data=8", 1.0) and " x" not in least.compared(
        "data=8", 1.0
    )


def test_the_best_of_ones_own_meshes_is_held_against_the_baseline():
    words = ("configure", STEP, "--pod", "h100-sxm:1x8", "--over", "data,model", "--compile", "1")
    shown = CliRunner().invoke(app, words)
    assert shown.exit_code == 0, shown.output
    last = shown.stdout.splitlines()[-2:]
    assert last[0].startswith("without jaxoverlap: ") and "by " in last[0]
    assert re.fullmatch(r"with it: \S+ ms on data=\d model=\d, \S+ x", last[1])
