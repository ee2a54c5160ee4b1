"""Take the GPT apart into blocks, so that zeroth-order steps can stream them from host memory."""

from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jaxoverlap.train import zeroth_order as zo
from models.layers import cross_entropy
from models.recipe import Recipe


def blocks_of(recipe: Recipe, config: Any, mesh: Mesh) -> zo.Blocks:
    """Return a GPT's loss as blocks: the embedding, a layer, and the head with the loss."""
    model: Any = nnx.eval_shape(lambda: recipe.model(config, mesh, nnx.Rngs(0)))
    definition, state = nnx.split(model)
    layer_definition, _ = nnx.split(model.layers)
    no_layers = nnx.to_pure_dict(state)["layers"]

    def without_layers(outer: Any) -> Any:
        return nnx.merge(definition, {**outer, "layers": no_layers})

    def begin(outer: Any, batch: Any) -> jax.Array:
        found = without_layers(outer)
        return found.embed(batch["inputs"], found.embedding())

    def block(layer: Any, x: jax.Array) -> jax.Array:
        return nnx.merge(layer_definition, layer)(x)

    def end(outer: Any, x: jax.Array, batch: Any) -> jax.Array:
        found = without_layers(outer)
        return cross_entropy(found.score(x, found.embedding()), batch["targets"])

    return zo.Blocks(begin, block, end)


def in_blocks(params: Any) -> dict[str, Any]:
    """Return a GPT's parameters as those of its blocks."""
    outer = {name: part for name, part in params.items() if name != "layers"}
    return dict(outer=outer, blocks=params["layers"])


def of_blocks(params: Any) -> dict[str, Any]:
    """Return a GPT's parameters from those of its blocks."""
    return {**params["outer"], "layers": params["blocks"]}


def replayed(step: zo.ZOStep, records: np.ndarray, params: Any, seed: int) -> zo.ZOState:
    """Return the state after a log's steps, replayed on the host, which has room for all blocks."""
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        found = zo.replay(records, step.transform, jax.tree.map(np.asarray, params), seed=seed)
        found = jax.tree.map(np.asarray, found._replace(key=jax.random.key_data(found.key)))
    start = step.init(found.params, seed=seed)
    return start._replace(step=jax.device_put(found.step, start.step.sharding))
