"""Define `ZOState`, all that a zeroth-order run keeps."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxoverlap.train.dtypes import is_narrow
from jaxoverlap.train.zeroth_order.directions import new_key
from jaxoverlap.train.zeroth_order.estimator import Mezo, Pending


class ZOState(NamedTuple):
    """The state of a run, a pytree.

    Attributes:
        params: the parameters, without the pending update.
        key: the run's key, from its seed.
        step: int32 [], how many steps have been taken.
        pending: the last step's update, where updates are deferred; else its rate is 0. With a
            narrow copy those since it was made, a dim of steps first.
        narrow: the copy of the blocks that is uploaded (`narrow.Narrowed`): "values" like them in
            host memory, "scales" float32 [layers] of each leaf; None without.
    """

    params: Any
    key: jax.Array
    step: jax.Array
    pending: Pending
    narrow: Any = None


def as_arrays(params: Any) -> Any:
    """Return parameters with Python's numbers as arrays of JAX's dtype for them."""
    return jax.tree.map(
        lambda x: x if hasattr(x, "dtype") else jnp.asarray(x, jnp.result_type(x)), params
    )


def check_trained(name: str, leaf: Any) -> None:
    """Raise a ValueError for a parameter of other than floats of 16 bits or more."""
    dtype = jnp.result_type(leaf)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(
            f"parameter {name} is of {dtype}: expected floats; give others to the loss function as "
            "an argument of its own"
        )
    if is_narrow(dtype):
        raise ValueError(
            f"parameter {name} is of {dtype}: expected floats of 16 bits or more, as fewer lose "
            "nearly every perturbation; keep it in bfloat16 or float32, and cast it in the loss "
            "function"
        )


def nothing(transform: Mezo) -> Pending:
    """Return the update of no step, which changes nothing."""
    zeros = jnp.zeros(transform.directions, jnp.float32)
    return Pending(zeros, jnp.float32(0), jnp.int32(0))


def new_state(params: Any, transform: Mezo, seed: int) -> ZOState:
    """Return the state of a run that begins at some parameters."""
    return ZOState(params, new_key(seed), jnp.int32(0), nothing(transform))


def after(state: ZOState, params: Any, pending: Pending) -> ZOState:
    """Return the state after a step."""
    return ZOState(params, state.key, state.step + 1, pending)


def outcome(transform: Mezo, state: ZOState, losses: jax.Array) -> tuple[Pending, dict[str, Any]]:
    """Return a step's update and its metrics.

    The update is nothing where losses, their difference or the rate are not finite, or the rate is
    below 0; "made" says whether it is something.

    Args:
        transform: the estimator.
        state: before the step.
        losses: float32 or float64 [directions, 2].
    """
    scalars, rate = transform.projected(losses), transform.rate(state.step)
    finite = jnp.isfinite(losses).all() & jnp.isfinite(rate * scalars).all() & (rate >= 0)
    scalars, rate = jnp.where(finite, scalars, 0.0), jnp.where(finite, rate, 0.0)
    metrics = dict(loss=losses.mean(), losses=losses, scalars=scalars, rate=rate, made=finite)
    return Pending(scalars, rate, state.step), metrics
