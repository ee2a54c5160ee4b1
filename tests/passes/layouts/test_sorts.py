"""Devices sort their own tokens by expert, with the numbers of plain."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoverlap
from benchmarks.written import more  # noqa: F401 - it registers its steps
from benchmarks.written.steps import POD, STEPS
from jaxoverlap.hardware.pods import pod_mesh
from jaxoverlap.passes.apply import apply
from jaxoverlap.passes.layouts import sorts
from jaxoverlap.plan.edits import Recompute, SortPerShard
from tests.support.edited import edited_of, evaluated, mesh_of
from tests.support.pods import marked
from tests.support.pods import pytestmark as pods

EXPERTS, WIDTH, BATCH, LENGTH = 4, 8, 8, 6
MESHES = ({"data": 8}, {"data": 4, "model": 2}, {"data": 2, "more": 2, "model": 2})


def counted(how, experts, order):
    """Return how many tokens each expert has."""
    if how == "sorted":
        return jnp.bincount(experts[order], length=EXPERTS)
    if how == "bincount":
        return jnp.bincount(experts, length=EXPERTS)
    if how == "one_hot":
        return jax.nn.one_hot(experts, EXPERTS).sum(0).astype(jnp.int32)
    if how == "compared":
        return (experts[:, None] == jnp.arange(EXPERTS)).sum(0)
    return jnp.zeros(EXPERTS, jnp.int32).at[experts].add(1)


def joined(how, y, x, gates, order):
    """Return for each token the sum of what its experts computed, by its gates."""
    slots = gates.shape[1]
    if how == "inverse":
        back = jnp.take(y, jnp.argsort(order), axis=0).reshape(-1, slots, WIDTH)
        return jnp.einsum("tkd,tk->td", back, gates)
    if how == "where each went":
        inverse = jnp.zeros_like(order).at[order].set(jnp.arange(order.size))
        return (y[inverse].reshape(-1, slots, WIDTH) * gates[..., None]).sum(1)
    y = y * gates.reshape(-1)[order][:, None]
    if how == "added":
        return jnp.zeros_like(x).at[order // slots].add(y)
    return jnp.zeros_like(y).at[order].set(y).reshape(-1, slots, WIDTH).sum(1)


def experts_of(w, x, slots, counts, joins, biased):
    """Compute a mixture of experts by sorting its tokens."""
    gates, experts = lax.top_k(jax.nn.softmax(x @ w["router"]), slots)
    flat = experts.reshape(-1)
    order = jnp.argsort(flat)
    sizes = counted(counts, flat, order)
    y = lax.ragged_dot(x[order // slots], w["up"], sizes)
    if biased:
        y = y + w["bias"][flat[order]]
    y = lax.ragged_dot(jax.nn.gelu(y), w["down"], sizes)
    return joined(joins, y, x, gates, order)


def stepped(layers, loop, slots, counts, joins, biased):
    """Return a step of some layers."""

    def layer(x, w):
        return x + experts_of(w, x, slots, counts, joins, biased), None

    def loss(ws, x):
        x = x.reshape(-1, WIDTH)
        if loop in ("scan", "saved"):
            x, _ = lax.scan(jax.checkpoint(layer) if loop == "scan" else layer, x, ws)
        else:
            for n in range(layers):
                one = jax.checkpoint(layer) if loop == "remat" else layer
                x, _ = one(x, jax.tree.map(lambda w, n=n: w[n], ws))
        return jnp.mean(x**2)

    def step(ws, x):
        value, gradients = jax.value_and_grad(loss)(ws, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, ws, gradients), value

    return step


def arguments(mesh, layers, along, wide):
    """Return weights, which two axes shard, and a batch, which some do."""
    rng = np.random.default_rng(layers)

    def at(*dims, spec):
        spec = P(*(a if a in mesh.axis_names or isinstance(a, tuple) else None for a in spec))
        value = rng.standard_normal(dims).astype(np.float32) / 2
        return jax.device_put(value, NamedSharding(mesh, spec))

    ws = {
        "router": at(layers, WIDTH, EXPERTS, spec=()),
        "up": at(layers, EXPERTS, WIDTH, WIDTH, spec=(None, None, "data", wide)),
        "bias": at(layers, EXPERTS, WIDTH, spec=()),
        "down": at(layers, EXPERTS, WIDTH, WIDTH, spec=(None, None, wide, "data")),
    }
    return ws, at(BATCH, LENGTH, WIDTH, spec=(along,))


def compare(axes, layers, loop, slots, counts, joins, biased, wide):
    mesh = mesh_of(axes)
    along = tuple(a for a in axes if a != "model")
    step, args = (
        stepped(layers, loop, slots, counts, joins, biased),
        arguments(mesh, layers, along, wide),
    )
    before = edited_of(step, args, mesh)
    alone = [np.asarray(v) for v in jax.tree.leaves(args)]
    wanted = jax.tree.leaves(jax.jit(step)(*jax.tree.unflatten(jax.tree.structure(args), alone)))
    proposed = [*sorts.proposals(before)]
    for edits in proposed:
        results = evaluated(apply(before, edits).jaxpr, args)
        for one, other in zip(results, wanted, strict=True):
            np.testing.assert_allclose(one, other, rtol=3e-4, atol=1e-5)
    return proposed


DRAWN = (
    st.sampled_from(MESHES),
    st.sampled_from([1, 2]),
    st.sampled_from(["scan", "saved", "remat", ""]),
    st.sampled_from([1, 2]),
    st.sampled_from(["bincount", "one_hot", "compared", "added", "sorted"]),
    st.sampled_from(["inverse", "where each went", "added", "set"]),
    st.booleans(),
    st.sampled_from([None, "model"]),
)


@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(*DRAWN)
def test_numbers_are_those_without_devices(axes, layers, loop, slots, counts, joins, biased, wide):
    assert compare(axes, layers, loop, slots, counts, joins, biased, wide)


@pytest.mark.nightly
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(*DRAWN)
def test_many_numbers(axes, layers, loop, slots, counts, joins, biased, wide):
    assert compare(axes, layers, loop, slots, counts, joins, biased, wide)


def proposed(fn, *shapes):
    mesh = mesh_of({"data": 8})

    def given(shape, dtype):
        value = np.zeros(shape, dtype)
        return jax.device_put(value, NamedSharding(mesh, P("data")))

    return [*sorts.proposals(edited_of(fn, tuple(given(*one) for one in shapes), mesh))]


TOKENS, NUMBERS = ((16, WIDTH), np.float32), ((16,), np.int32)
WEIGHTS = ((8, WIDTH, WIDTH), np.float32)


def test_an_order_that_others_depend_on_stays():
    def step(x, experts, w, change):
        order = jnp.argsort(experts)
        sizes = jnp.bincount(experts, length=8)
        return change(x, experts, order, lax.ragged_dot(x[order], w, sizes), sizes)

    def tried(change):
        return proposed(lambda *args: step(*args, change), TOKENS, NUMBERS, WEIGHTS)

    def first_tokens(x, experts, order, y, sizes):
        places = jnp.arange(16) - (jnp.cumsum(sizes) - sizes)[experts[order]]
        return jnp.zeros_like(y).at[order].set(jnp.where(places[:, None] < 1, y, 0))

    assert tried(lambda x, experts, order, y, sizes: jnp.zeros_like(y).at[order].set(y))
    assert tried(lambda x, experts, order, y, sizes: y.sum(0))
    assert not tried(lambda x, experts, order, y, sizes: y)
    assert not tried(lambda x, experts, order, y, sizes: jnp.tanh(y @ y.T).sum(0))
    assert not tried(lambda x, experts, order, y, sizes: x.at[order // 2].set(y))
    assert not tried(lambda x, experts, order, y, sizes: (y * (jnp.arange(16) % 2)[:, None]).sum(0))
    assert not tried(lambda x, experts, order, y, sizes: y + x)
    assert not tried(lambda x, experts, order, y, sizes: jnp.cumsum(y, 0)[jnp.argsort(order)])
    assert not tried(lambda x, experts, order, y, sizes: (y * order[:, None]).sum(0))
    assert not tried(lambda x, experts, order, y, sizes: y[::-1].sum(0) * y[0])
    assert not tried(first_tokens)


@pytest.mark.parametrize(
    "sizes",
    [
        lambda experts, other: jnp.bincount(other, length=8),
        lambda experts, other: jnp.bincount(7 - experts, length=8),
        lambda experts, other: jnp.bincount(experts, length=8)[::-1],
        lambda experts, other: 2 * jnp.bincount(experts, length=8),
        lambda experts, other: jnp.bincount(experts, weights=other, length=8),
        # A negative number would be the last expert's there, and is sorted first.
        lambda experts, other: jnp.zeros(8, jnp.int32).at[experts].add(1),
    ],
)
def test_sizes_that_do_not_count_what_is_sorted_are_seen(sizes):
    def step(x, experts, other, w):
        order = jnp.argsort(experts)
        return lax.ragged_dot(x[order], w, sizes(experts, other).astype(jnp.int32)).sum(0)

    assert not proposed(step, TOKENS, NUMBERS, NUMBERS, WEIGHTS)


def test_layers_that_save_sorted_values_are_recomputed():
    (edits,) = compare(MESHES[0], 2, "saved", 2, "bincount", "inverse", False, None)
    assert [type(edit) for edit in edits] == [Recompute, SortPerShard]


def test_an_edit_of_another_step_is_an_error():
    mesh = mesh_of({"data": 8})
    x = jax.device_put(np.ones((16, WIDTH)), NamedSharding(mesh, P("data")))
    edit = SortPerShard(source="a.py:1", axes=("data",))
    with pytest.raises(ValueError, match="the step has no such sorts"):
        apply(edited_of(lambda x: x * 2, (x,), mesh), [edit])


@marked(pods)
def test_sorted_experts_take_what_an_expert_s_take_on_a_pod():
    written = STEPS["sorted experts"]
    mesh = pod_mesh(POD, written.axes)
    took = []
    for expert in (False, True):
        step, args = written.build(mesh, expert)
        plan = jaxoverlap.overlap(step, cluster=POD, never_slower=False).explain(*args)
        assert plan.price
        took.append(plan.price.step_s)
    assert took[0] < 1.1 * took[1]
