"""The form says what the trainers' steps do, by simulation of what XLA compiles for a pod."""

import numpy as np
import pytest

from benchmarks.form import cases, outcome
from tests.support.pods import pytestmark  # noqa: F401 - it marks the tests of this file

MESHES = ("fsdp=8", "fsdp=2 model=4", "pipeline=2 fsdp=4", "data=2 expert=4")


@pytest.mark.nightly
def test_the_form_is_near_the_simulated_steps():
    """Of each kind of mesh one or two; `python -m benchmarks.form` has the whole grid."""
    chosen = [
        case
        for case in cases()
        if str(case.configuration).startswith(MESHES) and case.model.name in ("wide", "mixtral")
    ]
    found = [outcome(case) for case in chosen]
    assert not [one.error for one in found if one.error]
    off = np.array([one.predicted_s / one.simulated_s - 1 for one in found])
    assert len(off) == 7
    assert abs(off).mean() < 0.12
    assert abs(off).max() < 0.25


def test_the_grid_has_every_kind_of_mesh():
    axes = [case.configuration.axes for case in cases()]
    assert len(axes) > 40
    for axis in axes[0]:
        assert any(sizes[axis] > 1 for sizes in axes)
