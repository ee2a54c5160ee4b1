"""Odd trees of parameters and states: plain mathematics, or a sentence that refuses them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from jaxoverlap.train import LocalUpdates, co2, diloco, local_sgd
from jaxoverlap.train import zeroth_order as zo
from jaxoverlap.train.compression import data_parallel, none, uniform
from jaxoverlap.train.local_updates.state import ParamsIn
from jaxoverlap.train.zeroth_order.directions import Draw, direction
from tests.support.odd_trees import OTHERS, STATES, TRAINED, odd_parameters, odd_trees
from tests.support.seeds import some
from tests.train.compression.problem import mesh_of

ROWS = np.float32([[1], [1], [3], [3]])  # worker 0 has rows of mean 1, and worker 1 of mean 3
RATE = 0.125  # a power of 2, so that doubles are found to the last bit
OUTERS = ((local_sgd(every=2), 1.0), (diloco(every=2), 0.7 * 1.9), (co2(every=2), 1.0))
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*compresses 0 of 0", "ignore:.*requested in .* is not available"
)


def drawn(count: int) -> Any:
    return settings(
        max_examples=count, deadline=None, database=None, derandomize=True,
        phases=[Phase.generate], suppress_health_check=list(HealthCheck),
    )  # fmt: skip


def is_legal(params: Any, *, takes_complex: bool) -> bool:
    """Return whether parameters can be trained."""
    for leaf in jax.tree.leaves(params):
        dtype = jnp.result_type(leaf)
        kind = jnp.inexact if takes_complex else jnp.floating
        if not jnp.issubdtype(dtype, kind) or jnp.finfo(dtype).bits < 16:
            return False
    return takes_complex or bool(jax.tree.leaves(params))


@contextlib.contextmanager
def refused_unless(legal: bool, wide: bool) -> Iterator[None]:
    """Expect what is not legal to be refused by one sentence, and what is to run."""
    with jax.enable_x64(wide):
        if legal:
            yield
            return
        with pytest.raises(ValueError) as raised:
            yield
    text = str(raised.value)
    assert "\n" not in text and "PyTreeDef" not in text and 20 < len(text) < 500, text


def moved(leaf: Any, by: Any) -> Any:
    """Return a leaf, less what it moves by, in its own dtype; what is no number stays."""
    if not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
        return leaf
    leaf = jnp.asarray(leaf)
    by = jnp.asarray(by, jnp.float32)
    if leaf.dtype.itemsize < 2:
        return (leaf.astype(jnp.float32) - by).astype(leaf.dtype)
    return leaf - by.astype(leaf.dtype)


def check_moved(found: Any, begin: Any, by: float) -> None:
    """Compare a tree with the one that it began at, each number less `by`."""
    assert jax.tree.structure(found) == jax.tree.structure(begin)
    for leaf, first in zip(jax.tree.leaves(found), jax.tree.leaves(begin), strict=True):
        first = jnp.asarray(first)
        assert (leaf.shape, leaf.dtype) == (first.shape, first.dtype)
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            continue
        moves = by if jnp.issubdtype(leaf.dtype, jnp.inexact) else 0
        digits = jnp.finfo(leaf.dtype).eps if moves else 0
        kind = np.complex128 if jnp.iscomplexobj(leaf) else np.float64
        wanted = np.asarray(first).astype(kind) - moves
        off = 4 * float(digits) * (1 + abs(by))
        np.testing.assert_allclose(np.asarray(leaf).astype(kind), wanted, rtol=0, atol=off)


# -- local updates ---------------------------------------------------------------------------------


def local_updates(params: Any, others: Any, kind: Any, outer: Any, wide: bool) -> None:
    (make, where), (algorithm, factor) = kind, outer
    found = ParamsIn(where)

    def step(state: Any, batch: Any) -> Any:
        mean = batch.mean()
        mine = jax.tree.map(lambda leaf: moved(leaf, RATE * mean), found.get(state))
        rest = jax.tree.map(lambda leaf: moved(leaf, mean), state)
        return found.put(rest, mine), mean

    with refused_unless(is_legal(params, takes_complex=True), wide):
        updates = LocalUpdates(step, mesh_of(2), outer=algorithm, params=where, overlap=False)
        begin = make(params=params, count=others)
        state = updates.init(begin)
        state, _ = updates.round(state, np.stack([ROWS] * 2))
        updates.check(state)
        check_moved(updates.params(state), params, factor * RATE * 2 * 2)
        whole = updates.consolidate(state).worker
        check_moved(found.put(whole, ()), found.put(begin, ()), 4)
        fewer = LocalUpdates(step, mesh_of(1), outer=algorithm, params=where, overlap=False)
        fewer.spread(updates.consolidate(state))


LOCAL = (
    odd_parameters(), odd_trees(*TRAINED, *OTHERS), st.sampled_from(STATES), st.sampled_from(OUTERS),
    st.sampled_from((False, False, False, True)),
)  # fmt: skip


# -- data parallel ---------------------------------------------------------------------------------


def with_data_parallel(params: Any, model: Any, wide: bool) -> None:
    def gradients(params: Any, model: Any, batch: Any) -> Any:
        mean = batch.mean()
        grads = jax.tree.map(lambda p: jnp.full(jnp.shape(p), mean).astype(p.dtype), params)
        return (mean, jax.tree.map(lambda leaf: moved(leaf, mean), model)), grads

    with refused_unless(is_legal(params, takes_complex=True), wide):
        step = data_parallel(
            gradients, optax.sgd(RATE, 0.5), mesh_of(2), sync=uniform(none()), stateful=True
        )
        state = step.init(params, model)
        for number in (1, 2):
            state, value = step(state, ROWS)
            step.check()
            assert float(value) == 2
            check_moved(state.model, model, 2 * number)
        check_moved(state.params, params, RATE * (2 + 3))  # momentum 0.5: 2, then 2 + 1
        step.spread(step.consolidate(state))


PARALLEL = (
    odd_parameters(), odd_trees(*TRAINED, *OTHERS), st.sampled_from((False, False, False, True))
)  # fmt: skip


# -- zeroth order ----------------------------------------------------------------------------------


def zeroth_order(params: Any, wide: bool) -> None:
    """The loss is linear, so its gradient along a direction is the sum of the direction."""
    arrays = [leaf for leaf in jax.tree.leaves(params) if not isinstance(leaf, float)]
    shared = len({id(leaf) for leaf in arrays}) < len(arrays)

    def loss(params: Any, batch: Any) -> Any:
        leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(params)]
        return sum(leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32)).sum() for leaf in leaves)

    with refused_unless(is_legal(params, takes_complex=False) and not shared, wide):
        step = zo.step(loss, zo.mezo(eps=0.125, lr=RATE))
        state = step.init(params, seed=3)
        after, _ = step(state, ROWS)
        assert jax.tree.structure(after.params) == jax.tree.structure(params)
        first = zo.step(loss, zo.mezo(eps=0.125, lr=RATE)).init(params, seed=3)
        leaves = [np.asarray(leaf).astype(np.float64) for leaf in jax.tree.leaves(first.params)]
        along = [
            np.asarray(direction(Draw(first.key, jnp.int32(0)), number, leaf.shape), np.float64)
            for number, leaf in enumerate(leaves)
        ]
        total = sum(float(z.sum()) for z in along)
        narrow = any(leaf.dtype.itemsize == 2 for leaf in jax.tree.leaves(first.params))
        for leaf, old, z in zip(jax.tree.leaves(after.params), leaves, along, strict=True):
            off = 0.1 if narrow else 2e-3
            found = np.asarray(leaf).astype(np.float64)
            np.testing.assert_allclose(found, old - RATE * total * z, rtol=0, atol=off)


ZEROTH = odd_parameters(), st.sampled_from((False, False, False, True))


# -- how many draws --------------------------------------------------------------------------------

PROPERTIES = {
    "local updates": (local_updates, LOCAL),
    "data parallel": (with_data_parallel, PARALLEL),
    "zeroth order": (zeroth_order, ZEROTH),
}


@pytest.mark.rotating
@pytest.mark.parametrize("name", some(1, [*PROPERTIES]))
def test_an_odd_tree_trains_as_plain_mathematics_do_or_is_refused_in_a_sentence(name):
    run, strategies = PROPERTIES[name]
    drawn(15)(given(*strategies)(run))()


@pytest.mark.nightly
@pytest.mark.parametrize("name", PROPERTIES)
def test_a_hundred_odd_trees(name):
    run, strategies = PROPERTIES[name]
    drawn(100)(given(*strategies)(run))()
