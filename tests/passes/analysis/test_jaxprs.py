from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import check_jaxpr, jaxpr_as_fun
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxoverlap._jax import inlining
from jaxoverlap.passes.analysis.jaxprs import Body, Dot, dots, map_bodies

N = 4
X = np.cos(np.arange(N * N, dtype=np.float32)).reshape(N, N)
W = np.sin(np.arange(N * N, dtype=np.float32)).reshape(N, N)
ARGS = (jnp.asarray(X), jnp.asarray(W))


def map_dots(jaxpr: Any, visit: Callable[[Dot], list[Any] | None]) -> Any:
    """Replace each `dot_general` of a jaxpr by what `visit` returns; None leaves it."""

    def visit_body(body: Body) -> list[Any] | None:
        new = {dot.position: eqns for dot in body.dots if (eqns := visit(dot)) is not None}
        if not new:
            return None
        return [e for position, eqn in enumerate(body.eqns) for e in new.get(position, [eqn])]

    return map_bodies(jaxpr, visit_body)


def traced(fn: Callable[..., Any]) -> Any:
    return jax.jit(fn).trace(*ARGS).jaxpr


def run(jaxpr: Any) -> np.ndarray:
    check_jaxpr(jaxpr)
    (out,) = jaxpr_as_fun(jaxpr)(*ARGS)
    return np.asarray(out)


def runs(fn: Callable[..., Any]) -> list[int]:
    return [dot.runs for dot in dots(traced(fn))]


def instead(*chosen: int) -> Callable[[Dot], list[Any] | None]:
    """Return a visit that puts lhs + rhs in the place of the chosen matmuls."""

    def visit(dot: Dot) -> list[Any] | None:
        eqn = dot.eqn
        new = inlining.inline(lambda x, w: x + w, eqn.invars, eqn.outvars, eqn)
        return new if dot.index in chosen else None

    return visit


# -- steps with matmuls at every depth ----------------------------------------------------------


def flat(x, w):
    return (x @ w) @ x


@jax.jit
def inner(x, w):
    return x @ w


def called_twice(x, w):
    return inner(x, w) + inner(w, x)


def scanned(x, w):
    return lax.scan(lambda carry, _: (carry @ w, None), x, None, length=5)[0]


def scanned_in_a_scan(x, w):
    def outer(carry, _):
        carry = carry @ w
        return lax.scan(lambda c, _: (c @ w, None), carry, None, length=3)[0], None

    return lax.scan(outer, x, None, length=2)[0] @ w


def looped(x, w):
    """Run a while loop, whose condition has a matmul too, for three trips that nobody knows of."""

    def more(state):
        count, carry = state
        return (count < 3) & jnp.all(jnp.isfinite(carry @ w))

    return lax.while_loop(more, lambda s: (s[0] + 1, jnp.tanh(s[1] @ w)), (0, x))[1]


def branched(x, w):
    return lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: (w @ x) @ w)


def rematted(x, w):
    layer = jax.checkpoint(lambda x, w: jnp.sin(x @ w))
    return jax.grad(lambda x: layer(x, w).sum())(x)


@jax.custom_jvp
def gelu_like(x, w):
    return jnp.tanh(x @ w)


@gelu_like.defjvp
def _gelu_like_jvp(primals, tangents):
    (x, w), (dx, dw) = primals, tangents
    y = gelu_like(x, w)
    return y, (1 - y * y) * (dx @ w + x @ dw)


@jax.custom_vjp
def with_own_gradient(x, w):
    return x @ w


with_own_gradient.defvjp(
    lambda x, w: (with_own_gradient(x, w), (x, w)), lambda r, d: (d @ r[1].T, 2 * r[0].T @ d)
)


def with_gradient(x, w):
    return jax.grad(lambda x, w: with_own_gradient(x, w).sum(), argnums=1)(x, w)


def sharded(x, w):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    body = jax.shard_map(
        lambda x, w: lax.scan(lambda c, _: (c @ w, None), x @ w, None, length=3)[0],
        mesh=mesh,
        in_specs=(P("x"), P()),
        out_specs=P("x"),
        check_vma=False,
    )
    return body(x @ w, w) @ w


STEPS = [
    flat,
    called_twice,
    scanned,
    scanned_in_a_scan,
    looped,
    branched,
    rematted,
    gelu_like,
    with_own_gradient,
    with_gradient,
    sharded,
]
each = pytest.mark.parametrize("step", STEPS, ids=lambda f: getattr(f, "__name__", str(f)))


# -- what is found --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (flat, [1, 1]),
        (called_twice, [1, 1]),
        (scanned, [5]),
        (scanned_in_a_scan, [2, 2 * 3, 1]),
        (looped, [1, 1]),
        (branched, [1, 1, 1]),
        (gelu_like, [1]),
        (with_own_gradient, [1]),
    ],
)
def test_loops_multiply(step, expected: list[int]):
    assert runs(step) == expected


def test_a_rematted_layer_is_multiplied_again():
    (forward, again, backward) = dots(traced(rematted))
    numbers = [d.eqn.params["dimension_numbers"][0] for d in (forward, again, backward)]
    assert numbers[0] == numbers[1] != numbers[2]


def test_the_matmuls_of_a_gradient_of_ones_own_are_seen():
    # One forward, two in the rule for the gradient (the one of x is not used, and still there).
    assert runs(with_gradient) == [1, 1, 1]


def test_a_jvp_rule_is_seen_where_it_is_used():
    tangent = partial(jax.jvp, gelu_like)
    matmuls = dots(traced(lambda x, w: tangent((x, w), (w, x))[1]))
    assert len(matmuls) == 3
    assert all(d.inside is None for d in matmuls)


def test_what_is_manual_in_the_body_of_a_shard_map():
    matmuls = dots(traced(sharded))
    assert [d.inside for d in matmuls] == [None, "shard_map", "shard_map", None]
    assert [d.runs for d in matmuls] == [1, 1, 3, 1]
    assert [d.manual and d.manual.axes for d in matmuls] == [None, {"x": 2}, {"x": 2}, None]


def test_branches_and_loops_in_a_shard_map_are_looked_at_only():
    """Devices may run these bodies differently: nothing may be put there that wants them all."""

    def body(x, w):
        y = lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: x)
        return lax.while_loop(lambda c: c[0, 0] > 0, lambda c: c @ w, y)

    def step(x, w):
        auto = (AxisType.Auto,)
        mesh = jax.make_mesh((2,), ("x",), axis_types=auto, devices=jax.devices()[:2])
        specs = dict(in_specs=(P("x"), P()), out_specs=P("x"), check_vma=False)
        return jax.shard_map(body, mesh=mesh, **specs)(x, w)

    matmuls = dots(traced(step))
    assert [d.inside for d in matmuls] == ["cond in shard_map", "while in shard_map"]
    assert [d.manual for d in matmuls] == [None, None]


def test_a_linear_solver_is_looked_at_only():
    def solve(x, w):
        return lax.custom_linear_solve(
            lambda v: w @ v, x[0], lambda matvec, b: matvec(b), lambda matvec, b: b
        )

    jaxpr = traced(solve)
    matmuls = dots(jaxpr)
    assert matmuls
    assert {d.inside for d in matmuls} == {"custom_linear_solve"}
    with pytest.raises(AssertionError, match="not ours"):
        map_dots(jaxpr, lambda dot: [dot.eqn])
    np.testing.assert_array_equal(run(map_dots(jaxpr, lambda dot: None)), run(jaxpr))


@each
def test_places_are_counted_and_the_same_each_time(step):
    jaxpr = traced(step)
    first, second = dots(jaxpr), dots(jaxpr)
    assert [d.index for d in first] == list(range(len(first)))
    assert len(first) == len(second) > 0
    for one, other in zip(first, second, strict=True):
        assert one.eqn is other.eqn
        assert (one.index, one.runs, one.inside) == (other.index, other.runs, other.inside)


@each
def test_places_do_not_move_when_others_are_replaced(step):
    """A pass that replaces matmuls meets the ones that are left under the numbers it knows."""
    before = dots(traced(step))
    met = []

    def visit(dot: Dot) -> list[Any] | None:
        met.append(dot)
        return instead(dot.index)(dot) if dot.index % 2 and not dot.inside else None

    map_dots(traced(step), visit)
    key = [(d.index, d.runs, d.inside, str(d.eqn.params["dimension_numbers"])) for d in before]
    assert len(met) == len(before)
    for dot in met:  # bodies inside others come first
        numbers = str(dot.eqn.params["dimension_numbers"])
        assert (dot.index, dot.runs, dot.inside, numbers) == key[dot.index]


# -- what is put in its place ---------------------------------------------------------------------


@each
def test_a_visit_that_leaves_all_changes_nothing(step):
    jaxpr = traced(step)
    same = map_dots(jaxpr, lambda dot: None)
    assert [str(d.eqn) for d in dots(same)] == [str(d.eqn) for d in dots(jaxpr)]
    np.testing.assert_array_equal(run(same), run(jaxpr))


@pytest.mark.parametrize(
    ("step", "chosen", "expected"),
    [
        (flat, (0,), lambda: (X + W) @ X),
        (flat, (1,), lambda: X @ W + X),
        (flat, (0, 1), lambda: (X + W) + X),
        (scanned, (0,), lambda: X + 5 * W),
        (scanned_in_a_scan, (0, 1), lambda: (X + 8 * W) @ W),
        (scanned_in_a_scan, (1,), lambda: ((X @ W + 3 * W) @ W + 3 * W) @ W),
        (branched, (0, 1), lambda: X @ W),  # branches by number, and False, not taken, is 0
        (branched, (2,), lambda: X + W),
        (gelu_like, (0,), lambda: np.tanh(X + W)),
        (with_own_gradient, (0,), lambda: X + W),
    ],
)
def test_what_a_visit_returns_takes_the_place(step, chosen, expected):
    got = run(map_dots(traced(step), instead(*chosen)))
    np.testing.assert_allclose(got, expected(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("chosen", [0, 1])
def test_a_body_that_two_calls_share_is_replaced_in_one_place(chosen: int):
    jaxpr = traced(called_twice)
    first, second = (e.params["jaxpr"] for e in jaxpr.eqns if e.primitive.name == "jit")
    assert first is second
    before = str(jaxpr)
    calls = [X @ W, W @ X]
    calls[chosen] = X + W
    np.testing.assert_allclose(run(map_dots(jaxpr, instead(chosen))), sum(calls), rtol=1e-5)
    assert str(jaxpr) == before  # and the step itself is as it was
    np.testing.assert_allclose(run(jaxpr), X @ W + W @ X, rtol=1e-5)


def test_the_derivative_rule_of_a_replaced_body_stays():
    """A replaced matmul in a function with a rule of its own is still derived by that rule."""
    replaced = map_dots(traced(with_own_gradient), instead(0))

    def loss(x, w):
        return jaxpr_as_fun(replaced)(x, w)[0].sum()

    np.testing.assert_allclose(loss(*ARGS), (X + W).sum(), rtol=1e-5)
    grad = jax.grad(loss, argnums=1)(*ARGS)
    np.testing.assert_allclose(grad, 2 * X.T @ np.ones_like(X), rtol=1e-5)
