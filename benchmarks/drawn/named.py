"""Steps of four kinds that were found slower overlapped than plain."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.drawn import trainer
from benchmarks.drawn.sketch import Sketch
from benchmarks.drawn.step import Built, Step

_H100_8, _H100_64 = "h100-sxm:1x8", "h100-sxm:8x8"


def dense_pairs(mesh: Mesh, stream: P) -> Built:
    """Two residual pairs of Dense layers, 4096 -> 16384 -> 4096, trained with SGD in bfloat16.

    Only the residual stream is constrained, to `stream`; the hidden layers are not.
    """

    def at(shape: tuple[int, ...], spec: P) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))

    def loss_of(weights: list[tuple[Any, Any]], x: jax.Array) -> jax.Array:
        for up, down in weights:
            x = x + jax.nn.gelu(x @ up) @ down
            x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, stream))
        return jnp.mean(jnp.square(x.astype(jnp.float32)))

    def step(weights: list[tuple[Any, Any]], x: jax.Array) -> Any:
        loss, gradients = jax.value_and_grad(loss_of)(weights, x)
        return jax.tree.map(lambda w, g: w - 1e-3 * g, weights, gradients), loss

    pair = at((4096, 16384), P(None, "tp")), at((16384, 4096), P("tp", None))
    args = [pair, pair], at((4, 4096, 4096), stream)
    return Built(jax.jit(step, donate_argnums=0), args)


# 7B as in benchmarks/plain_gpt.py, but its residual stream is whole on tp, and one constraint is
# all that it has.
GPT_7B = Sketch(
    seed=0,
    pod=_H100_64,
    axes={"fsdp": 8, "tp": 8},
    layers=32,
    hidden=4096,
    mlp=16384,
    gated=False,
    parallel=False,
    attention="einsum",
    heads=32,
    kv_heads=32,
    projection="each",
    sequence=4096,
    batch=64,
    vocab=32768,
    tied=False,
    loss="one hot",
    dtype="float32",
    scan=True,
    remat="all",
    optimizer="adamw",
    stream="",
    constrained=("qkv",),
    layout="megatron",
    mixed={},
    donate=True,
    stated="in",
)
NO_REMAT_7B = replace(GPT_7B, remat="none")
# Layers, hidden size, heads and MLP of Qwen2.5-32B (arXiv:2412.15115, table 1).
NO_REMAT_32B = replace(
    NO_REMAT_7B, layers=64, hidden=5120, mlp=27648, gated=True, heads=40, kv_heads=8
)

_SKETCHES = {
    "no remat, 4 layers": replace(
        NO_REMAT_7B, layers=4, batch=8, sequence=2048, pod=_H100_8, axes={"fsdp": 4, "tp": 2}
    ),
    "no remat, 7B": NO_REMAT_7B,
    "no remat, 7B, tp 2": replace(NO_REMAT_7B, axes={"fsdp": 32, "tp": 2}),
    "no remat, 32B": NO_REMAT_32B,
    "one constraint, 7B": GPT_7B,
    "one constraint, 7B, fused": replace(GPT_7B, projection="fused"),
}


def _named() -> dict[str, Step]:
    dense = {"dense, whole stream": P(), "dense, split stream": P(None, "tp", None)}
    steps = [
        Step(name, _H100_8, {"tp": 8}, partial(dense_pairs, stream=stream))
        for name, stream in dense.items()
    ]
    steps += [
        Step(name, sketch.pod, sketch.axes, partial(trainer.build, sketch), sketch.about())
        for name, sketch in _SKETCHES.items()
    ]
    return {step.name: step for step in steps}


NAMED = _named()
