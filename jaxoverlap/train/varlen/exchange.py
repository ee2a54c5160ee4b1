"""Exchange heads for tokens in groups of neighbours: each device has some heads of all slots.

DeepSpeed-Ulysses (arXiv 2309.14509): one all-to-all before attention and one after it. Round a ring
of g devices keys and values travel g - 1 times, under blocks that may be too short to hide them;
here queries, keys, values and results travel once, and nothing hides them.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from jaxoverlap.train.varlen.rings import Nodes


class Heads(NamedTuple):
    """Groups of so many neighbours that exchange heads.

    Attributes:
        nodes: the devices.
        axes: the mesh axes, manual, whose product is all devices, node by node.
        size: devices of a group; it divides the kv heads.
    """

    nodes: Nodes
    axes: tuple[str, ...]
    size: int

    def split(self, *values: Array) -> tuple[Array, ...]:
        """Give each device all slots of its group with some heads, by one all-to-all.

        Values are f[b, slots, kv heads, ...]; early halves of all ranks come first, and then late
        halves, the last rank's first: the order of a sequence's chunks.
        """
        joined, cuts = _joined(values)
        arrived = self._all_to_all(joined, split=2, joined=1)
        return _cut(self.ordered(arrived, dim=1), values, cuts)

    def joined(self, *values: Array) -> tuple[Array, ...]:
        """Give each device all heads of its own slots again, by one all-to-all."""
        flat, cuts = _joined(values)
        early, late = jnp.split(flat, 2, axis=1)
        shape = flat.shape[0], self.size, -1, *flat.shape[2:]
        halves = early.reshape(shape), jnp.flip(late.reshape(shape), 1)
        by_rank = jnp.concatenate(halves, axis=2).reshape(flat.shape)
        return _cut(self._all_to_all(by_rank, split=1, joined=2), values, cuts)

    def ordered(self, x: Array, *, dim: int) -> Array:
        """Put slots that stand rank by rank, two halves each, in the order of chunks."""
        shape = x.shape[:dim], x.shape[dim + 1 :]
        halves = x.reshape(*shape[0], self.size, 2, -1, *shape[1])
        early, late = (lax.index_in_dim(halves, i, dim + 1, keepdims=False) for i in (0, 1))
        both = (y.reshape(*shape[0], -1, *shape[1]) for y in (early, jnp.flip(late, dim)))
        return jnp.concatenate(list(both), axis=dim)

    def _all_to_all(self, x: Array, *, split: int, joined: int) -> Array:
        first = range(0, self.nodes.total, self.size)
        groups = [list(range(at, at + self.size)) for at in first]
        return lax.all_to_all(x, self.axes, split, joined, axis_index_groups=groups, tiled=True)


def _joined(values: tuple[Array, ...]) -> tuple[Array, list[int]]:
    """Join what a kv head has of each value, and say where to cut it."""
    flat = [x.reshape(*x.shape[:3], -1) for x in values]
    ends = [0]
    for x in flat:
        ends.append(ends[-1] + x.shape[-1])
    return jnp.concatenate(flat, axis=-1), ends[1:-1]


def _cut(flat: Array, values: tuple[Array, ...], cuts: list[int]) -> tuple[Array, ...]:
    parts = jnp.split(flat, cuts, axis=-1)
    return tuple(
        part.reshape(*part.shape[:3], *value.shape[3:])
        for part, value in zip(parts, values, strict=True)
    )
