"""A mixture of experts with ragged exchanges, as MaxText, marin and tunix write theirs.

Inside a `shard_map` over all axes, with the router (`models/ragged.py` has it outside). XLA:CPU has no ragged all-to-all; `on_cpu` lowers it to gathers.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src.interpreters import mlir  # noqa: TID251 # XLA:CPU lacks one operation
from jax._src.lax.parallel import ragged_all_to_all_p  # noqa: TID251
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoverlap
from models.ragged import exchange_by_gathers, on_device


@functools.cache
def on_cpu() -> None:
    """Lower ragged all-to-alls for CPU devices, once a process."""

    def gathered(*operands, axis_name, **_):
        return exchange_by_gathers(*operands, axis_name=axis_name)

    lowering = mlir.lower_fun(gathered, multiple_results=False)
    mlir.register_lowering(ragged_all_to_all_p, lowering, platform="cpu")


def experts(x, p, *, axis: str, choices: int, room: float | None):
    """x [batch, sequence, width] of one device -> the same shape.

    Args:
        x: its tokens.
        p: router [width, experts], and gate, up [own experts, width, mlp], down [.., mlp, width].
        axis: the mesh axis of the experts.
        choices: experts of a token.
        room: rows of the buffer for the tokens that come, over those that it sends; None for as
            many as can come.
    """
    likely = jax.nn.softmax((x @ p["router"]).astype(jnp.float32))
    weights, chosen = lax.top_k(likely, choices)
    return on_device(
        x, weights, chosen, p["up"], p["down"], p["gate"],
        axis=axis, activation=jax.nn.silu, room=room, exchange=lax.ragged_all_to_all,
    )  # fmt: skip


def mixture_step(
    mesh, *, choices: int = 2, room: float | None = None, layers: int = 2, width: int = 16,
    mlp: int = 24, count: int = 8, sequence: int = 8, batch: int | None = None, remat: bool = True,
    dtype=jnp.float32, attention: int = 0, alone: bool = False,
):  # fmt: skip
    """Return a train step of layers of experts, and its arguments as shapes.

    Args:
        mesh: with axes "data" and "expert"; both shard the batch.
        choices: experts of a token.
        room: rows of a device's buffer, over the tokens that it sends; None for as many as can come.
        layers, width, mlp, count, sequence, batch: sizes; `count` is the number of experts.
        remat: whether layers are rematerialized.
        dtype: of all.
        alone: whether the experts are said to compute each sequence alone (`per_sequence`).
        attention: heads of 128 of attention before the experts, cuDNN's on a pod; 0 for none.
    """
    both, axis = P(tuple(mesh.axis_names)), "expert"
    batch = batch or mesh.size
    body = functools.partial(experts, axis=axis, choices=choices, room=room)
    own = {"router": P(), "gate": P(axis), "up": P(axis), "down": P(axis)}
    mixed = jax.shard_map(body, mesh=mesh, in_specs=(both, own), out_specs=both, check_vma=False)

    if alone:
        mixed = jaxoverlap.per_sequence(mixed)

    fused = "cudnn" if mesh.devices.flat[0].platform == "gpu" else None

    def norm(x):
        return x * lax.rsqrt(
            jnp.mean(jnp.square(x.astype(jnp.float32)), -1, keepdims=True) + 1e-6
        ).astype(x.dtype)

    def layer(x, p):
        if attention:
            q, k, v = (jnp.einsum("bsd,dhk->bshk", norm(x), p[n]) for n in "qkv")
            a = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=fused)
            x = x + jnp.einsum("bshk,hkd->bsd", a, p["o"])
            x = lax.with_sharding_constraint(x, NamedSharding(mesh, both))
        return x + mixed(norm(x), {name: p[name] for name in own}), None

    def loss(p, x):
        x, _ = lax.scan(jax.checkpoint(layer) if remat else layer, x, p)
        return jnp.mean(jnp.square(x.astype(jnp.float32)))

    @functools.partial(jax.jit, donate_argnums=0)
    def step(p, x):
        value, gradients = jax.value_and_grad(loss)(p, x)
        return jax.tree.map(lambda p, g: p - g.astype(p.dtype), p, gradients), value

    def array(spec, *shape):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))

    shapes = {
        "router": array((), layers, width, count),
        "gate": array((None, axis, "data"), layers, count, width, mlp),
        "up": array((None, axis, "data"), layers, count, width, mlp),
        "down": array((None, axis, None, "data"), layers, count, mlp, width),
    }
    if attention:
        shapes |= {n: array((None, "data"), layers, width, attention, 128) for n in "qkv"}
        shapes["o"] = array((None, None, None, "data"), layers, attention, 128, width)
    return step, shapes, array(both, batch, sequence, width)


def arrays(shapes, *, scale: float = 1.0):
    """Return random values of these shapes, where they are to be."""
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda s: jax.device_put(
            jnp.asarray(rng.normal(size=s.shape) * scale, s.dtype), s.sharding
        ),
        shapes,
    )
