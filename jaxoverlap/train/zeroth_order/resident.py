"""Take a zeroth-order step whose parameters are all on the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxoverlap.train.zeroth_order.blocks import Weighted, as_wide, mean_over
from jaxoverlap.train.zeroth_order.directions import Draw
from jaxoverlap.train.zeroth_order.estimator import Mezo
from jaxoverlap.train.zeroth_order.layout import BatchLayout
from jaxoverlap.train.zeroth_order.state import ZOState, after, nothing, outcome


@dataclass(frozen=True)
class Resident:
    """A step of any loss function, as pure functions of arrays.

    Attributes:
        loss: (parameters, batch, *rest) -> loss; with `has_aux` (loss, aux).
        transform: the estimator.
        layout: which device does what.
        deferred: whether an update is made at the next step's start.
        has_aux: whether the loss comes with other numbers to report.
    """

    loss: Callable[..., jax.Array]
    transform: Mezo
    layout: BatchLayout
    deferred: bool = False
    has_aux: bool = False

    def step(self, state: ZOState, batch: Any, *rest: Any) -> tuple[ZOState, dict[str, Any]]:
        """Take one step."""
        transform = self.transform
        params = self._made(state) if self.deferred else state.params
        shards = self.layout.split(batch)

        leaves, treedef = jax.tree.flatten(rest)

        def losses(number: Any) -> tuple[jax.Array, Any]:
            draw = Draw(state.key, state.step, number)

            def one(sign: jax.Array, _: None) -> tuple[jax.Array, Any]:
                moved = transform.perturbed(params, draw, sign)

                def loss(shard: Any) -> Any:
                    # Objects with a state (nnx.Rngs) are made anew, as none may outlive its trace.
                    found = self.loss(moved, shard, *jax.tree.unflatten(treedef, leaves))
                    return checked_loss(found, self.has_aux)

                of, aux = self.layout.each_shard(loss, shards)
                aux = jax.tree.map(lambda x: as_wide(x).mean(0), aux)
                return mean_over(of, jnp.sum, jnp.mean), aux

            return self.layout.pinned(self.layout.each_sign(one))

        found, aux = jax.lax.map(losses, jnp.arange(transform.directions))
        pending, metrics = outcome(transform, state, found)
        if self.has_aux:
            metrics["aux"] = jax.tree.map(lambda x: x.mean((0, 1)), aux)
        if self.deferred:
            return after(state, params, pending), metrics
        params = transform.applied(pending, state.key, params)
        return after(state, params, nothing(transform)), metrics

    def flush(self, state: ZOState) -> ZOState:
        """Make the pending update."""
        return state._replace(params=self._made(state), pending=nothing(self.transform))

    def _made(self, state: ZOState) -> Any:
        return self.transform.applied(state.pending, state.key, state.params)


def checked_loss(found: Any, has_aux: bool) -> tuple[Any, Any]:
    """Return the loss and what comes with it, None if nothing does.

    Raises:
        ValueError: if that is not what a loss function returned.
    """
    pair = isinstance(found, tuple) and not isinstance(found, Weighted)
    if has_aux != pair or (pair and len(found) != 2):
        raise ValueError(
            f"the loss function returned a {type(found).__name__}: expected "
            f"{'(loss, aux), as has_aux=True says' if has_aux else 'a loss (has_aux=False)'}"
        )
    loss, aux = found if has_aux else (found, None)
    for part in jax.tree.leaves(loss):
        if jnp.shape(part):
            raise ValueError(
                f"the loss has the shape {jnp.shape(part)}: expected a scalar; average it over the "
                "batch, or return Weighted(sum, weight)"
            )
    return loss, jax.tree.map(jnp.asarray, aux)
