"""One worker's step: gradients, their average, the optimizer; in a shard_map over the workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxoverlap.train.compression import backward
from jaxoverlap.train.compression.averager import Averager, Reduced
from jaxoverlap.train.compression.state import SyncState
from jaxoverlap.train.finite import all_fine, kept_if


@dataclass(frozen=True)
class WorkerStep:
    """A worker's step, for fixed settings.

    Attributes:
        loss_and_grads: of parameters and the worker's part of a batch.
        optimizer: that sees the averaged gradients.
        averager: that averages them.
        in_backward: whether stacked leaves are averaged inside the backward scan.
    """

    loss_and_grads: Callable[[Any, Any], tuple[Any, Any]]
    optimizer: optax.GradientTransformation
    averager: Averager
    in_backward: bool

    def over(self, mesh: Mesh) -> Callable[[Any, Any], tuple[Any, Any, jax.Array]]:
        """Return the step of all workers.

        It takes (params, optimizer, sync) and a batch, and gives the same, the value, and
        what was finite: the flags of the average, and whether the optimizer's update was. The
        flags outlive the state.
        """
        axis = self.averager.axis

        def compressed_step(state: Any, batch: Any) -> tuple[Any, Any, jax.Array]:
            whole = (P(), P(), specs_of(state[2], axis))
            return jax.shard_map(
                self._of_one,
                mesh=mesh,
                in_specs=(whole, P(axis)),
                out_specs=(whole, P(), P()),
                axis_names={axis},
                check_vma=False,
            )(state, batch)

        return compressed_step

    def _of_one(self, state: Any, batch: Any) -> tuple[Any, Any, jax.Array]:
        params, moments, sync = state
        sync = of_one(sync)
        value, gradients, reduced = self._gradients(params, batch, sync)
        _check_gradients(gradients, params)
        values, treedef = jax.tree.flatten(value)
        floats = [_as_float(v) for v in values]
        gradients, new, means = self.averager.average(gradients, sync, reduced=reduced, also=floats)
        updates, moved = self.optimizer.update(gradients, moments, params)
        after, before = (optax.apply_updates(params, updates), moved), (params, moments)
        fine = all_fine(after) | ~all_fine(before)
        (params, moments), kept = if_finite(after, before, new, sync, fine)
        state = (params, moments, with_workers(kept))
        finite = jnp.append(new.finite, fine.astype(jnp.float32))
        return state, jax.tree.unflatten(treedef, means), finite

    def _gradients(
        self, params: Any, batch: Any, sync: SyncState
    ) -> tuple[Any, Any, dict[int, Reduced]]:
        """Return the value, gradients, and those leaves that the backward scan has averaged."""
        if not self.in_backward:
            both = self.loss_and_grads(params, batch)
            if not isinstance(both, tuple) or len(both) != 2:
                raise ValueError(
                    f"loss_and_grads returned a {type(both).__name__}: expected (value, gradients),"
                    " as jax.value_and_grad(loss) gives"
                )
            return (*both, {})
        closed, shapes = jax.make_jaxpr(self.loss_and_grads, return_shape=True)(params, batch)
        before = len(jax.tree.leaves(shapes[0]))
        stacks = [
            leaf
            for leaf, numbers in self.averager.of_leaf.items()
            if self.averager.layers[numbers[0]].stack
        ]
        found = backward.find(closed, {leaf: before + leaf for leaf in stacks})
        if found.refused:
            reasons = (
                f"{self.averager.layers[self.averager.of_leaf[leaf][0]].name}: {reason}"
                for leaf, reason in found.refused.items()
            )
            raise ValueError(
                f"in_backward=True, and not all stacked leaves can be averaged inside a backward "
                f"scan ({'; '.join(reasons)}). Give in_backward=False, or name in `stacked` only "
                "leaves that one lax.scan of the loss runs over"
            )
        states = self.averager.leaf_states(sync)

        def reduce(slices: Any, own: Any, position: Any) -> dict[int, Reduced]:
            return self.averager.reduce_slices(slices, own, sync.count, position)

        outs, reduced = found.run(jax.tree.leaves((params, batch)), states, reduce)
        tree = jax.tree.unflatten(jax.tree.structure(shapes), outs)
        return (*tree, reduced)


def if_finite(
    after: Any, before: Any, new: SyncState, old: SyncState, also: Any = True
) -> tuple[Any, SyncState]:
    """Return what is after an average and its state; or what was before, if it is not finite.

    Args:
        after, before: what follows from the average, and what was there before it.
        new, old: the state of the compression.
        also: what has to be true beside the average's flags.
    """
    fine = jnp.all(new.finite == 1) & also
    kept, state = kept_if(fine, (after, new), (before, old))
    return kept, replace(state, count=new.count, finite=new.finite)


def _check_gradients(gradients: Any, params: Any) -> None:
    """Raise a ValueError if gradients are not a tree like the parameters."""
    found, wanted = jax.tree.structure(gradients), jax.tree.structure(params)
    if found != wanted:
        raise ValueError(
            f"loss_and_grads returned gradients of {found}: expected a tree like the parameters, "
            f"{wanted}"
        )


def _as_float(value: Any) -> jax.Array:
    value = jnp.asarray(value)
    return value if jnp.issubdtype(value.dtype, jnp.floating) else value.astype(jnp.float32)


def of_one(sync: SyncState) -> SyncState:
    """Return a worker's state from its part of that of all: without the dim of workers."""
    error, accumulated = jax.tree.map(lambda x: x.squeeze(0), (sync.error, sync.accumulated))
    return replace(sync, error=error, accumulated=accumulated)


def with_workers(sync: SyncState) -> SyncState:
    """Return a worker's part of the state of all."""
    error, accumulated = jax.tree.map(lambda x: x[None], (sync.error, sync.accumulated))
    return replace(sync, error=error, accumulated=accumulated)


def specs_of(sync: SyncState, axis: str) -> SyncState:
    """Return the specs of a state over the workers' axis."""
    error, accumulated = jax.tree.map(lambda _: P(axis), (sync.error, sync.accumulated))
    shared = jax.tree.map(lambda _: P(), sync.shared)
    return SyncState(P(), error, accumulated, shared, P())
