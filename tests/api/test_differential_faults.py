"""The comparison of steps finds each fault that it is there for; one is put in at a time."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.differential import compare
from tests.differential.by_hand import differs
from tests.differential.training import Program
from tests.differential.world import Leaf

SIZES = {"data": 2, "model": 2}


def program(mesh):
    """Return a step with a matrix and a counter, both fed back, and data that is neither."""

    def step(w, n, x):
        return w - 0.1 * jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w), n + 1

    w = np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32)
    state = [Leaf(w, P("data", "model")), Leaf(np.int32(0), P())]
    x = Leaf(np.ones((8, 8), np.float32), P("data"))
    return Program(step, state, lambda n: [x], (0, 1))


def differences(monkeypatch, overlap) -> list[str]:
    monkeypatch.setattr(compare.jaxoverlap, "overlap", lambda fn, **_: overlap(fn))
    monkeypatch.setattr(compare, "_ringed", lambda overlapped: 0)
    return differs(SIZES, program, donate_argnums=(0, 1))


def changed(change):
    """Return an overlap() whose steps change their weights by `change`."""

    def overlap(fn):
        def call(w, n, x):
            w, n = fn(w, n, x)
            return change(w), n

        return call

    return overlap


def recompiled(fn):
    def call(*args):
        fn.clear_cache()
        return fn(*args)

    return call


def traced_twice(fn):
    def call(*args):
        jax.make_jaxpr(lambda *a: fn.__wrapped__(*a))(*args)
        return fn(*args)

    return call


def warning(fn):
    def call(*args):
        warnings.warn("slower than plain", stacklevel=2)
        return fn(*args)

    return call


def test_a_step_does_not_differ_from_itself(monkeypatch):
    assert differences(monkeypatch, lambda fn: fn) == []


def replicated(w):
    return jax.device_put(w, NamedSharding(w.sharding.mesh, P()))


def on_another_mesh(w):
    mesh = w.sharding.mesh
    other = jax.sharding.Mesh(mesh.devices, ("x", "y"), axis_types=mesh.axis_types)
    return jax.device_put(w, NamedSharding(other, P("x", "y")))


FAULTS = {
    "off by": changed(lambda w: w * 1.01),
    "off by nan": changed(lambda w: w * jnp.nan),
    "sharding P(), plain P('data', 'model')": changed(replicated),
    "sharding P('x', 'y')": changed(on_another_mesh),
    "dtype": changed(lambda w: w.astype(jnp.bfloat16)),
    "shape": changed(lambda w: w[None]),
    "tree": changed(lambda w: [w]),
    "dtype None": changed(np.asarray),
    "donation: 2 kept": lambda fn: jax.jit(fn.__wrapped__),
    "compiles 1, plain 0": recompiled,
    "traces 1, plain 0": traced_twice,
    "warns: UserWarning: slower than plain": warning,
}


@pytest.mark.parametrize("says", FAULTS)
def test_a_fault_is_found(monkeypatch, says: str):
    texts = differences(monkeypatch, FAULTS[says])
    assert any(says in text for text in texts), texts


def test_another_weak_type_is_found(monkeypatch):
    def overlap(fn):
        return lambda w, n, x: (fn(w, n, x)[0], jax.device_put(jnp.asarray(1), n.sharding))

    assert any("weak type" in text for text in differences(monkeypatch, overlap))


def test_what_raises_is_found(monkeypatch):
    def overlap(fn):
        def call(*args):
            raise KeyError("w")

        return call

    assert differences(monkeypatch, overlap) == ["raises KeyError: 'w'"]
