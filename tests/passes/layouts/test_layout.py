"""Layouts put mesh axes on named dims."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from hypothesis import given
from hypothesis import strategies as st

from jaxoverlap.passes.analysis.dims import DimNames
from jaxoverlap.passes.layouts.layout import by_size, neighbours, spec_of, starts

B, S, D, H = range(4)
SIZES = {"fsdp": 2, "tp": 4}


def test_an_axis_shards_the_first_of_its_names_that_a_value_has():
    layout = {"fsdp": (B, D), "tp": (H, S)}
    assert spec_of((B, S, D), (8, 8, 8), layout, SIZES) == (("fsdp",), ("tp",), ())
    assert spec_of((B, H, S, S), (8, 8, 8, 8), layout, SIZES) == (("fsdp",), ("tp",), (), ())
    assert spec_of((D, H), (8, 8), layout, SIZES) == (("fsdp",), ("tp",))


def test_an_axis_goes_on_where_it_does_not_divide():
    layout = {"tp": (H, S)}
    assert spec_of((H, S), (2, 8), layout, SIZES) == ((), ("tp",))
    assert spec_of((H, S), (2, 6), layout, SIZES) == ((), ())


def test_two_axes_share_a_dim_only_if_both_divide_it():
    layout = {"fsdp": (B,), "tp": (B, S)}
    assert spec_of((B, S), (8, 8), layout, SIZES) == (("fsdp", "tp"), ())
    assert spec_of((B, S), (4, 8), layout, SIZES) == (("fsdp",), ("tp",))


@given(
    st.permutations(range(4)),
    st.lists(st.sampled_from([1, 2, 3, 4, 8]), min_size=4, max_size=4),
    st.dictionaries(st.sampled_from(["fsdp", "tp"]), st.permutations(range(4)).map(tuple)),
)
def test_each_axis_shards_one_dim_at_most_and_evenly(names, shape, layout):
    spec = spec_of(names, shape, layout, SIZES)
    axes = [axis for dim in spec for axis in dim]
    assert len(axes) == len(set(axes))
    for size, dim in zip(shape, spec, strict=True):
        parts = 1
        for axis in dim:
            parts *= SIZES[axis]
        assert size % parts == 0


def step(w, x):
    return w - jax.grad(lambda w: jnp.tanh(x @ w).sum())(w)


def test_the_first_layouts_are_those_of_batch_and_weights():
    jaxpr = jax.make_jaxpr(step)(jnp.zeros((8, 16)), jnp.zeros((4, 8))).jaxpr
    dims = DimNames(jaxpr)
    (d, f), (b, _) = map(dims.of, jaxpr.invars)
    arguments = [(("fsdp",), ("tp",)), (("fsdp",), ())]
    assert list(starts(jaxpr, arguments, dims, SIZES)) == [
        {"fsdp": (b, d), "tp": (f,)},
        {"fsdp": (d, b), "tp": (f,)},
    ]


def test_an_axis_of_one_device_and_arguments_that_nobody_placed_suggest_nothing():
    jaxpr = jax.make_jaxpr(step)(jnp.zeros((8, 16)), jnp.zeros((4, 8))).jaxpr
    dims = DimNames(jaxpr)
    arguments = [(("fsdp",), ("tp",)), None]
    (layout,) = starts(jaxpr, arguments, dims, {"fsdp": 1, "tp": 4})
    assert list(layout) == ["tp"]


def test_neighbours_change_one_name_of_one_axis():
    layout = {"fsdp": (B, D), "tp": (H,)}
    others = list(neighbours(layout, [S, B]))
    assert {"fsdp": (B, D), "tp": (H, S)} in others
    assert {"fsdp": (B, D), "tp": (S, H)} in others
    assert {"fsdp": (D,), "tp": (H,)} in others
    assert layout not in others
    assert all(sum(other[a] != layout[a] for a in layout) == 1 for other in others)


def test_names_come_in_the_order_of_the_elements_that_they_stand_in():
    jaxpr = jax.make_jaxpr(lambda x, w: x @ w)(jnp.zeros((64, 8)), jnp.zeros((8, 2))).jaxpr
    dims = DimNames(jaxpr)
    (rows, inner), (_, columns) = map(dims.of, jaxpr.invars)
    assert by_size(jaxpr.invars, dims) == [inner, rows, columns]
