"""The example trainer reads text, computes and keeps checkpoints; overlap has its own tests."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import typer.testing
from flax import nnx

from models import demo, train_gpt, trainer
from models.config import Config
from models.gpt import RECIPE, abstract_args, init_state, make_grads, make_mesh
from models.recipe import Recipe
from models.text import load_text, make_batch, text_batches

TINY = Config(
    layers=2,
    hidden=32,
    heads=4,
    mlp=64,
    sequence=16,
    batch=4,
    learning_rate=1e-2,
    warmup=2,
    steps=8,
    plain=True,
)
ROOT = Path(__file__).parents[2]


# -- text -----------------------------------------------------------------------------------------


def test_the_default_text_is_long_and_the_same_each_time():
    text = load_text(sequence=128)
    assert len(text) > 100_000
    np.testing.assert_array_equal(text, load_text(sequence=128))
    assert b"lambda" in text.tobytes()


def test_a_batch_is_a_function_of_seed_and_step():
    text = load_text(sequence=TINY.sequence)
    batch, again = make_batch(text, TINY, 3), make_batch(text, TINY, 3)
    for name in ("inputs", "targets"):
        assert batch[name].shape == (TINY.batch, TINY.sequence)
        assert batch[name].dtype == np.int32
        np.testing.assert_array_equal(batch[name], again[name])
    np.testing.assert_array_equal(batch["inputs"][:, 1:], batch["targets"][:, :-1])
    for other in (
        make_batch(text, TINY, 4),
        make_batch(text, dataclasses.replace(TINY, seed=1), 3),
    ):
        assert (other["inputs"] != batch["inputs"]).any()


def test_a_file_of_one_sequence_and_a_byte_is_enough(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(bytes(range(17)))
    batch = make_batch(load_text(path, sequence=16), TINY, 0)
    np.testing.assert_array_equal(batch["inputs"][0], np.arange(16))
    np.testing.assert_array_equal(batch["targets"][0], np.arange(1, 17))


def test_text_that_is_missing_or_too_short_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere: No such file.*expected a file.*Give another"):
        load_text(tmp_path / "nowhere", sequence=16)
    short = tmp_path / "short"
    short.write_bytes(b"0123456789abcdef")
    with pytest.raises(ValueError, match=r"short: 16 bytes; expected at least 17.*Give a longer"):
        load_text(short, sequence=16)


# -- configuration and mesh -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 3}, "hidden=32 with heads=3"),
        ({"model": 3}, "heads=4 with model=3"),
        ({"batch": 3}, "batch=3 with data=2"),
        ({"steps": 0}, "steps=0"),
        ({"hidden": 36, "heads": 4}, "hidden=36 with heads=4: a head must have an even size"),
    ],
)
def test_sizes_that_do_not_fit_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(TINY, **change)


def test_a_mesh_larger_than_the_machine_is_refused():
    with pytest.raises(ValueError, match=r"data=4 x model=4 needs 16 devices and JAX sees 8"):
        make_mesh(dataclasses.replace(TINY, data=4))


def test_a_pod_of_one_data_rank_has_more_than_one_sequence():
    assert Config.pod(data=1, model=8).batch == 2
    assert Config.pod(data=8, model=8).batch == 8


# -- the step -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def state():
    return init_state(TINY, make_mesh(TINY), seed=0)


def test_abstract_arguments_describe_the_real_ones(state):
    expected, _ = abstract_args(TINY, make_mesh(TINY))
    assert jax.tree.structure(state) == jax.tree.structure(expected)
    for real, abstract in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        assert (real.shape, real.dtype) == (abstract.shape, abstract.dtype)
        assert real.sharding.is_equivalent_to(abstract.sharding, real.ndim)


def test_every_large_array_of_the_state_is_split_over_all_devices():
    state, _ = abstract_args(TINY, make_mesh(TINY))
    for path, leaf in jax.tree.leaves_with_path(state):
        if leaf.ndim > 1 and "scale" not in jax.tree_util.keystr(path):
            local = np.prod(leaf.sharding.shard_shape(leaf.shape))
            assert local * 8 == leaf.size, jax.tree_util.keystr(path)


def test_loss_and_gradients_do_not_depend_on_the_mesh():
    """The split step is compared with one device, in float64: a missing reduction would show."""
    batch = make_batch(load_text(sequence=TINY.sequence), TINY, 0)
    by_mesh = []
    with jax.enable_x64(True):
        for data, model in ((1, 1), (2, 4)):
            config = dataclasses.replace(
                TINY, data=data, model=model, dtype="float64", param_dtype="float64"
            )
            mesh = make_mesh(config)
            params = init_state(config, mesh, seed=0)["params"]
            by_mesh.append(jax.device_get(make_grads(config, mesh)(params, batch)))
    for whole, split in zip(*map(jax.tree.leaves, by_mesh), strict=True):
        assert whole.dtype == np.float64
        np.testing.assert_allclose(split, whole, rtol=1e-9, atol=1e-12)


def test_a_byte_changes_no_logits_before_it(state):
    definition, _ = nnx.split(
        nnx.eval_shape(lambda: RECIPE.model(TINY, make_mesh(TINY), nnx.Rngs(0)))
    )
    logits_of = jax.jit(lambda params, tokens: nnx.merge(definition, params)(tokens))
    tokens = make_batch(load_text(sequence=TINY.sequence), TINY, 0)["inputs"]
    changed = tokens.copy()
    changed[:, 9] ^= 1
    logits, other = jax.device_get([logits_of(state["params"], x) for x in (tokens, changed)])
    assert logits.shape == (TINY.batch, TINY.sequence, 256)
    np.testing.assert_array_equal(logits[:, :9], other[:, :9])
    assert (logits[:, 9:] != other[:, 9:]).any(axis=(0, 2)).all()


# -- the trainer ----------------------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def one_compilation():
    """Share one step: the trainer's runs differ in what they keep, not in their step."""
    step = RECIPE.make_step(TINY, make_mesh(TINY))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Recipe, "make_step", lambda recipe, config, mesh: step)
        yield


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    """Return the rows of TINY's run and the file they were written to."""
    path = tmp_path_factory.mktemp("run") / "metrics.jsonl"
    return trainer.main(RECIPE, dataclasses.replace(TINY, metrics=path)), path


def test_training_lowers_the_loss_and_writes_what_it_returns(whole_run):
    rows, path = whole_run
    assert [row["step"] for row in rows] == list(range(TINY.steps))
    assert 5 < rows[0]["loss"] < 7  # near log(256) before the first step
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.5
    assert all(row["grad_norm"] > 0 and row["seconds"] > 0 for row in rows)
    assert [json.loads(line) for line in path.read_text().splitlines()] == rows


def test_a_run_that_was_interrupted_goes_on_as_if_it_had_not_been(whole_run, tmp_path):
    config = dataclasses.replace(
        TINY, checkpoint=tmp_path / "states", save_every=2, metrics=tmp_path / "metrics.jsonl"
    )

    def interrupted(config):
        batch_of = text_batches(config)

        def at(step, rows):
            if step == 5:  # after the state of 4 steps was saved, and one more step was taken
                raise KeyboardInterrupt
            return batch_of(step, rows)

        return at

    with pytest.raises(KeyboardInterrupt):
        trainer.main(dataclasses.replace(RECIPE, batches=interrupted), config)
    resumed = trainer.main(RECIPE, config)

    def numbers(rows):
        return [(row["step"], row["loss"], row["grad_norm"]) for row in rows]

    assert numbers(resumed) == numbers(whole_run[0])[4:]
    assert config.metrics is not None
    written = [json.loads(line) for line in config.metrics.read_text().splitlines()]
    assert numbers(written) == numbers(whole_run[0])
    assert trainer.main(RECIPE, config) == []  # nothing is left to do

    with pytest.raises(ValueError, match=r"holds another run \(seed: 0 there, 7 here\)"):
        trainer.main(RECIPE, dataclasses.replace(config, seed=7))


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the trainer as a user starts it, without the devices that the tests set up."""
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    environment |= {"JAX_PLATFORMS": "cpu", "COLUMNS": "200"}
    command = [sys.executable, "-m", "models.train_gpt", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, text=True, capture_output=True)


def test_the_command_line_trains_on_devices_of_its_own():
    sizes = "--layers 1 --hidden 32 --mlp 64 --sequence 16 --batch 4"
    done = run("--plain", "--steps", "2", *sizes.split())
    assert done.returncode == 0, done.stderr
    assert "plain  step 2/2  loss" in done.stdout


def test_the_command_line_helps():
    app = typer.testing.CliRunner()
    helped = app.invoke(train_gpt.app, ["--help"], env={"COLUMNS": "200", "TERM": "dumb"})
    assert helped.exit_code == 0
    for word in ("--steps", "--plain", "--checkpoint", "--metrics"):
        assert word in helped.output
    refused = app.invoke(train_gpt.app, ["--plain", "--hidden", "130"], env={"COLUMNS": "200"})
    assert refused.exit_code == 2
    assert "hidden=130 with heads=4" in refused.output


# -- the demo's pictures --------------------------------------------------------------------------


def test_the_demo_draws_curves_that_agree_and_that_differ(tmp_path):
    plain = [{"step": i, "loss": 6 / (i + 1), "seconds": 0.1} for i in range(100)]
    other = [{**row, "loss": row["loss"] * (1 + 1e-6 * (row["step"] % 2))} for row in plain]
    assert max(demo.differences(plain, other)) == pytest.approx(1e-6, rel=1e-3)
    for name, rows in (("equal", plain), ("different", other)):
        demo.draw_losses(plain, rows, tmp_path / f"{name}.svg")
        assert (tmp_path / f"{name}.svg").read_text().rstrip().endswith("</svg>")
    lines = demo.picture([row["loss"] for row in plain], width=20, height=5).splitlines()
    assert len(lines) == 5
    assert [line.count("█") for line in lines] == [1, 1, 1, 1, 2]  # only the start is high
    assert demo.picture([1.0, 1.0]).splitlines()[-1].endswith("▁▁")


def test_the_demo_compares_losses_and_no_seconds(tmp_path, monkeypatch, capsys):
    """A CPU's seconds say nothing about a GPU's."""
    monkeypatch.chdir(tmp_path)
    demo.OUT.mkdir(parents=True)
    demo.compare(dataclasses.replace(TINY, steps=3))
    shown = capsys.readouterr().out
    largest = re.search(r"largest relative difference of the losses: (\S+)", shown)
    assert largest and float(largest[1]) < 1e-5
    assert not re.search(r"\d ?(?:s|ms)\b|seconds|tokens|hops", shown)
    assert (tmp_path / demo.OUT / "losses.svg").is_file()
