"""benchmarks/order compares two orders; nothing is compiled here."""

import math

import pytest

from benchmarks import order
from benchmarks.pods.suite import STEPS


@pytest.mark.parametrize("name", STEPS)
def test_each_step_of_the_suite_has_meshes_of_all_its_devices(name: str):
    step = STEPS[name]
    found = order.ranked(step)
    assert len(found) >= 2
    assert [mesh.step_s for mesh in found] == sorted(mesh.step_s for mesh in found)
    devices = math.prod(step.axes.values())
    assert all(math.prod(mesh.axes.values()) == devices for mesh in found)


def test_a_step_keeps_its_batch_and_experts_on_another_mesh():
    moe = STEPS["moe-h100-64"]
    before = order.config_of(moe)
    after = order.config_of(order.on(moe, {"data": 16, "expert": 4}))
    assert (after.batch, after.experts) == (before.batch, before.experts)
    assert (after.data, after.expert) == (16, 4)


def test_lists_agree_where_seconds_rise_as_the_forms_do():
    of_step = [order.Ranked({"a": n}, float(n)) for n in (1, 2, 3)]
    rows = {("step", str(mesh)): {"step_s": mesh.step_s} for mesh in of_step}
    assert order.agrees("step", of_step, rows)
    rows["step", "a 1"] = {"step_s": 2.5}
    assert not order.agrees("step", of_step, rows)
    del rows["step", "a 1"]
    assert not order.agrees("step", of_step, rows)
