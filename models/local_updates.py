"""Train in rounds of local updates: what `--local-updates co2 --every 12` runs."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jaxoverlap
from jaxoverlap import train as algorithms
from jaxoverlap.train import LocalState, LocalUpdates, Outer
from models import compressed, trainer
from models.checkpoint import Checkpoints
from models.config import Mistake, Run
from models.processes import console, within_s
from models.recipe import Recipe
from models.report import Report


def outer_of(config: Run) -> Outer:
    """Return the outer optimizer that the flags name, with its published settings or the flags'."""
    every, rate = config.every, config.learning_rate
    sgd = dict(learning_rate="outer_rate", momentum="outer_momentum")
    # Of each algorithm: what makes it, what it is given here, and its arguments that are flags.
    known: dict[str, tuple[Any, dict[str, Any], dict[str, str]]] = {
        "local_sgd": (algorithms.local_sgd, {}, {}),
        "slowmo": (algorithms.slowmo, dict(inner_learning_rate=rate), sgd),
        "overlap_local_sgd": (algorithms.overlap_local_sgd, {}, dict(momentum="outer_momentum")),
        "diloco": (algorithms.diloco, {}, sgd),
        "eager_diloco": (algorithms.eager_diloco, {}, sgd),
        "streaming_diloco": (
            algorithms.streaming_diloco,
            dict(fragments=2, delay=every // (config.fragments or 2)),
            sgd | dict(fragments="fragments"),
        ),
        "co2": (algorithms.co2, {}, sgd | dict(staleness="staleness")),
    }
    name = config.local_updates
    if name not in known:
        raise Mistake(f"--local-updates {name}: expected one of {', '.join(known)}")
    make, given, flags = known[name]
    for flag in ("outer_rate", "outer_momentum", "staleness", "fragments"):
        if getattr(config, flag) is not None and flag not in flags.values():
            raise Mistake(f"--{flag.replace('_', '-')}: {name} has no such setting; leave it out")
    chosen = {
        argument: getattr(config, flag)
        for argument, flag in flags.items()
        if getattr(config, flag) is not None
    }
    try:
        return make(every=every, **(given | chosen))
    except ValueError as error:
        raise Mistake(f"--local-updates {name}: {error}") from error


def train(recipe: Recipe, config: Run) -> trainer.Trained:
    """Train in rounds up to `config.steps` steps, or to the end of the round that has the last.

    A row of metrics is a round, averaged over its steps and the workers.
    """
    outer = outer_of(config)
    mesh = recipe.make_mesh(config)
    step = recipe.make_step(config, mesh)
    params = recipe.abstract_args(config, mesh)[0]["params"]
    updates = LocalUpdates(
        step,
        mesh,
        axis="worker",
        outer=outer,
        shard_outer=not (outer.eager or config.compress),
        sync=compressed.sync_of(config) if config.compress else None,
        stacked=compressed.stacked_in(params) if config.compress else (),
        overlap=not (config.plain or config.ops),
    )
    with Checkpoints(config) as checkpoints, jaxoverlap.lost_named(within_s(config)):
        state, begin = restored(checkpoints, updates, recipe.abstract_args(config, mesh)[0])
        if state is None:
            state = updates.init(recipe.init_state(config, mesh, config.seed))
        else:
            console.print(f"resuming after step {begin} of {config.steps}")
        with Report(recipe, config, mesh, begin) as report:
            for at in range(begin, config.steps, config.every):
                end = at + config.every
                state, metrics = updates.round(state, batches(recipe, config, mesh, at))
                report.add(end - 1, jax.tree.map(jnp.mean, metrics))
                checkpoints.save(end, state, {"next_index": end}, config.every)
            updates.check(state)
        params = updates.params(state)
    return trainer.Trained(report.rows, step, dict(params=params))


def batches(recipe: Recipe, config: Run, mesh: Mesh, begin: int) -> Any:
    """Return the batches of the round that begins with step `at`, sharded by worker."""
    batch_of = recipe.batches(config)
    every = [batch_of(i, slice(0, config.batch)) for i in range(begin, begin + config.every)]
    stacked = jax.tree.map(lambda *b: np.stack(b), *every)
    return compressed.placed(stacked, mesh, P(None, "worker"))


def restored(
    checkpoints: Checkpoints, updates: LocalUpdates, state: Any
) -> tuple[LocalState | None, int]:
    """Return the newest checkpoint's state, also of another number of workers, and its step."""
    if (newest := checkpoints.newest()) is None:
        return None, 0
    taken, shapes = newest
    workers = jax.tree.leaves(shapes["worker"])[0].shape[0]
    found = checkpoints.restore_state(taken, updates.abstract(state, workers=workers))
    if workers != updates.workers:
        found = updates.spread(updates.consolidate(found))
    return found, taken
