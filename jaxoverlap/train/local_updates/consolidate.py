"""Put a state together for one worker, and spread it over others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxoverlap.train.compression.state import kept_by_workers
from jaxoverlap.train.local_updates.outer import Outer
from jaxoverlap.train.local_updates.state import LocalState, ParamsIn
from jaxoverlap.train.placement import WorkerPlacement, copies, folded, is_key, mean_of_workers


def consolidated(
    state: LocalState, outer: Outer, params_in: ParamsIn, place: WorkerPlacement
) -> LocalState:
    """Return a state without a dim of workers; see `LocalUpdates.consolidate`.

    It is computed where the state lies, which may be another mesh than `place`'s.
    """
    control, state = state.control, replace(state, control=None)

    def one(state: LocalState) -> LocalState:
        return _consolidated(state, outer, params_in)

    shapes = jax.eval_shape(one, state)
    at = _shardings_there(state, shapes, outer, place)
    return replace(jax.jit(one, out_shardings=at)(state), control=control)


def _consolidated(state: LocalState, outer: Outer, params_in: ParamsIn) -> LocalState:
    worker = jax.tree.map(mean_of_workers, state.worker)
    begin, optimizer, sent = state.begin, state.optimizer, state.sent
    if outer.eager:
        begin, optimizer = jax.tree.map(mean_of_workers, (begin, optimizer))
        workers = len(state.finite)  # each has applied its own part of what is under way
        sent = jax.tree.map(lambda own: own * (1 - 1 / workers), sent)
    elif outer.same_start:  # an average of equals may round
        worker = params_in.put(worker, jax.tree.map(lambda x: x[0], params_in.get(state.worker)))
    sent = jax.tree.map(mean_of_workers, sent)
    sync = kept_by_workers(state.sync, mean_of_workers)
    return LocalState(worker, begin, optimizer, sent, state.round, jnp.ones(()), sync)


def with_rest(state: LocalState, outer: Outer, workers: int) -> LocalState:
    """Return a consolidated state whose `sent` is right for so many workers.

    With an eager outer optimizer a worker applies its own part of what it sends at once, and what
    is left, 1 - 1 / workers of it, with the next round. A consolidated state has what is left; so
    that as much is left of another number of workers, it is scaled. One worker leaves nothing, and
    for it the rest is applied here.
    """
    if not outer.eager:
        return state
    if workers > 1:
        sent = jax.tree.map(lambda rest: rest / (1 - 1 / workers), state.sent)
        return replace(state, sent=sent)
    updates, moved = outer.transform.update(state.sent, state.optimizer[0], state.begin)
    begin = optax.apply_updates(state.begin, updates)
    sent = jax.tree.map(jnp.zeros_like, state.sent)
    return replace(state, begin=begin, optimizer=(moved,), sent=sent)


def _shardings_there(state: LocalState, shapes: Any, outer: Outer, place: WorkerPlacement) -> Any:
    """Return shardings of a consolidated state on the mesh where the state lies.

    Leaves keep the axes inside a worker, and lose the workers'.
    """

    def one(shape: Any, leaf: jax.Array) -> Any:
        at = leaf.sharding
        if not isinstance(at, NamedSharding):
            return None
        spec = list(at.spec) + [None] * (leaf.ndim - len(at.spec))
        spec = spec[leaf.ndim - shape.ndim :]
        return NamedSharding(at.mesh, P(*(None if dim == place.axis else dim for dim in spec)))

    return jax.tree.map(one, shapes, state)


def spread(state: LocalState, outer: Outer, workers: int) -> LocalState:
    """Return the state of so many workers, each with a copy; keys differ between them."""

    def of_all(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: _copies_or_keys(leaf, workers), tree)

    begin, optimizer = state.begin, state.optimizer
    if outer.eager:
        begin, optimizer = of_all((begin, optimizer))
    sync = kept_by_workers(state.sync, lambda leaf: copies(leaf, workers))
    worker, sent, finite = of_all((state.worker, state.sent, state.finite))
    return LocalState(worker, begin, optimizer, sent, state.round, finite, sync)


def of_workers(state: LocalState, outer: Outer, change: Callable[[Any], Any]) -> LocalState:
    """Return the shapes of a state with what differs between workers changed."""
    worker, sent, finite = jax.tree.map(change, (state.worker, state.sent, state.finite))
    state = replace(state, worker=worker, sent=sent, finite=finite)
    state = replace(state, sync=kept_by_workers(state.sync, change))
    if not outer.eager:
        return state
    begin, optimizer = jax.tree.map(change, (state.begin, state.optimizer))
    return replace(state, begin=begin, optimizer=optimizer)


def _copies_or_keys(leaf: Any, workers: int) -> jax.Array:
    leaf = jnp.asarray(leaf)
    if not is_key(leaf):
        return copies(leaf, workers)
    return jax.vmap(lambda number: folded(leaf, number))(jnp.arange(workers))
