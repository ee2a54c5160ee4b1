"""Parts of the parameters, and adapters beside them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxoverlap.train import zeroth_order as zo
from tests.train.zeroth_order import problem


def test_the_rest_stays_as_it_is():
    trained, frozen = zo.split(problem.params(), lambda path: "up" in path)
    step = zo.step(zo.of_part(problem.MODEL), zo.mezo(eps=1e-2, lr=1e-1))
    state = step.init(trained)
    for number in range(3):
        state, _ = step(state, problem.batch(number), frozen)
    after = zo.joined(state.params, frozen)
    np.testing.assert_array_equal(after["blocks"]["down"], problem.params()["blocks"]["down"])
    assert not np.array_equal(after["blocks"]["up"], problem.params()["blocks"]["up"])


def test_new_adapters_change_nothing_and_lora_learns():
    params = problem.params()
    adapters = zo.lora(params, rank=2, where=lambda path: "up" in path or "down" in path)
    assert adapters["['blocks']['up']"]["a"].shape == (4, 8, 2)
    assert adapters["['blocks']['up']"]["b"].shape == (4, 2, 16)
    jax.tree.map(np.testing.assert_array_equal, zo.adapted(params, adapters), params)
    step = zo.step(zo.of_adapters(problem.MODEL), zo.mezo(eps=1e-2, lr=3e-2, directions=8))
    state, losses = step.init(adapters), []
    for _ in range(30):
        state, metrics = step(state, problem.batch(0), params)
        losses.append(float(metrics["loss"]))
    assert np.mean(losses[-5:]) < np.mean(losses[:5])


def test_adapters_of_weights_with_two_output_dims():
    weight = dict(q=jnp.ones((3, 8, 2, 4)))
    made = zo.lora(weight, rank=2, where=lambda path: True, inputs=2)
    assert made["['q']"]["a"].shape == (3, 8, 2) and made["['q']"]["b"].shape == (3, 2, 2, 4)
    made["['q']"]["b"] = jnp.ones((3, 2, 2, 4))
    got = zo.adapted(weight, made)["q"]
    want = 1 + np.einsum("lir,lrab->liab", made["['q']"]["a"], made["['q']"]["b"])
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_bad_subsets_are_named():
    with pytest.raises(ValueError, match="takes none of the parameters"):
        zo.split(problem.params(), lambda path: False)
    with pytest.raises(ValueError, match="takes none of the parameters"):
        zo.lora(problem.params(), rank=1, where=lambda path: False)
    with pytest.raises(ValueError, match="rank=0"):
        zo.lora(problem.params(), rank=0, where=lambda path: True)
    with pytest.raises(ValueError, match="needs an input dim"):
        zo.lora(problem.params(), rank=1, where=lambda path: "outer" in path)
