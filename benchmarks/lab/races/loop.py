"""How much does the trainers' loop add to a step? On the hosts of a lab, or in one process.

python -m benchmarks.lab.races.loop        # on four hosts
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import jax

from benchmarks.lab import Host, Lab, Network
from models.config import Config
from models.gpt import RECIPE
from models.trainer import train

SIZES: dict[str, Any] = dict(layers=2, hidden=256, mlp=1024, heads=4, sequence=256, batch=16)
STEPS = 40


def loop(host: Host, *, data: int, model: int) -> dict[str, float]:
    """Return the median seconds of a step in the trainer's loop, and of the step alone.

    The step alone runs before and after, each time waited for, its batch already in its place.
    """
    options: dict[str, Any] = dict(SIZES, data=data, model=model, steps=STEPS, plain=True)
    if host.count > 1:
        options |= dict(coordinator=host.coordinator, processes=host.count, process=host.rank)
    config = Config(**options)
    rows, _, _ = train(RECIPE, config)
    mesh = RECIPE.make_mesh(config)
    step = RECIPE.make_step(config, mesh)
    state, batch = RECIPE.init_state(config, mesh, 0), RECIPE.abstract_args(config, mesh)[1]
    placed = jax.tree.map(
        lambda leaf: jax.jit(
            lambda: jax.numpy.zeros(leaf.shape, leaf.dtype), out_shardings=leaf.sharding
        )(),
        batch,
    )

    def alone() -> list[float]:
        nonlocal state
        taken = []
        for _ in range(STEPS):
            began = time.perf_counter()
            state, _ = jax.block_until_ready(step(state, placed))
            taken.append(time.perf_counter() - began)
        return taken[3:]

    first = alone()
    again = [row["seconds"] for row in rows[3:]]
    taken = first + alone()
    return {"loop_s": statistics.median(again), "step_s": statistics.median(taken)}


def main() -> None:
    """Compare, on four hosts."""
    with Lab(Network(hosts=4, rate_mbit=1000)) as lab:
        rows = lab.run("benchmarks.lab.races.loop:loop", data=2, model=2)
    loop_s, step_s = (max(row[key] for row in rows) for key in ("loop_s", "step_s"))
    more = loop_s / step_s - 1
    print(f"a step takes {loop_s * 1e3:.1f} ms in the loop, {step_s * 1e3:.1f} alone: {more:+.1%}")


if __name__ == "__main__":
    main()
