"""Exchange heads for tokens in groups of neighbours: each device has some heads of all slots.

DeepSpeed-Ulysses (arXiv 2309.14509): all-to-alls before attention and after it. Round a ring of g
devices keys and values travel g - 1 times, under blocks that may be too short to hide them; here
queries, keys, values and results travel once, and nothing hides them.

The slots of a program are static, and a batch seldom fills them. So they are exchanged in parts, in
a loop that ends with the last part that any device has tokens in: all devices make equally many
trips, as every one of them takes part in each all-to-all. A program may have one part instead: then
there is no loop, and XLA can exchange under the attention of documents that are local.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
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
        return self._exchanged(values, split=2, joined=1)

    def joined(self, *values: Array) -> tuple[Array, ...]:
        """Give each device all heads of its own slots again, by all-to-alls."""
        return self._exchanged(values, split=1, joined=2)

    def _exchanged(
        self, values: tuple[Array, ...], *, split: int, joined: int
    ) -> tuple[Array, ...]:
        """Split one dim of values over a group and join another, part by part in one loop."""
        flat = [x.reshape(*x.shape[:3], -1) for x in values]
        x, ends = jnp.concatenate(flat, axis=-1), np.cumsum([y.shape[-1] for y in flat])
        shape = list(x.shape)
        shape[split], shape[joined] = shape[split] // self.size, shape[joined] * self.size
        own, all_slots = self.part, self.part * self.size
        given, made = (own, all_slots) if joined == 1 else (all_slots, own)
        groups = [list(range(at, at + self.size)) for at in range(0, self.nodes.total, self.size)]

        def exchange(index: Array, arrived: Array) -> Array:
            leaving = lax.dynamic_slice_in_dim(x, index * given, given, axis=1)
            new = lax.all_to_all(
                leaving, self.axes, split, joined, axis_index_groups=groups, tiled=True
            )
            return lax.dynamic_update_slice_in_dim(arrived, new, index * made, axis=1)

        if x.shape[1] == given:
            arrived = lax.all_to_all(
                x, self.axes, split, joined, axis_index_groups=groups, tiled=True
            )
        else:
            arrived = lax.fori_loop(0, self.trips, exchange, jnp.zeros(shape, x.dtype))
        parts = jnp.split(arrived, ends[:-1], axis=-1)
        pairs = zip(parts, values, strict=True)
        return tuple(part.reshape(*part.shape[:3], *value.shape[3:]) for part, value in pairs)

    def arranged(self, x: Array) -> Array:
        """Put what slots have, [devices, slots], in the order in which `split` returns them."""
        return jnp.swapaxes(x.reshape(self.size, -1, self.part), 0, 1).ravel()
