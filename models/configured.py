"""Train the GPT or the mixture of experts as `jaxoverlap configure` says: one mesh of six axes.

    activation              shape                             sharding
    residual stream         [batch, sequence, hidden]         (BATCH, ("context", "model"), None)
    q, k, v, attended       [batch, sequence, heads, size]    (BATCH, "context", "model", None)
    scores                  [batch, heads, query, key]        (BATCH, "model", "context", None)
    MLP inner               [batch, sequence, mlp]            (BATCH, "context", "model")
    at the experts          [expert, group, slot, hidden]     ("expert", DATA, None, None)

DATA is ("data", "fsdp"), BATCH is ("data", "fsdp", "expert"). Weights lie over fsdp and model,
experts over expert too, and layers over pipeline. Micro-batches go through
`jaxoverlap.parallelism.pipeline`, which computes the gradients itself; to the recipe that is a
loss with a gradient of its own.
"""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import msgspec
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxoverlap.parallelism.configuration import AXES, Configuration
from jaxoverlap.parallelism.configure import load_configuration
from jaxoverlap.parallelism.pipeline.execute import value_and_grad
from jaxoverlap.parallelism.pipeline.schedule import stage_order
from models import gpt, moe
from models.config import Mistake, Run, TextRun
from models.layers import Layout, cross_entropy, run_stack, shard, wide
from models.recipe import Recipe

BATCH = ("data", "fsdp", "expert")
SIX_AXES = Layout(
    stream=P(BATCH, ("context", "model"), None),
    heads=P(BATCH, "context", "model", None),
    scores=P(BATCH, "model", "context", None),
    inner=P(BATCH, "context", "model"),
)


@dataclasses.dataclass(frozen=True)
class Config(TextRun):
    """The GPT's or the mixture's sizes, on a mesh of six axes."""

    AXES: ClassVar[tuple[str, str]] = ("fsdp", "model")  # of weights: rows, columns
    FROM_0: ClassVar[frozenset[str]] = TextRun.FROM_0 | {"experts", "choices", "balance"}

    split: Configuration = dataclasses.field(default_factory=Configuration)
    experts: int = 0
    choices: int = 0
    group: int = 64
    slack: float = 2.0
    balance: float = 1e-2

    @property
    def mesh(self) -> dict[str, int]:
        return self.split.axes

    @property
    def micro_batches(self) -> int:
        return self.split.micro_batches(self.batch)

    @property
    def capacity(self) -> int:
        return moe.Config.capacity.fget(self)  # type: ignore[attr-defined]

    def divisors(self) -> Iterator[tuple[str, str, int]]:
        of = self.split
        yield "hidden", "heads", self.heads
        yield "hidden", "fsdp", of.fsdp
        yield "batch", "micro-batches of all devices", of.batch_ways * of.micro_batch
        yield "heads", "model", of.model
        yield "mlp", "model", of.model
        yield "vocab", "fsdp x model", of.fsdp * of.model
        yield "sequence", "context x model", of.context * of.model
        yield "layers", "pieces of all stages", of.pipeline * of.interleave


class GPT(gpt.GPT):
    """The GPT in three parts: before the layers, a run of layers, after them."""

    at = SIX_AXES
    config: Any

    def first(self, batch: dict[str, jax.Array]) -> Any:
        return self.embed(batch["inputs"], self.embedding())

    def last(self, x: Any, batch: dict[str, jax.Array]) -> jax.Array:
        return cross_entropy(self.score(x, self.embedding()), batch["targets"])

    def loss(self, batch: dict[str, jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
        return self.last(run_stack(self.layers, self.first(batch)), batch), {}


class Experts(moe.Experts):
    """The mixture's: a sequence is whole where it is routed, experts' columns lie over model."""

    router_at = P("fsdp", None)
    up_at, down_at = P("expert", "fsdp", "model"), P("expert", "model", "fsdp")
    tokens_at, mask_at = P(BATCH, None, None), P(BATCH, None, None, None)
    there_at = P("expert", ("data", "fsdp"), None, None)
    inner_at = P("expert", ("data", "fsdp"), None, "model")


class Block(moe.Block):
    """The mixture's block on six axes."""

    mlp_type = Experts
    load_at = P(BATCH)


class MoE(GPT):
    """The GPT with experts, and in its loss a price for using them unevenly."""

    block = Block

    def first(self, batch: dict[str, jax.Array]) -> Any:
        groups = batch["inputs"].size // self.config.group
        even = shard(jnp.zeros(groups, wide(self.config.dtype)), self.mesh, P(BATCH))
        return super().first(batch), even

    def last(self, x: Any, batch: dict[str, jax.Array]) -> jax.Array:
        stream, load = x
        text = super().last(stream, batch)
        return text + self.config.balance * jnp.mean(load) / self.config.layers


@dataclasses.dataclass(frozen=True)
class Configured(Recipe):
    """A recipe on six axes, whose loss goes through the pipeline in micro-batches."""

    def make_mesh(self, config: Run) -> Mesh:
        devices, sizes = jax.devices(), tuple(config.mesh.values())
        needed = config.split.devices  # type: ignore[attr-defined]
        if len(devices) < needed:
            raise Mistake(
                f"{config.split} needs {needed} devices and JAX sees {len(devices)}; "  # type: ignore[attr-defined]
                "configure for fewer, or on a CPU ask for more (jax_num_cpu_devices)"
            )
        kinds = (AxisType.Auto,) * len(AXES)
        return jax.make_mesh(sizes, AXES, kinds, devices=devices[:needed])

    def state_shardings(self, config: Run, mesh: Mesh) -> dict[str, Any]:
        """The recipe's, with the layers' first dim over the stages."""

        def over_stages(path: Any, at: NamedSharding) -> NamedSharding:
            if not any(getattr(key, "key", None) == "layers" for key in path):
                return at
            return NamedSharding(mesh, P("pipeline", *at.spec[1:]))

        return jax.tree_util.tree_map_with_path(over_stages, super().state_shardings(config, mesh))

    def make_loss(self, config: Run, mesh: Mesh) -> Callable:
        split = config.split  # type: ignore[attr-defined]
        if split.pipeline == 1 and split.micro_batches(config.batch) == 1:
            return super().make_loss(config, mesh)
        return pipelined_loss(self, config, mesh)


def pipelined_loss(recipe: Recipe, config: Any, mesh: Mesh) -> Callable:
    """loss(params, batch) -> (the loss, {}), its gradients computed by the pipeline."""
    model: Any = nnx.eval_shape(lambda: recipe.model(config, mesh, nnx.Rngs(0)))
    definition, state = nnx.split(model)
    layers_definition, _ = nnx.split(model.layers)
    no_layers = nnx.to_pure_dict(state)["layers"]
    of = config.split
    order = jnp.array(stage_order(of.pipeline, of.interleave))

    def without_layers(shared: Any) -> Any:
        return nnx.merge(definition, {**shared, "layers": no_layers})

    pieces = of.pipeline * of.interleave
    run = value_and_grad(
        lambda weights, x: run_stack(nnx.merge(layers_definition, weights), x),
        first=lambda shared, batch: without_layers(shared).first(batch),
        last=lambda shared, x, batch: without_layers(shared).last(x, batch),
        mesh=mesh,
        micro_batches=config.micro_batches,
        pieces=of.interleave,
    )

    def to_pieces(a: jax.Array) -> jax.Array:
        a = a.reshape(pieces, -1, *a.shape[1:])
        return a if of.interleave == 1 else a[order]

    def from_pieces(a: jax.Array) -> jax.Array:
        a = a if of.interleave == 1 else jnp.zeros_like(a).at[order].set(a)
        return a.reshape(-1, *a.shape[2:])

    def micro_batched(a: jax.Array) -> jax.Array:
        return jnp.swapaxes(a.reshape(-1, config.micro_batches, *a.shape[1:]), 0, 1)

    def value(params: Any, batch: Any) -> tuple[jax.Array, Any]:
        shared = {name: of for name, of in params.items() if name != "layers"}
        stages = jax.tree.map(to_pieces, params["layers"])
        loss, (of_stages, of_shared) = run(stages, shared, jax.tree.map(micro_batched, batch))
        return loss, {**of_shared, "layers": jax.tree.map(from_pieces, of_stages)}

    @jax.custom_vjp
    def loss(params: Any, batch: Any) -> jax.Array:
        return value(params, batch)[0]

    def backward(gradients: Any, cotangent: jax.Array) -> tuple[Any, None]:
        return jax.tree.map(lambda g: (g * cotangent).astype(g.dtype), gradients), None

    loss.defvjp(value, backward)
    return lambda params, batch: (loss(params, batch), {})


DENSE = Configured(Config, GPT, gpt.RECIPE.batches)
MIXTURE = Configured(Config, MoE, gpt.RECIPE.batches)


def configured(run: TextRun, split: Configuration) -> tuple[Recipe, Config]:
    """The recipe and the configuration of a run, split as `split` says."""
    names = {field.name for field in dataclasses.fields(Config)} - {"split"}
    same = {f.name: getattr(run, f.name) for f in dataclasses.fields(run) if f.name in names}
    config = Config(**same, split=split)
    return (MIXTURE if config.experts else DENSE), config


def read_configuration(path: Path) -> Configuration:
    """The first configuration of a file that `jaxoverlap configure --json` wrote.

    Raises:
        Mistake: if it cannot be read, or is none.
    """
    try:
        data = msgspec.json.decode(path.read_bytes())
        return load_configuration(data.get("configurations", [data])[0])
    except (OSError, ValueError, LookupError, AttributeError, TypeError) as error:
        raise Mistake(
            f"--configuration {path}: {error}; expected a file that `jaxoverlap configure --json` "
            "wrote, or one configuration of it"
        ) from error


def chosen(recipe: Recipe, run: Run) -> tuple[Recipe, Run]:
    """The recipe and run of the file that a run's `configuration` names, or those given."""
    path = getattr(run, "configuration", None)
    if path is None:
        return recipe, run
    assert isinstance(run, TextRun)
    if run.has_workers:
        raise Mistake(
            "--configuration has no axis of workers: leave it out with --compress and "
            "--local-updates"
        )
    return configured(run, read_configuration(path))
