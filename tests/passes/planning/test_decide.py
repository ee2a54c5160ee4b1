"""Decide from shardings that are given by hand: no propagation, no devices, no numbers."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxoverlap import Decision, Skip, Variant
from jaxoverlap._util.text import human_bytes
from jaxoverlap.passes.analysis.jaxprs import Body, Dot, bodies
from jaxoverlap.passes.analysis.partitioned import Shardings as Read
from jaxoverlap.passes.planning.decide import decide
from jaxoverlap.passes.planning.entries import source_of
from jaxoverlap.passes.planning.matmuls import matmul_of
from jaxoverlap.plan.decisions import Reason
from tests.support.reads import NO, D, M, matmul
from tests.support.terms import terms_of

AXES = {"data": 2, "model": 4}


SOURCE = f"support/reads.py:{matmul.__code__.co_firstlineno + 1}"


def found_in(fn, *shapes, dtype="float32"):
    return bodies(jax.make_jaxpr(fn)(*(jax.ShapeDtypeStruct(s, dtype) for s in shapes)))


def dots(step_bodies: Sequence[Body]) -> list[Dot]:
    return [dot for body in step_bodies for dot in body.dots]


def one(lhs, rhs, out, *, x=(16, 32), w=(32, 64), dtype="float32", fn=matmul, axes=AXES, **options):
    step_bodies = found_in(fn, x, w, dtype=dtype)
    (entry,), rings_by_body = decide(
        step_bodies, {0: Read(lhs, rhs, out)}, terms_of(axes, **options)
    )
    (body_rings,) = rings_by_body.values()
    ringed = [m.dot.index for ring in body_rings.rings for m in ring.members]
    assert ringed == ([0] if isinstance(entry, Decision) else [])
    assert body_rings.skipped == ({} if ringed else {0: entry.why})
    return entry


# -- decisions ------------------------------------------------------------------------------------

X, W, Y = 16 * 32 * 4, 32 * 64 * 4, 16 * 64 * 4  # bytes
KINDS = {
    # shardings of x [a, b], w [b, c] and y [a, c]: kind, letter, bytes a device sends
    "gather a free dim": (((M, NO), (NO, M), (NO, M)), "all_gather_matmul", "a", X * 3 // 4),
    "gather a contracted dim": (((M, NO), (M, NO), (M, NO)), "all_gather_matmul", "b", W * 3 // 4),
    "scatter": (((NO, M), (M, NO), (M, NO)), "matmul_reduce_scatter", "a", Y * 3 // 4),
    "scatter the other dim": (((NO, M), (M, NO), (NO, M)), "matmul_reduce_scatter", "c", Y * 3 // 4),
    "sum": (((NO, M), (M, NO), (NO, NO)), "matmul_all_reduce", "c", 2 * Y * 3 // 4),
    "sum over a shard": (((D, M), (M, NO), (D, NO)), "matmul_all_reduce", "c", 2 * Y // 2 * 3 // 4),
}  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_kinds(name: str):
    shardings, kind, letter, size = KINDS[name]
    entry = one(*shardings)
    assert entry == Decision(
        site=0,
        ring=0,
        source=SOURCE,
        einsum="ab,bc->ac",
        kind=kind,
        axis="model",
        letter=letter,
        num_chunks=4,
        bytes_moved=size,
        runs=1,
    )


def test_the_axis_that_moves_most_becomes_the_ring():
    """The larger operand travels: FSDP's weight on one axis, or the sequence on the other."""
    specs = ((("data", "model"), NO), (D, M), (D, M))
    small = one(*specs, x=(16, 32), w=(32, 64))
    assert (small.axis, small.others) == ("data", ("model all_gather, 768 B",))
    assert small.why == "1.0 kB a run, the most"
    large = one(*specs, x=(64, 32), w=(32, 64))
    assert (large.axis, large.others) == ("model", ("data all_gather, 1.0 kB",))
    assert large.bytes_moved == 32 * 32 * 4 * 3 // 4


def test_bytes_count_every_run():
    def step(x, w):
        return lax.scan(lambda c, _: (jnp.sin(c @ w), None), x, None, length=5)[0]

    entry = one((M, NO), (NO, M), (NO, M), w=(32, 32), fn=step)
    assert (entry.runs, entry.bytes_moved) == (5, 5 * X * 3 // 4)


def test_bytes_are_of_the_dtype_that_moves():
    assert one((M, NO), (NO, M), (NO, M), dtype="bfloat16").bytes_moved == X // 2 * 3 // 4


def test_an_axis_of_one_device_moves_nothing():
    entry = one((M, NO), (NO, M), (NO, M), axes={"data": 8, "model": 1})
    assert (type(entry), entry.reason) == (Skip, "no collective")


def test_every_matmul_gets_an_entry_in_order():
    def step(x, w):
        return (x @ w) @ (w.T @ x.T)

    step_bodies = found_in(step, (16, 32), (32, 64))
    gather = ((M, NO), (NO, M), (NO, M))
    entries, rings_by_body = decide(
        step_bodies, {0: Read(*gather), 2: Read(*((NO, NO),) * 3)}, terms_of(AXES)
    )
    assert [e.site for e in entries] == [0, 1, 2]
    assert [type(e) for e in entries] == [Decision, Skip, Skip]
    assert [getattr(e, "reason", "") for e in entries[1:]] == [
        "its sharding is not known: it was dropped as unused, or lowered to something else",
        "no collective",
    ]
    (body_rings,) = rings_by_body.values()
    assert [ring.site for ring in body_rings.rings] == [0]
    assert set(body_rings.skipped) == {1, 2}


BOTH = ("data", "model")


@pytest.mark.parametrize("order", [BOTH, BOTH[::-1]], ids=str)
def test_a_dim_that_two_axes_gather(order):
    """The minor axis is gathered before the ring, so that a chunk of it lies side by side."""
    entry = one((order, NO), (NO, BOTH), (NO, BOTH))
    major, minor = order
    assert (entry.kind, entry.axis, entry.letter) == ("all_gather_matmul", major, "a")
    hoisted = X // 8 * (AXES[minor] - 1)
    assert entry.others == (f"{minor} all_gather, {human_bytes(hoisted)}",)
    assert entry.bytes_moved == X * (AXES[major] - 1) // AXES[major]


@pytest.mark.parametrize("order", [BOTH, BOTH[::-1]], ids=str)
def test_a_dim_that_two_axes_scatter(order):
    """The axis that sends most is the ring, and its sums are scattered over the other one."""
    entry = one((NO, BOTH), (BOTH, NO), (order, NO))
    assert (entry.kind, entry.axis, entry.letter) == ("matmul_reduce_scatter", "model", "a")
    assert entry.others == (f"data reduce_scatter, {human_bytes(Y // 4 // 2)}",)
    assert entry.bytes_moved == Y * 3 // 4


# -- skips ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_sharding_that_could_not_be_read(missing: int):
    shardings = [None if i == missing else s for i, s in enumerate([(M, NO), (NO, M), (NO, M)])]
    assert "splits a mesh axis, or could not be read" in one(*shardings).reason
    (dot,) = dots(found_in(matmul, (16, 32), (32, 64)))
    assert isinstance(matmul_of(dot, tuple(shardings), AXES), Reason)


@pytest.mark.parametrize("dtype", ["int16", "complex64", "bool"])
def test_dtypes(dtype: str):
    entry = one((M, NO), (NO, M), (NO, M), dtype=dtype)
    assert entry.reason.startswith(f"dtype {dtype} is not supported (supported: float8_e4m3fn")


@pytest.mark.parametrize(
    "dtype", ["float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32", "int8"]
)
def test_dtypes_that_are_taken(dtype: str):
    assert isinstance(one((M, NO), (NO, M), (NO, M), dtype=dtype), Decision)


def test_one_wrong_dtype_is_enough():
    def step(x, w):
        return lax.dot(x.astype("int16"), w.astype("int16"), preferred_element_type=jnp.int32)

    assert "int16" in one((M, NO), (NO, M), (NO, M), fn=step).reason


def test_a_site_may_be_left_plain_and_another_go_two_ways():
    where = one((M, NO), (NO, M), (NO, M)).source
    entry = one((M, NO), (NO, M), (NO, M), granularity={where: Variant("plain")})
    assert (type(entry), entry.reason) == (Skip, "not ringed: by granularity=")
    entry = one((M, NO), (NO, M), (NO, M), granularity={where: Variant("two_way")})
    assert isinstance(entry, Decision) and str(entry.variant) == "two_way"
    with pytest.raises(ValueError, match="names no line and no module of a matmul"):
        one((M, NO), (NO, M), (NO, M), granularity={"none.py:1": Variant("two_way")})


def test_opaque_bodies():
    def step(x, w):
        return lax.custom_linear_solve(lambda v: x @ v, w[:, 0], lambda _, b: b, symmetric=True)

    entries, rings_by_body = decide(found_in(step, (32, 32), (32, 4)), {}, terms_of(AXES))
    assert entries
    assert not any(s.rings or s.readers for s in rings_by_body.values())
    assert {e.reason for e in entries} == {
        "inside custom_linear_solve, whose body is not rewritten"
    }


def test_shardings_that_were_not_read():
    entry = one((M, NO), (NO, M), (NO, M), unread="the axes are odd")
    assert entry.reason == "the axes are odd"


@pytest.mark.parametrize(
    ("shardings", "x", "w", "says"),
    [
        (((NO, M), (M, NO), (NO, NO)), (3, 32), (32, 5), "no dim of the result (a 3, c 5)"),
        (((M, NO), (NO, M), (D, M)), (4, 32), (32, 64), "dim a of lhs has size 4: not divisible by 8"),
        (((NO, M), (M, NO), (M, NO)), (6, 32), (32, 64), "dim a of out has size 6: not divisible by 4"),
        (((M, NO), (NO, NO), (NO, NO)), (16, 32), (32, 8), "model wants gather of out dim a"),
        (
            ((("model", "data"), NO), (NO, M), (D, M)),
            (16, 32),
            (32, 64),
            "dim a is sharded in different orders: ('model', 'data') and ('data',)",
        ),
        (
            ((NO, ("model", "data")), (("data", "model"), NO), (M, D)),
            (16, 32),
            (32, 64),
            "dim b is sharded in different orders",
        ),
    ],
)  # fmt: skip
def test_layouts_that_no_ring_fits(shardings, x, w, says: str):
    assert says in one(*shardings, x=x, w=w).reason


# -- skip= ----------------------------------------------------------------------------------------

GATHER = ((M, NO), (NO, M), (NO, M))
FILE, LINE = SOURCE.removeprefix("support/").split(":")


@pytest.mark.parametrize("entry", [SOURCE, f"{FILE}:{LINE}", f"/home/me/support/{FILE}:{LINE}"])
def test_a_line_to_skip(entry: str):
    assert one(*GATHER, skip=(entry,)).reason == "skipped: by skip="


@pytest.mark.parametrize(
    "entry", [f"decide.py:{LINE}", f"{FILE}:{LINE}1", f"other/{FILE}:{LINE}", f":{LINE}", ""]
)
def test_a_line_that_names_no_matmul(entry: str):
    with pytest.raises(ValueError, match=f"skip='{entry}' names no line.*matmuls are at: {SOURCE}"):
        one(*GATHER, skip=(entry,))


def test_sources_are_named_once_each():
    def step(x, w):
        return x @ w + x @ w, jnp.sum(x @ w)

    step_bodies = found_in(step, (16, 32), (32, 64))
    sources = [source_of(dot) for dot in dots(step_bodies)]
    assert len(set(sources)) == 1 < len(sources)
    with pytest.raises(ValueError) as error:
        decide(step_bodies, {}, terms_of(AXES, skip=("none.py:1",)))
    assert str(error.value).count(sources[0]) == 1


def test_itemsizes_are_each_sides_own():
    def step(x, w):
        return lax.dot(x.astype("bfloat16"), w, preferred_element_type=jnp.float32)

    (dot,) = dots(found_in(step, (16, 32), (32, 64)))
    matmul = matmul_of(dot, GATHER, AXES)
    assert not isinstance(matmul, str)
    expected = [np.dtype(v.aval.dtype).itemsize for v in (*dot.eqn.invars, *dot.eqn.outvars)]
    assert list(matmul.itemsize) == expected == [2, 4, 4]


def test_sums_on_a_slow_link_go_straight_to_their_owner():
    scattered, gathered = ((NO, M), (M, NO), (M, NO)), ((M, NO), (NO, M), (NO, M))
    slow = {"data": 1.0, "model": 9.0}
    for shardings, costs, style in (
        (scattered, slow, "direct"),
        (scattered, None, "one_way"),
        (gathered, slow, "one_way"),
    ):
        entry = one(*shardings, costs=costs)
        assert isinstance(entry, Decision) and str(entry.variant) == style
    entry = one(*scattered, costs=slow, granularity=Variant("two_way"))
    assert isinstance(entry, Decision) and str(entry.variant) == "two_way"
