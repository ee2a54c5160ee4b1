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


def differing(
    seeds: range,
    *,
    always: bool = False,
    laid_out: bool = False,
    halved: bool = False,
    graph: bool = False,
) -> dict[int, list[str]]:
    """Return the differences by seed; run `python -m tests.differential --seed N` for one."""
    differences = {
        seed: compared(
            draw(seed, graph=graph), always=always, laid_out=laid_out, halved=halved
        ).differences
        for seed in seeds
    }
    jax.clear_caches()
    return {seed: texts for seed, texts in differences.items() if texts}


@pytest.mark.parametrize("first", range(0, 150, TOGETHER))
def test_drawn_steps_live_as_under_jit(first: int):
    assert differing(range(first, first + TOGETHER)) == {}


@pytest.mark.nightly
@pytest.mark.parametrize("first", range(150, 3150, TOGETHER))
def test_three_thousand_drawn_steps_live_as_under_jit(first: int):
    assert differing(range(first, first + TOGETHER), always=True) == {}


@pytest.mark.parametrize("first", range(0, 200, TOGETHER))
def test_drawn_layouts_and_halves_change_nothing_but_where_values_lie(first: int):
    seeds = range(first, first + TOGETHER)
    assert differing(seeds, laid_out=True, halved=True, graph=True) == {}


@pytest.mark.nightly
@pytest.mark.parametrize("first", range(0, 2000, TOGETHER))
def test_two_thousand_drawn_layouts_change_nothing(first: int):
    assert differing(range(first, first + TOGETHER), always=True, laid_out=True) == {}


@pytest.mark.nightly
@pytest.mark.parametrize("first", range(0, 2000, TOGETHER))
def test_two_thousand_steps_in_halves_live_as_under_jit(first: int):
    assert differing(range(first, first + TOGETHER), always=True, halved=True) == {}
