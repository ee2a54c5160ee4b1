"""Train as the example of docs/compression.md does, and end: a run that test_endings.py watches.

python -m tests.train.compression.ending FOLDER HOW SECONDS

HOW is "return", "raise" or "wait" (for a signal); the run ends by it after SECONDS, or, if these are
negative, when a program is being compiled in a thread. Writes log.json after each step and a
checkpoint after each fourth; prints "started" when all is imported, and "compiling".
"""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

from jaxoverlap._util.files import write_atomically
from jaxoverlap.train import compression
from tests.train.compression.problem import mesh_of

SHAPES = (64, 256), (256, 256), (256, 8)
EVERY = 8  # steps between choices: a program is compiled for most of the time
STEPS = 2000  # more than any run takes before it is ended


class OwnError(Exception):
    """What a run raises that ends by an exception."""


def new_step() -> tuple[compression.DataParallel, list[jax.Array]]:
    rng = np.random.default_rng(0)
    params = [jnp.asarray(rng.normal(size=s) * s[0] ** -0.5, "f") for s in SHAPES]
    sync = compression.lgreco(compression.power_sgd(rank=4), every=EVERY, beside=EVERY - 1)
    step = compression.data_parallel(
        jax.value_and_grad(loss), optax.adamw(1e-2), mesh_of(), axis="data", sync=sync
    )
    return step, params


def loss(params: list[jax.Array], batch: tuple[jax.Array, jax.Array]) -> jax.Array:
    h, y = batch
    for w in params[:-1]:
        h = jnp.tanh(h @ w)
    return jnp.mean((h @ params[-1] - y) ** 2)


def compiling() -> bool:
    return any(thread.name == "compile beside" for thread in threading.enumerate())


def main() -> None:
    began = time.monotonic()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells ignore it in the background
    print("started", flush=True)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    folder, how, seconds = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    step, params = new_step()
    state, rng, losses = step.init(params), np.random.default_rng(1), []
    target = rng.normal(size=(64, 8))
    manager = ocp.CheckpointManager(
        folder / "checkpoints", options=ocp.CheckpointManagerOptions(max_to_keep=2)
    )
    for number in range(STEPS):
        x = rng.normal(size=(256, 64)).astype("f")
        state, value = step(state, (x, np.sin(x @ target).astype("f")))
        losses.append(float(value))
        write_atomically(folder / "log.json", json.dumps(losses))
        if number % 4 == 3:
            manager.save(number, args=ocp.args.StandardSave(state))
        if compiling():
            print("compiling", flush=True)
        over = compiling() if seconds < 0 else time.monotonic() > began + seconds
        if over and how == "return":
            return
        if over and how == "raise":
            raise OwnError("its own")
    raise OwnError(f"nothing ended the run in {STEPS} steps")


if __name__ == "__main__":
    main()
