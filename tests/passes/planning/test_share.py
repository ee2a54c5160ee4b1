"""Matmuls share a ring as decided on jaxprs, from shardings that are given by hand."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoverlap
from jaxoverlap import Decision
from jaxoverlap._jax import compat
from jaxoverlap.passes.analysis.equation_order import EquationOrder
from jaxoverlap.passes.analysis.jaxprs import Body, bodies
from jaxoverlap.passes.analysis.partitioned import Shardings as Read
from jaxoverlap.passes.planning.decide import decide
from jaxoverlap.passes.planning.matmuls import matmul_of
from jaxoverlap.passes.planning.ring_plan import BodyRings, Ring
from jaxoverlap.passes.planning.share import NO_COLLECTIVE, share
from jaxoverlap.passes.planning.terms import Terms
from jaxoverlap.plan.decisions import Reason
from tests.support.precision import error

AXES = {"data": 2, "model": 4}
NO, D, M, BOTH = (), ("data",), ("model",), ("data", "model")
ROWS, COLUMNS, WHOLE = (M, NO), (NO, M), (NO, NO)
S, H, F = 32, 16, 64  # the sequence, a hidden dim, a wider one
X, W, V = (S, H), (H, F), (F, H)
GATHER = (ROWS, COLUMNS, COLUMNS)  # sequence parallel -> column parallel
SCATTER = (COLUMNS, ROWS, ROWS)  # column parallel -> sequence parallel
BYTES = S * H * 4 * 3 // 4  # what a device sends of x, or of a sum like it


def body_of(fn: Callable[..., Any], *shapes: tuple[int, ...]) -> Body:
    (body,) = bodies(jax.make_jaxpr(fn)(*(jax.ShapeDtypeStruct(s, "float32") for s in shapes)))
    return body


def shared(body: Body, *shardings: Any, axes: Mapping[str, int] = AXES) -> BodyRings:
    """Share the rings of a body; `shardings`: (lhs, rhs, result) by matmul, or a reason."""

    def read(dot):
        given = shardings[dot.index]
        return given if isinstance(given, Reason) else matmul_of(dot, given, axes)

    body_rings = share(body, read, lambda dot: ((), (), ()))
    check(body_rings, body)
    return body_rings


def reads(given: Sequence[Any]) -> dict[int, Read]:
    """Return what `decide` reads: the shardings of each matmul, with no reshards around it."""
    return {i: Read(*specs) for i, specs in enumerate(given)}


def members(body_rings: BodyRings) -> list[list[int]]:
    """Return the matmuls of each ring, by their numbers."""
    return [[m.dot.index for m in ring.members] for ring in body_rings.rings]


def check(body_rings: BodyRings, body: Body) -> None:
    """Check that a body has each matmul once, and that nothing is read before it is there."""
    rings = [i for ring in members(body_rings) for i in ring]
    readers = [m.dot.index for m in body_rings.readers]
    assert sorted([*rings, *readers, *body_rings.skipped]) == [dot.index for dot in body.dots]
    order = body_rings.order
    at = {position: i for i, position in enumerate(order.positions())}
    made = {v: position for position, eqn in enumerate(body.eqns) for v in eqn.outvars}
    for position, eqn in enumerate(body.eqns):
        for need in {made[v] for v in eqn.invars if not hasattr(v, "val") and v in made}:
            mine, theirs = order.first(position), order.first(need)
            assert at[theirs] < at[mine] or theirs == mine
    kept: dict[Any, Ring] = {ring.gathered: ring for ring in body_rings.rings if ring.keep}
    for ring in body_rings.rings:
        _check_ring(ring, body_rings)
        assert not ring.keep or ring.can_keep()
    for member in (*body_rings.readers, *(m for ring in body_rings.rings for m in ring.members)):
        for value in (member.lhs, member.rhs):
            if value in kept and value not in body_rings.hoisted:
                assert at[order.first(kept[value].position)] < at[order.first(member.dot.position)]


def _check_ring(ring: Ring, body_rings: BodyRings) -> None:
    """Check that all that a ring's members share is alike."""
    assert {body_rings.order.first(m.dot.position) for m in ring.members} == {
        body_rings.order.first(ring.position)
    }
    layouts = [m.layout for m in ring.members if m.layout]
    assert len(layouts) == len(ring.members)
    assert {layout.ring.axis for layout in layouts} == {ring.first.ring.axis}
    for member, layout in zip(ring.members, layouts, strict=True):
        collective = layout.ring.collective
        assert collective is not None and collective.kind == ring.kind
        assert layout.spec(collective.side) == ring.first.spec(ring.side)
        if ring.kind == "all_gather":
            assert member.value(collective.side) == ring.shard
    if len(ring.members) > 1:
        assert (ring.total is None) == (ring.kind == "all_gather")


# -- gathers that are shared ----------------------------------------------------------------------


def qkv(x, q, k, v):
    return x @ q, x @ k, x @ v


def test_three_projections_of_one_value_share_a_ring():
    body = body_of(qkv, X, W, W, W)
    body_rings = shared(body, GATHER, GATHER, GATHER)
    assert members(body_rings) == [[0, 1, 2]]
    (ring,) = body_rings.rings
    assert (ring.kind, ring.site, ring.keep, ring.total) == ("all_gather", 0, False, None)
    assert body_rings.order.positions() == [0]


def test_the_first_of_a_ring_has_its_bytes():
    body = body_of(qkv, X, W, W, W)
    entries, _ = decide([body], reads([GATHER] * 3), Terms(AXES))
    assert all(isinstance(e, Decision) for e in entries)
    assert [e.bytes_moved for e in entries] == [BYTES, 0, 0]
    assert [e.ring for e in entries] == [0, 0, 0]
    assert [e.why for e in entries] == ["", "shares ring 0", "shares ring 0"]


def test_two_values_travel_apart():
    body = body_of(lambda x, y, q, k: (x @ q, y @ k, x @ k), X, X, W, W)
    assert members(shared(body, GATHER, GATHER, GATHER)) == [[0, 2], [1]]


def test_the_same_value_wanted_from_another_sharding_is_not_gathered_again():
    body = body_of(lambda x, q, k: (x @ q, x @ k), X, W, W)
    other = (COLUMNS, COLUMNS, COLUMNS)  # its columns would be gathered, not its rows
    body_rings = shared(body, GATHER, other)
    assert members(body_rings) == [[0]]
    assert [m.lhs for m in body_rings.readers] == [body_rings.rings[0].gathered]


def test_one_is_enough_for_a_ring():
    asked = Reason("skipped", "as asked")
    body = body_of(qkv, X, W, W, W)
    body_rings = shared(body, asked, GATHER, (WHOLE, COLUMNS, COLUMNS))
    assert members(body_rings) == [[1]]
    assert body_rings.skipped == {0: asked, 2: NO_COLLECTIVE}


def test_the_gradient_of_a_result_feeds_both_gradients():
    """y = h @ w is scattered along the rows, so dy is sharded by rows; dh and dw gather it."""

    def backward(dy, h, w):
        return dy @ w.T, h.T @ dy

    body = body_of(backward, X, (S, F), V)
    to_h, to_w = (ROWS, COLUMNS, COLUMNS), (ROWS, ROWS, ROWS)
    body_rings = shared(body, to_h, to_w)
    assert members(body_rings) == [[0, 1]]
    (ring,) = body_rings.rings
    assert ring.side == "lhs"
    assert [m.layout.letter for m in ring.members if m.layout] == ["a", "b"]  # free; contracted


def test_a_value_may_be_the_left_of_one_and_the_right_of_another():
    body = body_of(lambda x, w, u: (x @ w, u @ x), X, W, (F, S))
    body_rings = shared(body, GATHER, ((M, NO), ROWS, (M, NO)))
    assert members(body_rings) == [[0, 1]]


def test_a_value_times_itself_is_gathered_once():
    body = body_of(lambda x: lax.dot_general(x, x, (((1,), (1,)), ((), ()))), X)
    body_rings = shared(body, (ROWS, ROWS, ROWS))
    assert members(body_rings) == [[0]]
    (member,) = body_rings.rings[0].members
    assert member.lhs == member.rhs == body_rings.rings[0].shard
    assert body_rings.rings[0].gathered != member.lhs


def test_numbers_are_no_values():
    """A dot of a scalar is a dot_general too, and its operand may be a literal."""
    body = body_of(lambda x, w: (lax.dot_general(2.0, x @ w, (((), ()), ((), ()))), x @ w), X, W)
    body_rings = shared(body, GATHER, ((), COLUMNS, COLUMNS), GATHER)
    assert members(body_rings) == [[0, 2]]
    assert body_rings.skipped == {1: NO_COLLECTIVE}


# -- what comes later reads what is kept ----------------------------------------------------------


def test_a_weight_gradient_reads_what_the_forward_matmul_gathered():
    """A gradient that follows from the ring's result cannot be in it; x is kept whole for it."""
    body = body_of(lambda x, w: lax.dot_general(x, jnp.sin(x @ w), (((0,), (0,)), ((), ()))), X, W)
    body_rings = shared(body, GATHER, (ROWS, COLUMNS, COLUMNS))
    assert members(body_rings) == [[0]]
    (ring,), (reader,) = body_rings.rings, body_rings.readers
    assert ring.keep
    assert (reader.dot.index, reader.layout) == (1, None)
    assert reader.lhs == ring.gathered
    assert ring.gathered.spec == WHOLE
    entries, _ = decide([body], reads([GATHER, (ROWS, COLUMNS, COLUMNS)]), Terms(AXES))
    assert [e.bytes_moved for e in entries if isinstance(e, Decision)] == [BYTES, 0]
    assert isinstance(entries[1], Decision)
    assert (entries[1].ring, entries[1].why) == (0, "reads what ring 0 moved")
    assert (entries[1].num_chunks, entries[1].letter) == (1, "")


def test_a_reader_may_still_have_sums_to_send():
    """The kept rows take the gather away; over data the weight gradient has partial sums."""

    def step(x, w):
        return lax.dot_general(x, jnp.sin(x @ w), (((0, 1), (0, 1)), ((), ())))

    body = body_of(step, (8, *X), W)
    forward = ((D, M, NO), COLUMNS, (D, NO, M))
    weight = ((D, M, NO), (D, NO, M), (D, M))
    body_rings = shared(body, forward, weight)
    assert members(body_rings) == [[0], [1]]
    assert not body_rings.readers
    first, second = body_rings.rings
    assert first.keep
    assert second.members[0].lhs == first.gathered
    assert (second.kind, second.first.ring.axis) == ("reduce_scatter", "data")
    assert second.first.others == ()


def test_two_groups_that_would_wait_for_each_other():
    """One of two rings that both read a later result of the other one keeps what it gathered."""

    def step(x, y, w, u):
        a, b = x @ w, y @ w
        return x @ (u + jnp.sum(b)), y @ (u + jnp.sum(a))

    body = body_of(step, X, X, W, W)
    body_rings = shared(body, GATHER, GATHER, GATHER, GATHER)
    assert members(body_rings) == [[0, 2], [1]]
    assert [ring.keep for ring in body_rings.rings] == [False, True]
    assert [m.dot.index for m in body_rings.readers] == [3]


LOW, SQUARE = (8, 64), (64, 64)  # so few rows that sums of them are cheaper than the weight
SLICED = (ROWS, (D, M), (NO, ("model", "data")))
"""Over data partial sums are scattered over the columns: a device takes its part of x's columns."""


def test_a_value_that_was_sliced_too_cannot_be_kept():
    """Over data the first matmul takes a slice of x; whole over model, that is still no x."""

    def step(x, w):
        y = jnp.sin(x @ w)
        return lax.dot_general(x, y, (((0,), (0,)), ((), ())))

    body = body_of(step, LOW, SQUARE)
    body_rings = shared(body, SLICED, (ROWS, COLUMNS, COLUMNS))
    assert members(body_rings) == [[0], [1]]
    first = body_rings.rings[0]
    assert (first.kind, first.first.ring.axis, first.first.lhs) == ("all_gather", "model", (M, D))
    assert not first.can_keep()
    assert not body_rings.readers


def test_the_major_axis_cannot_be_kept():
    """Its blocks do not lie side by side: no PartitionSpec says what is left."""
    matmul = (((("model", "data"), NO)), (NO, BOTH), (NO, BOTH))
    body = body_of(lambda x, w: x @ w, X, W)
    (ring,) = shared(body, matmul).rings
    assert ring.first.ring.axis == "model"
    assert ring.can_keep()  # the gather over data comes before: model is then alone on the dim
    assert ring.shard.spec == (M, NO)


# -- sums that are added --------------------------------------------------------------------------


def gradient_of_x(q, k, v, wq, wk, wv):
    return q @ wq + k @ wk + v @ wv


def test_the_gradients_that_three_projections_send_back_travel_as_one():
    body = body_of(gradient_of_x, (S, F), (S, F), (S, F), V, V, V)
    body_rings = shared(body, SCATTER, SCATTER, SCATTER)
    assert members(body_rings) == [[0, 1, 2]]
    (ring,) = body_rings.rings
    assert ring.kind == "reduce_scatter"
    assert ring.total is body.outvars[0]
    assert len(body_rings.order.positions()) == 1, "the adds are in the ring"
    entries, _ = decide([body], reads([SCATTER] * 3), Terms(AXES))
    assert [getattr(e, "bytes_moved", None) for e in entries] == [BYTES, 0, 0]
    assert [getattr(e, "why", None) for e in entries] == ["", "shares ring 0", "shares ring 0"]


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (lambda q, k, w: (lambda a, b: (a + b, a))(q @ w, k @ w), [[0], [1]]),
        (lambda q, k, w: (lambda a, b: (a + b) * jnp.sum(b))(q @ w, k @ w), [[0], [1]]),
        (lambda q, k, w: (q @ w) - (k @ w), [[0], [1]]),
        (lambda q, k, w: (q @ w) + 1.0, [[0]]),
        (lambda q, k, w: (lambda a: a + a)(q @ w), [[0]]),
        (lambda q, k, w: jnp.sin(q @ w) + k @ w, [[0], [1]]),
        (lambda q, k, w: (q @ w + k @ w) + (q @ (2 * w) + k @ (3 * w)), [[0, 1, 2, 3]]),
    ],
    ids=[
        "a result",
        "read twice",
        "a difference",
        "a number",
        "itself",
        "not bare",
        "sums of sums",
    ],
)
def test_which_sums_travel_as_one(step, expected):
    body = body_of(step, (S, F), (S, F), V)
    assert members(shared(body, *[SCATTER] * len(body.dots))) == expected


def test_a_sum_that_somebody_reads_is_sent_before_the_next_is_added():
    def step(q, k, v, w):
        two = q @ w + k @ w
        return two, two + v @ w

    body = body_of(step, (S, F), (S, F), (S, F), V)
    body_rings = shared(body, SCATTER, SCATTER, SCATTER)
    assert members(body_rings) == [[0, 1], [2]]
    assert body_rings.rings[0].total is body.outvars[0]


def test_sums_of_other_kinds_and_axes_travel_apart():
    body = body_of(lambda q, k, w: q @ w + k @ w, (S, F), (S, F), V)
    whole = (COLUMNS, ROWS, WHOLE)
    data = ((NO, D), (D, NO), (D, NO))
    columns = (COLUMNS, ROWS, COLUMNS)
    for other in (whole, data, columns):
        assert members(shared(body, SCATTER, other)) == [[0], [1]]
    assert members(shared(body, whole, whole)) == [[0, 1]]


def test_a_sum_is_not_merged_past_what_reads_of_it():
    """The second matmul follows from the first one's result: they cannot be one."""

    def step(q, w, u):
        first = q @ w
        return first + jnp.sin(q * jnp.sum(u)) @ w

    body = body_of(step, (S, F), V, V)
    assert members(shared(body, SCATTER, SCATTER)) == [[0, 1]]

    def after(q, w):
        first = q @ w
        return first + lax.concatenate([jnp.sin(first)] * (F // H), 1) @ w

    assert members(shared(body_of(after, (S, F), V), SCATTER, SCATTER)) == [[0], [1]]


# -- gathers on other axes ------------------------------------------------------------------------

FSDP = ((D, M, NO), (D, M), (D, NO, M))  # x [b/data, s/model, h] and w [h/data, f/model]
BACK = ((D, NO, M), (D, M), (D, M, NO))  # dy [b/data, s, f/model] and the same w
HOISTED = H * F * 4 // 4 // 2


def test_a_weight_is_gathered_once_for_the_forward_matmul_and_the_gradient():
    """A remat's backward pass multiplies again like this: recomputed y, and dx."""

    def step(x, w):
        y = jnp.sin(x @ w)
        return lax.dot_general(y, w, (((2,), (1,)), ((), ())))

    body = body_of(step, (8, *X), W)
    body_rings = shared(body, FSDP, BACK)
    assert members(body_rings) == [[0], [1]]
    (hoist,) = body_rings.hoisted.values()
    assert (hoist.axis, hoist.bytes_moved) == ("data", HOISTED)
    assert hoist.after.spec == COLUMNS
    assert [m.rhs for ring in body_rings.rings for m in ring.members] == [hoist.after] * 2
    entries, _ = decide([body], reads([FSDP, BACK]), Terms(AXES))
    assert [getattr(e, "others", None) for e in entries] == [("data all_gather, 512 B",), ()]


def test_a_ring_and_a_gather_before_it_for_each_of_its_members():
    body = body_of(qkv, (8, *X), W, W, W)
    body_rings = shared(body, FSDP, FSDP, FSDP)
    assert members(body_rings) == [[0, 1, 2]]
    assert len(body_rings.hoisted) == 3
    entries, _ = decide([body], reads([FSDP] * 3), Terms(AXES))
    assert [getattr(e, "others", None) for e in entries] == [("data all_gather, 512 B",)] * 3


def test_a_matmul_may_have_nothing_left_but_to_read_a_weight_that_was_gathered():
    def step(x, y, w):
        return x @ w, y @ w

    body = body_of(step, (8, *X), (8, *X), W)
    local = ((D, NO, NO), (D, M), (D, NO, M))  # only w has to be gathered
    body_rings = shared(body, FSDP, local)
    assert members(body_rings) == [[0]]
    (reader,) = body_rings.readers
    assert reader.rhs in body_rings.hoisted
    entries, _ = decide([body], reads([FSDP, local]), Terms(AXES))
    assert getattr(entries[1], "why", None) == "reads what the all_gather on data moved"


def test_a_gather_alone_is_a_ring_and_not_a_gather_before_one():
    body = body_of(lambda x, w: x @ w, (8, *X), W)
    body_rings = shared(body, ((D, NO, NO), (D, M), (D, NO, M)))
    assert members(body_rings) == [[0]]
    assert not body_rings.hoisted
    assert body_rings.rings[0].first.ring.axis == "data"


# -- layouts that do not fit together -------------------------------------------------------------


def test_matmuls_that_take_other_slices_of_a_value_do_not_share_its_ring():
    """The first gathers whole rows, the second a part of their columns: it reads what is kept."""
    body = body_of(lambda x, w, u: (x @ w, x @ u), LOW, SQUARE, SQUARE)
    body_rings = shared(body, GATHER, SLICED)
    assert members(body_rings) == [[0], [1]]
    first, second = body_rings.rings
    assert first.keep and second.members[0].lhs == first.gathered
    assert (second.kind, second.first.ring.axis) == ("reduce_scatter", "data")
    body_rings = shared(body, SLICED, GATHER)  # this one's cannot be kept
    assert members(body_rings) == [[0], [1]]
    assert [ring.kind for ring in body_rings.rings] == ["all_gather", "all_gather"]


# -- whatever the shardings -----------------------------------------------------------------------


def random_body(rng: random.Random) -> tuple[Body, list[Any]]:
    """Draw projections, outputs, weight gradients and sums of square values, as in a train step.

    Rows lie over data, and over model too or the columns do; weights are sharded by both. One in
    ten shardings is another one.
    """
    plan: list[tuple[str, int, int]] = []
    rows, columns = (BOTH, NO), (D, M)
    specs: list[Any] = [rows, rows, columns, (M, D), columns, (M, D)]  # two values, four weights
    while len(plan) < 10:
        one, other = rng.sample([i for i in range(len(specs)) if i < 2 or i > 5], 2)
        weight = rng.choice([2, 4]) if specs[one] == rows else rng.choice([3, 5])
        unread = [
            i for i in range(6, len(specs)) if not any(i in positions for _, *positions in plan)
        ]
        alike = len(unread) > 1 and specs[unread[-1]] == specs[unread[-2]]
        kind = "add" if alike and rng.random() < 0.5 else rng.choice(["project", "gradient"])
        if kind == "project":
            plan.append((kind, one, weight))
            specs.append(columns if specs[one] == rows else rows)
        elif kind == "gradient" and (specs[one], specs[other]) == (rows, columns):
            plan.append((kind, one, other))
            specs.append(columns)
        elif kind == "add":
            plan.append((kind, *unread[-2:]))
            specs.append(specs[unread[-1]])

    def step(*values):
        made = list(values)
        for what, one, other in plan:
            x, y = made[one], made[other]
            if what == "add":
                made.append(x + y)
            else:
                made.append(lax.dot_general(x, y, (((what == "project",), (0,)), ((), ()))))
        return made[-2:]

    body = body_of(step, *[(16, 16)] * 6)
    given = []
    for dot in body.dots:
        _, one, other = plan[dot.position]
        sides = [specs[one], specs[other], specs[6 + dot.position]]
        for side in range(3):
            if rng.random() < 0.1:
                sides[side] = rng.choice([WHOLE, ROWS, COLUMNS, (M, D), (NO, BOTH)])
        given.append(tuple(sides))
    return body, given


def test_whatever_the_shardings_each_matmul_is_somewhere_once():
    count = {"shared": 0, "summed": 0, "kept": 0, "hoisted": 0}
    for seed in range(30):
        body, given = random_body(random.Random(seed))
        entries, rings_by_body = decide([body], reads(given), Terms(AXES))
        body_rings = rings_by_body.get(body.index) or BodyRings(EquationOrder(body.eqns))
        check(body_rings, body)
        count["shared"] += any(len(r.members) > 1 and r.total is None for r in body_rings.rings)
        count["summed"] += any(r.total is not None for r in body_rings.rings)
        count["kept"] += any(r.keep for r in body_rings.rings)
        count["hoisted"] += bool(body_rings.hoisted)
        leading = [e.site for e in entries if isinstance(e, Decision) and e.bytes_moved]
        assert sorted(leading) == sorted(ring.site for ring in body_rings.rings)
    assert min(count.values()) >= 3, count


# -- numbers --------------------------------------------------------------------------------------

MESH = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
MODEL, DATA = P("model"), P(None, "model")
X3, ROWS3, COLUMNS3 = (4, *X), P("data", "model"), P("data", None, "model")
WEIGHT, BACKWARDS = P("data", "model"), P("model", "data")


def position(x, *spec):
    return lax.with_sharding_constraint(x, NamedSharding(MESH, P(*spec)))


def backward(dy, h, w):
    return dy @ w.T, h.T @ dy


def weight_gradient(x, w):
    y = jnp.sin(x @ w)
    return y, lax.dot_general(x, y, (((0,), (0,)), ((), ())))


def batched_weight_gradient(x, w):
    y = jnp.sin(x @ w)
    return y, lax.dot_general(x, y, (((0, 1), (0, 1)), ((), ())))


def waiting(x, y, w, u):
    a, b = x @ w, y @ w
    return x @ (u + jnp.mean(b)), y @ (u + jnp.mean(a))


def there_and_back(x, w):
    y = position(jnp.sin(x @ w), "data", None, "model")
    return lax.dot_general(y, w, (((2,), (1,)), ((), ())))


def gram(x, w):
    return lax.dot_general(x, x, (((1,), (1,)), ((), ()))), x @ w


@dataclass(frozen=True)
class Step:
    """A step, how its operands and results lie, and the ring of each of its matmuls."""

    fn: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    given: tuple[P, ...]
    wanted: tuple[P, ...] | P
    rings: tuple[int, ...]
    reads: int = 0
    """The number of matmuls that read what others gathered."""

    def jitted(self):
        at = [NamedSharding(MESH, spec) for spec in self.given]
        out = jax.tree.map(lambda spec: NamedSharding(MESH, spec), self.wanted)
        return jax.jit(self.fn, in_shardings=tuple(at), out_shardings=out)

    def operands(self, dtype) -> list[np.ndarray]:
        rng = np.random.default_rng(0)
        return [rng.standard_normal(shape).astype(dtype) / 4 for shape in self.shapes]

    def overlapped(self):
        step = jaxoverlap.overlap(self.jitted())
        plan = step.explain(*self.operands(np.float32))
        assert tuple(getattr(e, "ring", -1) for e in plan.entries) == self.rings, plan
        assert sum(d.why.startswith("reads") for d in plan.decisions) == self.reads, plan
        return step


STEPS = {
    "q, k and v": Step(
        qkv, (X, W, W, W), (MODEL, DATA, DATA, DATA), (DATA, DATA, DATA), (0, 0, 0)
    ),
    "q, k and v, of weights that are sharded twice": Step(
        qkv, (X3, W, W, W), (ROWS3, WEIGHT, WEIGHT, WEIGHT), (COLUMNS3,) * 3, (0, 0, 0)
    ),
    "q, k and v, of rows over both axes": Step(
        qkv, (X, W, W, W), (P(("model", "data")), *[P(None, ("data", "model"))] * 3),
        (P(None, ("data", "model")),) * 3, (0, 0, 0),
    ),
    "both gradients read dy": Step(backward, (X, (S, F), V), (MODEL, DATA, MODEL), (DATA, MODEL), (0, 0)),
    "a weight gradient reads what is kept": Step(
        weight_gradient, (X, W), (MODEL, DATA), (DATA, DATA), (0, 0), reads=1
    ),
    "a weight gradient reads what is kept, and has sums": Step(
        batched_weight_gradient, (X3, W), (ROWS3, WEIGHT), (COLUMNS3, WEIGHT), (0, 1)
    ),
    "the gradient of x": Step(
        gradient_of_x, ((S, F), (S, F), (S, F), V, V, V), (DATA,) * 3 + (MODEL,) * 3, MODEL, (0, 0, 0)
    ),
    "the gradient of x, whole": Step(
        gradient_of_x, ((S, F), (S, F), (S, F), V, V, V), (DATA,) * 3 + (MODEL,) * 3, P(), (0, 0, 0)
    ),
    "a weight that is gathered once": Step(
        there_and_back, (X3, W), (ROWS3, WEIGHT), ROWS3, (0, 1)
    ),
    "a value times itself, and times another": Step(
        gram, (X, W), (MODEL, DATA), (DATA, DATA), (0, 0)
    ),
    "two groups that would wait for each other": Step(
        waiting, (X, X, W, W), (MODEL, MODEL, DATA, DATA), (DATA, DATA), (0, 1, 0, 1), reads=1
    ),
}  # fmt: skip


def exact_of(fn: Callable[..., Any], operands: Sequence[np.ndarray]) -> list[np.ndarray]:
    with jax.enable_x64(True):
        exact = jax.jit(fn)(*(operand.astype(np.float64) for operand in operands))
        return [np.asarray(leaf) for leaf in jax.tree.leaves(exact)]


def compare(got: Any, plain: Any, exact: Sequence[np.ndarray], dtype: Any) -> None:
    """Check that a result is as exact as plain: at most twice its error, and one rounding more."""
    rounding = float(jnp.finfo(dtype).eps) / 2
    for one, other, right in zip(*map(jax.tree.leaves, (got, plain)), exact, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert one.sharding.is_equivalent_to(other.sharding, one.ndim)
        assert error(one, right) <= 2 * error(other, right) + rounding
        assert error(one, right) < 16 * rounding


@pytest.mark.parametrize("name", list(STEPS)[1:])  # the first is in bfloat16 below
def test_results_and_gradients(name: str):
    step = STEPS[name]
    operands = step.operands(np.float32)

    def both(fn):
        def results_and_gradients(*operands):
            results, back = jax.vjp(fn, *operands)
            return results, back(jax.tree.map(jnp.cos, results))

        return results_and_gradients

    overlapped = jax.jit(both(step.overlapped()))
    assert "ppermute" in str(overlapped.trace(*operands).jaxpr)
    exact = exact_of(both(step.fn), operands)
    compare(overlapped(*operands), jax.jit(both(step.jitted()))(*operands), exact, np.float32)


@pytest.mark.parametrize(
    "name",
    ["q, k and v", "the gradient of x",
     "a weight gradient reads what is kept, and has sums"],
)  # fmt: skip
def test_bfloat16(name: str):
    step = STEPS[name]
    operands = step.operands(jnp.bfloat16)
    exact = exact_of(step.fn, operands)
    compare(step.overlapped()(*operands), step.jitted()(*operands), exact, jnp.bfloat16)


def layer(x, weights):
    """Apply attention without the attention, and a gated MLP, each behind a norm."""

    def projected(x, *names):
        x = x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-3)
        return [position(x @ weights[name], "data", None, "model") for name in names]

    x = position(x, "data", "model")
    q, k, v = projected(x, "q", "k", "v")
    x = position(x + (jnp.tanh(q) * jnp.sin(k) + v) @ weights["o"], "data", "model")
    gate, up = projected(x, "gate", "up")
    return position(x + (jax.nn.silu(gate) * up) @ weights["down"], "data", "model"), None


def test_a_layer_in_a_remat_in_a_scan():
    """A whole layer has these rings and gathers, forward and backward."""

    def loss(weights, x):
        x, _ = lax.scan(jax.checkpoint(layer), x, weights)
        return jnp.mean(jnp.sin(x) ** 2)

    inward = dict.fromkeys(("q", "k", "v", "gate", "up"), (W, P(None, "data", "model")))
    outward = dict.fromkeys(("o", "down"), (V, P(None, "model", "data")))
    weights, at = {}, {}
    for name, (shape, spec) in {**inward, **outward}.items():
        weights[name] = jax.ShapeDtypeStruct((2, *shape), np.float32)
        at[name] = NamedSharding(MESH, spec)
    x = jax.ShapeDtypeStruct(X3, np.float32)
    plain = jax.jit(
        jax.value_and_grad(loss),
        in_shardings=(at, NamedSharding(MESH, ROWS3)),
        out_shardings=(None, at),
    )
    step = jaxoverlap.overlap(plain)
    plan = step.explain(weights, x)
    assert not plan.skips
    forward, again, backward = plan.decisions[:7], plan.decisions[7:13], plan.decisions[13:]
    assert sizes(forward) == [3, 2, 1, 1]  # q, k and v; gate and up; o; down
    assert sizes(again) == [3, 2, 1]  # the same, multiplied again; down is not read
    # dx of q, k and v, and of gate and up, are one sum each. dy of o and of down feed both their
    # gradients. The other five weight gradients read what was gathered; they have sums over data.
    assert sizes(backward) == [3, 2, 2, 2, 1, 1, 1, 1, 1]
    assert Counter(d.axis for d in plan.decisions) == {"model": 22, "data": 5}
    scans = [e for e in step.trace(weights, x).jaxpr.eqns if e.primitive.name == "scan"]
    for scan in scans:
        (body,) = compat.jaxprs_in(scan)
        assert scopes(body)["all_gather_over_data"] == 7, "each weight is gathered once"


def sizes(decisions: Sequence[Decision]) -> list[int]:
    """Count the matmuls that each ring serves, largest first."""
    return sorted(Counter(d.ring for d in decisions).values(), reverse=True)


def scopes(jaxpr: Any) -> Counter[str]:
    """Count the reshards of a body, at any depth, by the innermost scope that they stand in."""
    reshards = [e for e in jaxpr.eqns if e.primitive.name == "sharding_constraint"]
    here = Counter(str(e.source_info.name_stack).split("/")[-1] for e in reshards)
    inner = (scopes(body) for e in jaxpr.eqns for body in compat.jaxprs_in(e))
    return sum(inner, here)
