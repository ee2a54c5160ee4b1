"""Take a zeroth-order step whose parameters are all on the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxoverlap.train.zeroth_order.directions import Draw
from jaxoverlap.train.zeroth_order.estimator import Mezo
from jaxoverlap.train.zeroth_order.layout import Layout
from jaxoverlap.train.zeroth_order.state import ZOState, after, nothing, outcome


@dataclass(frozen=True)
class Resident:
    """A step of any loss function, as pure functions of arrays.

    Attributes:
        loss: (parameters, batch, *rest) -> loss.
        transform: the estimator.
        layout: which device does what.
        deferred: whether an update is made at the next step's start.
    """

    loss: Callable[..., jax.Array]
    transform: Mezo
    layout: Layout
    deferred: bool = False

    def step(self, state: ZOState, batch: Any, *rest: Any) -> tuple[ZOState, dict[str, Any]]:
        """Take one step."""
        transform = self.transform
        params = self._made(state) if self.deferred else state.params
        shards = self.layout.split(batch)

        def losses(number: Any) -> jax.Array:
            draw = Draw(state.key, state.step, number)

            def one(sign: jax.Array, _: None) -> jax.Array:
                moved = transform.perturbed(params, draw, sign)
                of = self.layout.each_shard(lambda shard: self.loss(moved, shard, *rest), shards)
                return of.astype(jnp.float32).mean()

            return self.layout.pinned(self.layout.each_sign(one))

        found = jax.lax.map(losses, jnp.arange(transform.directions))
        pending, metrics = outcome(transform, state, found)
        if self.deferred:
            return after(state, params, pending), metrics
        params = transform.applied(pending, state.key, params)
        return after(state, params, nothing(transform)), metrics

    def flush(self, state: ZOState) -> ZOState:
        """Make the pending update."""
        return state._replace(params=self._made(state), pending=nothing(self.transform))

    def _made(self, state: ZOState) -> Any:
        return self.transform.applied(state.pending, state.key, state.params)
