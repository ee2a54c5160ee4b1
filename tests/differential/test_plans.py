"""A plan is carried out as it was decided: another process makes the same program of it."""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.differential.plans import Drawn, _refused, differences
from tests.support.pods import needs_plugin


def drawn(fn: Any, *args: Any) -> Drawn:
    return Drawn(fn, lambda f: f(*args), contextlib.nullcontext, pod=False)


def test_jax_refuses_steps_whose_types_do_not_fit_and_those_that_it_has_no_rule_for():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    x = jax.device_put(jnp.ones((8, 8)), NamedSharding(mesh, P("data")))
    assert _refused(drawn(lambda x: x + x.T, x))
    assert _refused(drawn(jax.jacfwd(jax.scipy.linalg.schur), jnp.ones((3, 3))))
    assert not _refused(drawn(lambda x: x + x, x))


@pytest.mark.parametrize("error", [ValueError, TypeError, AttributeError, KeyError, RuntimeError])
def test_an_error_of_the_drawn_step_is_none_of_jaxs_refusals(error: type[Exception]):
    def step(x: Any) -> Any:
        raise error("the step's own")

    with pytest.raises(error, match="the step's own"):
        _refused(drawn(step, jnp.ones(8)))


@needs_plugin
def test_the_plans_of_drawn_steps_are_followed():
    """By explain() on CPU devices (12), by tune=True for a pod (13)."""
    assert differences(range(12, 14)) == {}


@pytest.mark.nightly
@needs_plugin
@pytest.mark.parametrize("first", range(0, 300, 20))
def test_the_plans_of_three_hundred_drawn_steps_are_followed(first: int):
    assert differences(range(first, first + 20)) == {}
