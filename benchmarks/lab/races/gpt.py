"""The trainers' GPT on hosts: its train step, with sharded arguments."""

from __future__ import annotations

from typing import Any

from models.config import Config
from models.feed import feed
from models.gpt import RECIPE


def gpt_step(axes: dict[str, int], sizes: dict[str, Any]) -> tuple[Any, Any, tuple[Any, Any]]:
    """Return the mesh, the jitted step (it donates nothing, to run again), and its arguments.

    Args:
        axes: sizes of data and model.
        sizes: more of the trainer's configuration.
    """
    options: dict[str, Any] = {**axes, **sizes}
    config = Config(**options)
    mesh = RECIPE.make_mesh(config)
    step = RECIPE.make_step(config, mesh, donate=False)
    batch = next(feed(RECIPE, config, mesh, 0))
    return mesh, step, (RECIPE.init_state(config, mesh, 0), batch)
