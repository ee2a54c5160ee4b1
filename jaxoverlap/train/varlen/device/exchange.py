"""Exchange heads for tokens in groups of neighbours: each device has some heads of all slots.

DeepSpeed-Ulysses (arXiv 2309.14509): all-to-alls before attention and after it. Round a ring of g
devices keys and values travel g - 1 times, under blocks that may be too short to hide them; here
queries, keys, values and results travel once, and nothing hides them.

The slots of a program are static, and a batch seldom fills them. So they are exchanged in parts, in
a loop that ends with the last part that any device has tokens in: all devices make equally many
trips, as every one of them takes part in each all-to-all.
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
        part: slots of a device that are exchanged together; it divides the slots.
        trips: i32[], parts to exchange, the same number on every device.
    """

    nodes: Nodes
    axes: tuple[str, ...]
    size: int
    part: int
    trips: Array

    def split(self, *values: Array) -> tuple[Array, ...]:
        """Give each device all slots of its group with some heads, by all-to-alls.

        Values are f[b, slots, kv heads, ...]. Slots come part by part, and in each rank by rank;
        those of parts that were not exchanged are zero.
        """
        x, cuts = _joined(values)
        many = self.part * self.size
        shape = x.shape[0], x.shape[1] * self.size, x.shape[2] // self.size, x.shape[3]

        def exchange(index: Array, arrived: Array) -> Array:
            leaving = lax.dynamic_slice_in_dim(x, index * self.part, self.part, axis=1)
            new = self._all_to_all(leaving, split=2, joined=1)
            return lax.dynamic_update_slice_in_dim(arrived, new, index * many, axis=1)

        arrived = lax.fori_loop(0, self.trips, exchange, jnp.zeros(shape, x.dtype))
        return _cut(arrived, values, cuts)

    def joined(self, *values: Array) -> tuple[Array, ...]:
        """Give each device all heads of its own slots again, by all-to-alls."""
        x, cuts = _joined(values)
        many = self.part * self.size
        shape = x.shape[0], x.shape[1] // self.size, x.shape[2] * self.size, x.shape[3]

        def exchange(index: Array, arrived: Array) -> Array:
            leaving = lax.dynamic_slice_in_dim(x, index * many, many, axis=1)
            new = self._all_to_all(leaving, split=1, joined=2)
            return lax.dynamic_update_slice_in_dim(arrived, new, index * self.part, axis=1)

        arrived = lax.fori_loop(0, self.trips, exchange, jnp.zeros(shape, x.dtype))
        return _cut(arrived, values, cuts)

    def arranged(self, x: Array) -> Array:
        """Put what slots have, [devices, slots], in the order in which `split` returns them."""
        return jnp.swapaxes(x.reshape(self.size, -1, self.part), 0, 1).ravel()

    def _all_to_all(self, x: Array, *, split: int, joined: int) -> Array:
        first = range(0, self.nodes.total, self.size)
        groups = [list(range(at, at + self.size)) for at in first]
        return lax.all_to_all(x, self.axes, split, joined, axis_index_groups=groups, tiled=True)


def _joined(values: tuple[Array, ...]) -> tuple[Array, list[int]]:
    """Join what a kv head has of each value, and return where to cut it again."""
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
