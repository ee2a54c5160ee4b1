"""A step runs at once as it is; trial steps then choose its program, and nothing is lost."""

from __future__ import annotations

import copy
import dataclasses
import random
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoverlap
from jaxoverlap._jax import jits
from jaxoverlap.hardware.cluster import parse_cluster
from jaxoverlap.start import at_once, contender, kept
from jaxoverlap.start.candidates import Offers
from jaxoverlap.start.record import PLAIN
from jaxoverlap.step.options import Options
from tests.start.case import (
    VARIANTS,
    arguments,
    decided,
    make_mesh,
    make_step,
    offer,
    plans,
    replace_run,
    slow,
    train,
    trials_of,
)

TOLERANCE = {"rtol": 2e-4, "atol": 1e-6}


@pytest.fixture(scope="module")
def mesh() -> jax.sharding.Mesh:
    return make_mesh()


def plain_losses(mesh: jax.sharding.Mesh, steps: int) -> list[float]:
    return train(make_step(mesh), *arguments(mesh), lambda number: number == steps)[1]


def dropped(trials: Any) -> dict[str, str]:
    return {one.name: one.dropped for one in trials.candidates if one.dropped}


# -- which is kept --------------------------------------------------------------------------------


@pytest.mark.parametrize("case", range(12))
def test_the_fastest_is_kept(case, mesh, tmp_path, monkeypatch):
    """Each program in its turn, with others 5 to 40 ms slower, in number from one to three."""
    rng = random.Random(case)
    names = VARIANTS[: 1 + case % 3]
    fastest = [PLAIN, *names][case % (len(names) + 1)]
    offer(monkeypatch, names)
    slow(
        monkeypatch,
        {n: 0.005 if n == fastest else rng.uniform(0.02, 0.05) for n in (PLAIN, *names)},
    )
    trials, losses = trials_of(tmp_path, mesh)
    assert trials.taken == fastest and not dropped(trials)
    assert 0 < trials.trial_steps <= 60 and trials.trial_s > 0.005 * trials.trial_steps
    assert trials.ran[0].name == PLAIN and trials.ran[-1].name == fastest
    assert sum(one.steps for one in trials.ran) == len(losses)
    assert all(len(one.seconds) >= 3 for one in trials.candidates)
    np.testing.assert_allclose(losses, plain_losses(mesh, len(losses)), **TOLERANCE)


def test_at_most_so_many_trial_steps(mesh, tmp_path, monkeypatch):
    offer(monkeypatch)
    trials, _ = trials_of(tmp_path, mesh, trials=12)
    assert trials.trial_steps <= 12 and trials.taken


def test_programs_for_which_there_are_too_few_steps_are_named(mesh, tmp_path, monkeypatch):
    offer(monkeypatch)
    trials, _ = trials_of(tmp_path, mesh, trials=6)
    timed = {one.name: len(one.seconds) for one in trials.candidates}
    assert timed == {PLAIN: 2, VARIANTS[0]: 2, VARIANTS[1]: 0, VARIANTS[2]: 0}
    assert set(dropped(trials).values()) == {"6 trial steps are too few for it too"}


def test_a_line_says_what_was_kept(mesh, tmp_path, monkeypatch, capfd):
    offer(monkeypatch, ["two_way"])
    slow(monkeypatch, {PLAIN: 0.03})
    step = jaxoverlap.overlap(make_step(mesh), start="plain", cache=tmp_path)
    assert step.trials == ()
    train(step, *arguments(mesh), decided(step))
    (trials,) = step.trials
    assert f"{trials}\n" in capfd.readouterr().err
    assert str(trials).startswith("train_step: ") and "two_way from step" in str(trials)
    assert "which ran when" in trials.text()


def test_the_search_finds_the_candidates(mesh, tmp_path):
    trials, losses = trials_of(tmp_path, mesh)
    assert [one.name for one in trials.candidates][:2] == [PLAIN, "overlapped"]
    assert not dropped(trials)
    np.testing.assert_allclose(losses, plain_losses(mesh, len(losses)), **TOLERANCE)


def test_each_signature_has_trials_of_its_own(mesh, tmp_path, monkeypatch):
    offers = {BATCH: Offers(why="the small one has none"), 2 * BATCH: Offers(why="nor the large")}
    monkeypatch.setattr(at_once, "offers_of", lambda call, _: offers[call.flat[-1].shape[0]])
    step = jaxoverlap.overlap(make_step(mesh), start="plain", cache=tmp_path, on_trials=print)
    state, x = arguments(mesh)
    large = jax.device_put(np.ones((2 * BATCH, x.shape[1]), "f"), x.sharding)
    end = time.monotonic() + 60
    while len(step.trials) < 2 or not all(one.taken for one in step.trials):
        state, _ = step(state, x)
        state, _ = step(state, large)
        assert time.monotonic() < end
    assert [one.why for one in step.trials] == ["the small one has none", "nor the large"]


BATCH = 16


def test_a_step_that_is_called_once_is_not_searched_for(mesh, tmp_path, monkeypatch):
    monkeypatch.setattr(at_once, "offers_of", lambda *_: pytest.fail("it was searched for"))
    step = jaxoverlap.overlap(make_step(mesh), start="plain", cache=tmp_path)
    step(*arguments(mesh))
    time.sleep(0.3)
    assert step.trials[0].taken == ""


@pytest.mark.parametrize("options", [{"trials": None}, {"start": "decided"}, {}])
def test_other_starts_decide_before_the_first_step(options, mesh, monkeypatch):
    monkeypatch.setattr(at_once, "AtOnce", lambda *_: pytest.fail("it started at once"))
    step = jaxoverlap.overlap(make_step(mesh), **options)
    train(step, *arguments(mesh), lambda number: number == 3)
    assert step.trials == ()


# -- what is dropped ------------------------------------------------------------------------------


def check_dropped(trials: Any, losses: list[float], mesh: Any, name: str, why: str) -> None:
    assert list(dropped(trials)) == [name] and why in dropped(trials)[name]
    assert trials.taken != name
    np.testing.assert_allclose(losses, plain_losses(mesh, len(losses)), **TOLERANCE)


def test_one_that_does_not_compile_is_dropped(mesh, tmp_path, monkeypatch):
    real = contender._compiled

    def compiled(call, program):
        if program.plan.rings[0].variant == plans()["two_way"].rings[0].variant:
            raise jax.errors.JaxRuntimeError("XLA gives up")
        return real(call, program)

    monkeypatch.setattr(contender, "_compiled", compiled)
    offer(monkeypatch)
    trials, losses = trials_of(tmp_path, mesh)
    check_dropped(trials, losses, mesh, "two_way", "XLA gives up")


def test_one_that_hangs_at_compile_is_dropped(mesh, tmp_path, monkeypatch):
    real = contender._compiled

    def compiled(call, program):
        if program.plan.rings[0].variant == plans()["two_way"].rings[0].variant:
            time.sleep(20)
        return real(call, program)

    monkeypatch.setattr(contender, "_compiled", compiled)
    monkeypatch.setattr(contender, "COMPILE_WITHIN_S", 5.0)
    offer(monkeypatch, ["direct", "two_way"])
    trials, losses = trials_of(tmp_path, mesh)
    check_dropped(trials, losses, mesh, "two_way", "XLA did not compile it within 5 s")


def test_one_that_does_not_fit_is_dropped(mesh, tmp_path, monkeypatch):
    monkeypatch.setattr(contender, "room_bytes", lambda flat: 1000)
    offer(monkeypatch, ["two_way"])
    trials, losses = trials_of(tmp_path, mesh)
    check_dropped(trials, losses, mesh, "two_way", "of a device, where 1.0 kB are")
    assert trials.taken == PLAIN and trials.trial_steps == 0


def test_one_with_another_sharding_of_a_result_is_dropped(mesh, tmp_path, monkeypatch):
    real, wrong = contender.jits.results_of, NamedSharding(mesh, P("data"))
    seen = []

    def results_of(compiled: Any) -> list[tuple[Any, Any]]:
        """Say of the first program that all its large results are sharded along the wrong axis."""
        seen.append(compiled)
        results = real(compiled)
        return [(kind, wrong if kind[0] else s) for kind, s in results if len(seen) == 1] or results

    monkeypatch.setattr(contender.jits, "results_of", results_of)
    offer(monkeypatch, ["direct", "one_way"])
    trials, losses = trials_of(tmp_path, mesh)
    check_dropped(trials, losses, mesh, "direct", "result 1 is sharded as")


def test_results_are_compared_by_type_sharding_memory_and_donation(mesh):
    args = arguments(mesh)
    call = jits.infer(make_step(mesh), args, {})
    original = contender.Results.of_original(call)
    assert original.donated == {0, 1, 2, 3, 4}
    first = original.types.index(((16, 32), np.dtype("f"), False))

    def differ(**changes: Any) -> str:
        return dataclasses.replace(original, **changes).differ(original)

    def with_first(values: tuple[Any, ...], value: Any) -> tuple[Any, ...]:
        return *values[:first], value, *values[first + 1 :]

    assert differ() == ""
    shardings, types = original.shardings, original.types
    wrong = NamedSharding(mesh, P("data"))
    assert f"result {first} is sharded as" in differ(shardings=with_first(shardings, wrong))
    elsewhere = shardings[first].with_memory_kind("unpinned_host")
    assert f"result {first} is sharded as" in differ(shardings=with_first(shardings, elsewhere))
    weak = (*types[first][:2], True)
    assert f"result {first} is of type" in differ(types=with_first(types, weak))
    assert differ(donated=frozenset({0, 1, 2, 3, 4, 5})).startswith("it donates argument 5")
    assert differ(donated=frozenset({0, 1, 3, 4})).startswith("it does not donate argument 2")


def test_one_that_fails_before_it_runs_is_dropped_and_the_state_stays(mesh, tmp_path, monkeypatch):
    def fails(name: str, run: Any) -> Any:
        def call(flat):
            raise jax.errors.JaxRuntimeError("no memory for it")

        return call if name == "two_way" else run

    replace_run(monkeypatch, fails)
    offer(monkeypatch)
    with pytest.warns(UserWarning, match="train_step: two_way was dropped: .*no memory for it"):
        trials, losses = trials_of(tmp_path, mesh)
    check_dropped(trials, losses, mesh, "two_way", "no memory for it")


def test_one_that_fails_with_the_state_raises(mesh, tmp_path, monkeypatch):
    def fails(name: str, run: Any) -> Any:
        def call(flat):
            flat[0].delete()
            raise jax.errors.JaxRuntimeError("it is too late")

        return call

    replace_run(monkeypatch, fails)
    offer(monkeypatch, ["two_way"])
    with pytest.raises(jax.errors.JaxRuntimeError, match="it is too late"):
        trials_of(tmp_path, mesh)


def test_one_that_donates_otherwise_is_dropped(mesh, tmp_path, monkeypatch):
    real = contender.jits.donated
    seen = []

    def donated(compiled: Any) -> frozenset[int]:
        seen.append(compiled)
        return real(compiled) | {5} if len(seen) == 1 else real(compiled)

    monkeypatch.setattr(contender.jits, "donated", donated)
    offer(monkeypatch, ["two_way", "direct"])
    trials, losses = trials_of(tmp_path, mesh)
    check_dropped(trials, losses, mesh, "two_way", "it donates argument 5")


def test_what_the_loop_reads_by_numpy_drops_no_program(mesh, tmp_path, monkeypatch):
    """On CPUs NumPy reads JAX's own memory, and what it reads is not donated in that call."""
    offer(monkeypatch, ["two_way"])
    step = jaxoverlap.overlap(
        make_step(mesh), start="plain", cache=tmp_path, on_trials=lambda _: None
    )
    (state, x), read, over = arguments(mesh), [], decided(step)
    while not read or not over(len(read)):
        state, _ = step(state, x)
        read.append(np.asarray(state["count"]))
        assert len(read) < 3000
        time.sleep(0.005)
    assert not dropped(step.trials[0])
    assert [int(count) for count in read] == [*range(1, len(read) + 1)]


def test_where_the_search_fails_training_goes_on_and_a_warning_says_why(
    mesh, tmp_path, monkeypatch
):
    step = jaxoverlap.overlap(
        make_step(mesh), start="plain", cache=tmp_path, skip=("nowhere.py:1",)
    )
    with pytest.warns(UserWarning, match="train_step: runs as it is: .*nowhere.py:1"):
        _, losses = train(step, *arguments(mesh), decided(step))
    assert step.trials[0].taken == PLAIN and not list(tmp_path.rglob("*.json"))
    np.testing.assert_allclose(losses, plain_losses(mesh, len(losses)), **TOLERANCE)


@pytest.mark.parametrize(("memory", "fits"), [(None, True), (0.9, True), (1000.0, False)])
def test_a_step_that_needs_more_than_memory_states_does_not_start_at_once(memory, fits, mesh):
    options = Options(cluster=parse_cluster("h100-sxm:1x8"), memory=memory)
    call = jits.infer(make_step(mesh), arguments(mesh), {})
    assert contender.fits_as_written(call, options) == fits


def test_room_is_what_is_not_allocated_and_what_the_arguments_have():
    stats = {"bytes_limit": 1000, "bytes_in_use": 500}
    assert contender._room(stats, 200) == pytest.approx(1000 * contender.MEMORY_SHARE - 300)
    assert contender._room(None, 200) == contender._room({}, 200) == float("inf")


# -- the next run ---------------------------------------------------------------------------------


@pytest.mark.parametrize("fastest", [PLAIN, "two_way"])
def test_the_next_run_decides_nothing(fastest, mesh, tmp_path, monkeypatch):
    offer(monkeypatch, ["two_way"])
    slow(monkeypatch, {name: 0.02 * (name != fastest) for name in (PLAIN, "two_way")})
    first, losses = trials_of(tmp_path, mesh)
    monkeypatch.undo()
    monkeypatch.setattr(at_once, "offers_of", lambda *_: pytest.fail("it decides again"))
    step = jaxoverlap.overlap(make_step(mesh), start="plain", cache=tmp_path)
    _, again = train(step, *arguments(mesh), lambda number: number == len(losses))
    np.testing.assert_allclose(again, losses, **TOLERANCE)
    (trials,) = step.trials
    assert trials.cached and trials.taken == first.taken == fastest
    assert trials.candidates == first.candidates and trials.trial_steps == 0
    assert "as an earlier run found" in str(trials)


@pytest.mark.parametrize("what", ["the step", "the mesh", "an option", "XLA's flags", "the batch"])
def test_a_change_decides_anew(what, mesh, monkeypatch):
    def key(mesh: Any, rate: float = 0.1, batch: int = 16, **options: Any) -> str:
        state, x = arguments(mesh)
        x = jax.device_put(np.ones((batch, x.shape[1]), "f"), x.sharding)
        step = jaxoverlap.overlap(make_step(mesh, rate), **options)
        call = contender.jits.infer(step._jitted, (state, x), {})
        return kept.key_of(kept.identity(contender.jits.without_arrays(call), step._options))

    same = key(mesh)
    assert same == key(mesh)
    if what == "XLA's flags":
        monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=/nowhere")
    other = {
        "the step": lambda: key(mesh, rate=0.2),
        "the mesh": lambda: key(make_mesh({"data": 4, "model": 2})),
        "an option": lambda: key(mesh, halves=None),
        "XLA's flags": lambda: key(mesh),
        "the batch": lambda: key(mesh, batch=32),
    }
    assert other[what]() != same


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: text.replace("two_way", "three_way"),
        lambda text: "",
        lambda text: '{"format": "another program"}',
    ],
)
def test_a_damaged_or_foreign_file_is_ignored_with_a_word(damage, mesh, tmp_path, monkeypatch):
    offer(monkeypatch, ["two_way"])
    slow(monkeypatch, {PLAIN: 0.02})
    trials_of(tmp_path, mesh)
    (path,) = (tmp_path / "starts").glob("*.json")
    path.write_text(damage(path.read_text()))
    with pytest.warns(UserWarning, match="is ignored, and the decision made again"):
        trials, _ = trials_of(tmp_path, mesh)
    assert not trials.cached and trials.taken == "two_way"
    assert kept.KeptDecision.from_bytes(path.read_bytes()).plan == plans()["two_way"]


def test_a_folder_that_takes_no_file_is_named(mesh, tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.write_text("")
    offer(monkeypatch, ["two_way"])
    with pytest.warns(UserWarning, match="cannot be written, so the next run decides again"):
        trials_of(file, mesh)


def test_the_environment_names_the_cache(mesh, tmp_path, monkeypatch):
    monkeypatch.setenv("JAXOVERLAP_CACHE", str(tmp_path))
    assert jaxoverlap.overlap(make_step(mesh), start="plain")._start.folder == tmp_path / "starts"
    named = jaxoverlap.overlap(make_step(mesh), cache=tmp_path / "own")
    assert named._start.folder == Path(tmp_path / "own" / "starts")


# -- arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"start": "soon"}, "start='soon': expected 'plain', 'decided' or None"),
        ({"trials": 3}, "trials=3: expected a number of steps, 6 or more, or None"),
        ({"trials": True}, "trials=True: expected"),
        ({"cache": 3}, "cache=3: expected the path of a folder"),
        ({"on_trials": "print"}, "on_trials='print': expected a function"),
        ({"start": "plain", "trials": None}, "start='plain' with trials=None"),
        ({"start": "plain", "never_slower": False}, "start='plain' with never_slower=False"),
        ({"start": "plain", "plan": "p.json"}, "start='plain' with plan"),
        ({"trials": 20, "start": "decided"}, "trials=20 with start='decided'"),
        ({"cache": "x", "start": "decided"}, "cache with start='decided'"),
    ],
)
def test_bad_arguments_are_refused(options, message, mesh):
    with pytest.raises(ValueError, match=message):
        jaxoverlap.overlap(make_step(mesh), **options)


@pytest.mark.parametrize(
    ("options", "on_cpus", "on_gpus"),
    [
        ({}, "decided", "plain"),
        ({"start": "plain"}, "plain", "plain"),
        ({"trials": 20}, "plain", "plain"),
        ({"cache": "folder"}, "plain", "plain"),
        ({"start": "decided"}, "decided", "decided"),
        ({"trials": None}, "decided", "decided"),
        ({"never_slower": False}, "decided", "decided"),
        ({"tune": True}, "decided", "plain"),
        ({"tune": True, "trials": None}, "decided", "decided"),
    ],
)
def test_how_a_step_starts(options, on_cpus, on_gpus, mesh):
    start = jaxoverlap.overlap(make_step(mesh), **options)._start
    gpus = SimpleNamespace(devices=np.array([SimpleNamespace(platform="gpu")]))
    found = ("plain" if start.is_plain(where) else "decided" for where in (mesh, gpus))
    assert tuple(found) == (on_cpus, on_gpus)


def test_a_plan_decides_and_copies_start_alike(mesh, tmp_path):
    assert jaxoverlap.overlap(make_step(mesh), plan=plans()["two_way"])._start.mode == "decided"
    with pytest.raises(ValueError, match="cache with plan"):
        jaxoverlap.overlap(make_step(mesh), plan=plans()["two_way"], cache=tmp_path)
    step = jaxoverlap.overlap(make_step(mesh), start="plain", trials=12, cache=tmp_path)
    assert copy.copy(step)._start == copy.deepcopy(step)._start == step._start
