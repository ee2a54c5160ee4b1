"""A stack of MLP blocks on hosts, with three shardings, and the bound of its step.

    way            weights               batch                 what moves
    tensor         split by inner dim    rows split, gathered  the stream, twice a block, forward
    data           whole                 rows split            the weights' gradients, once
    fsdp           rows split            rows split            weights, and their gradients, once

`tensor` is a forward pass, as the hand-written overlapped matmul is written for it; the others are
train steps (plain gradient descent). All compute in float32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

Weights = list[tuple[jax.Array, jax.Array]]
AXIS = "hosts"
_RATE = 1e-3


@dataclass(frozen=True)
class Size:
    """Batch (over all hosts), features, inner features and number of blocks."""

    rows: int = 2048
    hidden: int = 1024
    inner: int = 4096
    blocks: int = 3


@dataclass(frozen=True)
class Blocks:
    """The blocks on a mesh of one axis, with one of three shardings."""

    mesh: Mesh
    way: str
    size: Size

    @property
    def hosts(self) -> int:
        """Return the number of devices along the axis."""
        return self.mesh.size

    def at(self, *spec: str | None) -> NamedSharding:
        """Return a sharding on the mesh."""
        return NamedSharding(self.mesh, P(*spec))

    @property
    def specs(self) -> tuple[P, P]:
        """Return the shardings of a block's two weights."""
        if self.way == "tensor":
            return P(None, AXIS), P(AXIS, None)
        return (P(AXIS, None), P(AXIS, None)) if self.way == "fsdp" else (P(), P())

    def arguments(self) -> tuple[Weights, jax.Array]:
        """Return weights and batch, the same numbers in every process."""
        random, size = np.random.default_rng(0), self.size

        def array(rows: int, columns: int, spec: P) -> jax.Array:
            full = (random.standard_normal((rows, columns)) / np.sqrt(rows)).astype(np.float32)
            sharding = NamedSharding(self.mesh, spec)
            return jax.make_array_from_callback(full.shape, sharding, lambda at: full[at])

        up, down = self.specs
        weights = [
            (array(size.hidden, size.inner, up), array(size.inner, size.hidden, down))
            for _ in range(size.blocks)
        ]
        return weights, array(size.rows, size.hidden, P(AXIS, None))

    def step(self) -> Any:
        """Return the jitted step, with its sharding constraints."""
        rows, inner = self.at(AXIS, None), self.at(None, AXIS)
        tensor = self.way == "tensor"

        def forward(weights: Weights, x: jax.Array) -> jax.Array:
            for up, down in weights:
                h = jax.nn.relu(x @ up)
                h = lax.with_sharding_constraint(h, inner if tensor else rows)
                x = lax.with_sharding_constraint(h @ down, rows)
            return x

        if tensor:
            return jax.jit(forward, out_shardings=rows)

        def train(weights: Weights, x: jax.Array) -> tuple[Weights, jax.Array]:
            def loss(weights: Weights) -> jax.Array:
                return jnp.mean(jnp.square(forward(weights, x)))

            value, gradients = jax.value_and_grad(loss)(weights)
            return jax.tree.map(lambda w, g: w - _RATE * g, weights, gradients), value

        shardings = [
            tuple(NamedSharding(self.mesh, spec) for spec in self.specs)
        ] * self.size.blocks
        return jax.jit(train, out_shardings=(shardings, self.at()))

    def by_hand(self) -> Any:
        """Return the tensor-parallel step as JAX's documentation overlaps matmuls by hand.

        One ring of permutes for each matmul, unrolled, in one direction
        (https://docs.jax.dev/en/latest/notebooks/shard_map.html, "matmul_allgather_overlapped" and
        "matmul_psumscatter_overlapped").
        """

        def forward(weights: Weights, x: jax.Array) -> jax.Array:
            for up, down in weights:
                x = _scattered(jax.nn.relu(_gathered(x, up)), down)
            return x

        return self._mapped(forward)

    def compute(self) -> tuple[Any, tuple[Weights, jax.Array]]:
        """Return a host's own part of the step as a program of one device, and arguments for it.

        The same matmuls of the same sizes, with nothing to wait for.
        """
        size, n = self.size, self.hosts
        rows = size.rows if self.way == "tensor" else size.rows // n
        inner = size.inner // n if self.way == "tensor" else size.inner
        here = jax.local_devices()[0]

        def array(*shape: int) -> jax.Array:
            random = np.random.default_rng(1).standard_normal(shape) / np.sqrt(shape[0])
            return jax.device_put(random.astype(np.float32), here)

        weights = [(array(size.hidden, inner), array(inner, size.hidden))] * size.blocks
        alone = Blocks(Mesh([here], (AXIS,)), "data", size)
        if self.way != "tensor":
            return alone.step(), (weights, array(rows, size.hidden))

        def forward(weights: Weights, x: jax.Array) -> jax.Array:
            for up, down in weights:
                x = jax.nn.relu(x @ up) @ down
            return x

        return jax.jit(forward), (weights, array(rows, size.hidden))

    def communication(self) -> Any:
        """Return the step's collectives alone, each waiting for the one before, as few as can be.

        tensor: a gather and a reduce-scatter a block. data: an all-reduce of each gradient. fsdp: a
        gather of each weight, and a reduce-scatter of its gradient.
        """

        def forward(weights: Weights, x: jax.Array) -> jax.Array:
            if self.way == "tensor":
                for _ in weights:
                    full = lax.all_gather(x, AXIS, tiled=True)
                    x = lax.psum_scatter(full, AXIS, tiled=True)
                return x
            for weight in jax.tree.leaves(weights):
                weight = lax.optimization_barrier((weight, x))[0]
                if self.way == "fsdp":
                    full = lax.all_gather(weight, AXIS, tiled=True)
                    x = _after(x, lax.psum_scatter(full, AXIS, tiled=True))
                else:
                    x = _after(x, lax.psum(weight, AXIS))
            return x

        return self._mapped(forward)

    def closed_form_bytes(self) -> float:
        """Return the bytes that a host has to send in a step, by a ring's (n - 1) / n."""
        size, share = self.size, (self.hosts - 1) / self.hosts
        stream, weights = size.rows * size.hidden * 4, 2 * size.hidden * size.inner * 4
        passes = {"tensor": 2 * stream, "data": 2 * weights, "fsdp": 2 * weights}[self.way]
        return size.blocks * passes * share

    def _mapped(self, forward: Callable[[Weights, jax.Array], jax.Array]) -> Any:
        specs = ([self.specs] * self.size.blocks, P(AXIS, None))
        mapped = functools.partial(jax.shard_map, mesh=self.mesh, check_vma=False)
        return jax.jit(mapped(forward, in_specs=specs, out_specs=P(AXIS, None)))


def _after(x: jax.Array, y: jax.Array) -> jax.Array:
    """Return x, which is then there only when y is: a number of y so small that it adds nothing."""
    return x.at[0, 0].add(y[0, 0] * 1e-30)


def _gathered(x: jax.Array, w: jax.Array) -> jax.Array:
    """all_gather(x) @ w: while a chunk travels, the one that is here is multiplied."""
    me, n, rows = lax.axis_index(AXIS), lax.axis_size(AXIS), x.shape[0]
    out = jnp.zeros((n * rows, w.shape[1]), x.dtype)
    for hop in range(n):
        coming = lax.ppermute(x, AXIS, _to_the_next(n)) if hop < n - 1 else x
        out = lax.dynamic_update_slice(out, x @ w, ((me - hop) % n * rows, 0))
        x = coming
    return out


def _scattered(h: jax.Array, w: jax.Array) -> jax.Array:
    """psum_scatter(h @ w): while a sum travels, the next part of it is multiplied."""
    me, n, rows = lax.axis_index(AXIS), lax.axis_size(AXIS), h.shape[0] // lax.axis_size(AXIS)
    total: Any = None
    for hop in range(n):
        part = lax.dynamic_slice_in_dim(h, (me - 1 - hop) % n * rows, rows) @ w
        total = part if total is None else lax.ppermute(total, AXIS, _to_the_next(n)) + part
    return total


def _to_the_next(n: int) -> list[tuple[int, int]]:
    return [(i, (i + 1) % n) for i in range(n)]
