"""Steps of several libraries, with arguments of all kinds, start as they are and change programs."""

from __future__ import annotations

import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoverlap
from jaxoverlap.start.record import PLAIN
from tests.start.case import (
    arguments,
    decided,
    make_mesh,
    make_step,
    offer,
    replace_run,
    slow,
    train,
)
from tests.support.kinds_of_steps import SUPPORTED, with_nnx

MESH = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))


def leaves(value: Any) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(value) if hasattr(leaf, "dtype")]


def until_decided(step: Any, run: Any) -> int:
    """Call a step until some steps after the trials; return how many calls there were."""
    end, calls = time.monotonic() + 100, 0
    while not step.trials or step.trials[0].since is None or calls < step.trials[0].since + 3:
        run()
        calls += 1
        time.sleep(0.005)
        assert time.monotonic() < end
    return calls


def fed_back(step: Any, args: list[Any]) -> list[np.ndarray]:
    """Call a step, which may donate its first argument; the next call gets its first result."""
    results = step(*args)
    if isinstance(results, tuple):
        args[0] = results[0]
    return leaves(results)


@pytest.mark.parametrize("name", SUPPORTED)
def test_a_step_of_a_library_trains_as_without_overlap(name, tmp_path):
    build = SUPPORTED[name]
    plain, args = build(MESH)
    step, mine = build(MESH)
    step = jaxoverlap.overlap(step, start="plain", cache=tmp_path, on_trials=lambda _: None)
    mine, args, got = [*mine], [*args], []
    calls = until_decided(step, lambda: got.append(fed_back(step, mine)))
    assert step.trials[0].taken and not any(one.dropped for one in step.trials[0].candidates)
    for count in range(calls):
        for one, other in zip(got[count], fed_back(plain, args), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
    if build is with_nnx:
        for one, other in zip(leaves(mine[0]), leaves(args[0]), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("explicit", [False, True])
def test_static_named_and_numpy_arguments_keys_and_callbacks(explicit, tmp_path, monkeypatch):
    kind = AxisType.Explicit if explicit else AxisType.Auto
    mesh = jax.make_mesh((2, 4), ("data", "model"), (kind,) * 2)
    seen = []

    @functools.partial(jax.jit, static_argnames=("scale", "names"), donate_argnames="w")
    def step(w, key, batch, *, scale, names=("a",)):
        x = jnp.tanh(batch @ w) * jax.random.normal(key, ()) * scale
        if not explicit:
            jax.debug.callback(lambda _: seen.append(names), x.sum())
        return w + 0.01 * (batch.T @ x), {"loss": (x**2).sum(), names[0]: jax.random.split(key)[0]}

    def state() -> Any:
        w = np.random.default_rng(0).standard_normal((16, 32)).astype("f")
        return jax.device_put(w, NamedSharding(mesh, P(None, "model"))), jax.random.key(3)

    batch = np.random.default_rng(1).standard_normal((8, 16)).astype("f")
    overlapped = jaxoverlap.overlap(
        step, start="plain", cache=tmp_path, on_trials=lambda _: None, granularity="one_way"
    )
    with jax.set_mesh(mesh):
        (w, key), (wanted, same) = state(), state()

        def run() -> None:
            nonlocal w, key, wanted, same
            w, said = overlapped(w, key, batch, scale=2.0, names=("b",))
            wanted, expected = step(wanted, same, batch, scale=2.0, names=("b",))
            key, same = said["b"], expected["b"]
            np.testing.assert_allclose(said["loss"], expected["loss"], rtol=1e-3)

        until_decided(overlapped, run)
        np.testing.assert_allclose(w, wanted, rtol=1e-3, atol=1e-5)
    assert len(overlapped.trials) <= 2 and not any(
        one.dropped for record in overlapped.trials for one in record.candidates
    )
    assert set(seen) <= {("b",)}


def test_two_threads_may_call_one_step(tmp_path, monkeypatch):
    from concurrent.futures import ThreadPoolExecutor

    mesh = make_mesh()
    offer(monkeypatch, ["two_way"])
    step = jaxoverlap.overlap(
        make_step(mesh), start="plain", cache=tmp_path, on_trials=lambda _: None
    )
    plain = train(make_step(mesh), *arguments(mesh), lambda number: number == 60)[1]
    with ThreadPoolExecutor(2) as pool:
        runs = [
            pool.submit(train, step, *arguments(mesh), lambda number: number == 60)
            for _ in range(2)
        ]
        for run in runs:
            np.testing.assert_allclose(run.result()[1], plain, rtol=2e-4, atol=1e-6)
        runs = [pool.submit(train, step, *arguments(mesh), decided(step)) for _ in range(2)]
        for run in runs:
            losses = run.result()[1][:60]
            np.testing.assert_allclose(losses, plain[: len(losses)], rtol=2e-4, atol=1e-6)


def test_under_a_transformation_a_step_is_decided_as_ever(tmp_path):
    mesh = make_mesh()
    step = jaxoverlap.overlap(make_step(mesh), start="plain", cache=tmp_path)
    state, x = arguments(mesh)
    (_, value), (_, wanted) = (
        jax.jit(lambda s, x, f=f: f(s, x))(state, x) for f in (step, make_step(mesh))
    )
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    assert step.trials == ()


def test_off_runs_the_original_step(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXOVERLAP", "off")
    mesh = make_mesh()
    step = jaxoverlap.overlap(make_step(mesh), start="plain", cache=tmp_path)
    with pytest.warns(UserWarning, match="JAXOVERLAP=off"):
        train(step, *arguments(mesh), lambda number: number == 3)
    assert step.trials == ()


def test_clearing_forgets_the_trials_and_begins_again(tmp_path, monkeypatch):
    mesh = make_mesh()
    offer(monkeypatch, ["two_way"])
    slow(monkeypatch, {PLAIN: 0.02})
    step = jaxoverlap.overlap(
        make_step(mesh), start="plain", cache=tmp_path, on_trials=lambda _: None
    )
    train(step, *arguments(mesh), decided(step))
    step.clear_cache()
    assert step.trials == ()
    train(step, *arguments(mesh), lambda number: number == 2)
    assert step.trials[0].cached and step.trials[0].taken == "two_way"


def test_a_failure_of_the_step_itself_is_the_steps_own(tmp_path, monkeypatch):
    """An error in a trial step of the original program comes through, and training may go on."""
    mesh = make_mesh()
    offer(monkeypatch, ["two_way"])
    failed = []

    def fails_once(name: str, run: Any) -> Any:
        def call(flat: Any) -> Any:
            if not failed:
                failed.append(name)
                raise KeyboardInterrupt
            return run(flat)

        return call

    replace_run(monkeypatch, fails_once)
    step = jaxoverlap.overlap(
        make_step(mesh), start="plain", cache=tmp_path, on_trials=lambda _: None
    )
    state, x = arguments(mesh)
    interrupts, end = 0, time.monotonic() + 100
    while step.trials == () or step.trials[0].since is None:
        try:
            state, _ = step(state, x)
        except KeyboardInterrupt:
            interrupts += 1
        assert time.monotonic() < end
        time.sleep(0.005)
    assert interrupts == 1 and step.trials[0].taken
