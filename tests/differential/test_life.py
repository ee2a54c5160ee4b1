"""Drawn steps live under overlap() as under jax.jit; `python -m tests.differential` runs more.

A seed fixes the step. Seeds from 100,000 on are held back: nothing is mended by looking at them
before a release.
"""

from __future__ import annotations

import pytest

from jaxoverlap.step.options import Options
from tests.differential import models
from tests.differential.case import MAY_BE_EXPLICIT, SIGNALS, draw
from tests.differential.compare import TOGETHER, compared, differing
from tests.differential.pods import refused_on_pods
from tests.support.pods import needs_plugin
from tests.support.seeds import rotating, some


@pytest.mark.rotating
@pytest.mark.parametrize("first", rotating(10, range(60))[::TOGETHER])
def test_drawn_steps_live_as_under_jit(first: int):
    assert differing(range(first, first + TOGETHER)) == {}


@pytest.mark.parametrize("first", range(0, 10, TOGETHER))
def test_drawn_convolutions_groups_and_transforms_live_as_under_jit(first: int):
    assert differing(range(first, first + TOGETHER), among=SIGNALS) == {}


@pytest.mark.parametrize("first", range(60, 70, TOGETHER))
def test_halves_of_drawn_convolutions_groups_and_transforms_change_nothing(first: int):
    assert differing(range(first, first + TOGETHER), among=SIGNALS, halved=True) == {}


SCANS = (models.residual_scan, models.language_model, models.accumulated)
LAYERS_AHEAD = Options(layers_ahead=True, rings=False, layouts=None, halves=None)


def test_layers_that_are_gathered_ahead_change_nothing():
    assert differing(range(TOGETHER), among=SCANS, options=LAYERS_AHEAD) == {}


WITH_NORMS = (models.residual_scan, models.language_model)  # 17 of 40 have such sums


@pytest.mark.rotating
@pytest.mark.parametrize("halves", some(1, [None, 2]))
def test_sums_that_leave_their_scans_change_nothing(halves):
    options = Options(late_sums=True, layouts=None, halves=halves)
    seeds = rotating(2, range(12, 16))
    assert differing(seeds, among=WITH_NORMS, options=options) == {}


def test_where_xla_refuses_a_step_the_error_is_xlas_own():
    """If XLA comes to compile this one, take another that it refuses."""
    comparison = compared(draw(2005))
    assert comparison.notes[0].startswith("plain refuses: JaxRuntimeError: INTERNAL")
    assert comparison.differences == []


@pytest.mark.nightly
@pytest.mark.parametrize("first", range(30, 3030, TOGETHER))
def test_three_thousand_drawn_steps_live_as_under_jit(first: int):
    assert differing(range(first, first + TOGETHER), always=True) == {}


@pytest.mark.nightly
@pytest.mark.parametrize("first", range(TOGETHER, 500, TOGETHER))
def test_five_hundred_steps_with_layers_gathered_ahead(first: int):
    seeds = range(first, first + TOGETHER)
    assert differing(seeds, among=SCANS, always=True, options=LAYERS_AHEAD) == {}


@pytest.mark.nightly
@pytest.mark.parametrize("halves", [None, 2])
@pytest.mark.parametrize("first", range(20, 500, TOGETHER))
def test_drawn_sums_that_leave_their_scans(first: int, halves: int | None):
    options, seeds = Options(late_sums=True, halves=halves), range(first, first + TOGETHER)
    assert differing(seeds, among=WITH_NORMS, always=True, options=options) == {}


@pytest.mark.nightly
@pytest.mark.parametrize("halved", [False, True])
@pytest.mark.parametrize("first", range(0, 1000, TOGETHER))
def test_a_thousand_drawn_steps_on_explicit_and_automatic_axes(first: int, halved: bool):
    seeds = range(first, first + TOGETHER)
    among = MAY_BE_EXPLICIT
    assert differing(seeds, among=among, always=True, halved=halved, mixed=True) == {}


@pytest.mark.nightly
@pytest.mark.parametrize("halved", [False, True])
@pytest.mark.parametrize("first", range(0, 1000, TOGETHER))
def test_a_thousand_drawn_convolutions_groups_and_transforms(first: int, halved: bool):
    seeds = range(first, first + TOGETHER)
    assert differing(seeds, among=SIGNALS, always=True, halved=halved) == {}


@pytest.mark.nightly
@needs_plugin
@pytest.mark.parametrize("first", range(0, 300, TOGETHER))
def test_drawn_convolutions_groups_and_transforms_compile_for_pods(first: int):
    assert refused_on_pods(range(first, first + TOGETHER), among=SIGNALS) == {}
