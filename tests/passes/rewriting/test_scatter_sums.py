"""Sums stay scattered between two matmuls where that pays, and the numbers stay the same."""

from __future__ import annotations

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoverlap
from jaxoverlap import Decision, Plan
from jaxoverlap.passes.analysis.jaxprs import bodies
from jaxoverlap.passes.analysis.partitioned import Shardings as Read
from jaxoverlap.passes.planning.decide import decide
from jaxoverlap.passes.rewriting import propose
from jaxoverlap.passes.rewriting.scatter_sums import Point, exposure, points
from jaxoverlap.plan.plan import Remaining
from tests.support.engine import assert_close, equations
from tests.support.terms import terms_of

AXES = {"data": 2, "model": 4}
NO, D, M = (), ("data",), ("model",)


# -- where: shardings given by hand ---------------------------------------------------------------


def sharings_of(spec: str, lhs, rhs, out, *, sizes=None, fn=None):
    sizes = {"b": 4, "s": 16, "n": 64, "d": 32, "f": 64, "h": 8, "k": 4} | (sizes or {})
    structs = [
        jax.ShapeDtypeStruct(tuple(sizes[c] for c in letters), np.float32)
        for letters in spec.split("->")[0].split(",")
    ]
    step_bodies = bodies(jax.make_jaxpr(fn or (lambda x, w: jnp.einsum(spec, x, w)))(*structs))
    assert sum(len(body.dots) for body in step_bodies) == 1
    return decide(step_bodies, {0: Read(lhs, rhs, out)}, terms_of(AXES))[1].values()


TP = (D, NO, M), (M, NO), (D, NO, NO)
POINTS = {
    "the longer of the rows": ("bsf,fd->bsd", *TP, {}, Point(1, M)),
    "the free dim goes first": ("bsf,fd->bsd", *TP, {"b": 64}, Point(1, M)),
    "beside an axis, if no other divides": (
        *("bsf,fd->bsd", *TP, {"s": 3, "b": 8}),
        Point(0, ("data", "model")),
    ),
    "nothing divides": ("bsf,fd->bsd", *TP, {"s": 3}, None),
    "heads": ("bshk,hkd->bsd", (D, NO, M, NO), (M, NO, NO), (D, NO, NO), {}, Point(1, M)),
    "rows without a batch": ("nf,fd->nd", (D, M), (M, NO), (D, NO), {"s": 1}, Point(0, D + M)),
    "a row's gradient": ("bsf,df->bsd", (D, NO, M), (NO, M), (D, NO, NO), {}, Point(1, M)),
    "a weight's gradient": ("bsd,bsf->df", (D, NO, NO), (D, NO, M), (NO, M), {}, None),
    "the gradient of heads": (
        *("bsd,bshk->dhk", (D, NO, NO), (D, NO, M, NO), (NO, M, NO), {}),
        None,
    ),
    "scattered anyway": ("bsf,fd->bsd", (D, NO, M), (M, NO), (D, M, NO), {}, None),
    "a vector": ("f,fd->d", (M,), (M, NO), (NO,), {}, None),
}


@pytest.mark.parametrize("name", POINTS)
def test_points(name: str):
    spec, lhs, rhs, out, sizes, expected = POINTS[name]
    point_of = points(sharings_of(spec, lhs, rhs, out, sizes=sizes))
    assert point_of == ({} if expected is None else {0: expected})


# -- which is better ------------------------------------------------------------------------------


def test_what_nothing_hides_counts_twice():
    summed = sharings_of("bsf,fd->bsd", *TP)
    scattered = sharings_of("bsf,fd->bsd", (D, NO, M), (M, NO), (D, M, NO))
    half = 2 * 16 * 32 * 4 * 3 // 4  # the bytes of its scatter; the other half is the gather
    left = Remaining(kind="all_gather", axes=M, source="", runs=1, bytes_moved=half)
    assert exposure(summed, (), {}) == 3 * half
    assert exposure(scattered, (), {}) == half
    assert exposure(scattered, (left,), {}) == 3 * half, "no better, if XLA gathers it"
    assert exposure(scattered, (left,), {"model": 9.0}) == 27 * half


# -- steps ----------------------------------------------------------------------------------------

BATCH, SEQ, HIDDEN, FF, HEADS, LAYERS = 4, 16, 32, 64, 8, 2
SPECS = {
    "norm1": P(),
    "norm2": P(),
    "q": P(None, None, "model"),
    "k": P(None, None, "model"),
    "v": P(None, None, "model"),
    "o": P(None, "model"),
    "up": P(None, None, "model"),
    "down": P(None, "model"),
}


def mesh_of(kind=AxisType.Auto) -> Mesh:
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind,) * 2)


def on_mesh(array, *spec):
    return jax.device_put(np.asarray(array, np.float32), NamedSharding(mesh_of(), P(*spec)))


def weights():
    k = HIDDEN // HEADS
    heads = (LAYERS, HIDDEN, HEADS, k)
    shapes = {"norm1": (LAYERS, HIDDEN), "norm2": (LAYERS, HIDDEN), "q": heads, "k": heads}
    shapes |= {"v": heads, "o": (LAYERS, HEADS, k, HIDDEN)}
    shapes |= {"up": (LAYERS, HIDDEN, FF), "down": (LAYERS, FF, HIDDEN)}
    rng = np.random.default_rng(0)
    made = {name: rng.standard_normal(shape) / 6 for name, shape in shapes.items()}
    return {name: on_mesh(array, *SPECS[name]) for name, array in made.items()}


def rows():
    rng = np.random.default_rng(1)
    return on_mesh(rng.standard_normal((BATCH, SEQ, HIDDEN)), "data")


def norm(x, scale):
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * (1 + scale)


def block(x, w):
    h = norm(x, w["norm1"])
    q, k, v = (jnp.einsum("bsd,dhk->bshk", h, w[name]) for name in "qkv")
    scores = jax.nn.softmax(jnp.einsum("bshk,bthk->bhst", q, k))
    x = x + jnp.einsum("bshk,hkd->bsd", jnp.einsum("bhst,bthk->bshk", scores, v), w["o"])
    return x + jax.nn.gelu(norm(x, w["norm2"]) @ w["up"]) @ w["down"]


def train(w, x):
    """Return loss, gradients and the last residual stream, through a scan over rematted blocks."""

    def loss(w):
        y, _ = lax.scan(jax.checkpoint(lambda x, w: (block(x, w), None)), x, w)
        return jnp.mean(y * y), y

    return jax.value_and_grad(loss, has_aux=True)(w)


@pytest.fixture(scope="module")
def step():
    return jax.jit(train)


@pytest.fixture(scope="module")
def plan(step) -> Plan:
    return jaxoverlap.overlap(step).explain(weights(), rows())


def on_model(plan: Plan) -> list[Decision]:
    return [d for d in plan.decisions if d.axis == "model"]


def test_no_all_reduce_is_left_in_a_scan_with_remat(plan):
    rings = [d for d in on_model(plan) if d.bytes_moved]
    assert Counter(d.kind for d in rings) == {
        # The forward pass gathers and scatters twice, and so do remat and the backward pass; the
        # last sum of the remat is not read, and the backward pass gathers what it is given.
        "all_gather_matmul": 2 + 2 + 2,
        "matmul_reduce_scatter": 2 + 1 + 2,
    }
    for ring in rings:
        gathers = ring.kind == "all_gather_matmul"
        why = "gathers what is scattered" if gathers else "an all-reduce, scattered"
        assert ring.why.startswith(why)
    left = [r for r in plan.remaining if "model" in r.axes]
    assert all(r.kind in ("all_reduce", "all_gather") for r in left)
    assert sum(r.bytes_moved for r in left) < 5000, "scales of norms, and the result"


def test_the_gradients_of_q_k_and_v_travel_as_one(plan):
    sums = [d for d in on_model(plan) if d.kind == "matmul_reduce_scatter"]
    assert Counter(d.ring for d in sums).most_common(1)[0][1] == 3


def test_bytes_before_and_after(step, plan, monkeypatch):
    """The same bytes move, but for scales' gradients; the half that nothing hid is in rings now."""
    monkeypatch.setattr(propose, "points", lambda _: {})
    before = jaxoverlap.overlap(step).explain(weights(), rows())
    assert {d.kind for d in on_model(before)} == {"matmul_all_reduce"}

    def sent(plan):
        return sum(d.bytes_moved for d in plan.decisions)

    assert sent(plan) == sent(before)
    result = BATCH // 2 * SEQ * HIDDEN * 4

    def kept(plan):
        return sum(r.bytes_moved for r in plan.remaining if r.axes == ("model",))

    more = kept(plan) - kept(before)
    # `train` returns the residual stream, which is gathered for that; the rest is 4 small sums.
    assert 0 < more - result * 3 // 4 < 1000


def test_numbers_gradients_and_shardings_of_the_results(step):
    expected, got = step(weights(), rows()), jaxoverlap.overlap(step)(weights(), rows())
    pairs = zip(jax.tree.leaves(expected), jax.tree.leaves(got), strict=True)
    for one, other in pairs:
        assert other.sharding.is_equivalent_to(one.sharding, one.ndim)
        assert_close(other, np.float64(one))
    assert got[0][1].sharding.spec == P("data"), "the residual stream is whole again"


def mlp(ws, x):
    for up, down in ws:
        x = x + jax.nn.relu(norm(x, 0.0) @ up) @ down
    return x


def mlp_weights():
    rng = np.random.default_rng(2)
    ups = (rng.standard_normal((HIDDEN, FF)) / 6 for _ in range(2))
    return [(on_mesh(up, None, "model"), on_mesh(up.T, "model")) for up in ups]


def kinds(fn, *args) -> Counter:
    with_rings = jaxoverlap.overlap(fn)
    plan = with_rings.explain(*args)
    return Counter(d.kind for d in on_model(plan) if d.bytes_moved)


def test_rows_without_a_batch():
    x, ws = rows().reshape(BATCH * SEQ, HIDDEN), mlp_weights()
    grads = jax.jit(jax.grad(lambda ws, x: jnp.sum(mlp(ws, x) ** 2)))
    assert set(kinds(grads, ws, x)) == {"all_gather_matmul", "matmul_reduce_scatter"}
    expected, got = grads(ws, x), jaxoverlap.overlap(grads)(ws, x)
    for one, other in zip(jax.tree.leaves(expected), jax.tree.leaves(got), strict=True):
        assert other.sharding.is_equivalent_to(one.sharding, one.ndim)
        assert_close(other, np.float64(one))


def test_out_shardings_of_the_user_stay():
    whole = NamedSharding(mesh_of(), P())
    step = jax.jit(mlp, out_shardings=whole)
    assert set(kinds(step, mlp_weights(), rows())) == {"all_gather_matmul", "matmul_reduce_scatter"}
    got = jaxoverlap.overlap(step)(mlp_weights(), rows())
    assert got.sharding.is_equivalent_to(whole, 3)
    assert_close(got, np.float64(step(mlp_weights(), rows())))


def test_bfloat16():
    x, ws = jax.tree.map(lambda a: a.astype(jnp.bfloat16), (rows(), mlp_weights()))
    step = jax.jit(lambda ws, x: jnp.float32(mlp(ws, x)).sum(axis=-1))
    assert set(kinds(step, ws, x)) == {"all_gather_matmul", "matmul_reduce_scatter"}
    assert_close(jaxoverlap.overlap(step)(ws, x), np.float64(step(ws, x)), epsilon=2e-2)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_dropout_between_two_matmuls_drops_the_same(impl: str):
    @jax.jit
    def step(ws, x):
        for layer, (up, down) in enumerate(ws):
            y = jax.nn.relu(norm(x, 0.0) @ up) @ down
            key = jax.random.fold_in(jax.random.key(0, impl=impl), layer)
            x = x + jnp.where(jax.random.bernoulli(key, 0.5, y.shape), y, 0)
        return x

    assert "matmul_reduce_scatter" in kinds(step, mlp_weights(), rows())
    got = jaxoverlap.overlap(step)(mlp_weights(), rows())
    assert_close(got, np.float64(step(mlp_weights(), rows())))


# -- where it is not taken ------------------------------------------------------------------------


def test_a_result_that_is_returned_stays_a_sum():
    step = jax.jit(lambda w, x: jax.nn.relu(x @ w[0]) @ w[1])
    assert kinds(step, mlp_weights()[0], rows()) == {"matmul_all_reduce": 1}


@pytest.mark.parametrize("what", ["the sum", "the residual stream"])
def test_a_constraint_of_the_user_wins(what: str):
    whole = NamedSharding(mesh_of(), P("data"))

    def step(ws, x):
        for up, down in ws:
            y = jax.nn.relu(norm(x, 0.0) @ up) @ down
            if what == "the sum":
                y = lax.with_sharding_constraint(y, whole)
            x = lax.with_sharding_constraint(x + y, whole)
        return x

    assert set(kinds(jax.jit(step), mlp_weights(), rows())) == {"matmul_all_reduce"}


def test_lines_that_are_skipped_stay():
    line = f"rewriting/test_scatter_sums.py:{mlp.__code__.co_firstlineno + 2}"
    step = jaxoverlap.overlap(jax.jit(mlp), skip=(line,))
    with pytest.warns(UserWarning, match="rewrites nothing"):
        assert not step.explain(mlp_weights(), rows()).decisions


def test_explicit_meshes_are_left_alone():
    mesh = mesh_of(AxisType.Explicit)

    def step(ws, x):
        for up, down in ws:
            x = x + jnp.dot(jax.nn.relu(x @ up), down, out_sharding=P("data"))
        return x

    def typed(array):
        return jax.device_put(np.asarray(array), NamedSharding(mesh, array.sharding.spec))

    with jax.set_mesh(mesh):
        ws, x = jax.tree.map(typed, (mlp_weights(), rows()))
        assert set(kinds(jax.jit(step), ws, x)) == {"matmul_all_reduce"}


def test_a_step_without_such_sums_is_not_asked_about_again(monkeypatch):
    asked = []
    partitioned = propose.partitioned_scattered

    def counted(*args, **kwargs):
        asked.append(args)
        return partitioned(*args, **kwargs)

    monkeypatch.setattr(propose, "partitioned_scattered", counted)
    step = jax.jit(lambda w, x: jax.nn.relu(x @ w[0]))
    x = jax.device_put(rows(), NamedSharding(mesh_of(), P("data", "model")))
    jaxoverlap.overlap(step).explain(mlp_weights()[0], x)
    assert not asked


# -- what is added --------------------------------------------------------------------------------


def test_results_are_pinned_only_where_the_jit_does_not_say(step):
    def constraints(jitted):
        jaxpr = jaxoverlap.overlap(jitted).trace(weights(), rows()).jaxpr.jaxpr
        return [e for e in equations(jaxpr) if e.primitive.name == "sharding_constraint"]

    assert len(constraints(step)) == 1 + len(SPECS), "all but the loss, which has no dims"
    whole = NamedSharding(mesh_of(), P())
    assert not constraints(jax.jit(train, out_shardings=whole))
