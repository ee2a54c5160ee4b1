"""Tokens move at the least cost, and back to the bit; rails carry what one rail would."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from scipy.optimize import linear_sum_assignment

from jaxoverlap.train import varlen
from jaxoverlap.train.varlen.device.routing import Route, hop_pairs, send
from jaxoverlap.train.varlen.remap import remap, token_costs, transport
from jaxoverlap.train.varlen.rings import Nodes
from tests.train.varlen.batches import COSTS

AXES = ("node", "device")


def mesh_of(count, devices):
    places = np.array(jax.devices()[: count * devices]).reshape(count, devices)
    return Mesh(places, AXES, axis_types=(AxisType.Auto,) * 2)


@settings(max_examples=60, deadline=None)
@given(over=st.lists(st.integers(-9, 9), min_size=4, max_size=8), seed=st.integers(0, 99))
def test_transport_costs_what_an_assignment_of_single_tokens_does(over, seed):
    over = np.array(over)
    over[0] -= over.sum()
    give, want = np.maximum(over, 0), np.maximum(-over, 0)
    cost = np.random.default_rng(seed).uniform(1, 5, (len(over), len(over)))
    flow = transport(give, want, cost, at_once=1 << 20)
    assert np.array_equal(flow.sum(1), give) and np.array_equal(flow.sum(0), want)
    one = cost[np.ix_(np.repeat(np.arange(len(give)), give), np.repeat(np.arange(len(want)), want))]
    least = one[linear_sum_assignment(one)].sum()
    assert (flow * cost).sum() == pytest.approx(least)


def test_tokens_stay_inside_nodes_where_they_can():
    over = np.array([5, -5, 0, 0, 3, 1, -4, 0])
    cost = token_costs(Nodes(2, 4), 1.0, 10.0)
    flow = transport(np.maximum(over, 0), np.maximum(-over, 0), cost, at_once=8)
    assert flow[:4, 4:].sum() == flow[4:, :4].sum() == 0


def test_no_part_is_longer_than_it_must_be():
    flow = transport(np.array([9, 0, 0, 0]), np.array([0, 3, 3, 3]), np.ones((4, 4)))
    assert flow.max() == 3
    with pytest.raises(ValueError, match="3 tokens to give and 2 wanted"):
        transport(np.array([3, 0]), np.array([0, 2]), np.ones((2, 2)))


def test_remap_is_undone_to_the_bit_and_its_gradient_is_its_inverse():
    bounds = varlen.Bounds(((1, 64),), 26, 16, sequences=32)
    planner = varlen.Planner(COSTS, Nodes(2, 4), capacity=64, programs=[bounds])
    plan = planner([60, 3, 40, 7, 9, 50, 2, 2, 31])
    assert plan.remap_tokens, "this batch moves no token"
    arrays, each = plan.arrays, P(AXES)

    @functools.partial(jax.jit)
    @functools.partial(
        jax.shard_map, mesh=mesh_of(2, 4), in_specs=(each, each, each), out_specs=(each,) * 3,
        check_vma=False,
    )  # fmt: skip
    def both(x, there, back):
        there, back = jax.tree.map(lambda leaf: leaf[0], (there, back))
        slots, undo = jax.vjp(lambda x: remap(AXES, x, there, back), x[0])
        return slots[None], remap(AXES, slots, back, there)[None], undo(slots)[0][None]

    tokens = np.random.default_rng(0).normal(size=(plan.tokens, 3)).astype("f")
    x = plan.laid_out(tokens)
    slots, again, gradient = both(x, arrays.to_attention, arrays.to_linear)
    assert np.array_equal(again, x) and np.array_equal(gradient, x)
    used = plan.slots[..., 0] >= 0
    first = np.cumsum(plan.lengths) - plan.lengths
    want = tokens[first[plan.slots[..., 0][used]] + plan.slots[..., 1][used]]
    assert np.array_equal(np.asarray(slots)[used], want)


@pytest.mark.parametrize(("count", "devices", "size"), ((2, 4, 8), (4, 2, 8), (4, 2, 4), (8, 1, 8)))
@pytest.mark.parametrize("tokens", (7, 8))
def test_rails_carry_what_one_rail_would(count, devices, size, tokens):
    nodes = Nodes(count, devices)
    x = np.arange(8 * tokens * 2, dtype="f").reshape(8, 1, tokens, 2)
    want = np.empty_like(x)
    for pairs in hop_pairs(nodes, size):
        for a, b in pairs:
            want[b] = x[a]
    for proxies in range(1, devices + 1):
        route = Route(nodes, AXES, size, proxies)
        hop = jax.shard_map(
            lambda x, route=route: send(route, (x[0],))[0][None],
            mesh=mesh_of(count, devices), in_specs=P(AXES), out_specs=P(AXES), check_vma=False,
        )  # fmt: skip
        assert np.array_equal(jax.jit(hop)(x), want)


def test_all_rails_send_at_once():
    nodes = Nodes(2, 4)
    hop = jax.shard_map(
        lambda x: send(Route(nodes, AXES, 8, 4), (x[0],))[0][None],
        mesh=mesh_of(2, 4), in_specs=P(AXES), out_specs=P(AXES), check_vma=False,
    )  # fmt: skip
    jaxpr = str(jax.make_jaxpr(hop)(jnp.zeros((8, 1, 8, 2))))
    assert jaxpr.count("ppermute") == 3 + 1 + 3 + 1, jaxpr


def test_routing_pays_for_many_bytes_and_not_for_few():
    assert COSTS.proxies(1e3) == 1 and COSTS.proxies(1e8) == 2
    assert float(COSTS.crossing_s(1e8)) < float(replace(COSTS, rails=1).crossing_s(1e8))
