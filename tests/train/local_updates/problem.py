"""A small problem on eight CPU devices, and the numpy forms' view of the same data."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh

from tests.train.local_updates.numpy_forms import FEATURES, OUT

RATE = 0.1
ROWS = 4  # of a worker's batch


def mesh_of(workers: int, inside: int = 1) -> Mesh:
    """Return a mesh of workers, and of devices inside each, without other devices to spare."""
    sizes, names = ((workers, inside), ("data", "model"))
    return jax.make_mesh(
        sizes, names, (AxisType.Auto,) * 2, devices=jax.devices()[: workers * inside]
    )


def make_step(optimizer: optax.GradientTransformation | None = None) -> Any:
    """Return the ordinary jitted step of one worker."""
    optimizer = optimizer or optax.sgd(RATE)

    def loss(params, batch):
        x, y = batch
        return jnp.mean((x @ params["w"] + params["b"] - y) ** 2)

    @jax.jit
    def train_step(state, batch):
        value, gradients = jax.value_and_grad(loss)(state["params"], batch)
        updates, inner = optimizer.update(gradients, state["optimizer"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return dict(params=params, optimizer=inner), dict(loss=value)

    return train_step


def make_state(optimizer: optax.GradientTransformation | None = None) -> dict[str, Any]:
    rng = np.random.default_rng(1)
    params = dict(
        w=jnp.asarray(rng.normal(size=(FEATURES, OUT)), jnp.float32),
        b=jnp.asarray(rng.normal(size=OUT), jnp.float32),
    )
    return dict(params=params, optimizer=(optimizer or optax.sgd(RATE)).init(params))


def make_data(steps: int, workers: int) -> tuple[np.ndarray, np.ndarray]:
    """Return x and y, [steps, workers · ROWS, features]."""
    rng = np.random.default_rng(2)
    x = rng.normal(size=(steps, workers * ROWS, FEATURES)).astype(np.float32)
    y = np.sin(x @ rng.normal(size=(FEATURES, OUT))).astype(np.float32)
    return x, y


def by_worker(data: tuple[np.ndarray, np.ndarray], workers: int) -> Any:
    """Return the data as the numpy forms take it, in float64."""
    x, y = (np.float64(part) for part in data)
    return [
        [(a[i * ROWS : (i + 1) * ROWS], b[i * ROWS : (i + 1) * ROWS]) for i in range(workers)]
        for a, b in zip(x, y, strict=True)
    ]


def flat(params: Any) -> np.ndarray:
    """Return parameters as the numpy forms' vector."""
    return np.concatenate([np.ravel(params["w"]), np.ravel(params["b"])]).astype(np.float64)


def train(updates: Any, rounds: int, data: Any, state: Any = None) -> Any:
    """Return the state after so many rounds."""
    every = updates.outer.every
    state = updates.init(make_state()) if state is None else state
    for t in range(rounds):
        batches = tuple(d[t * every : (t + 1) * every] for d in data)
        state, _ = updates.round(state, batches)
    return state
