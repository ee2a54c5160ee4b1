"""Train the GPT or the mixture of experts as `jaxoverlap configure` says: one mesh of six axes.

`models.configured_model` has the models and their layout. Micro-batches go through
`jaxoverlap.pipeline`, which computes the gradients itself; to the recipe that is a loss with a
gradient of its own (`models.micro_batches`).
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxoverlap.hardware.cluster import parse_cluster
from jaxoverlap.hardware.pods import devices as pod_devices
from jaxoverlap.parallelism.configuration import AXES, Chosen, Configuration, read_chosen
from jaxoverlap.parallelism.model import Transformer
from jaxoverlap.parallelism.placement import Placement
from jaxoverlap.parallelism.sharding import mesh_of
from models import gpt, micro_batches
from models.config import Mistake, Run
from models.configured_model import GPT, GROUP, SLACK, Config, MoE
from models.recipe import Recipe


@dataclasses.dataclass(frozen=True)
class Configured(Recipe):
    """A recipe on six axes, with micro-batches and pipeline stages."""

    def make_mesh(self, config: Run) -> Mesh:
        return mesh_on(jax.devices(), config)

    def new_params(self, config: Any, mesh: Mesh, seed: int) -> dict[str, Any]:
        """Return new parameters; shorter pipeline chunks are padded by identity layers."""
        params = super().new_params(config, mesh, seed)
        real = micro_batches.real_layers(config)
        if real.all():
            return params
        at = np.flatnonzero(real)

        def padded(a: jax.Array) -> jax.Array:
            return jnp.zeros((real.size, *a.shape[1:]), a.dtype).at[at].set(a)

        return {**params, "layers": jax.tree.map(padded, params["layers"])}

    def state_shardings(self, config: Any, mesh: Mesh) -> dict[str, Any]:
        """Return the state's shardings: layers over stages; under ZeRO-1 moments over replicas."""

        def over_stages(path: Any, sharding: NamedSharding) -> NamedSharding:
            if not any(getattr(key, "key", None) == "layers" for key in path):
                return sharding
            return NamedSharding(mesh, P("pipeline", *sharding.spec[1:]))

        state = jax.tree_util.tree_map_with_path(over_stages, super().state_shardings(config, mesh))
        if not config.split.zero_stage:
            return state
        like = jax.eval_shape(lambda: self.new_state(config, mesh, 0))["optimizer"]
        moments = jax.tree.map(zero_sharding, state["optimizer"], like)
        return {**state, "optimizer": moments}

    def placed_gradients(self, config: Any, mesh: Mesh, gradients: Any) -> Any:
        """Return gradients sharded as the moments: under ZeRO-1 a device updates its shard only."""
        if not config.split.zero_stage:
            return gradients
        at = self.state_shardings(config, mesh)["params"]
        shardings = jax.tree.map(zero_sharding, at, gradients)
        return jax.lax.with_sharding_constraint(gradients, shardings)

    def make_loss(self, config: Any, mesh: Mesh) -> Callable:
        if config.split.pipeline > 1:
            return micro_batches.pipelined(self, config, mesh)
        if config.micro_batches > 1:
            return micro_batches.accumulated(super().make_loss(config, mesh), config, mesh)
        return super().make_loss(config, mesh)


def zero_sharding(sharding: NamedSharding, like: Any) -> NamedSharding:
    """Return a moment's sharding under ZeRO-1: one dim is also sharded over the replicating axes.

    The dim that `fsdp` splits where it can be divided so, else the first that can; none: as it is.
    """
    mesh = sharding.mesh
    spec = [*sharding.spec, *[None] * (like.ndim - len(sharding.spec))]
    entries = [entry if isinstance(entry, tuple) else (entry,) if entry else () for entry in spec]
    used = {name for entry in entries for name in entry}
    free = tuple(a for a in ("data", "context", "expert") if a not in used and mesh.shape[a] > 1)
    ways = int(np.prod([mesh.shape[axis] for axis in free]))
    for dim in sorted(range(like.ndim), key=lambda dim: "fsdp" not in entries[dim]):
        shards = int(np.prod([mesh.shape[axis] for axis in entries[dim]])) * ways
        if free and like.shape[dim] % shards == 0:
            spec[dim] = (*entries[dim], *free)
            return NamedSharding(mesh, P(*spec))
    return sharding


def mesh_on(devices: Any, config: Any) -> Mesh:
    """Return the mesh of a configuration, with its axes in the placement's order."""
    split = config.split
    if len(devices) < split.devices:
        raise Mistake(
            f"{split} needs {split.devices} devices and JAX sees {len(devices)}; "
            "configure for fewer, or on a CPU ask for more (jax_num_cpu_devices)"
        )
    sizes = tuple(split.axes[axis] for axis in config.order)
    return mesh_of(Placement(config.order, sizes, domain=1), devices)


DENSE = Configured(Config, GPT, gpt.RECIPE.batches)
MIXTURE = Configured(Config, MoE, gpt.RECIPE.batches)


def configured(
    run: Run, split: Configuration, order: tuple[str, ...] = AXES
) -> tuple[Recipe, Config]:
    """Return the recipe and the configuration of a run on a mesh of six axes.

    A vocabulary that the axes do not divide is padded.

    Raises:
        Mistake: if the run's sizes do not divide; it says which.
    """
    fields = {field.name for field in dataclasses.fields(Config)} - {"split", "order"}
    values = {name: getattr(run, name) for name in fields if hasattr(run, name)}
    shards = split.fsdp * split.model * split.pipeline
    values["vocab"] = -(-values["vocab"] // shards) * shards
    config = Config(split=split, order=order, **values)
    return (MIXTURE if config.experts else DENSE), config


def chosen(recipe: Recipe, run: Run) -> tuple[Recipe, Run]:
    """Return the recipe and run of the file of `--configuration`; without one, the given ones.

    Raises:
        Mistake: if the file is not one of `jaxoverlap configure --json`, or sizes do not divide.
    """
    path: Path | None = getattr(run, "configuration", None)
    if path is None:
        return recipe, run
    if run.has_workers:
        raise Mistake(
            "--configuration has no axis of workers: leave it out with --compress and "
            "--local-updates"
        )
    try:
        found = read_chosen(path)
        same_batch(run, found)
        return configured(run, found.configuration, found.order)
    except ValueError as error:
        raise Mistake(f"--configuration {path}: {error}") from error


def same_batch(run: Run, found: Chosen) -> None:
    """Raise `Mistake` if a file was made for another batch: its micro-batches would differ."""
    if found.global_batch not in (None, run.batch):
        raise Mistake(
            f"made for a batch of {found.global_batch}, and --batch is {run.batch}: give "
            f"--batch {found.global_batch}, or configure for another"
        )


def build(
    model: Transformer, split: Configuration, order: tuple[str, ...], global_batch: int, pod: str
) -> tuple[Any, tuple[Any, ...]]:
    """Return the trainer's step for a named model on a pod, and its arguments as shapes.

    Biases and learned positions, which this trainer has not, are left out.

    Raises:
        Mistake: if sizes do not divide, or the model has an expert that every token takes.
    """
    if model.shared_mlp:
        raise Mistake(f"shared_mlp={model.shared_mlp}: these trainers have no such expert")
    run = Config(
        layers=model.layers, hidden=model.hidden, heads=model.heads, mlp=model.inner,
        batch=global_batch, sequence=model.sequence, vocab=max(model.vocab, 256),
        kv_heads=model.kv_heads, head_dim=model.head_dim, gated=model.gated, tied=model.tied,
        experts=model.experts, choices=model.choices, dtype="bfloat16", slack=SLACK,
        group=min(GROUP, model.sequence),
    )  # fmt: skip
    recipe, config = configured(run, split, order)
    mesh = mesh_on(pod_devices(parse_cluster(pod)), config)
    return recipe.make_step(config, mesh), recipe.abstract_args(config, mesh)
