"""Manual code: collectives that a user wrote beside matmuls in the body of a shard_map."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxoverlap
from jaxoverlap import Decision
from jaxoverlap.passes.flatten import flatten
from jaxoverlap.passes.jaxprs import bodies, dots
from jaxoverlap.passes.manual import decide_manual
from jaxoverlap.passes.rewrite import rewrite
from tests.engine import equations

N = 4
MESH = jax.make_mesh((2, N), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
S, D, F = 32, 16, 64  # the sequence, a hidden dim, a wider one
X, W, V = (S // N, D), (D, F // N), (F // N, D)  # on a device: sharded rows, columns, rows

gather = partial(lax.all_gather, axis_name="model", tiled=True)
scatter = partial(lax.psum_scatter, axis_name="model", tiled=True)
exchange = partial(lax.all_to_all, axis_name="model", tiled=True)
each_check = pytest.mark.parametrize("check", [True, False], ids=["checked", "unchecked"])


def traced(body: Callable, *shapes: tuple[int, ...], check: bool = True, names=None) -> Any:
    """The jaxpr of a body on devices that each have arrays of these shapes, all different."""

    def step(*args):
        return mapped(lambda *a: jax.tree.map(lambda y: y[None], body(*(x[0] for x in a))))(*args)

    def mapped(fn):
        axes = names or {"data", "model"}
        spec = P(tuple(a for a in MESH.axis_names if a in axes))
        return jax.shard_map(
            fn, mesh=MESH, in_specs=spec, out_specs=spec, check_vma=check, axis_names=axes
        )

    return flatten(jax.make_jaxpr(step)(*(jnp.zeros((8, *s)) for s in shapes)))


def decided(body: Callable, *shapes: tuple[int, ...], **how: Any) -> tuple[list[Any], Counter]:
    """The entries of a body's matmuls, and its equations once it is rewritten."""
    jaxpr = traced(body, *shapes, **how)
    entries, sharings = decide_manual(bodies(jaxpr), {})
    assert sorted(entries) == [dot.index for dot in dots(jaxpr)]
    new = rewrite(jaxpr, sharings, MESH)
    return [entries[i] for i in sorted(entries)], Counter(e.primitive.name for e in equations(new))


def reason(body: Callable, *shapes: tuple[int, ...], **how: Any) -> str:
    """Why the one matmul of a body is left alone."""
    (entry,), found = decided(body, *shapes, **how)
    assert found["ppermute"] == 0
    return entry.reason


# -- what is found --------------------------------------------------------------------------------


@each_check
def test_matmuls_that_read_one_gather_share_a_ring(check: bool):
    def body(x, q, k):
        x = gather(x)
        return x @ q, x @ k

    entries, found = decided(body, X, W, W, check=check)
    assert [(e.kind, e.axis, e.ring, e.num_chunks) for e in entries] == [
        ("all_gather_matmul", "model", 0, N)
    ] * 2
    assert [e.bytes_moved for e in entries] == [(N - 1) * 4 * (S // N) * D, 0]
    assert (found["ppermute"], found["dot_general"], found["all_gather"]) == (N - 1, 2 * N, 0)


@each_check
def test_a_scattered_sum(check: bool):
    (entry,), found = decided(lambda h, w: scatter(h @ w), (S, F // N), V, check=check)
    assert (entry.kind, entry.letter, entry.bytes_moved) == (
        "matmul_reduce_scatter", "a", (N - 1) * 4 * S * D // N,
    )  # fmt: skip
    assert (found["ppermute"], found["dot_general"], found["reduce_scatter"]) == (N - 1, N, 0)


def test_matmuls_that_are_added_send_one_sum():
    def body(q, k, v, w):
        sums = [lax.dot_general(a, w, (((1,), (1,)), ((), ()))) for a in (q, k, v)]
        return scatter(sums[0] + sums[1] + sums[2])

    entries, found = decided(body, *[(S, F)] * 3, (D, F))
    assert [e.ring for e in entries] == [0, 0, 0]
    assert (found["ppermute"], found["dot_general"], found["reduce_scatter"]) == (N - 1, 3 * N, 0)


@each_check
def test_an_all_reduce_ends_in_a_gather_that_keeps_the_type(check: bool):
    def body(h, w):
        return lax.psum(h @ w, "model") * jnp.ones(())

    (entry,), found = decided(body, (S, F // N), V, check=check)
    assert (entry.kind, entry.bytes_moved) == ("matmul_all_reduce", 2 * (N - 1) * 4 * S * D // N)
    assert found["ppermute"] == N - 1
    assert found["psum"] + found["psum_invariant"] == 0
    assert found["all_gather_invariant" if check else "all_gather"] == 1


@each_check
def test_exchanges_before_and_after(check: bool):
    def body(x, w, v):
        y = exchange(x, split_axis=1, concat_axis=0) @ w
        return exchange(jnp.sin(y) @ v, split_axis=0, concat_axis=1)

    entries, found = decided(body, X, (D // N, F), (F, D // N), check=check)
    assert [(e.kind, str(e.variant)) for e in entries] == [("all_to_all_matmul", "direct")] * 2
    assert [e.letter for e in entries] == ["a", "a"]
    assert (found["ppermute"], found["all_to_all"]) == (2 * (N - 1), 0)


def test_what_stands_between_is_done_chunk_by_chunk():
    def body(w, x, h):
        whole = lax.all_gather(w.astype(jnp.bfloat16), "data", axis=1, tiled=True)
        y = x @ whole.T.astype(jnp.float32)
        out = jnp.einsum("sf,sd->df", h, x).T  # as the gradient of a weight stands
        return y, scatter(out.astype(jnp.bfloat16), scatter_dimension=1)

    entries, found = decided(body, (F, D // 2), (S, D), (S, F))
    assert [(e.kind, e.axis) for e in entries] == [
        ("all_gather_matmul", "data"),
        ("matmul_reduce_scatter", "model"),
    ]
    assert entries[0].bytes_moved == 2 * F * D // 2, "it travels as bfloat16"
    assert found["all_gather"] + found["reduce_scatter"] == 0


def test_a_value_that_others_read_too_is_kept_whole():
    def body(x, w):
        x = gather(x)
        return x @ w, x, x.T

    entries, found = decided(body, X, W)
    assert isinstance(entries[0], Decision)
    assert (found["ppermute"], found["all_gather"]) == (N - 1, 0)


def test_a_matmul_that_comes_later_reads_what_was_kept():
    def body(x, w):
        x = gather(x)
        return x.T @ jnp.sin(x @ w)

    entries, found = decided(body, X, W)
    assert [e.why for e in entries] == ["", "reads what ring 0 moved"]
    assert (found["ppermute"], found["dot_general"]) == (N - 1, N + 1)


def test_of_two_collectives_the_larger_becomes_the_ring():
    def body(x, w):
        return scatter(x @ lax.all_gather(w, "data", axis=0, tiled=True))

    (entry,), found = decided(body, (S, D), (D // 2, 8 * S))
    assert (entry.axis, entry.kind) == ("model", "matmul_reduce_scatter")
    assert entry.others == (f"data all_gather, {D // 2 * 8 * S * 4 / 1e3:.1f} kB",)
    assert (found["all_gather"], found["reduce_scatter"]) == (1, 0)


def test_an_exchange_between_two_matmuls_is_done_once():
    def body(x, w, v):
        return exchange(x @ w, split_axis=1, concat_axis=0) @ v

    entries, found = decided(body, X, (D, F), (F // N, D))
    assert found["ppermute"] == N - 1
    assert [type(e).__name__ for e in entries] == ["Skip", "Decision"]


def test_loops_and_shard_maps_inside():
    def body(x, w):
        def layer(x, _):
            inner = lambda x: jax.jit(lambda x: scatter(gather(x) @ w @ w.T))(x)  # noqa: E731
            return jax.checkpoint(inner)(x), None

        return lax.scan(layer, x, length=3)[0]

    entries, found = decided(body, X, (D, D))
    assert [e.kind for e in entries] == ["all_gather_matmul", "matmul_reduce_scatter"]
    assert [e.runs for e in entries] == [3, 3]
    assert found["all_gather"] + found["reduce_scatter"] == 0


# -- why not --------------------------------------------------------------------------------------

HW = ((S, F), (F, D))
GROUPS = [[0, 1], [2, 3]]


@pytest.mark.parametrize(
    ("body", "shapes", "why"),
    [
        (lambda x, w: x @ w, (X, W), "no collective beside it inside shard_map"),
        (
            lambda x, w: gather(x, axis_index_groups=GROUPS) @ w,
            (X, W),
            "all_gather is over groups of an axis (axis_index_groups)",
        ),
        (
            lambda x, w: jnp.tensordot(lax.all_gather(x, "model"), w, 1),
            (X, W),
            "all_gather is not tiled",
        ),
        (
            lambda h, w: lax.psum(h @ w, ("data", "model")),
            HW,
            "psum is over data x model: a ring has one manual mesh axis",
        ),
        (
            lambda h, w: lax.psum(h @ w, "model"),
            ((3, F), (F, 5)),
            "no dim of the result (3, 5) divides into 4 chunks",
        ),
        (
            lambda h, w: scatter(h @ w + 1),
            HW,
            "its result is read by reduce_scatter in a sum with something else",
        ),
        (
            lambda h, w: scatter(jnp.sin(h @ w)),
            HW,
            "its result is read by reduce_scatter through sin",
        ),
        (lambda x, w: jnp.sin(gather(x)) @ w, (X, W), "reads the result of all_gather through sin"),
        (
            lambda h, w: (lambda p: (scatter(p), p))(h @ w),
            HW,
            "its result is read by reduce_scatter and by others",
        ),
        (lambda h, w: lax.pmax(h @ w, "model"), HW, "pmax beside it is not decomposed"),
        (
            lambda x: (lambda x: x @ x.T)(gather(x)),
            (X,),
            "reads the result of all_gather, in a way that no ring does",
        ),
        (
            lambda x, w: exchange(x, split_axis=0, concat_axis=0) @ w,
            (X, (D, F)),
            "all_to_all splits the dim that it gathers",
        ),
        (
            lambda x, w: lax.cond(x[0, 0] > 0, lambda: scatter(x @ w), lambda: x[: S // N]),
            ((S, D), (D, D)),
            "inside cond in shard_map, whose body is not rewritten",
        ),
        (lambda x, w: gather(x) @ w, ((0, D), W), "it has a dim of size 0"),
        (lambda h, w: lax.psum(h, "model") @ w, HW, "no collective beside it inside shard_map"),
    ],
)
def test_reasons(body: Callable, shapes: tuple, why: str):
    assert explained(body, *shapes) == why


def explained(body: Callable, *shapes: tuple[int, ...]) -> str:
    """The reason that `explain` gives for the one matmul of a body; a branch is not manual code."""
    step = traced(body, *shapes, check=False)
    found = jaxoverlap.overlap(jax.jit(jax.extend.core.jaxpr_as_fun(step)))
    args = [jax.ShapeDtypeStruct((8, *s), "float32") for s in shapes]
    with pytest.warns(UserWarning, match="changes nothing"):
        (entry,) = found.explain(*args).entries
    return entry.reason
