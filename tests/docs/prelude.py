"""The names that the Python of a page may use: a small train step on eight devices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoverlap

# Pages name its matmuls as a user's: gpt.py:88 and gpt.py:89.
_STEP = (
    "\n" * 86
    + """def loss(state, batch):
    hidden = jax.lax.with_sharding_constraint(batch @ state["up"], on("data", None, "model"))
    y = jax.lax.with_sharding_constraint(hidden @ state["down"], on("data", "model", None))
    return jnp.mean(y**2)

@jax.jit
def train_step(state, batch):
    value, grads = jax.value_and_grad(loss)(state, batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), value
"""
)


def prelude() -> dict[str, Any]:
    """Return `train_step(state, batch)`, its arguments, and what else pages take for granted."""
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    def on(*spec):
        return NamedSharding(mesh, P(*spec))

    names: dict[str, Any] = dict(jax=jax, jnp=jnp, on=on)
    exec(compile(_STEP, "gpt.py", "exec"), names)
    rng = np.random.default_rng(0)

    def array(sharding, *shape):
        return jax.device_put(rng.normal(size=shape).astype(np.float32), sharding)

    state = {
        "up": array(on(None, "model"), 32, 128),
        "down": array(on("model", None), 128, 32),
    }
    batch = array(on("data", "model", None), 4, 16, 32)
    return dict(
        jax=jax, jnp=jnp, np=np, jaxoverlap=jaxoverlap, P=P, NamedSharding=NamedSharding,
        mesh=mesh, train_step=names["train_step"], state=state, batch=batch, args=(state, batch),
        batches=[batch] * 2, __name__="example",
    )  # fmt: skip
