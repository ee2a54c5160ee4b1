"""One small train step as users of several libraries write it, on any mesh with an axis "data"."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen, nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxoverlap.hardware.pods import is_pod

SIZE = 64
Built = tuple[Callable[..., Any], tuple[Any, ...]]


def _sharded(mesh: Mesh, value: Any) -> Any:
    """Shard the first dim of arrays that have two; on a pod give their shapes."""

    def one(x: Any) -> Any:
        sharding = NamedSharding(mesh, P("data") if x.ndim > 1 else P())
        if is_pod(mesh):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        return jax.device_put(x, sharding)

    return jax.tree.map(one, value)


def _loss(y: jax.Array) -> jax.Array:
    return jnp.mean((y - 1) ** 2)


def _update(weights: Any, gradients: Any) -> Any:
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients)


def with_jit(mesh: Mesh) -> Built:
    """A step of `jax.jit` that donates its weights."""

    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        loss, gradient = jax.value_and_grad(lambda w: _loss(x @ w))(w)
        return w - 0.1 * gradient, loss

    values = jnp.ones((SIZE, SIZE)), jnp.ones((SIZE, SIZE))
    return jax.jit(step, donate_argnums=0), _sharded(mesh, values)


def with_partial(mesh: Mesh) -> Built:
    """A `functools.partial` of a jitted step."""
    step, args = with_jit(mesh)
    return functools.partial(step), args


class _Trainer:
    @functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
    def step(self, w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        loss, gradient = jax.value_and_grad(lambda w: _loss(x @ w))(w)
        return w - 0.1 * gradient, loss


def with_method(mesh: Mesh) -> Built:
    """A jitted method of a trainer."""
    values = jnp.ones((SIZE, SIZE)), jnp.ones((SIZE, SIZE))
    return _Trainer().step, _sharded(mesh, values)


def with_nnx(mesh: Mesh) -> Built:
    """A step of `nnx.jit` that changes a module and its optimizer."""

    @nnx.jit
    def step(model: nnx.Linear, optimizer: nnx.Optimizer, x: jax.Array) -> jax.Array:
        loss, gradients = nnx.value_and_grad(lambda m: _loss(m(x)))(model)
        optimizer.update(model, gradients)
        return loss

    model = nnx.Linear(SIZE, SIZE, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    graph, state = nnx.split((model, optimizer))
    model, optimizer = nnx.merge(graph, _sharded(mesh, state))
    return step, (model, optimizer, _sharded(mesh, jnp.ones((SIZE, SIZE))))


def with_linen(mesh: Mesh) -> Built:
    """A step of `jax.jit` over the parameters of a linen module."""
    module = linen.Dense(SIZE)
    x = jnp.ones((SIZE, SIZE))

    @jax.jit
    def step(parameters: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        loss, gradients = jax.value_and_grad(lambda p: _loss(module.apply(p, x)))(parameters)
        return _update(parameters, gradients), loss

    return step, _sharded(mesh, (module.init(jax.random.key(0), x), x))


def with_equinox(mesh: Mesh) -> Built:
    """A step of equinox's `filter_jit` that returns its module and its optimizer's state."""
    eqx = pytest.importorskip("equinox", reason="equinox is not installed (the dev extra)")
    optimizer = optax.adam(0.1)

    @eqx.filter_jit
    def step(model: Any, state: Any, x: jax.Array) -> tuple[Any, Any, jax.Array]:
        def loss_of(model: Any) -> jax.Array:
            return _loss(model.activation(x @ model.linear.weight))

        loss, gradients = eqx.filter_value_and_grad(loss_of)(model)
        updates, state = optimizer.update(gradients, state, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), state, loss

    class Model(eqx.Module):
        linear: Any
        activation: Callable[..., Any]  # a leaf that is no array

    linear = eqx.nn.Linear(SIZE, SIZE, use_bias=False, key=jax.random.key(0))
    model = Model(linear, jax.nn.relu)
    state = optimizer.init(eqx.filter(model, eqx.is_array))
    arrays, others = eqx.partition((model, state, jnp.ones((SIZE, SIZE))), eqx.is_array)
    return step, eqx.combine(_sharded(mesh, arrays), others)


class FilterJit:
    """Stands in for a library whose jit is not known: a class with a `lower` of its own."""

    def __init__(self, fn: Callable[..., Any]):
        self._jitted = jax.jit(fn)

    def __call__(self, *args: Any) -> Any:
        return self._jitted(*args)

    def lower(self, *args: Any) -> Any:
        return self._jitted.lower(*args)


SUPPORTED = {
    "jit": with_jit,
    "partial": with_partial,
    "method": with_method,
    "nnx": with_nnx,
    "linen": with_linen,
    "equinox": with_equinox,
}
