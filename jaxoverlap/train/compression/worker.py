"""One worker's step: gradients, their average, the optimizer; in a shard_map over the workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxoverlap.train.compression import backward
from jaxoverlap.train.compression.averager import Averager, Reduced
from jaxoverlap.train.compression.state import SyncState, TrainState
from jaxoverlap.train.dtypes import is_narrow
from jaxoverlap.train.finite import kept_if, stays_fine
from jaxoverlap.train.optax_update import update
from jaxoverlap.train.placement import folded, is_key, over_workers


@dataclass(frozen=True)
class WorkerStep:
    """A worker's step, for fixed settings.

    Attributes:
        loss_and_grads: of parameters and the worker's part of a batch.
        optimizer: that sees the averaged gradients.
        averager: that averages them.
        in_backward: whether stacked leaves are averaged inside the backward scan.
        stateful: whether loss_and_grads takes the model's state behind the parameters, and gives
            (value, the state after it) for its value.
    """

    loss_and_grads: Callable[..., tuple[Any, Any]]
    optimizer: optax.GradientTransformation
    averager: Averager
    in_backward: bool
    stateful: bool = False

    def over(self, mesh: Mesh) -> Callable[[Any, Any], tuple[Any, Any, jax.Array]]:
        """Return the step of all workers.

        It takes a state without its control, and a batch, and gives the state, the value, and what
        was finite: the flags of the average, and whether the optimizer's update was. The flags
        outlive the state.
        """
        axis = self.averager.axis
        specs = TrainState(P(), P(), SyncState.specs(axis), None, P())

        def compressed_step(state: Any, batch: Any) -> tuple[Any, Any, jax.Array]:
            rows = jax.tree.map(lambda leaf: P(axis) if jnp.ndim(leaf) else P(), batch)
            given, made = (specs, rows), (specs, P(), P())
            return over_workers(self._of_one, mesh, axis, given, made)(state, batch)

        return compressed_step

    def _of_one(self, state: TrainState, batch: Any) -> tuple[TrainState, Any, jax.Array]:
        params, moments, model = before = state.params, state.optimizer, state.model
        sync, axis = state.sync.without_workers(), self.averager.axis
        (value, seen), gradients, reduced = self._gradients(
            params, own_keys(model, axis), batch, sync
        )
        _check_like(gradients, params, "gradients of", "the parameters")
        _check_like(seen, model, "a model state of", "the one it was given")
        values, treedef = jax.tree.flatten((value, _floats(seen)))
        floats = [_as_float(v) for v in values]
        gradients, new, means = self.averager.average(gradients, sync, reduced=reduced, also=floats)
        value, means = jax.tree.unflatten(treedef, means)
        updates, moved = update(
            self.optimizer, gradients, moments, params, value=value, grad=gradients
        )
        model_after = _next_model(model, seen, means, self.averager.workers)
        after = optax.apply_updates(params, updates), moved, model_after
        # In a model's state a running maximum may begin at -inf.
        fine = stays_fine(before[:2], after[:2])
        fine &= stays_fine(model, model_after, [False] * len(jax.tree.leaves(model)))
        (params, moments, model), kept = if_finite(after, before, new, sync, fine)
        finite = jnp.append(new.finite, fine.astype(jnp.float32))
        return TrainState(params, moments, kept.with_workers(), None, model), value, finite

    def _called(self, params: Any, model: Any, batch: Any) -> tuple[tuple[Any, Any], Any]:
        """Return ((value, the model's state after it), gradients)."""
        given = (params, model, batch) if self.stateful else (params, batch)
        both = self.loss_and_grads(*given)
        if not isinstance(both, tuple) or len(both) != 2:
            raise ValueError(
                f"loss_and_grads returned a {type(both).__name__}: expected (value, gradients), as "
                "jax.value_and_grad(loss) gives"
            )
        value, gradients = both
        if not self.stateful:
            return (value, None), gradients
        if not isinstance(value, tuple) or len(value) != 2:
            raise ValueError(
                f"loss_and_grads returned a value of type {type(value).__name__}: expected (value, "
                "the model's state), as jax.value_and_grad(loss, has_aux=True) gives"
            )
        return value, gradients

    def _gradients(
        self, params: Any, model: Any, batch: Any, sync: SyncState
    ) -> tuple[tuple[Any, Any], Any, dict[int, Reduced]]:
        """Return what `_called` does, and those leaves that the backward scan has averaged."""
        if not self.in_backward:
            return (*self._called(params, model, batch), {})
        closed, shapes = jax.make_jaxpr(self._called, return_shape=True)(params, model, batch)
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

        outs, reduced = found.run(jax.tree.leaves((params, model, batch)), states, reduce)
        tree = jax.tree.unflatten(jax.tree.structure(shapes), outs)
        return (*tree, reduced)


def if_finite(
    after: Any, before: Any, new: SyncState, old: SyncState, also: Any = True
) -> tuple[Any, SyncState]:
    """Return the values and state after an average; or those before it, if it is not finite.

    Args:
        after, before: what follows from the average, and what was there before it.
        new, old: the state of the compression.
        also: what has to be true besides the average's flags.
    """
    fine = jnp.all(new.finite == 1) & also
    kept, state = kept_if(fine, (after, new), (before, old))
    return kept, replace(state, count=new.count, finite=new.finite)


def _check_like(found: Any, wanted: Any, what: str, like: str) -> None:
    """Raise a ValueError if what loss_and_grads returned is no tree like another one."""
    one, other = jax.tree.structure(found), jax.tree.structure(wanted)
    if one != other:
        raise ValueError(
            f"loss_and_grads returned {what} {one}: expected a tree like {like}, {other}"
        )


# -- the model's state ----------------------------------------------------------------------------


def own_keys(model: Any, axis: str) -> Any:
    """Return a model's state with the index of the worker folded into its random keys."""
    return jax.tree.map(lambda x: folded(x, lax.axis_index(axis)) if is_key(x) else x, model)


def _floats(model: Any) -> Any:
    """Return a model's state with only the leaves that are averaged; the others become None."""
    return jax.tree.map(lambda x: x if jnp.issubdtype(x.dtype, jnp.inexact) else None, model)


def _next_model(before: Any, seen: Any, means: Any, workers: int) -> Any:
    """Return the model's state after a step: means of floats, and new keys for all.

    Args:
        before: the step.
        seen: after it, on this worker.
        means: of its floats, over the workers.
        workers: how many there are, the first number that none of them has.
    """

    def one(old: Any, own: Any, mean: Any) -> Any:
        if is_key(old):
            return folded(old, workers)
        return own if mean is None else mean.astype(own.dtype)

    flat, treedef = jax.tree.flatten(before)
    return treedef.unflatten(map(one, flat, jax.tree.leaves(seen), treedef.flatten_up_to(means)))


def _as_float(value: Any) -> jax.Array:
    """Return a value in a dtype that is averaged: float32 for integers and floats of 8 bits."""
    value = jnp.asarray(value)
    fits = jnp.issubdtype(value.dtype, jnp.inexact) and not is_narrow(value.dtype)
    return value if fits else value.astype(jnp.float32)
