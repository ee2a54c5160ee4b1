"""The steps that are compiled for pods: local updates, synchronous AdamW, and MaxText's DiLoCo.

One worker a GPU. The model is a stack of two matmuls a layer with a residual, scanned, in bfloat16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


@dataclass(frozen=True)
class Size:
    """The size of the model, and of a worker's batch."""

    layers: int = 8
    hidden: int = 2048
    mlp: int = 8192
    sequence: int = 1024
    batch: int = 4

    @property
    def params(self) -> int:
        return 2 * self.layers * self.hidden * self.mlp

    @property
    def tokens(self) -> int:
        """Return the tokens of a worker's step."""
        return self.sequence * self.batch


INNER = optax.adamw(1e-4)
OUTER = optax.sgd(0.7, 0.9, nesterov=True)


def loss(params: Any, x: jax.Array) -> jax.Array:
    def layer(h: jax.Array, w: Any) -> tuple[jax.Array, None]:
        return h + jax.nn.gelu(h @ w["up"]) @ w["down"], None

    h, _ = lax.scan(layer, x, params)
    return jnp.mean(h.astype(jnp.float32) ** 2)


@jax.jit
def train_step(state: Any, x: jax.Array) -> tuple[Any, Any]:
    """Take the ordinary step of one worker, or of all together."""
    value, gradients = jax.value_and_grad(loss)(state["params"], x)
    updates, inner = INNER.update(gradients, state["optimizer"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    return dict(params=params, optimizer=inner), dict(loss=value)


def state_like(mesh: Mesh, size: Size) -> Any:
    """Return the state of one worker as shapes."""
    replicated = NamedSharding(mesh, P())

    def like(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=replicated)

    up = (size.layers, size.hidden, size.mlp)
    params = dict(up=like(*up), down=like(up[0], up[2], up[1]))
    optimizer = jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=replicated),
        jax.eval_shape(INNER.init, params),
    )
    return dict(params=params, optimizer=optimizer)


def batch_like(mesh: Mesh, size: Size, *steps: int) -> jax.ShapeDtypeStruct:
    """Return the batch of a step, or of so many, as a shape."""
    shape = (*steps, size.batch * mesh.shape["data"], size.sequence, size.hidden)
    spec = P(*(None,) * len(steps), "data")
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))


def synchronous(mesh: Mesh) -> jax.stages.Wrapped:
    """Return AdamW on the global batch: gradients are all-reduced in every step."""
    sharding = NamedSharding(mesh, P())
    return jax.jit(train_step, donate_argnums=0, out_shardings=(sharding, sharding))


# -- as MaxText writes it -------------------------------------------------------------------------


def maxtext_like(mesh: Mesh, size: Size, fragments: int = 1) -> Any:
    """Return the arguments of MaxText's step: worker copies, outer state, the step, a batch."""
    state = state_like(mesh, size)
    workers = mesh.shape["data"]

    def copies(leaf: Any) -> Any:
        sharding = NamedSharding(mesh, P("data", *leaf.sharding.spec))
        return jax.ShapeDtypeStruct((workers, *leaf.shape), leaf.dtype, sharding=sharding)

    whole = state["params"]
    outer = dict(params=whole, momentum=whole)
    if fragments > 1:
        outer |= dict(under_way=whole)
    count = jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(mesh, P()))
    return (jax.tree.map(copies, state), outer, count), batch_like(mesh, size)


def maxtext(mesh: Mesh, every: int) -> jax.stages.Wrapped:
    """Return DiLoCo's step in MaxText's form: an inner step, then the average inside `lax.cond`.

    After src/maxtext/trainers/diloco at e591f30cb: replicas in a leading dim, mapped with
    spmd_axis_name; `cond(step % period == 0, synchronise, identity)`.
    """

    def step(carry: Any, x: jax.Array) -> tuple[Any, Any]:
        workers, outer, count = carry
        workers, metrics = _inner(mesh, workers, x)

        def synchronise(workers: Any, outer: Any) -> tuple[Any, Any]:
            mean = jax.tree.map(_mean, workers["params"])
            gradient = jax.tree.map(jnp.subtract, outer["params"], mean)
            params, momentum = _nesterov(outer["params"], outer["momentum"], gradient)
            copies = jax.tree.map(lambda p, w: _copies(mesh, p, w), params, workers["params"])
            return dict(workers, params=copies), dict(params=params, momentum=momentum)

        due = (count + 1) % every == 0
        workers, outer = lax.cond(due, synchronise, lambda *same: same, workers, outer)
        return (workers, outer, count + 1), metrics

    return jax.jit(step, donate_argnums=0)


def maxtext_streaming(mesh: Mesh, every: int, delay: int, alpha: float) -> jax.stages.Wrapped:
    """Return streaming DiLoCo's step in MaxText's form, two fragments: `cond` and `switch`.

    The average of a fragment stands in one conditional, its use `delay` steps later in another.
    """
    names = ("down", "up")

    def step(carry: Any, x: jax.Array) -> tuple[Any, Any]:
        workers, outer, count = carry
        workers, metrics = _inner(mesh, workers, x)
        part = every // len(names)

        def send(name: str) -> Any:
            def average(workers: Any, outer: Any) -> Any:
                gone = outer["params"][name] - _mean(workers["params"][name])
                return dict(outer["under_way"], **{name: gone})

            return average

        def apply(name: str) -> Any:
            def applied(workers: Any, outer: Any) -> tuple[Any, Any]:
                one = (outer[part][name] for part in ("params", "momentum", "under_way"))
                new, momentum = _nesterov(*one)
                own = workers["params"][name]
                mixed = alpha * own + (1 - alpha) * _copies(mesh, new, own)
                workers = dict(workers, params=dict(workers["params"], **{name: mixed}))
                changed = dict(params=new, momentum=momentum)
                return workers, outer | {k: dict(outer[k], **{name: v}) for k, v in changed.items()}

            return applied

        now, later = count + 1, count + 1 - delay
        under_way = lax.cond(
            now % part == 0,
            lambda w, o: lax.switch(now // part % 2, [*map(send, names)], w, o),
            lambda w, o: o["under_way"],
            workers,
            outer,
        )
        outer = dict(outer, under_way=under_way)
        workers, outer = lax.cond(
            later % part == 0,
            lambda w, o: lax.switch(later // part % 2, [*map(apply, names)], w, o),
            lambda *same: same,
            workers,
            outer,
        )
        return (workers, outer, count + 1), metrics

    return jax.jit(step, donate_argnums=0)


def _inner(mesh: Mesh, workers: Any, x: jax.Array) -> tuple[Any, Any]:
    count = mesh.shape["data"]
    split = x.reshape(count, x.shape[0] // count, *x.shape[1:])
    split = lax.with_sharding_constraint(split, NamedSharding(mesh, P("data")))
    return jax.vmap(train_step, spmd_axis_name="data")(workers, split)


def _copies(mesh: Mesh, params: jax.Array, like: jax.Array) -> jax.Array:
    copies = jnp.broadcast_to(params, like.shape)
    return lax.with_sharding_constraint(copies, NamedSharding(mesh, P("data")))


def _mean(params: jax.Array) -> jax.Array:
    """Return the mean over the workers in the parameters' own dtype; `mean` would send float32."""
    zero = jnp.zeros((), params.dtype)
    return lax.reduce(params, zero, lax.add, (0,)) / params.shape[0]


def _nesterov(params: Any, momentum: Any, gradient: Any) -> tuple[Any, Any]:
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradient)
    moved = jax.tree.map(lambda p, m, g: p - 0.7 * (g + 0.9 * m), params, momentum, gradient)
    return moved, momentum
