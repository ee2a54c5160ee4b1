"""The rules of primitives say what Shardy's own sharding rules say of the operations they lower to."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jaxlib.mlir import passmanager  # noqa: TID251 # Shardy has no Python function

from jaxoverlap._jax import compat
from jaxoverlap.passes.analysis.dim_rules import _ELEMENTWISE, _RULES, DimRule, dim_rule
from jaxoverlap.passes.analysis.jaxprs import equations

Pair = frozenset[tuple[str, int, int]]
ROWS = jnp.array([[1], [0], [3], [2]])
NUMBERS = lax.GatherDimensionNumbers
SCATTER = lax.ScatterDimensionNumbers(
    update_window_dims=(1,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0,)
)
BATCHED = lax.ScatterDimensionNumbers(
    update_window_dims=(1,),
    inserted_window_dims=(),
    scatter_dims_to_operand_dims=(1,),
    operand_batching_dims=(0,),
    scatter_indices_batching_dims=(0,),
)


def conv(x, k, **groups):
    return lax.conv_general_dilated(x, k, (1,), "SAME", **groups)


# The primitive, the operation that it lowers to, a function, and the shapes of its arguments.
CASES: list[tuple[str, str, Callable, tuple[tuple[int, ...], ...]]] = [
    ("tanh", "tanh", jnp.tanh, ((4, 6),)),
    ("select_n", "select", lambda x, y: jnp.where(x > 0, x, y), ((4, 6), (4, 6))),
    ("dot_general", "dot_general", lambda x, w: x @ w, ((4, 6), (6, 8))),
    (
        "dot_general",
        "dot_general",
        lambda q, k: jnp.einsum("bqnh,bknh->bnqk", q, k),
        ((2, 4, 6, 8), (2, 5, 6, 8)),
    ),
    ("conv_general_dilated", "convolution", conv, ((4, 6, 8), (10, 6, 3))),
    ("broadcast_in_dim", "broadcast_in_dim", lambda x: lax.broadcast_in_dim(x, (4, 5, 6), (0, 2)), ((4, 6),)),
    ("reshape", "reshape", lambda x: x.reshape(4, 3, 5), ((12, 5),)),
    ("reshape", "reshape", lambda x: x.reshape(12, 5), ((4, 3, 5),)),
    ("reshape", "reshape", lambda x: x.reshape(1, 12, 5, 1), ((12, 5),)),
    ("transpose", "transpose", lambda x: x.transpose(2, 0, 1), ((4, 3, 5),)),
    ("squeeze", "reshape", lambda x: x.squeeze(1), ((4, 1, 5),)),
    ("reduce_sum", "reduce", lambda x: x.sum(1), ((4, 3, 5),)),
    ("reduce_max", "reduce", lambda x: x.max((0, 2)), ((4, 3, 5),)),
    ("cumsum", "reduce_window", lambda x: lax.cumsum(x, 1), ((4, 6),)),
    ("sort", "sort", lambda x: lax.sort(x, dimension=1), ((4, 6),)),
    ("concatenate", "concatenate", lambda x, y: jnp.concatenate([x, y], 1), ((4, 6), (4, 3))),
    (
        "reduce_window_max",
        "reduce_window",
        lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 1), (1, 1, 1), "SAME"),
        ((4, 6, 5),),
    ),
    (
        "select_and_scatter_add",
        "select_and_scatter",
        jax.grad(
            lambda x: (
                lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 1), (1, 2, 1), "SAME") ** 2
            ).sum()
        ),
        ((4, 6, 5),),
    ),
    ("rev", "reverse", lambda x: lax.rev(x, (0,)), ((4, 6),)),
    ("slice", "slice", lambda x: x[:, 1:4], ((4, 6),)),
    ("pad", "pad", lambda x: lax.pad(x, 0.0, ((0, 0, 0), (2, 0, 0))), ((4, 6),)),
    ("pad", "pad", lambda x: lax.pad(x, 0.0, ((2, -2, 0), (0, 0, 0))), ((4, 6),)),
    (
        "dynamic_slice",
        "dynamic_slice",
        lambda x, i: lax.dynamic_slice(x, (0, jnp.int32(i)), (4, 2)),
        ((4, 6), ()),
    ),
    (
        "dynamic_update_slice",
        "dynamic_update_slice",
        lambda x, y, i: lax.dynamic_update_slice(x, y, (0, jnp.int32(i))),
        ((4, 6), (4, 2), ()),
    ),
    (
        "gather",
        "gather",
        lambda x: lax.gather(
            x, ROWS, NUMBERS((1,), (0,), (0,)), (1, 8), mode="promise_in_bounds"
        ),
        ((6, 8),),
    ),
    (
        "gather",
        "gather",
        lambda x: lax.gather(
            x, ROWS, NUMBERS((1,), (), (1,), (0,), (0,)), (1, 5), mode="promise_in_bounds"
        ),
        ((4, 8),),
    ),
    ("scatter-add", "scatter", lambda x, u: lax.scatter_add(
        x, ROWS, u, SCATTER, mode="promise_in_bounds"), ((6, 8), (4, 8))),
    ("scatter-add", "scatter", lambda x, u: lax.scatter_add(
        x, ROWS, u, BATCHED, mode="promise_in_bounds"), ((4, 8), (4, 2))),
    ("fft", "fft", lambda x: jnp.fft.fft(lax.complex(x, x)), ((4, 6),)),
]  # fmt: skip


def pairs(operands: list, results: list, but: set) -> set[Pair]:
    """Return the dims of which two have one factor, without the factors in `but`."""
    named = [
        (factor, (side, number, d))
        for side, values in (("operand", operands), ("result", results))
        for number, factors in enumerate(values)
        for d, factor in enumerate(factors)
        if factor not in but
    ]
    return {
        frozenset((one, other))
        for (f, one), (g, other) in itertools.combinations(named, 2)
        if f == g
    }


def shardys(fn: Callable, shapes: tuple, operation: str) -> tuple[set[Pair], set]:
    """Return the pairs of dims of Shardy's rule of one operation, and the dims that are summed."""
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    module = jax.jit(fn).lower(*arguments).compiler_ir("stablehlo")
    with module.context:
        passmanager.PassManager.parse(
            "builtin.module(func.func(sdy-populate-op-sharding-rules))"
        ).run(module.operation)

        def rules(operation_of) -> Iterator[str]:
            for region in operation_of.regions:
                for block in region:
                    for op in block:
                        if op.operation.name == f"stablehlo.{operation}":
                            yield str(op.operation.attributes["sdy.sharding_rule"])
                        yield from rules(op.operation)

        *_, rule = rules(module.operation)
    sides = re.search(r"<\((.*)\)->\((.*)\) {", rule)
    assert sides, rule
    operands, results = (
        [[d[0] for d in dims.split(", ") if d] for dims in re.findall(r"\[([^]]*)\]", side)]
        for side in sides.groups()
    )
    kinds = {
        kind: set(factors.split(", "))
        for kind, factors in re.findall(r"(\w+)={(\w+(?:, \w+)*)}", rule)
    }
    alone = set[str]().union(*(kinds.get(k, ()) for k in ("need_replication", "permutation")))
    sizes = dict(re.findall(r"(\w+)=(\d+)", rule))
    alone |= {factor for factor, size in sizes.items() if size == "1"}
    summed = [
        ("operand", number, d)
        for number, factors in enumerate(operands)
        for d, factor in enumerate(factors)
        if factor in kinds.get("reduction", ())
    ]
    return pairs(operands, results, alone), set(summed)


# Shards of a table that is looked up, or added to, mask what is another's; parts do not.
_LESS = ("gather", "scatter-add")


@pytest.mark.parametrize(
    ("name", "operation", "fn", "shapes"), CASES, ids=[f"{i} {c[0]}" for i, c in enumerate(CASES)]
)
def test_a_rule_is_shardys(name, operation, fn, shapes):
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    jaxpr = jax.make_jaxpr(fn)(*arguments).jaxpr
    *_, eqn = (eqn for eqn, _ in equations(jaxpr) if eqn.primitive.name == name)
    rule = dim_rule(eqn)
    assert rule is not None
    ours = pairs(list(rule.operands), list(rule.results), set(rule.mixed))
    theirs, summed = shardys(fn, shapes, operation)
    if name in _LESS:
        assert ours <= theirs
    else:
        assert ours == theirs
        assert summed == summed_of(rule)


def summed_of(rule: DimRule) -> set:
    if not rule.combine:
        return set()
    kept = {factor for factors in rule.results for factor in factors} | rule.mixed
    return {
        ("operand", number, d)
        for number, factors in enumerate(rule.operands)
        for d, factor in enumerate(factors)
        if factor not in kept
    }


def test_each_value_of_a_rule_has_a_factor_for_each_dim():
    for name, _, fn, shapes in CASES:
        arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
        for eqn, _ in equations(jax.make_jaxpr(fn)(*arguments).jaxpr):
            if not compat.has_jaxprs(eqn) and (rule := dim_rule(eqn)):
                values = zip(
                    (*eqn.invars, *eqn.outvars), (*rule.operands, *rule.results), strict=True
                )
                assert all(len(factors) in (0, v.aval.ndim) for v, factors in values), name


def test_a_primitive_has_one_rule():
    assert not _ELEMENTWISE & set(_RULES)


def test_a_grouped_matmul_is_mixed_along_its_groups():
    def fn(x, w):
        return lax.ragged_dot(x, w, jnp.array([3, 1, 4]))

    arguments = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((8, 6), (3, 6, 5))]
    *_, eqn = (
        eqn
        for eqn, _ in equations(jax.make_jaxpr(fn)(*arguments).jaxpr)
        if eqn.primitive.name == "ragged_dot_general"
    )
    rule = dim_rule(eqn)
    (rows, inner), (groups, again, columns), (counts,) = rule.operands
    assert (again, counts) == (inner, groups)
    assert rule.results == ((rows, columns),)
    assert rule.mixed == {rows, groups}
    assert rule.combine == "add"
