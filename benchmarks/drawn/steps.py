"""The steps of the benchmark, by name."""

from __future__ import annotations

from functools import partial

from benchmarks.drawn import trainer
from benchmarks.drawn.drawing import draw
from benchmarks.drawn.named import NAMED
from benchmarks.drawn.step import Step
from benchmarks.strangers.pod_steps import POD_STEPS

_DRAWN = "drawn-"


def drawn_name(seed: int) -> str:
    return f"{_DRAWN}{seed}"


def step_of(name: str) -> Step:
    """A named or published step, or the random one of the seed in the name, as in "drawn-7".

    Raises:
        ValueError: if there is no such step.
    """
    if known := (NAMED | POD_STEPS).get(name):
        return known
    seed = name.removeprefix(_DRAWN)
    if not name.startswith(_DRAWN) or not seed.isdecimal():
        raise ValueError(f"step {name!r}: expected {', '.join(NAMED)}, or drawn- and a seed")
    sketch = draw(int(seed))
    build = partial(trainer.build, sketch)
    return Step(name, sketch.pod, sketch.axes, build, about=sketch.about())
