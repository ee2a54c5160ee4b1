"""Put a state together for one worker, and spread it over others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxoverlap.train.local_updates.outer import Outer
from jaxoverlap.train.local_updates.round import Rounds
from jaxoverlap.train.local_updates.state import LocalState
from jaxoverlap.train.placement import Placement


def consolidated(rounds: Rounds, state: LocalState) -> LocalState:
    """Return a state without a dim of workers; see `LocalUpdates.consolidate`."""
    outer, params_in = rounds.outer, rounds.params_in
    worker = jax.tree.map(_one, state.worker)
    if outer.same_start:  # an average of equals may round
        worker = params_in.put(worker, jax.tree.map(lambda x: x[0], params_in.get(state.worker)))
    begin, optimizer = state.begin, state.optimizer
    if outer.eager:
        begin, optimizer = jax.tree.map(_one, (begin, optimizer))
    sync = _kept_by_workers(state.sync, _one)
    sent = jax.tree.map(_one, state.sent)
    return LocalState(worker, begin, optimizer, sent, state.round, jnp.ones(()), sync)


def spread(state: LocalState, outer: Outer, workers: int) -> LocalState:
    """Return the state of so many workers, each with a copy; keys differ between them."""

    def copies(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: _copies(leaf, workers), tree)

    begin, optimizer = state.begin, state.optimizer
    if outer.eager:
        begin, optimizer = copies((begin, optimizer))
    sync = _kept_by_workers(state.sync, lambda leaf: _copies(leaf, workers))
    worker, sent, finite = copies((state.worker, state.sent, state.finite))
    return LocalState(worker, begin, optimizer, sent, state.round, finite, sync)


def optimizer_shardings(outer: Outer, place: Placement, shapes: Any, begin: Any) -> Any:
    """Return the shardings of an outer optimizer's state: moments lie where parameters do."""
    others = place.at(place.axis) if outer.eager else place.at()
    return place.of_optimizer(outer.transform, shapes, begin, others=others)


def _kept_by_workers(sync: Any, change: Any) -> Any:
    """Change what differs between workers in the state of a compression."""
    if sync is None:
        return None
    error, accumulated = jax.tree.map(change, (sync.error, sync.accumulated))
    return replace(sync, error=error, accumulated=accumulated)


def _one(leaf: jax.Array) -> jax.Array:
    """Average floats over the workers, or take worker 0's."""
    if jnp.issubdtype(leaf.dtype, jnp.floating):
        return leaf.astype(jnp.float32).mean(0).astype(leaf.dtype)
    return leaf[0]


def _copies(leaf: Any, workers: int) -> jax.Array:
    leaf = jnp.asarray(leaf)
    if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jnp.broadcast_to(leaf, (workers, *leaf.shape))

    def folded(number: jax.Array) -> jax.Array:
        keys = jax.vmap(lambda key: jax.random.fold_in(key, number))(leaf.reshape(-1))
        return keys.reshape(leaf.shape)

    return jax.vmap(folded)(jnp.arange(workers))
