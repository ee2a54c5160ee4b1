"""Train with compressed gradients: what `--compress lgreco:powersgd:4` runs."""

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoverlap
from jaxoverlap.train import compression
from models import trainer
from models.checkpoint import Checkpoints
from models.config import Mistake, Run
from models.processes import console, within_s
from models.recipe import Recipe, make_optimizer
from models.report import Report

COMPRESSORS = dict(powersgd=compression.power_sgd, qsgd=compression.qsgd, topk=compression.top_k)
CHOOSERS = ("uniform", "accordion", "lgreco", "lgreco-accordion")


def sync_of(config: Run) -> compression.Sync:
    """Return the synchronisation that `--compress [CHOOSER:]COMPRESSOR[:SETTING]` names."""
    text = config.compress or "none"
    parts = text.split(":")
    chooser = parts.pop(0) if parts[0] in CHOOSERS else "uniform"
    name, *setting = parts or [""]
    if name not in (*COMPRESSORS, "none") or len(setting) > (name != "none"):
        raise Mistake(
            f"--compress {text}: expected [CHOOSER:]COMPRESSOR[:SETTING], as lgreco:powersgd:4, "
            f"with one of {', '.join(CHOOSERS)} and of {', '.join(COMPRESSORS)}, none"
        )
    # Outer gradients come seldom: what rounding loses is kept for the next one.
    feeds = dict(error_feedback=True) if name == "qsgd" and config.local_updates else {}
    try:
        if name == "none":
            compressor = compression.none()
        else:
            number = float if name == "topk" else int
            compressor = COMPRESSORS[name](*map(number, setting), **feeds)  # type: ignore[operator]
        when: dict[str, Any] = dict(every=config.compress_every, seed=config.seed)
        switch = compression.accordion
        return {
            "uniform": lambda: compression.uniform(compressor, seed=config.seed),
            "accordion": lambda: switch(compressor, **when),
            "lgreco": lambda: compression.lgreco(compressor, **when),
            "lgreco-accordion": lambda: compression.lgreco(switch(compressor), **when),
        }[chooser]()
    except ValueError as error:
        raise Mistake(f"--compress {text}: {error}") from error


def stacked_in(params: Any) -> tuple[str, ...]:
    """Return the key below which a model's layers are stacked, if it has one."""
    return ("layers",) if "layers" in params else ()


def train(recipe: Recipe, config: Run) -> trainer.Trained:
    """Train by compressed data parallelism over the mesh axis `worker`."""
    mesh = recipe.make_mesh(config)
    params = recipe.abstract_args(config, mesh)[0]["params"]
    step = compression.data_parallel(
        jax.value_and_grad(recipe.make_loss(config, mesh), has_aux=True),
        make_optimizer(config),
        mesh,
        axis="worker",
        sync=sync_of(config),
        stacked=stacked_in(params),
        overlap=not (config.plain or config.ops),
    )
    with Checkpoints(config) as checkpoints, jaxoverlap.lost_named(within_s(config)):
        state, begin = restored(checkpoints, step, params)
        if state is None:
            state = step.init(recipe.init_state(config, mesh, config.seed)["params"])
        else:
            console.print(f"resuming after step {begin} of {config.steps}")
        batch_of = recipe.batches(config)
        with Report(recipe, config, mesh, begin) as report:
            for index in range(begin, config.steps):
                batch = placed(batch_of(index, slice(0, config.batch)), mesh, P("worker"))
                state, (loss, others) = step(state, batch)
                report.add(index, dict(loss=loss, **others))
                checkpoints.save(index + 1, state, {"next_index": index + 1})
            step.check()
    if jax.process_index() == 0 and not console.quiet:
        print(step.explain(state))
    return trainer.Trained(report.rows, step, dict(params=state.params))


def placed(batch: Any, mesh: Mesh, spec: P) -> Any:
    """Shard a batch over the mesh; every process makes the full batch and uses its part."""
    sharding = NamedSharding(mesh, spec)
    return jax.tree.map(
        lambda rows: jax.make_array_from_callback(rows.shape, sharding, lambda index: rows[index]),
        batch,
    )


def restored(
    checkpoints: Checkpoints, step: compression.DataParallel, params: Any
) -> tuple[compression.TrainState | None, int]:
    """Return the newest checkpoint's state, also of another number of workers, and its step."""
    if (newest := checkpoints.newest()) is None:
        return None, 0
    taken, shapes = newest
    errors = jax.tree.leaves((shapes["sync"]["error"], shapes["sync"]["accumulated"]))
    workers = errors[0].shape[0] if errors else None
    found = checkpoints.restore_state(taken, step.abstract(params, workers=workers))
    if workers not in (None, step.workers):
        found = step.spread(step.consolidate(found))
    return found, taken
