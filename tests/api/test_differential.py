"""Drawn steps live under overlap() as under jax.jit; `python -m tests.differential` runs more.

A seed fixes the step. Seeds from 100,000 on are held back: nothing is mended by looking at them
before a release.
"""

from __future__ import annotations

import jax
import pytest

from tests.differential.case import draw
from tests.differential.compare import compared

TOGETHER = 10  # seeds a test


def differing(seeds: range, *, always: bool) -> dict[int, list[str]]:
    """Return the differences by seed; run `python -m tests.differential --seed N` for one."""
    differences = {seed: compared(draw(seed), always=always).differences for seed in seeds}
    jax.clear_caches()
    return {seed: texts for seed, texts in differences.items() if texts}


@pytest.mark.parametrize("first", range(0, 150, TOGETHER))
def test_drawn_steps_live_as_under_jit(first: int):
    assert differing(range(first, first + TOGETHER), always=False) == {}


@pytest.mark.nightly
@pytest.mark.parametrize("first", range(150, 3150, TOGETHER))
def test_three_thousand_drawn_steps_live_as_under_jit(first: int):
    assert differing(range(first, first + TOGETHER), always=True) == {}
