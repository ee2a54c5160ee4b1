"""On GPUs without a cost table there are no rings by rule, unless an option or a clock asks."""

from __future__ import annotations

import pytest

import jaxoverlap
from jaxoverlap.start.candidates import offers_of
from tests.support.pods import pytestmark as pods
from tests.support.two_axes import POD, two_axes

pytestmark = pods
OPTIONS = {"schedule": None, "trials": None}  # there is no order without prices


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("jaxoverlap.step.context.has_packaged_tables", lambda cluster: False)
    return two_axes(POD, 4096, 1024)


def test_a_step_runs_as_it_is_and_says_what_to_give(built):
    step, args = built
    overlapped = jaxoverlap.overlap(step, **OPTIONS)
    with pytest.warns(UserWarning, match="no cost table of .*H100.*granularity='one_way'"):
        plan = overlapped.explain(*args)
    assert not plan.edits and not plan.decisions
    waiting = {skip.reason for skip in plan.skips if not skip.idle}
    assert waiting == {"not ringed: there is no cost table of these GPUs"}
    assert "collective-permute" not in overlapped.lower(*args).compile().as_text()


@pytest.mark.filterwarnings("error")
def test_rings_are_made_where_an_option_asks_for_them(built):
    step, args = built
    for options in ({"granularity": "one_way"}, {"fsdp": "ring"}):
        assert jaxoverlap.overlap(step, **OPTIONS, **options).explain(*args).rings


def test_trial_steps_race_them_as_the_clock_chooses(built):
    step, args = built
    overlapped = jaxoverlap.overlap(step, schedule=None)
    offers = offers_of(overlapped._inferred(args, {}), overlapped._options)
    assert [offer.name for offer in offers.offers] == ["overlapped"]
    assert offers.offers[0].plan.rings
