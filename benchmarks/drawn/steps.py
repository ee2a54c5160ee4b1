"""The steps of the benchmark, by name."""

from __future__ import annotations

from functools import partial

from benchmarks.drawn import trainer
from benchmarks.drawn.drawing import draw
from benchmarks.drawn.named import NAMED
from benchmarks.drawn.step import Step

_DRAWN = "drawn-"


def drawn_name(seed: int) -> str:
    return f"{_DRAWN}{seed}"


def step_of(name: str) -> Step:
    """A named step, or the one that is drawn with the seed in the name, as in "drawn-7".

    Raises:
        ValueError: if there is no such step.
    """
    if name in NAMED:
        return NAMED[name]
    seed = name.removeprefix(_DRAWN)
    if not name.startswith(_DRAWN) or not seed.isdecimal():
        raise ValueError(f"step {name!r}: expected {', '.join(NAMED)}, or drawn- and a seed")
    sketch = draw(int(seed))
    build = partial(trainer.build, sketch)
    return Step(name, sketch.pod, sketch.axes, build, about=sketch.about())
