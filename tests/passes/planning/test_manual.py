"""Rings take the place of collectives that a user wrote beside matmuls in a shard_map's body."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
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
from jaxoverlap.passes.analysis.flatten import flatten
from jaxoverlap.passes.analysis.jaxprs import bodies, dots
from jaxoverlap.passes.planning.decide import decide
from jaxoverlap.passes.planning.terms import Terms
from jaxoverlap.passes.rewriting import ring_functions
from jaxoverlap.passes.rewriting.rewrite import rewrite
from tests.support.engine import equations

N = 4
MESH = jax.make_mesh((2, N), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
S, D, F = 32, 16, 64  # the sequence, a hidden dim, a wider one
X, W, V = (S // N, D), (D, F // N), (F // N, D)  # on a device: sharded rows, columns, rows

gather = partial(lax.all_gather, axis_name="model", tiled=True)
scatter = partial(lax.psum_scatter, axis_name="model", tiled=True)
exchange = partial(lax.all_to_all, axis_name="model", tiled=True)
each_check = pytest.mark.parametrize("check", [True, False], ids=["checked", "unchecked"])


def stacked(body: Callable, check: bool = True) -> Callable:
    """Return a step that runs a body on 8 devices, each with its row of every argument."""

    def on_device(*args):
        return jax.tree.map(lambda y: y[None], body(*(x[0] for x in args)))

    spec = P(MESH.axis_names)
    return jax.shard_map(on_device, mesh=MESH, in_specs=spec, out_specs=spec, check_vma=check)


def structs(shapes: tuple[tuple[int, ...], ...]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct((8, *shape), "float32") for shape in shapes]


def decided(
    body: Callable, *shapes: tuple[int, ...], check: bool = True
) -> tuple[list[Any], Counter]:
    """Return the entries of a body's matmuls, and counts of its equations once it is rewritten."""
    jaxpr = flatten(jax.make_jaxpr(stacked(body, check))(*structs(shapes)))
    entries, rings_by_body = decide(bodies(jaxpr), {}, Terms(axis_sizes=dict(MESH.shape)))
    assert [entry.site for entry in entries] == [dot.index for dot in dots(jaxpr)]
    new, _ = rewrite(jaxpr, rings_by_body, MESH)
    return list(entries), Counter(e.primitive.name for e in equations(new))


# -- what is found --------------------------------------------------------------------------------


@each_check
def test_matmuls_that_read_one_gather_share_a_ring(check: bool):
    def body(x, q, k):
        x = gather(x)
        return x @ q, x @ k

    entries, count = decided(body, X, W, W, check=check)
    assert [(e.kind, e.axis, e.ring, e.num_chunks) for e in entries] == [
        ("all_gather_matmul", "model", 0, N)
    ] * 2
    assert [e.bytes_moved for e in entries] == [(N - 1) * 4 * (S // N) * D, 0]
    assert (count["ppermute"], count["dot_general"], count["all_gather"]) == (N - 1, 2 * N, 0)


@each_check
def test_a_scattered_sum(check: bool):
    (entry,), count = decided(lambda h, w: scatter(h @ w), (S, F // N), V, check=check)
    assert (entry.kind, entry.letter, entry.bytes_moved) == (
        "matmul_reduce_scatter", "a", (N - 1) * 4 * S * D // N,
    )  # fmt: skip
    assert (count["ppermute"], count["dot_general"], count["reduce_scatter"]) == (N - 1, N, 0)


def test_matmuls_that_are_added_send_one_sum():
    def body(q, k, v, w):
        sums = [lax.dot_general(a, w, (((1,), (1,)), ((), ()))) for a in (q, k, v)]
        return scatter(sums[0] + sums[1] + sums[2])

    entries, count = decided(body, *[(S, F)] * 3, (D, F))
    assert [e.ring for e in entries] == [0, 0, 0]
    assert (count["ppermute"], count["dot_general"], count["reduce_scatter"]) == (N - 1, 3 * N, 0)


@each_check
def test_an_all_reduce_ends_in_a_gather_that_keeps_the_type(check: bool):
    def body(h, w):
        return lax.psum(h @ w, "model") * jnp.ones(())

    (entry,), count = decided(body, (S, F // N), V, check=check)
    assert (entry.kind, entry.bytes_moved) == ("matmul_all_reduce", 2 * (N - 1) * 4 * S * D // N)
    assert count["ppermute"] == N - 1
    assert count["psum"] + count["psum_invariant"] == 0
    assert count["all_gather_invariant" if check else "all_gather"] == 1


@each_check
def test_exchanges_before_and_after(check: bool):
    def body(x, w, v):
        y = exchange(x, split_axis=1, concat_axis=0) @ w
        return exchange(jnp.sin(y) @ v, split_axis=0, concat_axis=1)

    entries, count = decided(body, X, (D // N, F), (F, D // N), check=check)
    assert [(e.kind, str(e.variant)) for e in entries] == [("all_to_all_matmul", "direct")] * 2
    assert [e.letter for e in entries] == ["a", "a"]
    assert (count["ppermute"], count["all_to_all"]) == (2 * (N - 1), 0)


def test_what_stands_between_is_done_chunk_by_chunk():
    def body(w, x, h):
        whole = lax.all_gather(w.astype(jnp.bfloat16), "data", axis=1, tiled=True)
        y = x @ whole.T.astype(jnp.float32)
        out = jnp.einsum("sf,sd->df", h, x).T  # as the gradient of a weight stands
        return y, scatter(out.astype(jnp.bfloat16), scatter_dimension=1)

    entries, count = decided(body, (F, D // 2), (S, D), (S, F))
    assert [(e.kind, e.axis) for e in entries] == [
        ("all_gather_matmul", "data"),
        ("matmul_reduce_scatter", "model"),
    ]
    assert entries[0].bytes_moved == 2 * F * D // 2, "it travels as bfloat16"
    assert count["all_gather"] + count["reduce_scatter"] == 0


def test_a_value_that_others_read_too_is_kept_whole():
    def body(x, w):
        x = gather(x)
        return x @ w, x, x.T

    entries, count = decided(body, X, W)
    assert isinstance(entries[0], Decision)
    assert (count["ppermute"], count["all_gather"]) == (N - 1, 0)


def test_a_matmul_that_comes_later_reads_what_was_kept():
    def body(x, w):
        x = gather(x)
        return x.T @ jnp.sin(x @ w)

    entries, count = decided(body, X, W)
    assert [e.why for e in entries] == ["", "reads what ring 0 moved"]
    assert (count["ppermute"], count["dot_general"]) == (N - 1, N + 1)


def test_of_two_collectives_the_larger_becomes_the_ring():
    def body(x, w):
        return scatter(x @ lax.all_gather(w, "data", axis=0, tiled=True))

    (entry,), count = decided(body, (S, D), (D // 2, 8 * S))
    assert (entry.axis, entry.kind) == ("model", "matmul_reduce_scatter")
    assert entry.others == (f"data all_gather, {D // 2 * 8 * S * 4 / 1e3:.1f} kB",)
    assert (count["all_gather"], count["reduce_scatter"]) == (1, 0)


def test_a_collective_that_no_ring_does_is_named_beside_one():
    def body(x, w):
        return lax.psum(gather(x) @ w, ("data", "model"))

    (entry,), count = decided(body, X, W, check=False)
    assert entry.others == ("psum is over data x model: a ring has one manual mesh axis",)
    assert (count["ppermute"], count["psum"]) == (N - 1, 1)


def test_an_exchange_between_two_matmuls_is_done_once():
    def body(x, w, v):
        return exchange(x @ w, split_axis=1, concat_axis=0) @ v

    entries, count = decided(body, X, (D, F), (F // N, D))
    assert count["ppermute"] == N - 1
    assert isinstance(entries[0], Decision)
    assert entries[1].reason == "no collective: ring 0 does its all_to_all"


def test_loops_and_shard_maps_inside():
    def body(x, w):
        def layer(x, _):
            inner = lambda x: jax.jit(lambda x: scatter(gather(x) @ w @ w.T))(x)  # noqa: E731
            return jax.checkpoint(inner)(x), None

        return lax.scan(layer, x, length=3)[0]

    entries, count = decided(body, X, (D, D))
    assert [e.kind for e in entries] == ["all_gather_matmul", "matmul_reduce_scatter"]
    assert [e.runs for e in entries] == [3, 3]
    assert count["all_gather"] + count["reduce_scatter"] == 0


# -- why not --------------------------------------------------------------------------------------

HW = ((S, F), (F, D))
GROUPS = [[0, 1], [2, 3]]


@pytest.mark.parametrize(
    ("body", "shapes", "why"),
    [
        (lambda x, w: x @ w, (X, W), "no collective: none next to it inside shard_map"),
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
        (lambda h, w: lax.pmax(h @ w, "model"), HW, "pmax next to it is not decomposed"),
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
        (lambda h, w: scatter(h @ w), ((S, F), (F, 0)), "it has a dim of size 0"),
        (
            lambda h, w: lax.psum(h, "model") @ w,
            HW,
            "no collective: none next to it inside shard_map",
        ),
    ],
)
def test_reasons(body: Callable, shapes: tuple, why: str):
    overlapped = jaxoverlap.overlap(jax.jit(stacked(body, check=False)))
    with pytest.warns(UserWarning, match="rewrites nothing"):
        (entry,) = overlapped.explain(*structs(shapes)).entries
    assert entry.reason == why


@pytest.mark.filterwarnings("ignore:overlap.. rewrites nothing")
@pytest.mark.parametrize("variant", ["one_way", "direct", "sliced x 2"])
def test_rings_by_hand_are_left_alone(variant: str):
    """Chunks of a ring stand beside collectives too, and already have them underneath."""

    def loss(x, w, v):
        if variant != "direct":
            x = jaxoverlap.ring.all_gather_matmul(x, w, "model", variant=variant)
            y = jaxoverlap.ring.matmul_reduce_scatter(jnp.sin(x), v, "model", variant=variant)
        else:
            x = jaxoverlap.ring.all_to_all_matmul(x, w, "model", variant=variant)
            y = jaxoverlap.ring.matmul_all_to_all(x, v, "model", variant=variant)
        return jnp.sum(y)

    body = jax.grad(loss, argnums=(0, 1, 2))
    shapes = (X, (N * D if variant == "direct" else D, F), (F, D))
    plan = jaxoverlap.overlap(jax.jit(stacked(body))).explain(*structs(shapes))
    assert plan.entries and not plan.decisions
    assert {e.reason for e in plan.skips} == {"no collective: none next to it inside shard_map"}


def test_matmuls_that_the_user_wants_left_alone():
    step = jax.jit(stacked(lambda x, w: gather(x) @ w))
    line = jaxoverlap.overlap(step).explain(*structs((X, W))).entries[0].source
    left = jaxoverlap.overlap(step, skip=[line])
    with pytest.warns(UserWarning, match="rewrites nothing"):
        (entry,) = left.explain(*structs((X, W))).entries
    assert entry.reason == "skipped: by skip="


def test_a_failed_rewrite_says_where(monkeypatch):
    monkeypatch.setattr(ring_functions, "operand_ring", lambda *_, **__: 1 / 0)
    step = jaxoverlap.overlap(jax.jit(stacked(lambda x, w: gather(x) @ w)))
    with pytest.raises(
        jaxoverlap.RewriteError, match=r"(?s)matmul 0 .*test_manual.py:\d+.*by zero"
    ):
        step.explain(*structs((X, W)))


# -- automatic axes next to the manual ones -------------------------------------------------------


def beside(body: Callable, *arrays: tuple[tuple[int, ...], P, P]) -> Any:
    """Return the plan of a body that is manual over `model`; `arrays`: shape, place, in_spec."""
    step = jax.shard_map(
        body,
        mesh=MESH,
        in_specs=tuple(entering for *_, entering in arrays),
        out_specs=P("model"),
        axis_names={"model"},
    )
    args = [
        jax.ShapeDtypeStruct(shape, "float32", sharding=NamedSharding(MESH, spec))
        for shape, spec, _ in arrays
    ]
    return jaxoverlap.overlap(jax.jit(step)).explain(*args)


ROWS, COLUMNS, BOTH = P("model"), P(None, "model"), P("data", "model")


def test_bytes_are_those_of_one_device():
    x = ((S, 8, D), P("model", "data"), ROWS)
    plan = beside(lambda x, w: (gather(x) @ w).sum((0, 1))[None], x, ((D, F), COLUMNS, COLUMNS))
    assert [d.bytes_moved for d in plan.decisions] == [(N - 1) * 4 * (S // N) * 8 * D // 2]


@pytest.mark.filterwarnings("ignore:overlap.. rewrites nothing")
def test_what_xla_would_move_once_a_chunk():
    def body(x, w):
        return (gather(x) @ w).sum(0)[None]

    arrays = ((S, D), BOTH, ROWS), ((D, F), BOTH, COLUMNS)
    (skip,) = beside(body, *arrays).skips
    assert skip.reason == "XLA moves it along data too, and would do so once a chunk"


@pytest.mark.filterwarnings("ignore:overlap.. rewrites nothing")
def test_a_dim_that_an_automatic_axis_shards():
    def body(h, w):
        return scatter(lax.with_sharding_constraint(h, P("data")) @ w)

    (skip,) = beside(body, ((S, F), COLUMNS, COLUMNS), ((F, D), ROWS, ROWS)).skips
    assert skip.reason == "dim a moves, and automatic axis data shards it"


def test_an_explicit_axis_beside():
    mesh = jax.make_mesh((2, N), ("data", "model"), axis_types=(AxisType.Explicit, AxisType.Auto))
    with jax.set_mesh(mesh):
        step = jax.shard_map(
            lambda x, w: gather(x) @ w,
            in_specs=(ROWS, COLUMNS),
            out_specs=COLUMNS,
            axis_names={"model"},
        )
        overlapped = jaxoverlap.overlap(jax.jit(step))
        with pytest.warns(UserWarning, match="rewrites nothing"):
            (skip,) = overlapped.explain(jnp.zeros((S, D)), jnp.zeros((D, F))).skips
    # The type that the gathered value has over data becomes a constraint.
    assert skip.reason == "reads the result of all_gather through sharding_constraint"


# -- numbers and gradients ------------------------------------------------------------------------

B, L = 4, 2


def layer(x: jax.Array, weights: tuple) -> tuple[jax.Array, None]:
    """Apply sequence and tensor parallelism by hand: three projections of one gathered value."""
    whole = gather(x, axis=1)
    q, k, v = (jnp.einsum("bsd,df->bsf", whole, w) for w in weights[:3])
    y = jnp.einsum("bsf,fd->bsd", jnp.tanh(q) * k + v, weights[3])
    return x + scatter(y, scatter_dimension=1), None


def fsdp_layer(x: jax.Array, weights: tuple) -> tuple[jax.Array, None]:
    """Apply `layer` to weights sharded over `data`: gradients are transposed and scattered."""
    dims = (0, 0, 0, 1)
    whole = [
        lax.all_gather(w, "data", axis=d, tiled=True) for w, d in zip(weights, dims, strict=True)
    ]
    return layer(x, tuple(whole))


def reduced_layer(x: jax.Array, weights: tuple) -> tuple[jax.Array, None]:
    """Apply tensor parallelism without a split sequence, and exchange heads for the sequence."""
    h = jnp.einsum("bsd,df->bsf", x, weights[0])
    y = lax.psum(jnp.einsum("bsf,fd->bsd", jnp.tanh(h), weights[3]), "model")
    q, k = (jnp.einsum("bsd,df->bsf", y, w) for w in weights[1:3])
    mine = jnp.tanh(q) * k
    rows = exchange(mine, split_axis=1, concat_axis=2)
    back = jnp.einsum("bsf,fd->bsd", rows, jnp.ones((F, F), x.dtype) / F)
    mine = exchange(back, split_axis=2, concat_axis=1)
    return x + lax.psum(jnp.einsum("bsf,fd->bsd", mine, weights[3]), "model"), None


def grads(
    one: Callable,
    x_spec: P,
    fsdp: str | None = None,
    *,
    check: bool = True,
    manual: frozenset[str] = frozenset(MESH.axis_names),
) -> Callable:
    """Return a step of the loss and gradients of a few layers, in a scan with remat."""
    spec = (P(None, fsdp, "model"),) * 3 + (P(None, "model", fsdp),)

    def only(specs: Any) -> Any:
        keep = lambda s: P(*(a if a in manual else None for a in s))  # noqa: E731
        return jax.tree.map(keep, specs, is_leaf=lambda s: isinstance(s, P))

    specs = only((x_spec, spec))
    fn = jax.shard_map(
        lambda x, weights: lax.scan(jax.checkpoint(one), x, weights)[0],
        mesh=MESH,
        in_specs=specs,
        out_specs=specs[0],
        axis_names=manual,
        check_vma=check,
    )
    mean = lambda x, weights: jnp.mean(jnp.float32(fn(x, weights)) ** 2)  # noqa: E731
    options = {"xla_backend_optimization_level": 0}  # these tests spend their time on compiling
    return jax.jit(jax.value_and_grad(mean, argnums=(0, 1)), compiler_options=options)


def arguments(dtype: Any, x_spec: P, fsdp: str | None = None) -> Any:
    rng = np.random.default_rng(0)

    def array(spec: P, *shape: int) -> jax.Array:
        values = rng.standard_normal(shape) / np.sqrt(shape[-2])
        return jax.device_put(jnp.asarray(values, dtype), NamedSharding(MESH, spec))

    down = P(None, fsdp, "model")
    weights = (*(array(down, L, D, F) for _ in "qkv"), array(P(None, "model", fsdp), L, F, D))
    return array(x_spec, B, S, D), weights


def agrees(step: Callable, *args: Any, exact: Any = None, variant: str | None = None) -> Any:
    """Check the overlapped step's numbers, and return its plan."""
    overlapped = jaxoverlap.overlap(step, granularity=variant)
    plain, mine = step(*args), overlapped(*args)
    exact = plain if exact is None else exact
    for p, m, e in zip(*map(jax.tree.leaves, (plain, mine, exact)), strict=True):
        assert jax.typeof(p) == jax.typeof(m)
        p, m, e = np.float64(p), np.float64(m), np.float64(e)
        error = np.linalg.norm(m - e) / np.linalg.norm(e)
        assert error <= 2 * np.linalg.norm(p - e) / np.linalg.norm(e) + 2e-6
    return overlapped.explain(*args)


@each_check
def test_tensor_and_fully_sharded_parallelism(check: bool):
    step = grads(fsdp_layer, BOTH, "data", check=check)
    plan = agrees(step, *arguments(np.float32, BOTH, "data"))
    assert not plan.skips
    assert Counter(d.axis for d in plan.decisions) == {"model": 12, "data": 3}


@each_check
def test_sums_and_exchanges(check: bool):
    step = grads(reduced_layer, P("data"), check=check)
    plan = agrees(step, *arguments(np.float32, P("data")))
    kinds = Counter(d.kind for d in plan.decisions if d.axis == "model")
    # Unchecked, the gradient of x is summed once, at the end, and not layer by layer.
    assert kinds == {"matmul_all_reduce": 6 if check else 5, "all_to_all_matmul": 4}
    (skip,) = (s for s in plan.skips if not s.idle)
    assert skip.reason == "its result is read by all_to_all through mul"


def test_bfloat16_is_as_exact_as_the_plain_step():
    step = grads(fsdp_layer, BOTH, "data")
    args = arguments(jnp.bfloat16, BOTH, "data")
    exact = step(*jax.tree.map(lambda a: a.astype(np.float32), args))
    plan = agrees(step, *args, exact=exact)
    assert not plan.skips


def test_one_shard_map_in_another():
    def inner(x, w, v):
        return lax.psum(jnp.sin(gather(x) @ lax.all_gather(w, "data", tiled=True)) @ v, "model")

    def outer(x, w, v):
        specs = (ROWS, COLUMNS, ROWS)
        return jax.shard_map(inner, in_specs=specs, out_specs=P(), axis_names={"model"})(x, w, v)

    step = jax.shard_map(
        outer,
        mesh=MESH,
        in_specs=(P(None, "data"), P("data"), P(None, "data")),
        out_specs=P(None, "data"),
        axis_names={"data"},
    )
    rng = np.random.default_rng(0)
    args = [rng.standard_normal(s).astype(np.float32) for s in ((S, 2 * D), (D, F), (F, 2 * D))]
    plan = agrees(jax.jit(step), *args)
    assert [(d.axis, d.kind) for d in plan.decisions] == [
        ("model", "all_gather_matmul"),
        ("model", "matmul_all_reduce"),
    ]
    assert plan.decisions[0].others == ("data all_gather, 512 B",)


def test_a_manual_axis_beside_an_automatic_one():
    step = grads(layer, BOTH, manual=frozenset({"model"}))
    plan = agrees(step, *arguments(np.float32, BOTH))
    # The weights' gradients are summed over `data` by XLA, and left alone.
    assert (len(plan.decisions), len(plan.skips)) == (11, 4)


def test_bfloat16_beside_an_automatic_axis():
    """On CPUs the user has to widen sums in such a body, else XLA aborts; the ring's are as wide."""

    def body(x, w, v):
        h = jnp.sin(gather(x, axis=1) @ w)
        y = lax.psum((h @ v).astype(jnp.float32), "model")
        return y, scatter((h @ v).astype(jnp.float32), scatter_dimension=1)

    across = P(None, "model")
    specs = dict(in_specs=(across, COLUMNS, ROWS), out_specs=(P(), across))
    step = jax.jit(jax.shard_map(body, mesh=MESH, axis_names={"model"}, **specs))
    x, weights = arguments(jnp.bfloat16, BOTH)
    args = x, weights[0][0], weights[3][0]
    exact = step(*(a.astype(np.float32) for a in args))
    plan = agrees(step, *args, exact=exact)
    assert [d.bytes_moved for d in plan.decisions] == [
        (N - 1) * 2 * x.size // N // 2,
        2 * (N - 1) * 4 * x.size // N // 2,
        (N - 1) * 4 * x.size // N // 2,
    ]


@pytest.mark.parametrize("variant", ["two_way", "direct x 2", "sliced x 2"])
def test_variants(variant: str):
    step = grads(layer, BOTH)
    plan = agrees(step, *arguments(np.float32, BOTH), variant=variant)
    assert {str(d.variant) for d in plan.decisions if d.axis == "model"} == {variant}


def test_gradients_of_a_rewritten_step():
    """The step is differentiated after it was rewritten: the rings themselves have gradients."""
    spec = NamedSharding(MESH, ROWS)

    def body(x, w, v):
        return lax.psum(jnp.sin(gather(x) @ w) @ v, "model")

    mapped = jax.shard_map(
        body, mesh=MESH, in_specs=(ROWS, COLUMNS, ROWS), out_specs=P(), axis_names={"model"}
    )
    rng = np.random.default_rng(0)
    args = [rng.standard_normal(s).astype(np.float32) / 4 for s in ((S, D), (D, F), (F, D))]
    step = jax.jit(mapped, in_shardings=(spec, NamedSharding(MESH, COLUMNS), spec))

    def loss(step: Callable) -> Callable:
        return jax.jit(jax.grad(lambda *a: jnp.sum(step(*a) ** 2), argnums=(0, 1, 2)))

    for mine, plain in zip(loss(jaxoverlap.overlap(step))(*args), loss(step)(*args), strict=True):
        np.testing.assert_allclose(mine, plain, rtol=1e-4, atol=1e-5)
