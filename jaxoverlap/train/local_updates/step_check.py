"""Refuse batches that workers cannot share, and train steps that cannot be mapped over workers.

JAX maps a step over workers by `jax.vmap(spmd_axis_name=...)`, which adds the workers' axis to the
step's own constraints and shard_maps. Where these name that axis themselves, or leave it automatic,
JAX fails deep inside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxoverlap._util.expect import expect
from jaxoverlap.passes.analysis.jaxprs import equations
from jaxoverlap.train.arguments import check_like, check_shared
from jaxoverlap.train.compression.sync import Sync
from jaxoverlap.train.local_updates.outer import Outer
from jaxoverlap.train.programs import without_first


def check_step(
    step: Callable[[Any, Any], Any], worker: Any, batches: Any, axis: str, workers: int
) -> None:
    """Trace one worker's step, and raise for what cannot be mapped.

    Args:
        step: train_step(state, batch) -> (state, metrics).
        worker: the states of all workers, arrays or shapes [workers, ...].
        batches: arrays or shapes [steps, global batch, ...], or [steps].
        axis: the workers' mesh axis.
        workers: its size.

    Raises:
        ValueError: for a collective, a constraint, a sharding or a shard_map over the workers'
            axis, for a shard_map that leaves it automatic, and for results that are no
            (state, metrics) or no state like the one given.
    """

    def of_batch(leaf: Any) -> jax.ShapeDtypeStruct:
        shape = leaf.shape[1:]
        shape = (shape[0] // workers, *shape[1:]) if shape else shape
        return jax.ShapeDtypeStruct(shape, leaf.dtype)

    state, batch = jax.tree.map(without_first, worker), jax.tree.map(of_batch, batches)
    try:
        closed, shapes = jax.make_jaxpr(step, return_shape=True)(state, batch)
    except NameError as error:
        if axis not in str(error):
            raise
        raise ValueError(
            f"the train step has a collective over {axis!r}, the workers' axis ({error}): workers "
            "take their steps alone, and the round averages; leave it out"
        ) from error
    _check_result(shapes, state)
    for eqn, around in equations(closed.jaxpr):
        manual = any(one.primitive.name == "shard_map" for one in around)
        if not manual and (text := _refused(eqn, axis)):
            raise ValueError(f"the train step {text}")


def check_outer(outer: Any, sync: Any, *, shard_outer: bool) -> None:
    """Raise a ValueError unless these options of `LocalUpdates` fit together."""
    expect(isinstance(outer, Outer), "outer", outer, "an outer optimizer, as co2(every=12)")
    what = "None, or one such as uniform(power_sgd(4))"
    expect(isinstance(sync, Sync | None), "sync", sync, what)
    if outer.eager and shard_outer:
        raise ValueError(
            "shard_outer=True with an eager outer optimizer: its state differs between "
            "workers, so there is nothing to scatter; leave out either"
        )
    if outer.eager and outer.has_waits and sync is not None:
        raise ValueError(
            "sync with an eager outer optimizer whose first or last rounds wait: these average "
            "parameters, which a compressor would blur; leave out sync, eager or rounds"
        )
    if sync is not None and shard_outer:
        raise ValueError(
            "shard_outer=True with sync: a compressed average is whole on every worker, so "
            "nothing is saved by scattering it; leave out either"
        )


def check_batches(batches: Any, every: int, workers: int, axis: str) -> None:
    """Raise a ValueError unless batches have a round's shape and the workers divide the batch."""
    for leaf in jax.tree.leaves(batches):
        shape = np.shape(leaf)
        if not shape or shape[0] != every:
            raise ValueError(
                f"batches of shape {shape}: expected [every, global batch, ...], or [every] of "
                f"what is one number a step, with every={every}; stack those of a round's steps"
            )
        check_shared(shape, 1, workers, f"workers along {axis!r}")


def _check_result(result: Any, state: Any) -> None:
    if not isinstance(result, tuple) or len(result) != 2:
        raise ValueError(
            f"the train step returned a {type(result).__name__}: expected (state, metrics)"
        )
    if jax.tree.structure(result[0]) != jax.tree.structure(state):
        check_like(result[0], state, "the state that the train step returned", "it was given")
    for (path, old), new in zip(
        jax.tree.leaves_with_path(state), jax.tree.leaves(result[0]), strict=True
    ):
        if (old.shape, old.dtype) != (new.shape, new.dtype):
            raise ValueError(
                f"the train step changed the state's {jax.tree_util.keystr(path)} from "
                f"{old.dtype}{list(old.shape)} to {new.dtype}{list(new.shape)}: expected the same, "
                "as the next step takes it; cast it back"
            )


def _refused(eqn: Any, axis: str) -> str:
    """Return why an equation cannot be mapped over workers; empty if it can."""
    name, params = eqn.primitive.name, eqn.params
    if name == "shard_map":
        if axis not in params["newly_manual_axes"]:
            return (
                f"has a shard_map over {sorted(params['newly_manual_axes'])} alone, which leaves "
                f"the workers' axis {axis!r} automatic: JAX cannot map that over workers. Leave "
                "axis_names out, so that all axes are manual"
            )
        if axis in jax.tree.leaves([tuple(s) for s in (*params["in_specs"], *params["out_specs"])]):
            return (
                f"has a shard_map whose specs name {axis!r}, the workers' axis: a worker has its "
                "own rows and nothing of the others; name the other axes alone"
            )
    shardings = [params.get("sharding"), *params.get("in_shardings", ())]
    shardings += params.get("out_shardings", ())
    for sharding in shardings:
        spec = getattr(sharding, "spec", None)
        if spec is not None and axis in jax.tree.leaves(tuple(spec)):
            return (
                f"constrains a value to {spec}, over the workers' axis {axis!r}: a worker has its "
                "own rows and nothing of the others; name the other axes alone"
            )
    return ""
