"""Parts that all models share: sharding constraints, weights, norms, the scan over layers."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoverlap
from models.config import Run


@dataclass(frozen=True)
class Layout:
    """The shardings of a transformer's activations.

    `stream` is the residual stream [batch, sequence, hidden] and all that is sharded like it,
    `heads` are q, k, v and attention's result [batch, sequence, heads, size], `scores` is [batch,
    heads, query, key], and `inner` is inside the MLP [batch, sequence, mlp].
    """

    stream: P
    heads: P
    scores: P
    inner: P


def shard(x: jax.Array, mesh: Mesh, spec: P) -> jax.Array:
    """Constrain the sharding of `x`, and in the backward pass of its cotangent, to `spec`.

    Inside a shard_map, as a pipeline has, the mesh is the context's, and nothing can be pinned over
    its manual axes: there `x` is a device's part already.
    """
    manual = jax.sharding.get_abstract_mesh().manual_axes
    if not manual:
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))
    return jax.lax.with_sharding_constraint(x, without(spec, manual))


def without(spec: P, axes: Collection[str]) -> P:
    """Return a spec without some axes."""

    def left(entry: Any) -> Any:
        names = entry if isinstance(entry, tuple) else (entry,)
        return tuple(name for name in names if name is not None and name not in axes) or None

    return P(*map(left, spec))


def wide(dtype: Any) -> jnp.dtype:
    """Return the dtype for sums over many elements: float32, or `dtype` if that is wider."""
    return jnp.promote_types(dtype, jnp.float32)


def einsum_of(config: Run) -> Callable[..., Any]:
    """Return the einsum for a model's matmuls: JAX's, or `jaxoverlap.einsum`."""
    return jaxoverlap.einsum if config.ops else jnp.einsum


class Weight(nnx.Module):
    """A weight [*shape], stored in param_dtype at `spec`, and used in the dtype of activations."""

    def __init__(self, config: Run, mesh: Mesh, rngs: nnx.Rngs, spec: P, shape, std: float):
        value = jax.random.normal(rngs.params(), shape, config.param_dtype) * std
        self.weight = nnx.Param(value, spec=spec)
        self.config, self.mesh, self.spec = config, mesh, spec

    def __call__(self) -> jax.Array:
        # Cast, then pin: FSDP's gather moves the narrow type, and the constraint's transpose
        # makes the gradient a reduce-scatter inside the layer loop instead of an all-reduce.
        return shard(self.weight[...].astype(self.config.dtype), self.mesh, self.spec)


class Norm(nnx.Module):
    """RMSNorm of the residual stream, sharded as `spec`."""

    def __init__(self, config: Run, mesh: Mesh, spec: P):
        self.scale = nnx.Param(jnp.ones(config.hidden, config.param_dtype), spec=P(None))
        self.mesh, self.spec = mesh, spec

    def __call__(self, x: jax.Array) -> jax.Array:
        y = x.astype(wide(x.dtype))
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + 1e-6)
        return shard((y * self.scale[...]).astype(x.dtype), self.mesh, self.spec)


def rotate(x: jax.Array, positions: jax.Array | None = None) -> jax.Array:
    """Apply rotary positions to x [batch, sequence, heads, size] (Su et al., arXiv:2104.09864).

    `positions` [batch, sequence]; none: each row begins at zero.
    """
    sequence, half = x.shape[1], x.shape[3] // 2
    dtype = wide(x.dtype)
    frequency = 10000.0 ** (-jnp.arange(half, dtype=dtype) / half)
    at = jnp.arange(sequence, dtype=dtype) if positions is None else positions.astype(dtype)
    angle = at[..., None, None] * frequency
    cos, sin = jnp.cos(angle).astype(x.dtype), jnp.sin(angle).astype(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def stack(new_layer: Callable[[nnx.Rngs], Any], count: int, rngs: nnx.Rngs) -> Any:
    """Return `count` layers as one, whose weights have an additional first dim."""
    return nnx.split_rngs(splits=count)(nnx.vmap(new_layer))(rngs)


def run_stack(layers: Any, x: Any, *arguments: Any) -> Any:
    """Run stacked layers in one scan; `x` is the scan's carry.

    Each layer is called with `x` and what else is given to all of them alike.
    """
    definition, weights = nnx.split(layers)

    def layer(x, weights):
        return nnx.merge(definition, weights)(x, *arguments), None

    # Remat: the backward pass keeps only each layer's input and computes the rest again.
    return jax.lax.scan(jax.checkpoint(layer, prevent_cse=False), x, weights)[0]


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Return the mean of -log p(target), in nats."""
    at_target = jax.nn.one_hot(targets, logits.shape[-1], dtype=logits.dtype)
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - jnp.sum(logits * at_target, axis=-1))
