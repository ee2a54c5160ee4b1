"""A step is traced, decided on and compiled as often as under jit alone, and can be forgotten."""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
import pickle
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import serialize_executable
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxoverlap import overlap
from jaxoverlap._jax import jits
from jaxoverlap.step import pipeline

MESH = jax.make_mesh((2, 4, 1), ("data", "model", "one"), axis_types=(AxisType.Auto,) * 3)


def on(*spec: Any, **options: Any) -> NamedSharding:
    return NamedSharding(MESH, P(*spec), **options)


def put(shape: tuple[int, ...], *spec: Any) -> jax.Array:
    values = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    return jax.device_put(values, on(*spec))


def product(x, w):
    return lax.with_sharding_constraint(x @ w, on(None, "model"))


ARGS = put((16, 32), "model"), put((32, 64), None, "model")


@contextlib.contextmanager
def compiles(name: str) -> Iterator[list[str]]:
    """Collect XLA's compilations of steps of a name, as jax logs them."""
    compilations: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if f"Finished XLA compilation of jit({name})" in record.getMessage():
                compilations.append(record.getMessage())

    handler, logger = Handler(), logging.getLogger("jax")
    logger.addHandler(handler)
    jax.config.update("jax_log_compiles", True)  # jax.log_compiles() is for one thread
    try:
        yield compilations
    finally:
        jax.config.update("jax_log_compiles", False)
        logger.removeHandler(handler)


@pytest.fixture
def decisions(monkeypatch) -> list[None]:
    """Collect an element each time that the passes run."""
    calls: list[None] = []
    run_passes = pipeline.run_passes
    monkeypatch.setattr(
        "jaxoverlap.step.program.run_passes", lambda *args: calls.append(None) or run_passes(*args)
    )
    return calls


# -- results fed back -----------------------------------------------------------------------------


def trained(wrap: Callable[[Any], Any], specs: dict[str, P]) -> tuple[int, int, list[Any]]:
    """Count traces and compilations of three steps, each on the results of the one before.

    Return also the shardings of the results: the jit leaves them open, so XLA says them.
    """
    traces = []

    @partial(jax.jit, donate_argnums=0)
    def train_step(params, x):
        traces.append(None)

        def loss(params):
            y = jnp.tanh(x @ params["w"])
            return jnp.mean((y @ params["v"] + params["b"]) ** 2)

        value, gradient = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient), value

    shapes = {"w": (32, 64), "v": (64, 32), "b": (32,)}
    params = {name: put(shape, *specs[name]) for name, shape in shapes.items()}
    step, x = wrap(train_step), put((16, 32), "data", None)
    with compiles("train_step") as compilations:
        for _ in range(3):
            params, _ = step(params, x)
    return (
        len(traces),
        len(compilations),
        jax.tree.leaves(jax.tree.map(lambda a: a.sharding, params)),
    )


@pytest.mark.parametrize(
    "specs",
    [
        {"w": P(None, "model"), "v": P("model", None), "b": P(None)},
        {"w": P("data", "model"), "v": P(("model", "data"), None), "b": P()},
        {"w": P("one", "model"), "v": P("model", "one"), "b": P("one")},
    ],
    ids=["None at the end", "two axes", "an axis of one device"],
)
def test_results_fed_back_are_no_new_signature(specs, decisions):
    plain, ours = trained(lambda fn: fn, specs), trained(overlap, specs)
    assert ours == plain
    assert len(decisions) == 1


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (on("model"), on("model", None), True),
        (on(("model",)), on("model"), True),
        (on("one", "model"), on(None, "model"), True),
        (on(("data", "one")), on("data"), True),
        (on("one"), on(), True),
        (on("model"), on(None, "model"), False),
        (on(("data", "model")), on(("model", "data")), False),
        (on("model"), on("model", memory_kind="pinned_host"), False),
        (on("data"), NamedSharding(jax.make_mesh((2,), ("data",), (AxisType.Auto,), devices=jax.devices()[:2]), P("data")), False),
    ],
    ids=str,
)  # fmt: skip
def test_shardings_are_told_apart_by_what_they_do(one, other, same: bool):
    first, second = (jax.ShapeDtypeStruct((8, 8), np.float32, sharding=s) for s in (one, other))
    assert (jits.placement(first) == jits.placement(second)) is same
    if same:
        assert hash(jits.placement(first)) == hash(jits.placement(second))
        assert one.is_equivalent_to(other, 2)


def test_what_is_bound_to_no_sharding_has_no_placement():
    assert jits.placement(np.ones(3)) is jits.placement(jnp.ones(3)) is None
    single = jax.device_put(np.ones(3), jax.devices()[1])
    assert jits.placement(single) == single.sharding


# -- threads --------------------------------------------------------------------------------------


def test_six_threads_trace_decide_and_compile_once(decisions):
    traces, start, results = [], threading.Barrier(6), []

    def step(x, w):
        traces.append(None)
        time.sleep(0.05)
        return product(x, w)

    overlapped = overlap(step)

    def call() -> None:
        start.wait()
        results.append(overlapped(*ARGS))

    threads = [threading.Thread(target=call) for _ in range(6)]
    with compiles("step") as compilations:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=120)
    assert (len(traces), len(decisions), len(compilations)) == (1, 1, 1)
    assert len(results) == 6
    for result in results:
        np.testing.assert_array_equal(result, results[0])


def test_two_steps_that_call_each_other_do_not_wait_for_ever():
    """Each thread is at its first call of one step, which calls the other."""
    start, results = threading.Barrier(2), []

    def inner(x, w, *, other):
        start.wait(timeout=60)
        return other(x, w) if other else product(x, w)

    position = {"in_shardings": tuple(a.sharding for a in ARGS)}
    leaves = [overlap(jax.jit(product, **position)) for _ in range(2)]
    steps = [overlap(jax.jit(partial(inner, other=leaf), **position)) for leaf in leaves]
    threads = [threading.Thread(target=lambda s=s: results.append(s(*ARGS))) for s in steps]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert len(results) == 2


# -- what is forgotten ----------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["the step's", "all of jax's"])
def test_cleared_caches_keep_nothing(how: str, decisions):
    traces = []

    def step(x, w):
        traces.append(None)
        return product(x, w)

    overlapped = overlap(step)
    clear = overlapped.clear_cache if how == "the step's" else jax.clear_caches
    for times in (1, 2):
        with compiles("step") as compilations:
            for _ in range(2):
                overlapped(*ARGS)
        assert (len(traces), len(decisions), len(compilations)) == (times, times, 1)
        jaxpr = weakref.ref(jits.traced_params(overlapped.trace(*ARGS))["jaxpr"])
        assert "ppermute" in str(jaxpr())
        clear()
        gc.collect()
        assert jaxpr() is None


def test_a_step_that_nobody_holds_is_forgotten():
    step = overlap(product)
    step(*ARGS)
    there = weakref.ref(step)
    del step
    gc.collect()
    assert there() is None


def test_jaxprs_that_lie_where_others_lay_are_not_mistaken(decisions):
    """Each call has a jaxpr of its own, and the one before may be gone."""
    factors = []

    def step(x, w):
        return product(x, w) * factors[-1]

    overlapped = overlap(step)
    for factor in range(1, 6):
        factors.append(factor)
        overlapped.clear_cache()
        gc.collect()
        np.testing.assert_allclose(overlapped(*ARGS), factor * product(*ARGS), rtol=1e-4, atol=1e-4)
    assert len(decisions) == 5


# -- copies ---------------------------------------------------------------------------------------


def module_step(x, w):
    return product(x, w)


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda step: pickle.loads(pickle.dumps(step))],
    ids=["copy", "deepcopy", "pickle"],
)  # fmt: skip
def test_a_step_that_has_run_can_be_copied(copied):
    step = overlap(module_step, on_error="plain", granularity="two_way")
    expected = step(*ARGS)
    other = copied(step)
    np.testing.assert_array_equal(other(*ARGS), expected)
    assert other.explain(*ARGS) == step.explain(*ARGS)
    assert other.__name__ == "module_step"


# -- on disk --------------------------------------------------------------------------------------


@pytest.mark.anew  # XLA does not serialize a loaded program again
def test_a_compiled_step_goes_to_disk_and_back():
    @overlap
    @partial(jax.jit, donate_argnums=0)
    def step(state, x, w):
        return {"sum": state["sum"] + product(x, w), "mean": x.mean()}

    def state():
        return {"sum": jax.device_put(np.ones((16, 64), np.float32), on(None, "model"))}

    compiled = step.lower(state(), *ARGS).compile()
    assert compiled.plan.decisions
    expected = compiled(state(), *ARGS)
    kept, *trees = pickle.loads(pickle.dumps(serialize_executable.serialize(compiled)))
    loaded = serialize_executable.deserialize_and_load(kept, *trees)
    hops = [one.as_text().count(" collective-permute(") for one in (loaded, compiled)]
    assert hops[0] == hops[1] > 0
    given = state()
    got = loaded(given, *ARGS)
    assert given["sum"].is_deleted()
    jax.tree.map(np.testing.assert_array_equal, got, expected)
    assert got["sum"].sharding == expected["sum"].sharding


def test_a_compiled_step_has_what_jaxs_own_has():
    compiled, plain = (f.lower(*ARGS).compile() for f in (overlap(product), jax.jit(product)))
    for name in dir(plain):
        if not name.startswith("__"):
            assert hasattr(compiled, name), name
    with pytest.raises(AttributeError, match="no_such_name"):
        compiled.no_such_name  # noqa: B018
    assert copy.copy(compiled).plan is compiled.plan
