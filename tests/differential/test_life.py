"""Drawn steps live under overlap() as under jax.jit; `python -m tests.differential` runs more.

A seed fixes the step. Seeds from 100,000 on are held back: nothing is mended by looking at them
before a release.
"""

from __future__ import annotations

import pytest

from tests.differential.case import draw
from tests.differential.compare import TOGETHER, compared, differing


@pytest.mark.parametrize("first", range(0, 150, TOGETHER))
def test_drawn_steps_live_as_under_jit(first: int):
    assert differing(range(first, first + TOGETHER)) == {}


def test_where_xla_refuses_a_step_the_error_is_xlas_own():
    """If XLA comes to compile this one, take another that it refuses."""
    comparison = compared(draw(2005))
    assert comparison.notes[0].startswith("plain refuses: JaxRuntimeError: INTERNAL")
    assert comparison.differences == []


@pytest.mark.nightly
@pytest.mark.parametrize("first", range(150, 3150, TOGETHER))
def test_three_thousand_drawn_steps_live_as_under_jit(first: int):
    assert differing(range(first, first + TOGETHER), always=True) == {}
