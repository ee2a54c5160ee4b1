"""What a user is told once a step."""

from __future__ import annotations

import pytest

from jaxoverlap.plan.edits import PinArgument
from jaxoverlap.plan.plan import Plan
from jaxoverlap.plan.price import Price
from jaxoverlap.step.notices import repaired

PIN = PinArgument(argument=0, name="x", value="f32[8]", spec=(("data",),))


@pytest.mark.parametrize(("saved_s", "said"), [(0.9, "train_step loses 90% of its"), (0.1, None)])
def test_a_step_that_loses_much_as_written_is_told_so(saved_s: float, said: str | None):
    price = Price(plain_s=1.0, plain_exposed_s=0.5, step_s=0.1, saved_s={"layouts": saved_s})
    plan = Plan(
        step="train_step",
        mesh={"data": 8},
        edits=(PIN,),
        entries=(),
        notes=("The batch argument x is replicated.",),
        price=price,
    )
    notice = repaired(plan)
    assert (notice is not None) == (said is not None)
    if notice is not None and said is not None:
        assert said in notice.text and "The batch argument x is replicated." in notice.text
        assert repaired(plan.left_alone()) is None
