"""Equations that treat rows alike run in parts; those that mix them are named, and run whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from jaxoverlap.passes.analysis.batch import BatchSplit
from jaxoverlap.passes.halves.halve import Halved
from tests.support.halves import assert_same, computed, values

ROWS = 8
CUT = BatchSplit(2, 2)


def halved(fn: Callable, *args: Any, cut: BatchSplit = CUT, dims: tuple[int | None, ...] = (0,)):
    """Cut the rows of a function's arguments; the others are whole.

    Args:
        fn: the function.
        args: its arguments.
        cut: how they are cut.
        dims: the dims of the arguments along which they lie, the first argument's first.

    Returns:
        The parts' results beside the plain ones, and the names of the primitives that mix rows.
    """
    jaxpr = jax.make_jaxpr(fn)(*args)
    rows = dict(zip(jaxpr.invars, dims, strict=False))
    done = Halved(jaxpr, rows.get, cut)
    evaluated = (computed(j, jax.tree.leaves(args)) for j in (done.jaxpr, jaxpr))
    return (
        list(zip(*evaluated, strict=True)),
        [eqn.primitive.name for eqn in done.mixing],
        done.jaxpr,
    )


W = values(6, 5, seed=1)
PLACES = jnp.asarray([[0, 3], [1, 1], [5, 0], [2, 2], [4, 4], [3, 5], [0, 0], [5, 5]])
ALIKE: dict[str, Callable] = {
    "element-wise": lambda x: jnp.tanh(x) * 2 + jnp.where(x > 0, x, -x),
    "a value without rows": lambda x: x + W[:, 0],
    "a whole value with rows": lambda x: x * jnp.arange(ROWS)[:, None],
    "a matmul": lambda x: x @ W,
    "a matmul from the left": lambda x: W.T @ x.T,
    "a matmul over the rows": lambda x: x.T @ jnp.cos(x),
    "a batched matmul": lambda x: jnp.einsum("bi,bj->bij", x, x),
    "rows by rows": lambda x: jax.nn.softmax(x @ x.T) @ x,
    "a matmul over the rows of one": lambda x: jnp.einsum("bi,cj->ij", x, x),
    "means and maxima": lambda x: (x.mean(0), x.max(0), x.min(0), x.sum(), jnp.prod(x, 0)),
    "all and any": lambda x: ((x > 0).all(0), (x > 0).any(0), (x > 0).any(1)),
    "softmax": jax.nn.softmax,
    "argmax of a row": lambda x: jnp.argmax(x, 1),
    "a sum along a row": lambda x: jnp.cumsum(x, 1),
    "a sorted row": lambda x: jnp.sort(x, axis=1),
    "the largest of a row": lambda x: lax.top_k(x, 2),
    "reshapes that merge": lambda x: jnp.tanh(x.reshape(ROWS * 6)).reshape(ROWS * 2, 3) * 2,
    "dims of one element": lambda x: x[None, :, None].squeeze(2) + 1,
    "a transpose": lambda x: jnp.exp(x.T),
    "slices and pads": lambda x: jnp.pad(x[:, 1:4], ((0, 0), (1, 2))) + x[:, ::-1],
    "a dynamic slice": lambda x: lax.dynamic_slice_in_dim(x, jnp.int32(2), 3, 1),
    "a dynamic update": lambda x: lax.dynamic_update_slice_in_dim(x, x[:, :2], jnp.int32(3), 1),
    "concatenations": lambda x: jnp.concatenate([x, W[:4].T.repeat(2, 0)[:ROWS]], 1),
    "stacks": lambda x: jnp.stack([x, 2 * x], 0) + jnp.stack([x, x], 1).transpose(1, 0, 2),
    "splits": lambda x: jnp.split(x, [2, 3], axis=1),
    "tiles": lambda x: jnp.tile(x, (1, 2)),
    "a lookup": lambda x: W[jnp.argmax(x, 1)],
    "a lookup in each row": lambda x: jnp.take_along_axis(x, PLACES, 1),
    "the gradient of that": lambda x: jax.grad(
        lambda x: (jnp.take_along_axis(x, PLACES, 1) ** 2).sum()
    )(x),
    "a convolution": lambda x: lax.conv_general_dilated(x[:, None], W[:3, None, :2], (1,), "SAME"),
    "a pooling": lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 3), (1, 2), "SAME"),
    "an average pooling": lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 2), (1, 1), "VALID"),
    "the gradient of a pooling": lambda x: jax.grad(
        lambda x: (lax.reduce_window(x, -jnp.inf, lax.max, (1, 2), (1, 2), "SAME") ** 2).sum()
    )(x),
    "the gradient of its kernel": lambda x: jax.grad(
        lambda k: (lax.conv_general_dilated(x[:, None], k, (1,), "SAME") ** 2).sum()
    )(W[:3, None, :2]),
    "a barrier": lambda x: lax.optimization_barrier((x, W))[0] @ W,
    "a derivative of its own": lambda x: jax.nn.relu(x),
    "a helper": lambda x: jax.jit(lambda x: jnp.tanh(x) * 2)(x),
    "a derivative of its own, taken": lambda x: jax.grad(lambda x: jax.nn.relu(x).sum())(x),
    "a remat": lambda x: jax.checkpoint(lambda x: jnp.sin(x @ W))(x),
    "a branch": lambda x: lax.cond(W[0, 0] > 0, lambda x: x + 1, lambda x: jnp.ones_like(x), x),
    "dropped elements": lambda x: jnp.where(
        jax.random.bernoulli(jax.random.key(0), 0.5, x.shape), x, 0
    ),
}
MIXING: dict[str, tuple[Callable, str]] = {
    "a sum of fractions that is a whole number": (
        lambda x: lax.dot_general(x, x, (((0,), (0,)), ((), ())), preferred_element_type=jnp.int32),
        "dot_general",
    ),
    "a sum over rows before": (lambda x: jnp.cumsum(x, 0) * x, "cumsum"),
    "a sort of the rows": (lambda x: jnp.sort(x, axis=0) + 1, "sort"),
    "rows from last to first": (lambda x: x[::-1] * x, "rev"),
    "a pooling of the rows": (
        lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (2, 1), (1, 1), "SAME") + x,
        "reduce_window_max",
    ),
    "some of the rows": (lambda x: x[:4] + 1, "slice"),
    "rows moved by one": (lambda x: jnp.roll(x, 1, 0) - x, "slice"),
    "the largest row": (lambda x: jnp.argmax(x, 0), "argmax"),
    "rows behind others": (lambda x: x.T.reshape(-1) * 2, "reshape"),
    "rows beside other rows": (lambda x: jnp.concatenate([x, x + 1], 0), "concatenate"),
    "a lookup among the rows": (lambda x: x[jnp.arange(ROWS) // 2], "gather"),
    "a gradient of a lookup": (
        lambda x: jnp.zeros((6, 6)).at[jnp.argmax(x, 1)].add(x),
        "scatter-add",
    ),
    "a loop": (lambda x: lax.while_loop(lambda x: x.sum() < 0, lambda x: x + 1, x), "while"),
    "a scan over the rows": (lambda x: lax.scan(lambda c, r: (c + r, c * r), W[:, 0], x), "scan"),
}


@pytest.mark.parametrize("name", ALIKE)
def test_rows_that_are_treated_alike_run_in_parts(name):
    pairs, mixing, jaxpr = halved(ALIKE[name], values(ROWS, 6))
    assert_same(pairs)
    assert mixing == [], jaxpr


@pytest.mark.parametrize("name", MIXING)
def test_an_equation_that_mixes_rows_runs_on_joined_parts(name):
    fn, primitive = MIXING[name]
    pairs, mixing, _ = halved(fn, values(ROWS, 6))
    assert_same(pairs)
    assert primitive in mixing


def test_a_matmul_over_the_rows_of_both_operands_is_added_once():
    _, _, jaxpr = halved(lambda x, y: x.T @ y, values(8, 3), values(8, 4), dims=(0, 0))
    names = [eqn.primitive.name for eqn in jaxpr.eqns]
    assert names.count("dot_general") == 2
    assert names.count("add") == 1


def test_operands_whose_rows_lie_elsewhere_are_joined_and_cut_anew():
    pairs, mixing, _ = halved(lambda x, y: jnp.tanh(x) + y, values(8, 8), values(8, 8), dims=(0, 1))
    assert_same(pairs)
    assert mixing == ["add"]


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_any_shards_and_parts_give_the_whole(data):
    shards, parts = data.draw(st.sampled_from([1, 2, 4])), data.draw(st.sampled_from([2, 3, 4]))
    cut = BatchSplit(shards, parts)
    rows = shards * parts * data.draw(st.integers(1, 2))
    name = data.draw(st.sampled_from(["a matmul over the rows", "softmax", "a remat", "stacks"]))
    pairs, _, _ = halved(ALIKE[name], values(rows, 6), cut=cut)
    assert_same(pairs)


def test_each_shard_is_cut_by_itself():
    """Two shards of rows 0 to 3 and 4 to 7: the first part has 0, 1, 4 and 5."""
    _, _, jaxpr = halved(lambda x: jnp.tanh(x), jnp.arange(8.0))
    first = next(eqn for eqn in jaxpr.eqns if eqn.primitive.name == "tanh").invars[0]
    shown = jaxpr.replace(outvars=[first])
    (part,) = computed(shown, [jnp.arange(8.0)])
    np.testing.assert_array_equal(part, [0, 1, 4, 5])
