"""Plain jits are opened in their place, others stay, and the jaxpr computes the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import check_jaxpr, jaxpr_as_fun
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxoverlap._jax import compat
from jaxoverlap.passes.analysis.flatten import flatten
from jaxoverlap.passes.analysis.jaxprs import bodies, dots

N = 4
X = np.cos(np.arange(N * N, dtype=np.float32)).reshape(N, N)
W = np.sin(np.arange(N * N, dtype=np.float32)).reshape(N, N)
ARGS = (jnp.asarray(X), jnp.asarray(W))


def traced(fn: Callable[..., Any]) -> Any:
    return jax.jit(fn).trace(*ARGS).jaxpr


def flat(fn: Callable[..., Any]) -> Any:
    """Return the flattened jaxpr, once it is certain that it is sound and computes the same."""
    before = traced(fn)
    text = str(before)
    after = flatten(before)
    assert str(before) == text, "the jaxpr that was given is as it was"
    check_jaxpr(after)
    assert after.invars == before.invars
    assert [v.aval for v in after.outvars] == [v.aval for v in before.outvars]
    for got, expected in zip(jaxpr_as_fun(after)(*ARGS), jaxpr_as_fun(before)(*ARGS), strict=True):
        np.testing.assert_array_equal(got, expected)
    return after


def names(jaxpr: Any) -> list[str]:
    return [eqn.primitive.name for eqn in jaxpr.eqns]


def everywhere(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in compat.jaxprs_in(eqn):
            yield from everywhere(inner)


def jits(jaxpr: Any) -> int:
    return Counter(eqn.primitive.name for eqn in everywhere(jaxpr))["jit"]


product = jax.jit(lambda x, w: x @ w)


# -- what is opened -------------------------------------------------------------------------------


def test_a_plain_jit_is_opened():
    assert names(flat(lambda x, w: jnp.sin(product(x, w)))) == ["dot_general", "sin"]


def test_einsums_meet_in_one_body():
    """Each einsum is a jit inside jnp, but three projections of one value belong together."""

    def step(x, w):
        return [jnp.einsum("ij,jk->ik", x, w) for _ in range(3)]

    (body,) = bodies(flat(step))
    assert len(body.dots) == 3
    assert len({dot.eqn.invars[0] for dot in body.dots}) == 1


def test_a_jit_in_a_jit_in_a_jit():
    step = jax.jit(lambda x, w: jax.jit(lambda x: product(x, w) + 1)(2 * x))
    assert names(flat(step)) == ["mul", "dot_general", "add"]


def test_a_body_is_opened_in_two_places():
    after = flat(lambda x, w: product(product(x, w), x))
    assert names(after) == ["dot_general", "dot_general"]
    made = [v for eqn in after.eqns for v in eqn.outvars]
    assert len(set(made)) == 2, "each place has variables of its own"


def test_a_body_without_a_matmul_stays_closed():
    square = jax.jit(lambda x: x * x + 1)
    assert names(flat(lambda x, w: square(product(square(x), w)))) == ["jit", "dot_general", "jit"]


def test_a_step_without_a_matmul_is_left_as_it_is():
    jaxpr = traced(lambda x, w: jax.jit(jnp.sin)(x) + w)
    assert flatten(jaxpr) is jaxpr


def test_equal_constraints_of_one_value_are_one():
    """MaxText constrains its stream twice, and XLA would gather it twice."""
    mesh = jax.make_mesh((8,), ("tp",), axis_types=(AxisType.Auto,))

    def split(x, axis="tp"):
        return lax.with_sharding_constraint(x, NamedSharding(mesh, P(None, None, axis)))

    def step(x, w):
        x = jnp.tile(x, (1, 1, 2))
        return [split(x) @ w, split(x) @ w, split(x, None) @ w, split(2 * x) @ w]

    args = jnp.ones((2, 4, 4)), jnp.ones((8, 8))
    before = jax.jit(step).trace(*args).jaxpr
    after = flatten(before)
    check_jaxpr(after)
    constraints = [eqn for eqn in after.eqns if eqn.primitive.name == "sharding_constraint"]
    assert len(constraints) == 3
    products = [eqn for eqn in after.eqns if eqn.primitive.name == "dot_general"]
    assert products[0].invars[0] is products[1].invars[0]
    assert len({eqn.invars[0] for eqn in products}) == 3
    for got, expected in zip(jaxpr_as_fun(after)(*args), jax.jit(step)(*args), strict=True):
        np.testing.assert_array_equal(got, expected)


# -- results that the body does not compute -------------------------------------------------------


def test_operands_may_be_results():
    both = jax.jit(lambda x, w: (w, x @ w, x))
    after = flat(lambda x, w: both(x, w)[0] + both(w, x)[2] + both(x, w)[1])
    assert "jit" not in names(after)
    after = flat(lambda x, w: both(x, w))
    assert [after.outvars[0], after.outvars[2]] == [after.invars[1], after.invars[0]]


def test_numbers_may_be_results_and_operands():
    scaled = jax.jit(lambda x, w, by: (3.0, by, (x @ w) * by))
    after = flat(lambda x, w: (scaled(x, w, 2.0), scaled(w, x, scaled(x, w, 5.0)[1])))
    assert "jit" not in names(after)


def test_a_result_may_be_given_twice():
    twice = jax.jit(lambda x, w: (lambda y: (y, y))(x @ w))
    after = flat(lambda x, w: twice(x, w))
    assert after.outvars[0] is after.outvars[1]


def test_one_operand_may_be_given_twice():
    assert names(flat(lambda x, w: product(x, x) + product(w, w))) == [
        "dot_general", "dot_general", "add",
    ]  # fmt: skip


def test_results_that_nobody_reads():
    pair = jax.jit(lambda x, w: (x @ w, w @ x))
    after = flat(lambda x, w: pair(x, w)[1] + pair(w, x)[0])
    assert "jit" not in names(after)


def test_a_jit_may_do_nothing_but_pass_on_what_another_computes():
    passed = jax.jit(lambda x, w: jax.jit(lambda y: (y, x, y @ w))(product(x, w)))
    assert names(flat(lambda x, w: passed(x, w))) == ["dot_general", "dot_general"]


# -- inside other bodies --------------------------------------------------------------------------


def in_scan(x, w):
    return lax.scan(lambda c, _: (product(c, w), None), x, None, length=3)[0]


def in_while(x, w):
    return lax.while_loop(
        lambda s: (s[0] < 3) & jnp.all(jnp.isfinite(product(s[1], w))),
        lambda s: (s[0] + 1, jnp.tanh(product(s[1], w))),
        (0, x),
    )[1]


def in_cond(x, w):
    return lax.cond(x[0, 0] > 0, product, lambda x, w: product(product(w, x), w), x, w)


def in_remat(x, w):
    return jax.grad(lambda x: jax.checkpoint(lambda x: jnp.sin(product(x, w)))(x).sum())(x)


@jax.custom_vjp
def own_gradient(x, w):
    return product(x, w)


own_gradient.defvjp(
    lambda x, w: (product(x, w), (x, w)),
    lambda r, d: (product(d, r[1].T), 2 * product(r[0].T, d)),
)


def in_custom_vjp(x, w):
    return own_gradient(x, w) + jax.grad(lambda w: own_gradient(x, w).sum())(w)


@jax.custom_jvp
def own_tangent(x, w):
    return jnp.tanh(product(x, w))


own_tangent.defjvps(lambda t, y, x, w: product(t, w), None)


def in_a_remat_in_a_scan(x, w):
    layer = jax.checkpoint(lambda x: jax.jit(in_cond)(x, w))
    loss = lambda x: lax.scan(lambda c, _: (layer(c), None), x, None, length=2)[0].sum()  # noqa: E731
    return jax.grad(loss)(x)


INSIDE = [in_scan, in_while, in_cond, in_remat, in_custom_vjp, own_tangent, in_a_remat_in_a_scan]


@pytest.mark.parametrize("step", INSIDE, ids=lambda f: getattr(f, "__name__", str(f)))
def test_jits_inside_other_bodies_are_opened(step):
    after = flat(lambda x, w: jax.jit(step)(x, w))
    with_matmul = [
        eqn for eqn in everywhere(after)
        if eqn.primitive.name == "jit" and any(dots(j) for j in compat.jaxprs_in(eqn))
    ]  # fmt: skip
    assert not with_matmul
    assert len(dots(after)) == len(dots(traced(step)))


def test_a_rule_for_the_derivative_stays():
    after = flat(lambda x, w: own_gradient(x, w))
    assert names(after) == ["custom_vjp_call"]
    grad = jax.grad(lambda w: jaxpr_as_fun(after)(X, w)[0].sum())(ARGS[1])
    np.testing.assert_allclose(grad, 2 * X.T @ np.ones_like(X), rtol=1e-5)


def test_a_flattened_step_can_be_differentiated_and_mapped():
    after = flat(lambda x, w: jnp.sin(product(x, w)))
    step = lambda x, w: jaxpr_as_fun(after)(x, w)[0]  # noqa: E731
    plain = lambda x, w: jnp.sin(x @ w)  # noqa: E731
    for of in (step, plain):
        assert jax.vmap(of, (0, None))(jnp.stack([X, W]), W).shape == (2, N, N)
    got, expected = (jax.grad(lambda x, f=f: f(x, W).sum())(ARGS[0]) for f in (step, plain))
    np.testing.assert_allclose(got, expected, rtol=1e-6)


# -- what stays -----------------------------------------------------------------------------------

MESH = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
ROWS = NamedSharding(MESH, P("model"))


def effectful(x, w):
    jax.debug.print("{}", x[0, 0])
    return x @ w


SAYS_MORE = {
    "in_shardings": dict(in_shardings=(ROWS, None)),
    "out_shardings": dict(out_shardings=ROWS),
    "donation": dict(donate_argnums=0),
}


@pytest.mark.parametrize("what", SAYS_MORE)
def test_a_jit_that_says_more_stays(what: str):
    inner = jax.jit(lambda x, w: product(x, w), **SAYS_MORE[what])
    after = flatten(traced(lambda x, w: 2 * inner(x, w)))
    assert names(after) == ["jit", "mul"]
    assert names(after.eqns[0].params["jaxpr"]) == ["dot_general"], "but what is in it is opened"


def test_a_jit_with_effects_stays(capfd):
    inner = jax.jit(effectful)
    after = flat(lambda x, w: 2 * inner(x, w))
    assert names(after) == ["jit", "mul"]
    jax.effects_barrier()
    assert capfd.readouterr().out.count("\n") == 2


def test_options_layouts_constants_and_wishes_about_inlining_are_kept():
    (eqn,) = traced(lambda x, w: product(x, w)).eqns
    assert compat.is_plain_jit(eqn)
    closed = jax.make_jaxpr(lambda x, w: product(x, w) + X)(*ARGS)
    assert closed.consts and not eqn.params["jaxpr"].consts
    more = {
        "jaxpr": closed,
        "inline": type(eqn.params["inline"])("xla_late"),
        "compiler_options_kvs": (("xla_embed_ir_in_executable", True),),
        "in_layouts": ("a layout", None),
    }
    for key, value in more.items():
        assert not compat.is_plain_jit(eqn.replace(params={**eqn.params, key: value})), key


def test_other_primitives_are_no_jits():
    assert not any(map(compat.is_plain_jit, traced(in_scan).eqns))


def test_the_body_of_a_primitive_with_rules_of_its_own_stays():
    def solved(x, w):
        return lax.custom_linear_solve(
            lambda v: product(x, v[:, None])[:, 0],
            w[0],
            lambda _, b: product(x, b[:, None])[:, 0],
            symmetric=True,
        )

    after = flat(lambda x, w: jnp.dot(solved(x, w), product(x, w)))
    (solve,) = (e for e in after.eqns if e.primitive.name == "custom_linear_solve")
    before = next(
        e for e in everywhere(traced(solved)) if e.primitive.name == "custom_linear_solve"
    )
    assert type(solve.params["jaxprs"]) is type(before.params["jaxprs"])
    assert jits(solve.params["jaxprs"].matvec) == jits(before.params["jaxprs"].matvec) > 0


def test_jits_in_the_body_of_a_shard_map_are_opened():
    mapped = jax.shard_map(product, mesh=MESH, in_specs=(P("model"), P()), out_specs=P("model"))
    (eqn,) = flat(lambda x, w: jax.jit(mapped)(x, w)).eqns
    assert eqn.primitive.name == "shard_map"
    assert names(eqn.params["jaxpr"]) == ["pvary", "dot_general"]


# -- names ----------------------------------------------------------------------------------------


def test_scopes_name_the_jits_that_were_opened():
    def helper(x, w):
        with jax.named_scope("inside"):
            return x @ w

    def step(x, w):
        with jax.named_scope("layer"):
            return jax.jit(jax.jit(helper))(x, w)

    (dot,) = dots(flat(step))
    assert str(dot.eqn.source_info.name_stack) == "layer/jit(helper)/jit(helper)/inside"


def test_the_users_line_is_kept():
    (dot,) = dots(flat(lambda x, w: product(x, w)))
    file, line, _ = compat.source_line(dot.eqn)
    assert file.endswith("test_flatten.py")
    with open(__file__) as source:
        assert "product = jax.jit(lambda x, w: x @ w)" in source.read().splitlines()[line - 1]


@pytest.mark.parametrize("precision", [lax.Precision.HIGHEST, lax.Precision.DEFAULT])
def test_parameters_of_the_matmul_are_kept(precision):
    inner = jax.jit(partial(lax.dot, precision=precision, preferred_element_type=jnp.float32))
    (dot,) = dots(flat(lambda x, w: inner(x, w)))
    (before,) = dots(traced(lambda x, w: inner(x, w)))
    assert dot.eqn.params == before.eqn.params
