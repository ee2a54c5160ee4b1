"""A matmul becomes the right jaxpr, equation by equation; no device computes anything here."""

from __future__ import annotations

import inspect
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoverlap
from jaxoverlap._jax import compat

GOLDEN = Path(__file__).parent / "golden"
MESH = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
N = 4
X, W = jax.ShapeDtypeStruct((64, 32), jnp.float32), jax.ShapeDtypeStruct((32, 64), jnp.float32)
# name: the shardings of x [a, b], w [b, c] and of their product
CASES = {
    "all_gather_matmul_free": (P("model"), P(None, "model"), P(None, "model")),
    "all_gather_matmul_contracted": (P("model"), P("model"), P("model")),
    "matmul_reduce_scatter": (P(None, "model"), P("model"), P("model")),
    "matmul_all_reduce": (P(None, "model"), P("model"), P()),
    "second_axis_gathers": (P(("data", "model")), P("data", "model"), P("data", "model")),
    "second_axis_scatters": (P("model", "data"), P("data", "model"), P("data", "model")),
    "matmul_reduce_scatter_of_one_dim": (
        P(None, ("data", "model")), P(("data", "model")), P(("data", "model"))
    ),
    "second_axis_gathers_the_same_dim": (
        P(("data", "model")), P(None, ("data", "model")), P(None, ("data", "model"))
    ),
}  # fmt: skip


# Steps whose matmuls share one ring: what they compute, and the shardings.
_ROWS, _COLUMNS = P("model"), P(None, "model")


def _kept(x, w):
    y = jnp.tanh(x @ w)
    return y, lax.dot_general(x, y, (((0,), (0,)), ((), ())))


JOINT = {
    "shared_free": (lambda x, w: (x @ w, x @ (2 * w)), (_ROWS, _COLUMNS), (_COLUMNS, _COLUMNS)),
    "shared_free_and_contracted": (
        lambda dy, w: (
            dy @ w,
            lax.dot_general(
                jnp.tanh(
                    lax.with_sharding_constraint(jnp.ones((64, 32)), NamedSharding(MESH, _COLUMNS))
                ),
                dy,
                (((0,), (0,)), ((), ())),
            ),
        ),
        (_ROWS, _COLUMNS), (_COLUMNS, _ROWS),
    ),
    "shared_kept": (_kept, (_ROWS, _COLUMNS), (_COLUMNS, _COLUMNS)),
    "shared_sum": (lambda x, w: x @ w + jnp.sin(x) @ w, (_COLUMNS, _ROWS), _ROWS),
    "shared_sum_whole": (lambda x, w: x @ w + jnp.sin(x) @ w, (_COLUMNS, _ROWS), P()),
    "shared_rows_over_both": (
        lambda x, w: (x @ w, x @ (2 * w)),
        (P(("model", "data")), P(None, ("data", "model"))), (P(None, ("data", "model")),) * 2,
    ),
}  # fmt: skip


def joint(name: str):
    """Return the one ring of a step with several matmuls, and the step's jaxpr."""
    fn, given, wanted = JOINT[name]
    at = [jax.tree.map(lambda spec: NamedSharding(MESH, spec), specs) for specs in (given, wanted)]
    step = jaxoverlap.overlap(jax.jit(fn, in_shardings=at[0], out_shardings=at[1]))
    jaxpr = step.trace(X, W).jaxpr
    (eqn,) = (e for e in jaxpr.eqns if e.primitive.name == "shard_map")
    return eqn, jaxpr


def kind_of(name: str) -> str:
    return next((k for k in KINDS if name.startswith(k)), "all_gather_matmul")


KINDS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")


def length_of(name: str) -> int:
    """Return the ring's size; of two axes that gather a dim, the minor one is gathered before."""
    return MESH.shape["data" if name == "second_axis_gathers_the_same_dim" else "model"]


def shard(x, spec: P):
    return lax.with_sharding_constraint(x, NamedSharding(MESH, spec))


def step_of(name: str):
    """Return the matmul of one case as a jitted step, in a scope of the user's."""
    lhs, rhs, out = (NamedSharding(MESH, spec) for spec in CASES[name])

    def step(x, w):
        with jax.named_scope("layer"):
            return x @ w  # the matmul

    return jax.jit(step, in_shardings=(lhs, rhs), out_shardings=out)


def rewritten(name: str):
    """Return the ring that took the matmul's place; nothing but a gather may stand before it."""
    jaxpr = jaxoverlap.overlap(step_of(name)).trace(X, W).jaxpr
    *before, eqn = jaxpr.eqns
    hoisted = ["sharding_constraint"] * name.startswith("second_axis_gathers")
    assert [e.primitive.name for e in before] == hoisted
    return eqn


# -- what stands in a ring ------------------------------------------------------------------------


def show(eqn: Any) -> str:
    """Show a shard_map as text, less integer arithmetic, which differs between versions of JAX."""
    names: dict[Any, str] = {}

    def name(atom: Any) -> str:
        return (
            names.setdefault(atom, f"v{len(names)}") + f":{atom.aval.str_short(short_dtypes=True)}"
        )

    def values(atoms: Any) -> str:
        arrays = [a for a in atoms if not hasattr(a, "val") and a.aval.shape]
        return ", ".join(name(a) for a in arrays)

    params, body = eqn.params, eqn.params["jaxpr"]
    manual = ", ".join(sorted(params["newly_manual_axes"]))
    specs = (
        f"{', '.join(map(str, params['in_specs']))} -> {', '.join(map(str, params['out_specs']))}"
    )
    lines = [f"shard_map over {{{manual}}}: {specs}", f"  {values(body.invars)}"]
    for inner in body.eqns:
        if any(v.aval.shape for v in inner.outvars):
            lines.append(
                f"  {values(inner.outvars)} = {called(inner)} {values(inner.invars)}".rstrip()
            )
    lines.append(f"  return {values(body.outvars)}")
    return "\n".join(lines) + "\n"


SHOWN = {
    "ppermute": ("axis_name", "perm"),
    "dot_general": ("dimension_numbers", "preferred_element_type"),
    "all_gather": ("axis_name", "all_gather_dimension", "tiled"),
    "reduce_scatter": ("axis_name", "scatter_dimension", "tiled"),
}


def called(eqn: Any) -> str:
    shown = [f"{key}={eqn.params[key]}" for key in SHOWN.get(eqn.primitive.name, ())]
    return f"{eqn.primitive.name}[{' '.join(shown)}]" if shown else eqn.primitive.name


@pytest.mark.parametrize("name", [*CASES, *JOINT])
def test_golden(name: str):
    """Rings read as in the golden files: write those with GOLDEN=write, then read what changed."""
    text = show(joint(name)[0] if name in JOINT else rewritten(name))
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("GOLDEN") == "write":
        path.write_text(text)
    assert text == path.read_text()


def test_a_gather_before_the_ring_makes_one_axis_whole():
    """The gather stands at the user's line too, in a scope that names its axis."""
    jaxpr = jaxoverlap.overlap(step_of("second_axis_gathers")).trace(X, W).jaxpr
    gather, ring = jaxpr.eqns
    assert gather.params["sharding"].spec == P(None, "model")
    assert [*gather.invars] == [jaxpr.invars[1]]
    assert [*ring.invars] == [jaxpr.invars[0], *gather.outvars]
    assert str(gather.source_info.name_stack) == "layer/all_gather_over_data"
    assert compat.source_line(gather) == compat.source_line(ring)


def counts(jaxpr: Any) -> Counter[str]:
    return Counter(e.primitive.name for e in equations(jaxpr))


def equations(jaxpr: Any) -> Iterator[Any]:
    """Yield every equation at any depth."""
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple) else (value,):
                if hasattr(inner, "eqns"):
                    yield from equations(inner)


@pytest.mark.parametrize("name", CASES)
def test_a_ring_is_n_matmuls_and_a_hop_less(name: str):
    eqn = rewritten(name)
    assert eqn.primitive.name == "shard_map"
    count = counts(eqn.params["jaxpr"])
    n = length_of(name)
    assert (count["dot_general"], count["ppermute"]) == (n, n - 1)
    barriers = {"all_gather_matmul": n - 1}.get(kind_of(name), 2 * (n - 1))
    rooms = count["broadcast_in_dim"]  # whose zeros wait for what is written first
    assert count["optimization_barrier"] == barriers + rooms


@pytest.mark.parametrize("name", JOINT)
def test_a_ring_for_two_matmuls_has_as_many_hops_as_for_one(name: str):
    eqn, jaxpr = joint(name)
    count, outside = counts(eqn.params["jaxpr"]), counts(jaxpr) - counts(eqn.params["jaxpr"])
    wide = name.startswith("shared_sum")
    served = 1 if name == "shared_kept" or wide else 2  # a sum is one matmul, twice as long
    assert (count["dot_general"], count["ppermute"]) == (served * N, N - 1)
    assert outside["dot_general"] == (name == "shared_kept")  # that reads what the ring keeps
    assert outside["add"] == 0, "the sum of two results is made inside"
    rooms = count["broadcast_in_dim"] + (name == "shared_kept")  # its shard waits for the matmul
    assert count["optimization_barrier"] == (2 if wide else 1) * (N - 1) + rooms


@pytest.mark.parametrize("name", JOINT)
def test_every_chunk_of_a_hop_runs_over_the_next_hop(name: str):
    """Hop i waits for all matmuls of chunk i - 1, of every member, and all of chunk i for it."""
    body = joint(name)[0].params["jaxpr"]
    before: dict[Any, set[int]] = {}  # the matmuls that a value depends on
    one = name == "shared_kept" or name.startswith("shared_sum")
    hops, matmuls, served = [], 0, 1 if one else 2
    for eqn in body.eqns:
        needs = set().union(*(before.get(v, ()) for v in eqn.invars if not hasattr(v, "val")))
        if eqn.primitive.name == "ppermute":
            hops.append(len(needs))
        if eqn.primitive.name == "dot_general":
            assert len(needs) >= matmuls // served * served
            needs, matmuls = needs | {matmuls}, matmuls + 1
        before |= dict.fromkeys(eqn.outvars, needs)
    first = 1 if name.startswith("shared_sum") else 0
    assert hops == [served * (first + i) for i in range(N - 1)]


def test_what_reads_a_kept_value_stays_a_matmul_of_its_own():
    eqn, jaxpr = joint("shared_kept")
    reader = jaxpr.eqns[-1]
    assert reader.primitive.name == "dot_general"
    assert reader.invars[0] is eqn.outvars[1], "the second result of the ring is x, whole"
    assert eqn.params["out_specs"][1] in (P(), P(None, None))
    assert reader.invars[0].aval.shape == X.shape


def test_operands_that_several_matmuls_read_enter_a_ring_once_each():
    eqn, jaxpr = joint("shared_free")
    assert len(eqn.invars) == 3 and eqn.invars[0] is jaxpr.invars[0]
    assert eqn.params["in_specs"] == (P("model", None), *[P(None, "model")] * 2)


@pytest.mark.parametrize("name", CASES)
def test_every_axis_turns_manual(name: str):
    """All axes turn manual, so that a ring's body leaves a partitioner nothing to decide."""
    assert rewritten(name).params["newly_manual_axes"] == {"data", "model"}


@pytest.mark.parametrize("name", CASES)
def test_other_collectives_run_once_and_outside_the_ring(name: str):
    """A gather comes before the first hop and matmul, a sum after the last.

    A gather whose axis is the minor one of its dim comes before the shard_map.
    """
    names = [e.primitive.name for e in rewritten(name).params["jaxpr"].eqns]
    ring = [i for i, n in enumerate(names) if n in ("ppermute", "dot_general")]
    gathers, sums = (
        [i for i, n in enumerate(names) if n == w] for w in ("all_gather", "reduce_scatter")
    )
    assert len(gathers) == (name == "matmul_all_reduce")
    assert len(sums) == (name in ("second_axis_scatters", "matmul_reduce_scatter_of_one_dim"))
    for position in (*sums, *(gathers if name == "matmul_all_reduce" else ())):
        assert position > ring[-1]


@pytest.mark.parametrize("name", CASES)
def test_each_hop_and_each_later_matmul_waits_for_the_matmul_before(name: str):
    """XLA would otherwise undo the ring; so hop i must depend on matmul i - 1, for i > 0."""
    body = rewritten(name).params["jaxpr"]
    before: dict[Any, int] = {}  # how many matmuls a value depends on
    hops, matmuls = [], []
    for eqn in body.eqns:
        depth = max((before.get(v, 0) for v in eqn.invars if not hasattr(v, "val")), default=0)
        if eqn.primitive.name == "ppermute":
            hops.append(depth)
        if eqn.primitive.name == "dot_general":
            matmuls.append(depth)
            depth += 1
        before |= dict.fromkeys(eqn.outvars, depth)
    first = 0 if kind_of(name) == "all_gather_matmul" else 1
    assert hops == [first + i for i in range(length_of(name) - 1)]
    assert matmuls == list(range(length_of(name)))


# -- what stays as it was -------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_every_new_equation_points_at_the_users_line(name: str):
    lines, start = inspect.getsourcelines(step_of)
    position = start + next(i for i, line in enumerate(lines) if "# the matmul" in line)
    for eqn in equations(rewritten(name).params["jaxpr"]):
        file, line, function = compat.source_line(eqn)
        assert (Path(file).name, line) == (Path(__file__).name, position), eqn
        assert function.endswith("step")


@pytest.mark.parametrize("name", CASES)
def test_every_new_operation_carries_the_users_scope_and_the_rings(name: str):
    eqn = rewritten(name)
    assert str(eqn.source_info.name_stack) == f"layer/{kind_of(name)}.0"
    text = jaxoverlap.overlap(step_of(name)).lower(X, W).as_text(debug_info=True)
    assert f'"jit(step)/layer/{kind_of(name)}.0/shard_map' in text


@pytest.mark.parametrize("kind", ["all_gather_matmul_contracted", "matmul_reduce_scatter"])
@pytest.mark.parametrize(("operand", "result"), [("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float32", "float32")])  # fmt: skip
def test_the_results_dtype_is_kept(kind: str, operand: str, result: str):
    lhs, rhs, out = (NamedSharding(MESH, spec) for spec in CASES[kind])
    step = jax.jit(
        lambda x, w: lax.dot(x, w, preferred_element_type=result),
        in_shardings=(lhs, rhs),
        out_shardings=out,
    )
    args = [jax.ShapeDtypeStruct(v.shape, operand) for v in (X, W)]
    jaxpr = jaxoverlap.overlap(step).trace(*args).jaxpr
    assert [v.aval.dtype for v in jaxpr.outvars] == [np.dtype(result)]
    body = next(e for e in jaxpr.eqns if e.primitive.name == "shard_map").params["jaxpr"]
    dots = {e.outvars[0].aval.dtype.name for e in body.eqns if e.primitive.name == "dot_general"}
    hops = {e.outvars[0].aval.dtype.name for e in body.eqns if e.primitive.name == "ppermute"}
    if kind == "matmul_reduce_scatter":  # the sums travel as XLA's would
        assert (dots, hops) == ({result}, {result})
    else:  # the operand travels, and products are added up in float32
        assert (dots, hops) == ({"float32"}, {operand})


@pytest.mark.parametrize("precision", [lax.Precision.HIGHEST, lax.DotAlgorithmPreset.BF16_BF16_F32])
def test_the_precision_is_kept(precision):
    lhs, rhs, out = (NamedSharding(MESH, spec) for spec in CASES["all_gather_matmul_free"])
    plain = jax.jit(
        lambda x, w: lax.dot(x, w, precision=precision, preferred_element_type=jnp.float32),
        in_shardings=(lhs, rhs),
        out_shardings=out,
    )
    (expected,) = (e.params["precision"] for e in dots_of(plain.trace(X, W).jaxpr))
    precisions = [
        e.params["precision"] for e in dots_of(jaxoverlap.overlap(plain).trace(X, W).jaxpr)
    ]
    assert precisions == [expected] * N


def dots_of(jaxpr: Any) -> list[Any]:
    return [e for e in equations(jaxpr) if e.primitive.name == "dot_general"]


def test_only_the_matmuls_equation_changes():
    def step(x, w):
        def layer(x, _):
            y = jnp.tanh(shard(x @ w, P(None, "model")))
            return shard(y @ w.T, P("model")), jnp.sum(y)

        return lax.scan(jax.checkpoint(layer), shard(x, P("model")), None, length=3)

    plain = jax.jit(step)
    w = jax.ShapeDtypeStruct(W.shape, W.dtype, sharding=NamedSharding(MESH, P(None, "model")))
    before, after = plain.trace(X, w).jaxpr, jaxoverlap.overlap(plain).trace(X, w).jaxpr
    assert [v.aval for v in before.invars] == [v.aval for v in after.invars]
    assert [v.aval for v in before.outvars] == [v.aval for v in after.outvars]

    def outside(jaxpr):
        """Yield primitives in order, a ring as the matmul it stands for."""
        for eqn in jaxpr.eqns:
            ring = eqn.primitive.name == "shard_map"
            yield "dot_general" if ring else eqn.primitive.name
            if not ring:
                for value in eqn.params.values():
                    if hasattr(value, "eqns"):
                        yield from outside(value)

    primitives = list(outside(before))
    assert list(outside(after))[: len(primitives)] == primitives
    assert set(list(outside(after))[len(primitives) :]) == {"sharding_constraint"}, "of the results"
    assert counts(before)["shard_map"] == 0
    assert counts(after)["shard_map"] == 2


def test_a_matmul_that_two_places_share_may_become_a_ring_in_one():
    @jax.jit
    def product(x, w):
        return x @ w

    def step(x, w):
        return shard(product(x, w), P(None, "model")), shard(
            product(jnp.sin(shard(x, P())), w), P(None, "model")
        )

    at = (NamedSharding(MESH, P("model")), NamedSharding(MESH, P(None, "model")))
    overlapped = jaxoverlap.overlap(jax.jit(step, in_shardings=at))
    kinds = [type(e).__name__ for e in overlapped.explain(X, W).entries]
    assert kinds == ["Decision", "Skip"]
    count = counts(overlapped.trace(X, W).jaxpr)
    assert (count["shard_map"], count["dot_general"]) == (1, N + 1)
