"""Steps may hold their jit inside: functools.partial, and nnx.jit whose functions change models."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoverlap
from jaxoverlap._jax.jit_wrappers import find_jit

MESH = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


class MLP(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.up = nnx.Linear(16, 32, rngs=rngs)
        self.down = nnx.Linear(32, 16, rngs=rngs)
        self.calls = nnx.BatchStat(jnp.zeros((), jnp.int32))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.calls[...] += 1
        x = jax.lax.with_sharding_constraint(x, NamedSharding(MESH, P("data", "model")))
        hidden = jax.nn.relu(self.up(x))
        hidden = jax.lax.with_sharding_constraint(hidden, NamedSharding(MESH, P("data", "model")))
        return self.down(hidden)


def train_step(model: MLP, optimizer: nnx.Optimizer, x: jax.Array) -> jax.Array:
    def loss_fn(model: MLP) -> jax.Array:
        return (model(x) ** 2).mean()

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


def trainer() -> tuple[MLP, nnx.Optimizer]:
    model = MLP()
    return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)


X = jax.device_put(
    np.random.default_rng(0).standard_normal((8, 16)).astype(np.float32),
    NamedSharding(MESH, P("data")),
)


def jitted() -> Any:
    return nnx.jit(train_step, donate_argnames=("optimizer",))


def same(model: MLP, other: MLP) -> None:
    for a, b in zip(*map(jax.tree.leaves, (nnx.state(model), nnx.state(other))), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_an_nnx_step_changes_its_model_as_it_did():
    plain, overlapped = trainer(), trainer()
    step = jitted()
    ringed = jaxoverlap.overlap(step)
    for _ in range(3):
        np.testing.assert_allclose(ringed(*overlapped, X), step(*plain, X), rtol=1e-5)
    same(plain[0], overlapped[0])
    assert overlapped[0].calls[...] == 3
    assert "ppermute" not in str(step.trace(*plain, X).traced.jaxpr), "it stays as it was"
    assert "ppermute" in str(ringed.trace(*overlapped, X).jaxpr)


def test_an_nnx_step_is_explained_without_being_run():
    model, optimizer = trainer()
    plan = jaxoverlap.overlap(jitted()).explain(model, optimizer, X)
    assert plan.decisions
    assert plan.step == "train_step"
    assert model.calls[...] == 0


def test_an_nnx_step_compiles_ahead_and_runs():
    plain, overlapped = trainer(), trainer()
    compiled = jaxoverlap.overlap(jitted()).lower(*overlapped, X).compile()
    assert compiled.plan is not None and compiled.plan.decisions
    np.testing.assert_allclose(compiled(*overlapped, X), jitted()(*plain, X), rtol=1e-5)
    same(plain[0], overlapped[0])


@pytest.mark.parametrize("tree_mode", [False, True])
def test_a_partial_of_an_nnx_step(tree_mode: bool):
    """google-tunix's trainer keeps its step in this form."""
    model, optimizer = trainer()
    kind = {"graph": False, "graph_updates": False} if tree_mode else {}
    step = functools.partial(nnx.jit(train_step, **kind), model, optimizer)
    ringed = jaxoverlap.overlap(step)
    assert ringed.explain(X).decisions
    assert ringed(X) > ringed(X) > 0
    assert model.calls[...] == 2
    assert ringed.func.jitted_fn is step.func.jitted_fn, "what a trainer asks of its step"


def test_cached_partial_goes_around():
    model, optimizer = trainer()
    step = nnx.cached_partial(jaxoverlap.overlap(jitted()), model, optimizer)
    assert step(X) > step(X)
    with pytest.raises(ValueError, match=r"nnx\.cached_partial\(overlap\(step\)"):
        jaxoverlap.overlap(nnx.cached_partial(jitted(), model, optimizer))


def test_plain_and_overlapped_may_call_each_other_inside():
    """To nnx the two are one object: the calls in progress must not be mixed up."""
    plain, overlapped = trainer(), trainer()
    step = jitted()
    ringed = jaxoverlap.overlap(step)

    @nnx.jit
    def both(a: Any, b: Any) -> Any:
        return step(*a, X), step(*b, X)

    one, other = both(plain, overlapped)
    assert one == other
    np.testing.assert_allclose(ringed(*overlapped, X), step(*plain, X), rtol=1e-5)


def test_a_partial_of_a_jit_keeps_its_donation():
    step = jax.jit(lambda scale, x: x * scale, donate_argnums=1)
    x = jax.device_put(np.ones((8, 16), np.float32), X.sharding)
    with pytest.warns(UserWarning, match="rewrites nothing"):
        jaxoverlap.overlap(functools.partial(step, 2.0))(x)
    assert x.is_deleted()


def test_a_bound_method_of_a_jit():
    """kauldron's train step has this form: the trainer itself is a static argument."""

    class Trainer:
        scale = 2.0

        @functools.partial(jax.jit, static_argnames="self")
        def step(self, x: jax.Array) -> jax.Array:
            return self.scale * jax.lax.with_sharding_constraint(x @ x.T, X.sharding)

    trainer = Trainer()
    step = jaxoverlap.overlap(trainer.step)
    assert step.explain(X).decisions
    np.testing.assert_allclose(step(X), trainer.step(X), rtol=1e-5)


def test_a_method_of_an_equinox_module_is_bound():
    eqx = pytest.importorskip("equinox", reason="equinox is not installed (the dev extra)")

    class Trainer(eqx.Module):
        weight: jax.Array

        @eqx.filter_jit
        def step(self, x: jax.Array) -> jax.Array:
            return jax.lax.with_sharding_constraint(x @ self.weight, X.sharding)

    trainer = Trainer(X.T)
    step = jaxoverlap.overlap(trainer.step)
    assert step.explain(X).decisions
    np.testing.assert_allclose(step(X), trainer.step(X), rtol=1e-5)


def test_a_compiled_partial_takes_no_static_argument():
    fn = jax.jit(
        lambda scale, x, *, flip: (x.T if flip else x) @ x * scale,
        static_argnums=0,
        static_argnames="flip",
    )
    step = jaxoverlap.overlap(functools.partial(fn, 3, flip=True))
    np.testing.assert_allclose(step.lower(X).compile()(X), step(X), rtol=1e-5)


def test_a_partial_of_a_plain_function_holds_no_jit():
    assert find_jit(functools.partial(train_step)) is None
    assert find_jit(train_step) is None


def test_overlapped_twice_is_overlapped_once():
    model, optimizer = trainer()
    step = jaxoverlap.overlap(jaxoverlap.overlap(jitted()))
    assert step.explain(model, optimizer, X).decisions


def test_an_object_with_no_jit_inside_is_refused():
    class Wrapper:
        _cached = jitted()  # a name that equinox has too

        def __call__(self):
            return 0

        def lower(self):
            return 0

    with pytest.raises(ValueError, match=r"expected a function from jax\.jit, nnx\.jit or eq"):
        jaxoverlap.overlap(Wrapper())
