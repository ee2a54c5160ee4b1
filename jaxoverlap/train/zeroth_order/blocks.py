"""Describe a model as blocks, so that one of them at a time can be on the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxoverlap.train.dtypes import at_least_float32


class Weighted(NamedTuple):
    """A loss of examples with different weights: sum / weight, each summed over the batch.

    A mean over the labels of a shard is no mean over those of the batch where shards have other
    numbers of them. Return the parts, and they are added up over the shards before one is divided
    by the other.

    Attributes:
        sum: of the losses of the examples, a scalar.
        weight: what they count, a scalar: the number of labels.
    """

    sum: jax.Array
    weight: jax.Array


def mean_over(loss: Any, total: Callable[[jax.Array], jax.Array], mean: Callable[..., Any]) -> Any:
    """Return the loss over all shards, float32; float64 where it is that.

    Args:
        loss: of the shards, as arrays or `Weighted`.
        total: adds up over the shards.
        mean: averages over them.

    Raises:
        ValueError: if the loss is of other than real floats.
    """
    value = jnp.asarray(loss.sum if isinstance(loss, Weighted) else loss)
    if not jnp.issubdtype(value.dtype, jnp.floating):
        raise ValueError(
            f"the loss is of {value.dtype}: expected real floats, as the step takes the difference "
            "of two losses that are nearly equal; return one of float32"
        )
    loss = jax.tree.map(as_wide, loss)
    if isinstance(loss, Weighted):
        return total(loss.sum) / total(loss.weight)
    return mean(loss)


def as_wide(value: Any) -> jax.Array:
    """Return a value as float32, or in its own dtype if that is wider."""
    value = jnp.asarray(value)
    return value.astype(at_least_float32(value.dtype))


@dataclass(frozen=True)
class Blocks:
    """A loss in three parts, of parameters {"outer": tree, "blocks": tree of stacked layers}.

    Every leaf of "blocks" has a first dim of layers. A value is also an ordinary loss function of
    parameters and a batch.

    Attributes:
        begin: (outer, batch) -> x, as an embedding.
        block: (one layer's part of "blocks", x) -> x.
        end: (outer, x, batch) -> loss, a mean over the batch, or `Weighted`; it may read what
            `begin` does, as a head that is tied to the embedding.
    """

    begin: Callable[[Any, Any], Any]
    block: Callable[[Any, Any], Any]
    end: Callable[[Any, Any, Any], jax.Array]

    def __call__(self, params: Any, batch: Any) -> jax.Array:
        """Return the loss, all layers on the device."""
        x = self.begin(params["outer"], batch)
        x, _ = jax.lax.scan(lambda x, layer: (self.block(layer, x), None), x, params["blocks"])
        return self.end(params["outer"], x, batch)


def depth(blocks: Any) -> int:
    """Return the number of stacked layers.

    Raises:
        ValueError: if there are none, or leaves disagree.
    """
    found = {leaf.shape[:1] for leaf in jax.tree.leaves(blocks)}
    if len(found) != 1 or found == {()}:
        raise ValueError(
            f'leaves of params["blocks"] have first dims {sorted(found)}: expected one for all, '
            "the number of layers; stack the layers' parameters"
        )
    return found.pop()[0]
