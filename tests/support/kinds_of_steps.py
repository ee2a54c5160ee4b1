"""One small train step as users of several libraries write it, on any mesh with an axis "data"."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
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


class FilterJit:
    """Stands in for equinox's `filter_jit`: it jits what is an array, and closes over the rest."""

    def __init__(self, fn: Callable[..., Any]):
        self._fn = fn
        self._jitted = jax.jit(fn, static_argnums=2)

    def __call__(self, *args: Any) -> Any:
        return self._jitted(*args)

    def lower(self, *args: Any) -> Any:
        return self._jitted.lower(*args)


def with_filter_jit(mesh: Mesh) -> Built:
    """A step as equinox jits it."""

    def step(w: jax.Array, x: jax.Array, activation: Callable[..., Any]) -> Any:
        loss, gradient = jax.value_and_grad(lambda w: _loss(activation(x @ w)))(w)
        return w - 0.1 * gradient, loss

    values = jnp.ones((SIZE, SIZE)), jnp.ones((SIZE, SIZE))
    return FilterJit(step), (*_sharded(mesh, values), jax.nn.relu)


SUPPORTED = {"jit": with_jit, "partial": with_partial, "nnx": with_nnx, "linen": with_linen}
