"""Train the GPT or the mixture of experts as `jaxoverlap configure` says: one mesh of six axes.

`models.configured_model` has the models and their layout. Micro-batches go through
`jaxoverlap.pipeline`, which computes the gradients itself; to the recipe that is a loss with a
gradient of its own (`models.micro_batches`).
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping
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
    run: Run,
    split: Configuration,
    order: tuple[str, ...] = AXES,
    sizes: Mapping[str, Any] | None = None,
) -> tuple[Recipe, Config]:
    """Return the recipe and the configuration of a run on a mesh of six axes.

    A vocabulary that the axes do not divide is padded.

    Args:
        sizes: fields that differ from the run's.

    Raises:
        Mistake: if the run's sizes do not divide; it says which.
    """
    fields = {field.name for field in dataclasses.fields(Config)} - {"split", "order"}
    values = {name: getattr(run, name) for name in fields if hasattr(run, name)}
    values |= sizes or {}
    shards = split.fsdp * split.model * split.pipeline
    values["vocab"] = -(-values["vocab"] // shards) * shards
    config = Config(split=split, order=order, **values)
    return (MIXTURE if config.experts else DENSE), config


def check_order(order: str, split: Configuration) -> None:
    """Check that a pipeline of a configuration can run in an order.

    XLA refuses ZB-H1's passes, which are branches of a conditional, where axes that it partitions
    are sharded in one and not in another.

    Raises:
        Mistake: if it cannot.
    """
    others = split.fsdp * split.model * split.context * split.expert
    if order != "1F1B" and (split.pipeline == 1 or split.interleave > 1 or others > 1):
        raise Mistake(
            f"--pipeline-order {order} on {split}: expected two stages or more, of one piece each, "
            "and no axis but pipeline and data"
        )


def chosen(recipe: Recipe, run: Run, given: Collection[str] = frozenset()) -> tuple[Recipe, Run]:
    """Return the recipe and run of the file of `--configuration`; without one, the given ones.

    The file's model and batch are trained.

    Args:
        given: the fields of the run that the user gave: these may not differ from the file's.

    Raises:
        Mistake: if the file is not one of `jaxoverlap configure --json`, sizes do not divide, or
            these trainers have not what it asks for.
    """
    path: Path | None = getattr(run, "configuration", None)
    order: str = getattr(run, "pipeline_order", "1F1B")
    if order not in ("1F1B", "ZB-H1"):
        raise Mistake(f"--pipeline-order {order}: expected 1F1B or ZB-H1")
    if path is None:
        if order != "1F1B":
            raise Mistake(f"--pipeline-order {order} without a pipeline: give --configuration")
        return recipe, run
    if run.has_workers or getattr(run, "varlen", False):
        raise Mistake(
            "--configuration has no axis of workers, and texts of one length: leave it out with "
            "--compress, --local-updates and --varlen"
        )
    try:
        found = read_chosen(path)
        sizes = sizes_of_file(found)
        check_given(run, sizes, given)
        check_order(order, found.configuration)
        return configured(run, found.configuration, found.order, sizes)
    except ValueError as error:
        raise Mistake(f"--configuration {path}: {error}") from error


def sizes_of_file(found: Chosen) -> dict[str, Any]:
    """Return the fields of a run that a file sets: its model's and its batch."""
    if found.dtype not in (None, "bf16"):
        raise Mistake(f"made for matmuls in {found.dtype}: these trainers have none; configure "
                      "with --dtype bf16")  # fmt: skip
    split = found.configuration
    if split.experts_on_model or split.offload:
        raise Mistake(
            f"{split}: these trainers split experts over the axis expert alone, and "
            "offload nothing; configure with --stack jax"
        )
    sizes = sizes_of(found.model) if found.model else {}
    return sizes | ({"batch": found.global_batch} if found.global_batch else {})


def check_given(run: Run, sizes: Mapping[str, Any], given: Collection[str]) -> None:
    """Raise `Mistake` if the user gave a size that is not the file's."""
    for name in sorted(set(given) & set(sizes)):
        if getattr(run, name) != sizes[name]:
            raise Mistake(
                f"made for {name}={sizes[name]}, and --{name} is {getattr(run, name)}: leave "
                f"--{name} out, or configure for another"
            )


def sizes_of(model: Transformer) -> dict[str, Any]:
    """Return a model's sizes as fields of a run.

    Biases and learned positions, which these trainers have not, are left out.

    Raises:
        Mistake: if the model has other layers than attention and an MLP or experts.
    """
    kinds = [kind for _, kind in model.kinds]
    alike = len(kinds) == 1 and kinds[0].mixer == "attention" and kinds[0].has_mlp
    if not alike or model.kv_rank or model.shared_mlp or model.expert_hidden or model.predictions:
        raise Mistake(
            f"{model.name} has latent attention, several kinds of layers, or an expert that every "
            "token takes: these trainers have not"
        )
    sizes = dict(
        layers=model.layers, hidden=model.hidden, heads=model.heads, mlp=model.inner,
        sequence=model.sequence, vocab=max(model.vocab, 256), kv_heads=model.kv_heads,
        head_dim=model.head_dim, gated=model.gated, tied=model.tied,
    )  # fmt: skip
    if not model.experts:
        return sizes | dict(experts=0, choices=0)
    group = min(GROUP, model.sequence)
    return sizes | dict(experts=model.experts, choices=model.choices, slack=SLACK, group=group)


def build(
    model: Transformer, split: Configuration, order: tuple[str, ...], global_batch: int, pod: str
) -> tuple[Any, tuple[Any, ...]]:
    """Return the trainer's step for a named model on a pod, and its arguments as shapes.

    Raises:
        Mistake: if sizes do not divide, or the model has layers that this trainer has not.
    """
    run = Config(batch=global_batch, dtype="bfloat16", **sizes_of(model))
    recipe, config = configured(run, split, order)
    mesh = mesh_on(pod_devices(parse_cluster(pod)), config)
    return recipe.make_step(config, mesh), recipe.abstract_args(config, mesh)
