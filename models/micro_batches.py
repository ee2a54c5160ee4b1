"""Run a step in micro-batches: through the stages of a pipeline, or one after the other."""

from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jaxoverlap.parallelism import pipeline
from jaxoverlap.parallelism.configuration import Configuration
from models.recipe import Recipe

DATA = ("data",)  # the axes over which no weight is split


def run_layers(layers: Any, x: Any, split: Configuration, real: Any = None) -> Any:
    """Run stacked layers in one scan, recomputing as a configuration says.

    `real` [layer] is 0 for layers that hand on what they are given; None: all are layers.
    """
    definition, weights = nnx.split(layers)

    def layer(x: Any, sliced: tuple[Any, Any]) -> tuple[Any, None]:
        weights, real = sliced
        y = nnx.merge(definition, weights)(x)
        if real is None:
            return y, None
        return jax.tree.map(lambda new, old: jnp.where(real > 0, new, old), y, x), None

    if split.recompute != "none":
        layer = jax.checkpoint(layer, prevent_cse=False, policy=policy(split.saved))
    return jax.lax.scan(layer, x, (weights, real))[0]


def policy(saved: Collection[str]) -> Callable[..., bool]:
    """Return a policy of jax.checkpoint that saves the values of these names (`recompute.VALUES`).

    Attention that is a kernel is saved with what its gradient's kernel reads besides.
    """
    named = jax.checkpoint_policies.save_only_these_names(*saved)

    def saves(prim: Any, *avals: Any, **params: Any) -> bool:
        fused = "attention" in saved and "dot_product_attention_fwd" in str(prim)
        return fused or named(prim, *avals, **params)

    return saves


def real_layers(config: Any) -> np.ndarray:
    """Return 1 for each stored layer that is no padding, float32 [chunks x layers of the largest].

    Chunks are of equal size in one program; those with a layer fewer end in one that does nothing.
    """
    most = max(config.chunks)
    return np.array(
        [float(i < layers) for layers in config.chunks for i in range(most)], np.float32
    )


def micro_batched(batch: Any, count: int) -> Any:
    """Return a batch's arrays [batch, ...] reshaped to [micro-batch, sequence, ...]."""
    return jax.tree.map(lambda a: jnp.swapaxes(a.reshape(-1, count, *a.shape[1:]), 0, 1), batch)


def with_gradients(value: Callable[[Any, Any], tuple[jax.Array, Any]]) -> Callable:
    """Return loss(params, batch) -> (loss, {}) from a function that returns loss and gradients."""

    @jax.custom_vjp
    def loss(params: Any, batch: Any) -> jax.Array:
        return value(params, batch)[0]

    def backward(gradients: Any, cotangent: jax.Array) -> tuple[Any, None]:
        return jax.tree.map(lambda g: (g * cotangent).astype(g.dtype), gradients), None

    loss.defvjp(value, backward)
    return lambda params, batch: (loss(params, batch), {})


def accumulated(loss: Callable, config: Any, mesh: Mesh) -> Callable:
    """Return loss(params, batch) -> (loss, {}), whose gradients are summed over micro-batches."""
    add_up = pipeline.accumulated(
        lambda params, batch: loss(params, batch)[0], mesh=mesh, data=DATA
    )
    return with_gradients(
        lambda params, batch: add_up(params, micro_batched(batch, config.micro_batches))
    )


def pipelined(recipe: Recipe, config: Any, mesh: Mesh) -> Callable:
    """Return loss(params, batch) -> (loss, {}), whose gradients the pipeline computes."""
    model: Any = nnx.eval_shape(lambda: recipe.model(config, mesh, nnx.Rngs(0)))
    definition, state = nnx.split(model)
    layers_definition, _ = nnx.split(model.layers)
    no_layers = nnx.to_pure_dict(state)["layers"]
    split, real = config.split, real_layers(config)
    chunks = split.pipeline * split.interleave
    order = np.array(pipeline.stage_order(split.pipeline, split.interleave))

    def without_layers(shared: Any) -> Any:
        return nnx.merge(definition, {**shared, "layers": no_layers})

    def stage(weights: Any, x: Any) -> Any:
        layers = nnx.merge(layers_definition, weights["layers"])
        return run_layers(layers, x, split, weights.get("real"))

    run = pipeline.value_and_grad(
        stage,
        first=lambda shared, batch: without_layers(shared).first(batch),
        last=lambda shared, x, batch: without_layers(shared).last(x, batch),
        mesh=mesh,
        micro_batches=config.micro_batches,
        pieces=split.interleave,
        data=DATA,
        order=config.pipeline_order,
    )

    def to_chunks(a: jax.Array) -> jax.Array:
        a = a.reshape(chunks, -1, *a.shape[1:])
        return a if split.interleave == 1 else a[order]

    def from_chunks(a: jax.Array) -> jax.Array:
        a = a if split.interleave == 1 else jnp.zeros_like(a).at[order].set(a)
        return a.reshape(-1, *a.shape[2:])

    def value(params: Any, batch: Any) -> tuple[jax.Array, Any]:
        shared = {name: weights for name, weights in params.items() if name != "layers"}
        stages = {"layers": jax.tree.map(to_chunks, params["layers"])}
        if not real.all():
            stages["real"] = to_chunks(jnp.asarray(real))
        split_batch = micro_batched(batch, config.micro_batches)
        loss, (of_stages, of_shared) = run(stages, shared, split_batch)
        layers = jax.tree.map(from_chunks, of_stages["layers"])
        return loss, {**of_shared, "layers": layers}

    return with_gradients(value)
