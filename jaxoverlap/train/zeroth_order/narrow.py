"""Stream a narrow copy of the blocks, while the host has their exact values.

A step uploads each block in `dtype` (8 or 16 bits) and sends nothing back: the device makes again
all updates since the copy was made, which follow from a few scalars each, and uses the result. The
host's exact blocks move once in `every` steps, when the pending updates are applied to them, in
order, and the copy is made anew. So the exact values are those that the scalars say (a log replays
to the same bits), and only the losses see the rounding of the copy. A step moves, for a parameter
of s bytes and a copy of c,

    up c + s / every,  down (c + s) / every

bytes, in place of s and s, for (every - 1) / 2 more draws of each direction in the mean. ZO2 (arXiv
2503.12668) sends its blocks in low precision and has no other values; this is a reconstruction of
the idea with exact ones, and this project's own.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxoverlap._util.expect import expect
from jaxoverlap.train.zeroth_order.estimator import Pending
from jaxoverlap.train.zeroth_order.state import ZOState, nothing
from jaxoverlap.train.zeroth_order.streamed import Streamed


@dataclass(frozen=True)
class Narrowed(Streamed):
    """A streamed step that uploads a narrow copy of the blocks.

    It takes a step of a `light` state, and gives one with neither blocks nor copy.

    Attributes:
        dtype: of the copy, a float; one of less range than bfloat16 has a scale for each leaf of
            each block.
        every: steps between two times that the exact blocks move.
        dtypes: the blocks' own, a tree.
        refreshes: whether blocks are the exact ones, updated and sent back.
    """

    dtype: Any = None
    every: int = 8
    dtypes: Any = None
    refreshes: bool = False

    def light(self, state: ZOState) -> ZOState:
        """Return the state without its exact blocks, which a step does not read."""
        return state._replace(params=dict(outer=state.params["outer"], blocks=None))

    def joined(self, state: ZOState, new: ZOState) -> ZOState:
        """Return the state after a step, with the blocks and the copy of the one before it."""
        params = dict(outer=new.params["outer"], blocks=state.params["blocks"])
        return new._replace(params=params, narrow=state.narrow)

    def nothing(self) -> Pending:
        """Return `every` updates of no step."""
        one = nothing(self.transform)
        return jax.tree.map(lambda leaf: jnp.zeros((self.every, *leaf.shape), leaf.dtype), one)

    def flush(self, state: ZOState) -> ZOState:
        """Make all pending updates on the exact blocks, and a new copy of them."""
        made = replace(self, refreshes=True)
        state = state._replace(narrow=None)
        specs, do = made._specs(state), functools.partial(made._flush, made._is_sliced(state))
        replicated: Any = P()
        narrow = dict(values=specs.params["blocks"], scales=replicated)
        return made._mapped(do, (specs,), specs._replace(narrow=narrow))(state)

    # -- on one device of the mesh ----------------------------------------------------------------

    def _flush(self, is_sliced: Any, state: ZOState) -> ZOState:
        number = self._numbers(state)
        outer = self._updated(state, state.params["outer"], number["outer"])
        _, back = self._through(is_sliced, state, number["blocks"], lambda x, layer, row: x, ())
        params = dict(outer=outer, blocks=back.pop("blocks"))
        return ZOState(params, state.key, state.step, self.nothing(), back)

    def _after(self, state: ZOState, outer: Any, blocks: Any, pending: Pending) -> ZOState:
        at = state.step % self.every
        ring = jax.tree.map(lambda old, new: old.at[at].set(new), state.pending, pending)
        return ZOState(dict(outer=outer, blocks=None), state.key, state.step + 1, ring)

    def _specs_after(self, specs: Any) -> Any:
        return specs._replace(narrow=None)

    def _stack(self, state: ZOState) -> Any:
        return state.params["blocks"] if self.refreshes else state.narrow["values"]

    def _updated(self, state: ZOState, part: Any, number: Any, row: Any = None) -> Any:
        """Return the outer part with the last update, or a block with all that are pending."""

        def one(at: Any, part: Any) -> Any:
            pending = jax.tree.map(lambda leaf: leaf[at], state.pending)
            return self.transform.applied(pending, state.key, part, number=number, row=row)

        if row is None:
            return one((state.step - 1) % self.every, part)
        if self.refreshes:
            return jax.lax.fori_loop(0, self.every, one, part)
        scales = jax.tree.map(lambda scale: scale[row], state.narrow["scales"])
        wide = jax.tree.map(
            lambda value, scale, dtype: (value.astype(jnp.float32) * scale).astype(dtype),
            part,
            scales,
            self.dtypes,
        )
        return jax.lax.fori_loop(0, state.step % self.every, one, wide)

    def _back(self, layer: Any, is_sliced: Any) -> Any:
        if not self.refreshes:
            return None
        scales = jax.tree.map(self._scale, layer)
        values = jax.tree.map(
            lambda leaf, scale: (leaf.astype(jnp.float32) / scale).astype(self.dtype), layer, scales
        )
        put = super()._back
        return dict(blocks=put(layer, is_sliced), values=put(values, is_sliced), scales=scales)

    def _scale(self, leaf: jax.Array) -> jax.Array:
        """Return by what a leaf is divided, float32 []: 1 where the copy has bfloat16's range."""
        largest = float(jnp.finfo(self.dtype).max)
        if largest >= float(jnp.finfo(jnp.bfloat16).max):
            return jnp.float32(1)
        most = jnp.abs(leaf).max().astype(jnp.float32) / largest
        return jnp.where(most > 0, most, 1.0)

    def _specs(self, state: ZOState) -> Any:
        replicated: Any = P()
        stack = jax.tree.map(lambda leaf: P(*self.spec_of(leaf)), self._stack(state))
        blocks = None if state.params["blocks"] is None else stack
        narrow = None if state.narrow is None else dict(values=stack, scales=replicated)
        pending = Pending(replicated, replicated, replicated)
        params = dict(outer=replicated, blocks=blocks)
        return ZOState(params, replicated, replicated, pending, narrow)


def copy_dtype(value: Any) -> Any:
    """Return the dtype of a narrow copy: a float of 8 to 32 bits."""
    try:
        found = jnp.dtype(value)
    except TypeError:
        found = None
    is_float = found is not None and jnp.issubdtype(found, jnp.floating)
    fits = is_float and 8 <= jnp.finfo(found).bits <= 32
    expect(fits, "offload_dtype", value, "a float of 8 to 32 bits, as jnp.float8_e4m3fn")
    return found
