"""Drawn steps with drawn layouts, and in halves, live under overlap() as under jax.jit."""

from __future__ import annotations

import pytest

from tests.differential.case import GRAPHS, draw
from tests.differential.compare import TOGETHER, compared, differing
from tests.support.seeds import rotating


@pytest.mark.rotating
@pytest.mark.parametrize("first", rotating(10, range(30))[::TOGETHER])
def test_drawn_layouts_and_halves_change_nothing_but_where_values_lie(first: int):
    seeds = range(first, first + TOGETHER)
    assert differing(seeds, laid_out=True, halved=True, among=GRAPHS) == {}


@pytest.mark.parametrize("seed", [34, 49])
def test_a_layout_in_which_xla_loses_a_permute_is_not_taken(seed: int):
    """XLA multiplies rows that it has permuted and leaves the product there: docs/upstream.md."""
    case = draw(seed)
    assert sum(n > 1 for n in case.mesh.shape.values()) == 3
    assert compared(case, always=True, laid_out=True).differences == []


@pytest.mark.nightly
@pytest.mark.parametrize("first", range(0, 2000, TOGETHER))
def test_two_thousand_drawn_layouts_change_nothing(first: int):
    assert differing(range(first, first + TOGETHER), always=True, laid_out=True) == {}


@pytest.mark.nightly
@pytest.mark.parametrize("first", range(0, 2000, TOGETHER))
def test_two_thousand_steps_in_halves_live_as_under_jit(first: int):
    assert differing(range(first, first + TOGETHER), always=True, halved=True) == {}
