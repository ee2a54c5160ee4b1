"""A state says what made it: that of another algorithm or optimizer is refused in a sentence."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxoverlap.train import (
    LocalUpdates,
    Outer,
    bmuf,
    co2,
    diloco,
    eager_diloco,
    local_sgd,
    overlap_local_sgd,
    slowmo,
    streaming_diloco,
)
from jaxoverlap.train.compression import data_parallel, none, uniform
from tests.train.compression.problem import mesh_of

PARAMS = dict(w=jnp.ones((4, 3)), b=jnp.ones(3))
BATCHES = np.ones((2, 4, 3), np.float32)
OUTERS = (
    local_sgd(every=2),
    bmuf(every=2),
    diloco(every=2),
    diloco(every=2, delay=1),
    co2(every=2),
    eager_diloco(every=2),
    overlap_local_sgd(every=2),
    slowmo(every=2, inner_learning_rate=0.1),
    streaming_diloco(every=2, fragments=2, delay=1),
    streaming_diloco(every=2, fragments=1, delay=1),
)


def local_updates(outer, workers=2, **options):
    def step(params, batch):
        return jax.tree.map(lambda leaf: leaf - 0.1, params), batch.mean()

    given = dict(outer=outer, params=None, overlap=False) | options
    return LocalUpdates(step, mesh_of(workers), **given)


def calls(updates, state):
    """Return all that is done with a state of workers."""
    return (
        lambda: updates.round(state, BATCHES),
        lambda: updates.params(state),
        lambda: updates.consolidate(state),
        lambda: updates.lower(state, BATCHES),
    )


@pytest.mark.parametrize("made", OUTERS, ids=lambda outer: outer.kind)
def test_a_state_of_another_outer_optimizer_is_refused_by_its_name(made):
    updates = local_updates(made)
    state = updates.init(PARAMS)
    whole = updates.consolidate(state)
    for outer in OUTERS:
        if outer is made:
            continue
        other = local_updates(outer)
        for call in (*calls(other, state), lambda other=other: other.spread(whole)):
            with pytest.raises(ValueError) as raised:
                call()
            text = str(raised.value)
            assert text.startswith(f"the state was made by {made.kind}, and these")
            assert outer.kind in text and "\n" not in text
    state, _ = updates.round(state, BATCHES)
    again = updates.spread(updates.consolidate(state))
    assert np.array_equal(again.made_by, state.made_by)


def test_other_settings_of_one_algorithm_go_on():
    state, _ = (first := local_updates(diloco(every=2))).round(first.init(PARAMS), BATCHES)
    local_updates(diloco(every=2, learning_rate=0.1, momentum=0.5)).round(state, BATCHES)


def test_a_checkpoint_has_what_made_it():
    """Leaves alone are stored, and are put into the tree of `abstract()`."""
    state = local_updates(bmuf(every=2)).init(PARAMS)
    other = local_updates(diloco(every=2))
    abstract = other.abstract(PARAMS)
    stored = jax.tree.map(
        lambda leaf, like: jax.device_put(np.asarray(leaf), like.sharding), state, abstract
    )
    with pytest.raises(ValueError, match=r"made by bmuf\(\)"):
        other.round(stored, BATCHES)


def test_what_does_not_fit_is_named_by_its_path():
    mine, other = (
        local_updates(Outer(every=2, transform=transform))
        for transform in (optax.sgd(1.0), optax.adam(1.0))
    )
    for updates, made, says in (
        (other, mine, r"has nothing at \.optimizer\[0\]\[0\]\.count: expected int32\[\]"),
        (mine, other, r"has int32\[\] at \.optimizer\[0\]\[0\]\.count: expected nothing"),
    ):
        state = made.init(PARAMS)
        for call in calls(updates, state):
            with pytest.raises(ValueError, match=f"the state {says}, as this optimizer makes"):
                call()
    state = mine.init(PARAMS)
    for field, value in (("begin", dict(PARAMS, w=jnp.ones((2, 3)))), ("begin", None)):
        with pytest.raises(ValueError, match=r"at \.begin\['.'\]: expected float32"):
            mine.params(replace(state, **{field: value}))
    with pytest.raises(ValueError, match="does not say which outer optimizer made it"):
        mine.params(replace(state, made_by=None))
    lists = replace(state, optimizer=[*state.optimizer])
    with pytest.raises(ValueError, match=r"containers of other types.*abstract\(\)"):
        mine.params(lists)


def test_a_consolidated_state_is_no_state_of_workers_nor_the_reverse():
    updates = local_updates(co2(every=2))
    state = updates.init(PARAMS)
    whole = updates.consolidate(state)
    with pytest.raises(ValueError, match=r"the mesh has 2: give it to.*spread\(\)"):
        updates.round(whole, BATCHES)
    for call in (lambda: updates.spread(state), lambda: updates.consolidate(whole)):
        with pytest.raises(ValueError, match=r"the state has float32.*: expected float32"):
            call()


def test_the_state_of_another_optimizer_of_data_parallel_is_refused_by_a_path():
    def step_of(optimizer):
        gradients = jax.value_and_grad(lambda p, b: jnp.mean((b @ p["w"].T) ** 2) + p["b"].sum())
        return data_parallel(gradients, optimizer, mesh_of(2), sync=uniform(none()))

    adam, sgd = step_of(optax.adam(0.1)), step_of(optax.sgd(0.1))
    state = adam.init(PARAMS)
    for call in (lambda: sgd(state, BATCHES[0]), lambda: sgd.consolidate(state)):
        with pytest.raises(ValueError, match=r"has int32\[\] at \.optimizer\[0\]\.count"):
            call()
    whole = adam.consolidate(state)
    with pytest.raises(ValueError, match="expected nothing, as this optimizer makes"):
        sgd.spread(whole)
    adam(adam.spread(whole), BATCHES[0])
