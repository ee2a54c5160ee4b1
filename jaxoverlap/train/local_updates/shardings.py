"""Say where the leaves of a state lie, and how many bytes of it a device has."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from jaxoverlap.train.compression.control_loop import ControlLoop
from jaxoverlap.train.local_updates.outer import Outer
from jaxoverlap.train.local_updates.state import LocalState, ParamsIn, fragments_of
from jaxoverlap.train.placement import WorkerPlacement


def shardings_of(
    state: Any, outer: Outer, params_in: ParamsIn, place: WorkerPlacement, loop: ControlLoop | None
) -> LocalState:
    """Return the sharding of each leaf of the state of all workers.

    Args:
        state: of one worker, arrays or shapes.
        outer: the outer optimizer.
        params_in: where the state has its parameters.
        place: the mesh.
        loop: the compression of averages, if there is one.
    """
    params = params_in.get(state)
    specs = jax.tree.map(place.spec_of, params)
    shapes = jax.eval_shape(lambda p: jax.tree.map(jnp.asarray, p), params)
    stacked = place.stacked(specs)
    begin = stacked if outer.eager else place.outer(shapes, specs)
    others = place.at(place.axis) if outer.eager else place.at()
    takes = fragments_of(shapes, outer.fragments)
    return LocalState(
        worker=place.stacked(jax.tree.map(place.spec_of, state)),
        begin=begin,
        optimizer=tuple(
            place.of_optimizer(outer.transform, take(shapes), take(begin), others=others)
            for take in takes
        ),
        sent=stacked if outer.delay else None,
        round=place.at(),
        finite=place.at(place.axis),
        sync=None if loop is None else loop.shardings(shapes, specs),
    )


def beside_bytes(outer: Outer, params: Any, kept: Any) -> int:
    """Return the bytes on a device of what a round keeps beside its steps.

    These are the average that is under way, what it is of, where the next round begins, and the
    train state that a worker may go back to.

    Args:
        outer: the outer optimizer.
        params: of the workers, arrays or shapes with shardings.
        kept: the train state that a worker may go back to; empty if none is kept.
    """
    if not (outer.delay or outer.lag):
        return 0
    return 3 * _bytes_on_device(params) + _bytes_on_device(kept)


def _bytes_on_device(tree: Any) -> int:
    leaves = (leaf for leaf in jax.tree.leaves(tree) if hasattr(leaf.dtype, "itemsize"))
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)


def named_shardings(state: LocalState) -> LocalState:
    """Return where a state's leaves lie, or raise if that is on no mesh."""
    return jax.tree.map(_named_sharding, state)


def like_at(leaf: Any, at: NamedSharding) -> jax.ShapeDtypeStruct:
    """Return an array's shape, with a sharding."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=at)


def _named_sharding(leaf: Any) -> NamedSharding:
    if not isinstance(leaf.sharding, NamedSharding):
        raise ValueError(
            f"a state with a leaf that lies at {leaf.sharding}: give what init(), spread() or a "
            "round returned, or a checkpoint restored to the shardings of abstract()"
        )
    return leaf.sharding
