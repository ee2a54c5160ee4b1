"""Take a zeroth-order step whose blocks are in host memory, uploading one or two blocks ahead.

Zeroth-order (MeZO, SPSA): losses at perturbed parameters, +eps and -eps, and no backward pass.
While a block computes, the next is uploaded and the one before goes back: the loop over blocks
carries the blocks uploaded ahead, and XLA starts the copies under the matmuls. The last step's
update is made when a block is used, so that each block moves once a step in each direction (ZO2,
arXiv 2503.12668; DistZO2, arXiv 2507.03211). Where several devices hold the parameters, each
uploads its slice of a block two blocks ahead, and the slices are gathered one block ahead.

All of it is in one `shard_map`: a partitioner that is left to choose lets the slices' sharding
reach the matmuls. XLA's compiler needs three things more, as tried on jax 0.12.0.1. The slice's
index is a value that the loop carries: one that is computed in place is fused with the slice into a
kernel, which reads host memory and stops the others. A barrier follows the upload. And callers must
not donate the blocks: a result in the memory of an argument would be copied there, entirely, after
the loop; so the host's memory holds them twice during a step.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxoverlap.train.zeroth_order.blocks import Blocks, depth, mean_over
from jaxoverlap.train.zeroth_order.directions import Draw, numbers
from jaxoverlap.train.zeroth_order.estimator import Mezo, Pending
from jaxoverlap.train.zeroth_order.layout import BatchLayout
from jaxoverlap.train.zeroth_order.state import ZOState, after, nothing, outcome


@dataclass(frozen=True)
class Streamed:
    """A step of a model of blocks, as pure functions of arrays; updates are deferred.

    Attributes:
        model: the model.
        transform: the estimator.
        layout: which device does which signs (`perturb`, an axis of `pairs` devices) on which
            shard of the batch (`data`); along both (`own_axes`) parameters are replicated.
        sliced: whether each device along `own_axes` uploads a slice of each block.
    """

    model: Blocks
    transform: Mezo
    layout: BatchLayout
    sliced: bool = True

    def spec_of(self, leaf: Any) -> tuple[Any, ...]:
        """Return the spec of a stacked leaf in host memory: sliced along a layer's first dim.

        () if not sliced, as are leaves that the devices do not divide evenly.
        """
        axes = self.layout.own_axes
        parts = self.layout.pairs * self.layout.shards
        if not self.sliced or not axes or len(leaf.shape) < 2 or leaf.shape[1] % parts:
            return ()
        return (None, axes)

    def step(self, state: ZOState, batch: Any) -> tuple[ZOState, dict[str, Any]]:
        """Take one step.

        Raises:
            ValueError: if the devices cannot share the batch evenly.
        """
        self.layout.check(batch)
        specs, do = self._specs(state), functools.partial(self._step, self._is_sliced(state))
        rows = jax.tree.map(lambda leaf: P(self.layout.data) if leaf.ndim else P(), batch)
        return self._mapped(do, (specs, rows), (self._specs_after(specs), P()))(state, batch)

    def flush(self, state: ZOState) -> ZOState:
        """Make the pending update: each block goes to the device and back."""
        specs, do = self._specs(state), functools.partial(self._flush, self._is_sliced(state))
        return self._mapped(do, (specs,), specs)(state)

    # -- on one device of the mesh ----------------------------------------------------------------

    def _step(self, is_sliced: Any, state: ZOState, batch: Any) -> tuple[ZOState, dict[str, Any]]:
        model, number = self.model, self._numbers(state)
        outer = self._updated(state, state.params["outer"], number["outer"])

        def on_perturbed(part: Any, numbered: Any, do: Any, values: Any, row: Any = None) -> Any:
            """Call a function on perturbed parameters for each direction and local sign."""

            def one(given: Any) -> Any:
                which, sign, value = given
                draw = Draw(state.key, state.step, which)
                moved = self.transform.perturbed(part, draw, sign, number=numbered, row=row)
                return do(moved, value)

            each_sign = lambda given: jax.lax.map(one, given)  # noqa: E731
            return jax.lax.map(each_sign, (*self._signs(), values))

        def block(x: Any, layer: Any, row: jax.Array) -> Any:
            return on_perturbed(layer, number["blocks"], model.block, x, row)

        x = on_perturbed(outer, number["outer"], lambda p, _: model.begin(p, batch), None)
        x, blocks = self._through(is_sliced, state, number["blocks"], block, x)
        losses = on_perturbed(outer, number["outer"], lambda p, x: model.end(p, x, batch), x)
        pending, metrics = outcome(self.transform, state, self._of_all(losses))
        return self._after(state, outer, blocks, pending), metrics

    def _after(self, state: ZOState, outer: Any, blocks: Any, pending: Pending) -> ZOState:
        return after(state, dict(outer=outer, blocks=blocks), pending)

    def _specs_after(self, specs: Any) -> Any:
        """Return the shardings of the state after a step, by those before it."""
        return specs

    def _numbers(self, state: ZOState) -> Any:
        """Return each parameter's number."""
        return numbers(dict(outer=state.params["outer"], blocks=self._stack(state)))

    def _stack(self, state: ZOState) -> Any:
        """Return what is uploaded, layer by layer."""
        return state.params["blocks"]

    def _flush(self, is_sliced: Any, state: ZOState) -> ZOState:
        number = self._numbers(state)
        outer = self._updated(state, state.params["outer"], number["outer"])
        _, blocks = self._through(is_sliced, state, number["blocks"], lambda x, layer, row: x, ())
        params = dict(outer=outer, blocks=blocks)
        return state._replace(params=params, pending=nothing(self.transform))

    def _updated(self, state: ZOState, part: Any, number: Any, row: Any = None) -> Any:
        return self.transform.applied(state.pending, state.key, part, number=number, row=row)

    def _signs(self) -> tuple[jax.Array, jax.Array]:
        """Return the numbers of directions and this device's signs, both [directions, signs].

        There are two signs, or one where a pair shares them.
        """
        signs = jnp.array([1.0, -1.0], jnp.float32)
        if self.layout.perturb is not None:
            signs = jax.lax.dynamic_slice(signs, (jax.lax.axis_index(self.layout.perturb),), (1,))
        which = jnp.arange(self.transform.directions)
        shape = (len(which), len(signs))
        return jnp.broadcast_to(which[:, None], shape), jnp.broadcast_to(signs, shape)

    def _of_all(self, losses: Any) -> jax.Array:
        """Return the losses [directions, 2] of all devices from those of one."""
        data = self.layout.data
        if data is None:
            losses = mean_over(losses, lambda x: x, lambda x: x)
        else:
            over = dict(axis_name=data)
            losses = mean_over(
                losses, partial(jax.lax.psum, **over), partial(jax.lax.pmean, **over)
            )
        if self.layout.perturb is None:
            return losses
        return jax.lax.all_gather(losses, self.layout.perturb, axis=1, tiled=True)

    def _through(self, is_sliced: Any, state: ZOState, number: Any, do: Any, x: Any) -> Any:
        """Bring block after block to the device, update it, use it and send it back.

        Args:
            is_sliced: for each leaf of the blocks, whether it is sliced.
            state: with the update of the last step pending.
            number: for each leaf of the blocks, the parameter's number (`numbers`).
            do: (x, block, row) -> x, where row is the block's index.
            x: the first.

        Returns:
            The last x, and the updated blocks.
        """
        blocks = self._stack(state)
        last, ahead = depth(blocks) - 1, 2 if any(jax.tree.leaves(is_sliced)) else 1

        def body(carry: Any, _: None) -> Any:
            x, (stale, *uploaded), row, next_row = carry  # stale: the last update is not applied
            following = self._upload(blocks, next_row)
            prefetched = (*(self._gathered(part, is_sliced) for part in uploaded), following)
            layer = jax.lax.optimization_barrier(self._updated(state, stale, number, row))
            back = self._back(layer, is_sliced)
            return (do(x, layer, row), prefetched, row + 1, jnp.minimum(next_row + 1, last)), back

        first = self._gathered(self._upload(blocks, jnp.int32(0)), is_sliced)
        second = (self._upload(blocks, jnp.int32(min(1, last))) for _ in range(ahead - 1))
        carry = (x, (first, *second), jnp.int32(0), jnp.int32(min(ahead, last)))
        (x, *_), back = jax.lax.scan(body, carry, length=last + 1)
        return x, back

    def _back(self, layer: Any, is_sliced: Any) -> Any:
        """Send an updated block to the host, or this device's slices of it."""
        return jax.device_put(self._own(layer, is_sliced), jax.memory.Space.Host)

    def _upload(self, blocks: Any, row: jax.Array) -> Any:
        """Bring a block to the device, or this device's slices of it."""

        def one(stack: jax.Array) -> jax.Array:
            start = (row, *(jnp.int32(0),) * (stack.ndim - 1))
            sizes = (1, *stack.shape[1:])
            layer = jax.lax.dynamic_slice(stack, start, sizes, allow_negative_indices=False)
            layer = jax.device_put(layer, jax.memory.Space.Device)
            return jax.lax.optimization_barrier(layer)[0]

        return jax.tree.map(one, blocks)

    # -- slices -----------------------------------------------------------------------------------

    def _gathered(self, layer: Any, is_sliced: Any) -> Any:
        """Gather a block from the slices of all devices."""
        axes = self.layout.own_axes

        def one(own: jax.Array, sliced: bool) -> jax.Array:
            return jax.lax.all_gather(own, axes, tiled=True) if sliced else own

        return jax.lax.optimization_barrier(jax.tree.map(one, layer, is_sliced))

    def _own(self, layer: Any, is_sliced: Any) -> Any:
        """Return this device's slices of a full block."""

        def one(leaf: jax.Array, sliced: bool) -> jax.Array:
            if not sliced:
                return leaf
            size = leaf.shape[0] // (self.layout.pairs * self.layout.shards)
            index = jax.lax.axis_index(self.layout.own_axes)
            return jax.lax.dynamic_slice_in_dim(leaf, index * size, size)

        return jax.tree.map(one, layer, is_sliced)

    def _is_sliced(self, state: ZOState) -> Any:
        """Return for each leaf of the blocks, given as global arrays, whether it is sliced."""
        return jax.tree.map(lambda leaf: bool(self.spec_of(leaf)), self._stack(state))

    def _specs(self, state: ZOState) -> Any:
        blocks = jax.tree.map(lambda leaf: P(*self.spec_of(leaf)), state.params["blocks"])
        replicated: Any = P()
        pending = Pending(replicated, replicated, replicated)
        params = dict(outer=replicated, blocks=blocks)
        return ZOState(params, replicated, replicated, pending)

    def _mapped(self, do: Any, in_specs: Any, out_specs: Any) -> Any:
        mesh = self.layout.mesh
        assert mesh is not None  # `step` asks for one
        return jax.shard_map(do, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
