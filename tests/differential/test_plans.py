"""A plan is carried out as it was decided: another process makes the same program of it."""

from __future__ import annotations

import pytest

from tests.differential.plans import differences
from tests.support.pods import needs_plugin


@needs_plugin
def test_the_plans_of_drawn_steps_are_followed():
    """By explain(), by tune (7) and by tune=True (13), on CPU devices and for pods."""
    assert differences(range(7, 14)) == {}


@pytest.mark.nightly
@needs_plugin
@pytest.mark.parametrize("first", range(0, 300, 20))
def test_the_plans_of_three_hundred_drawn_steps_are_followed(first: int):
    assert differences(range(first, first + 20)) == {}
