"""Take a zeroth-order step whose blocks are in host memory, one or two of them on the device.

While a block computes, the next is uploaded and the one before goes back: the loop over blocks
carries what was uploaded ahead, and XLA starts the copies under the matmuls. The last step's update
is made when a block is used, so that each block moves once a step in each direction (ZO2, arXiv
2503.12668; DistZO2, arXiv 2507.03211). Where several devices hold the parameters, each uploads its
slice of a block, and the slices are gathered a block ahead too.

XLA's compiler needs three things for this, as tried on jax 0.12.0.1. The slice's index is a value
that the loop carries: one that is computed in place is fused with the slice into a kernel, which
reads host memory and stops the others. A barrier stands behind the upload. And the blocks are not
donated: a result in the memory of an argument would be copied there, whole, after the loop; so the
host's memory holds them twice during a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxoverlap.train.zeroth_order.blocks import Blocks, depth
from jaxoverlap.train.zeroth_order.directions import Draw, numbers
from jaxoverlap.train.zeroth_order.estimator import Mezo
from jaxoverlap.train.zeroth_order.layout import Layout
from jaxoverlap.train.zeroth_order.state import ZOState, after, nothing, outcome


@dataclass(frozen=True)
class Streamed:
    """A step of a model of blocks, as pure functions of arrays; updates are deferred.

    Attributes:
        model: the model.
        transform: the estimator.
        layout: which device does what.
        sliced: whether each device along the layout's own axes uploads a slice of each block.
    """

    model: Blocks
    transform: Mezo
    layout: Layout
    sliced: bool = True

    def spec_of(self, leaf: Any) -> tuple[Any, ...]:
        """Return the spec of a stacked leaf in host memory: sliced along a layer's first dim.

        Leaves that the devices cannot share evenly stay whole.
        """
        axes = self.layout.own_axes
        parts = self.layout.pairs * self.layout.shards
        if not self.sliced or not axes or len(leaf.shape) < 2 or leaf.shape[1] % parts:
            return ()
        return (None, axes)

    def step(self, state: ZOState, batch: Any) -> tuple[ZOState, dict[str, Any]]:
        """Take one step."""
        transform, layout, model = self.transform, self.layout, self.model
        number, blocks = numbers(state.params), state.params["blocks"]
        shards = layout.split(batch)
        outer = transform.applied(
            state.pending, state.key, state.params["outer"], number=number["outer"]
        )

        def at(part: Any, numbered: Any, row: Any = None) -> Any:
            """Return what maps a function of moved parameters over directions and signs."""

            def mapped(do: Any, values: Any = None) -> Any:
                def one(which: Any, values: Any) -> Any:
                    draw = Draw(state.key, state.step, which)
                    return layout.each_sign(
                        lambda sign, x: do(
                            transform.perturbed(part, draw, sign, number=numbered, row=row), x
                        ),
                        values,
                    )

                which = jnp.arange(transform.directions)
                return jax.lax.map(lambda pair: one(*pair), (which, values))

            return mapped

        x = at(outer, number["outer"])(
            lambda moved, _: layout.each_shard(lambda shard: model.begin(moved, shard), shards)
        )

        def block(x: Any, layer: Any, row: jax.Array) -> Any:
            return at(layer, number["blocks"], row)(
                lambda moved, x: layout.each_shard(lambda x: model.block(moved, x), x), x
            )

        x, blocks = self._through(blocks, state, number["blocks"], block, x)

        def loss(moved: Any, x: Any) -> jax.Array:
            of = layout.each_shard(lambda x, shard: model.end(moved, x, shard), x, shards)
            return of.astype(jnp.float32).mean()

        found = layout.pinned(at(outer, number["outer"])(loss, x))
        pending, metrics = outcome(transform, state, found)
        return after(state, dict(outer=outer, blocks=blocks), pending), metrics

    def flush(self, state: ZOState) -> ZOState:
        """Make the pending update: each block goes to the device and back."""
        number = numbers(state.params)
        outer = self.transform.applied(
            state.pending, state.key, state.params["outer"], number=number["outer"]
        )
        _, blocks = self._through(
            state.params["blocks"], state, number["blocks"], lambda x, layer, row: x, ()
        )
        params = dict(outer=outer, blocks=blocks)
        return state._replace(params=params, pending=nothing(self.transform))

    def _through(self, blocks: Any, state: ZOState, number: Any, do: Any, x: Any) -> Any:
        """Bring block after block to the device, update it, use it and send it back.

        Returns:
            What `do(x, block, its number)` made in the end, and the updated blocks.
        """
        last = depth(blocks) - 1
        is_sliced = any(self.spec_of(leaf) for leaf in jax.tree.leaves(blocks))

        def body(carry: Any, _: None) -> Any:
            x, (raw, *uploaded), row, wanted = carry
            following = self._upload(blocks, wanted)
            held = (self._gathered(uploaded[0]), following) if is_sliced else (following,)
            layer = self.transform.applied(state.pending, state.key, raw, number=number, row=row)
            layer = jax.lax.optimization_barrier(layer)
            back = jax.device_put(self._slices(layer), jax.memory.Space.Host)
            carry = do(x, layer, row), held, row + 1, jnp.minimum(wanted + 1, last)
            return carry, back

        held = (self._gathered(self._upload(blocks, jnp.int32(0))),)
        if is_sliced:
            held = (*held, self._upload(blocks, jnp.int32(min(1, last))))
        wanted = jnp.int32(min(len(held), last))
        (x, *_), back = jax.lax.scan(body, (x, held, jnp.int32(0), wanted), length=last + 1)
        return x, back

    def _upload(self, blocks: Any, row: jax.Array) -> Any:
        """Bring a block to the device, each device its slices."""

        def one(stack: jax.Array) -> jax.Array:
            start = (row, *(jnp.int32(0),) * (stack.ndim - 1))
            sizes = (1, *stack.shape[1:])
            layer = jax.lax.dynamic_slice(stack, start, sizes, allow_negative_indices=False)
            return jax.lax.optimization_barrier(jax.device_put(layer, jax.memory.Space.Device))[0]

        return jax.tree.map(one, blocks)

    def _gathered(self, layer: Any) -> Any:
        return jax.lax.optimization_barrier(self.layout.pinned(layer))

    def _slices(self, layer: Any) -> Any:
        def one(leaf: jax.Array) -> jax.Array:
            stacked = jax.ShapeDtypeStruct((1, *leaf.shape), leaf.dtype)
            return self.layout.pinned(leaf, *self.spec_of(stacked)[1:])

        return jax.tree.map(one, layer)
