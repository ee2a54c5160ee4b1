"""Averages on four CPU devices, and a small model with scanned layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxoverlap.train.compression.averager import averager_of

WORKERS = 4


def mesh_of(workers: int = WORKERS, inside: int = 1) -> Any:
    devices = jax.devices()[: workers * inside]
    return jax.make_mesh(
        (workers, inside), ("data", "model"), (AxisType.Auto,) * 2, devices=devices
    )


class Averages:
    """Averages of gradients that differ between workers; everything has a dim of workers."""

    def __init__(self, sync: Any, params: Any, *, settings: Any = None, accumulate: bool = False):
        averager = averager_of(sync, params, axis="data", workers=WORKERS)
        if settings is not None:
            averager = replace(averager, settings=tuple(settings))
        self.averager = averager = replace(averager, accumulate=accumulate)

        def stacked(tree: Any) -> Any:
            return jax.tree.map(lambda x: x[None], tree)

        def one(gradients: Any, state: Any) -> Any:
            gradients, state = jax.tree.map(lambda x: x[0], (gradients, state))
            return stacked(averager.average(gradients, state)[:2])

        def measured(state: Any) -> Any:
            return stacked(averager.measure(jax.tree.map(lambda x: x[0], state)))

        def mapped(fn: Any, count: int) -> Any:
            specs = (P("data"),) * count
            return jax.jit(
                jax.shard_map(
                    fn, mesh=mesh_of(), in_specs=specs, out_specs=P("data"), check_vma=False
                )
            )

        self.call, self.measure = mapped(one, 2), mapped(measured, 1)
        start = averager.init(params)
        self.state = jax.tree.map(lambda x: jnp.broadcast_to(x, (WORKERS, *x.shape)), start)


LAYERS, WIDTH, INNER, OUT = 3, 48, 64, 32


def make_params(seed: int = 0) -> Any:
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape) * shape[-2] ** -0.5, jnp.float32)

    layers = dict(up=normal(LAYERS, WIDTH, INNER), down=normal(LAYERS, INNER, WIDTH))
    layers["scale"] = jnp.ones((LAYERS, WIDTH))
    return dict(layers=layers, head=normal(WIDTH, OUT))


def loss(params: Any, batch: Any) -> jax.Array:
    x, y = batch

    def layer(h: jax.Array, w: Any) -> tuple[jax.Array, None]:
        return h + jnp.tanh((h * w["scale"]) @ w["up"]) @ w["down"], None

    h, _ = jax.lax.scan(layer, x, params["layers"])
    return jnp.mean((h @ params["head"] - y) ** 2)


def make_batch(step: int, rows: int = 32) -> Any:
    rng = np.random.default_rng((7, step))
    x = rng.normal(size=(rows, WIDTH)).astype(np.float32)
    target = np.random.default_rng(3).normal(size=(WIDTH, OUT))
    return x, np.sin(x @ target).astype(np.float32)
