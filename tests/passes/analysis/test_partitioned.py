"""The shardings that are read for each matmul are XLA's own, and never a guess."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoverlap
from jaxoverlap import RewriteError
from jaxoverlap._jax import partitioner
from jaxoverlap.passes.analysis.partitioned import partitioned
from jaxoverlap.passes.analysis.partitioner_collectives import partitioner_collectives
from jaxoverlap.simulation import hlo
from tests.support.pods import needs_plugin

MESH = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
MODEL, DATA, BOTH = ("model",), ("data",), ("data", "model")


def at(*spec) -> NamedSharding:
    return NamedSharding(MESH, P(*spec))


def pin(x, *spec):
    return lax.with_sharding_constraint(x, at(*spec))


def struct(shape, *spec, dtype="float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=at(*spec))


X = struct((16, 32), "model")  # sequence parallel
W = struct((32, 64), None, "model")  # column parallel
V = struct((64, 32), "model")  # row parallel
ROWS, COLUMNS, WHOLE = (MODEL, ()), ((), MODEL), ((), ())


def read_all(step, *args, **options) -> list:
    """Return all that is read of each matmul, in order; None for one that was not found."""
    traced = jax.jit(step, **options).trace(*args)
    shardings = partitioned(traced, traced.jaxpr, MESH).shardings
    return [shardings.get(i) for i in range(max(shardings, default=-1) + 1)]


def read(step, *args, **options) -> list:
    """Return (lhs, rhs, result) of each matmul, in order; None for one that was not found."""
    return [matmul and matmul[:3] for matmul in read_all(step, *args, **options)]


# -- what a step pins, and what follows from it ---------------------------------------------------


def mlp(x, w, v):
    return pin(jnp.tanh(x @ w) @ v, "model")


def test_two_matmuls():
    assert read(mlp, X, W, V) == [(ROWS, COLUMNS, COLUMNS), (COLUMNS, ROWS, ROWS)]


def test_in_and_out_shardings_of_the_jit():
    x, w = (jax.ShapeDtypeStruct(s.shape, s.dtype) for s in (X, W))
    options = dict(in_shardings=(at("model"), at(None, "model")), out_shardings=at(None, "model"))
    assert read(lambda x, w: x @ w, x, w, **options) == [(ROWS, COLUMNS, COLUMNS)]


def test_several_axes_on_a_dim_keep_their_order():
    x = struct((16, 32), ("model", "data"))
    w = struct((32, 64), "data", "model")
    shardings = read(lambda x, w: pin(x @ w, ("data", "model")), x, w)
    assert shardings == [(((("model", "data")), ()), (DATA, MODEL), (BOTH, ()))]


def test_batch_dims():
    x, y = struct((4, 16, 32), "data", "model"), struct((4, 32, 64), "data", None, "model")
    shardings = read(lambda x, y: pin(x @ y, "data", None, "model"), x, y)
    assert shardings == [((DATA, MODEL, ()), (DATA, (), MODEL), (DATA, (), MODEL))]


def test_a_backward_pass():
    def step(x, w, v):
        return jax.grad(lambda w, v: jnp.sum(jnp.sin(mlp(x, w, v))), (0, 1))(w, v)

    options = dict(out_shardings=(at(None, "model"), at("model")))
    forward, second, to_v, to_inner, to_w = read(step, X, W, V, **options)
    assert forward == (ROWS, COLUMNS, COLUMNS)
    assert second == (COLUMNS, ROWS, ROWS)
    assert to_v is not None and to_v[2] in (ROWS, COLUMNS)
    assert to_inner[0] == ROWS  # the cotangent of the pinned result lies as it does
    assert set(to_w[:2]) >= {COLUMNS}


# -- what the values around a matmul are before and after resharding ------------------------------


def test_resharding_around_a_matmul_is_looked_through():
    """Constraints in a row are looked through; an operation that computes something ends them."""

    def step(x, w):
        return pin(pin(pin(pin(x, "data"), None, None) @ jnp.tanh(w), None, "model"), "model")

    (matmul,) = read_all(step, X, W)
    assert matmul[:3] == (WHOLE, COLUMNS, COLUMNS)
    assert matmul.lhs_sources == ((("data",), ()), ROWS)
    assert matmul.rhs_sources == ()
    assert matmul.out_sinks == (COLUMNS, ROWS)


def test_a_slice_of_a_scan_is_sharded_as_it_is_cut():
    """Shardy gives a constraint's sharding to the slice itself, which is gathered all the same."""

    def layer(x, w):
        return pin(x @ pin(w, None, None), "model"), None

    (matmul,) = read_all(
        lambda x, w: lax.scan(layer, x, w)[0], X, struct((3, 32, 32), None, "data")
    )
    assert matmul[:2] == (ROWS, WHOLE)
    assert matmul.rhs_sources == ((DATA, ()),)


def test_without_resharding_there_is_nothing_beyond():
    (matmul,) = read_all(lambda x, w: jnp.tanh(x) @ w, X, W, out_shardings=at(None, "model"))
    assert matmul[:3] == (ROWS, COLUMNS, COLUMNS)
    assert matmul[3:6] == ((), (), ())


def test_a_result_that_somebody_else_reads_is_not_followed():
    """A result may be given as it is wanted in the end only if nobody else needs it as it is."""

    def step(x, w):
        y = pin(x @ w, None, "model")
        return pin(y, "model"), jnp.sum(y, axis=1)

    (matmul,) = read_all(step, X, W)
    assert matmul.out_sinks == (COLUMNS,)


# -- bodies ---------------------------------------------------------------------------------------


def in_scan(f):
    return lambda x, *rest: lax.scan(lambda c, _: (f(c, *rest), None), x, None, length=3)[0]


def in_while(f):
    return lambda x, *rest: lax.while_loop(
        lambda c: jnp.sum(c[1]) > c[0], lambda c: (c[0] + 1, f(c[1], *rest)), (0.0, x)
    )[1]


def in_cond(f):
    return lambda x, *rest: lax.cond(jnp.sum(x) > 0, f, lambda x, *_: x, x, *rest)


def in_custom_vjp(f):
    g = jax.custom_vjp(f)
    g.defvjp(lambda *a: (f(*a), a), lambda a, _: a)
    return lambda *args: g(*args)


WRAPS = {
    "jit": lambda f: jax.jit(f),
    "jit in jit": lambda f: lambda *a: jax.jit(jax.jit(f))(*a),
    "remat": lambda f: jax.checkpoint(f),
    "scan": in_scan,
    "while": in_while,
    "cond": in_cond,
    "custom_vjp": in_custom_vjp,
    "remat in scan": lambda f: in_scan(jax.checkpoint(f)),
    "cond in while": lambda f: in_while(in_cond(f)),
}


@pytest.mark.parametrize("name", WRAPS)
def test_bodies_are_read_like_the_step_itself(name: str):
    shardings = read(WRAPS[name](mlp), X, W, V)
    assert shardings == [(ROWS, COLUMNS, COLUMNS), (COLUMNS, ROWS, ROWS)]


@pytest.mark.parametrize("name", ["scan", "while", "cond"])
def test_what_a_body_gives_out_is_known_outside(name: str):
    def step(x, w):
        y = WRAPS[name](lambda x: jnp.tanh(x))(x)
        return pin(y @ w, None, "model")

    assert read(step, X, W) == [(ROWS, COLUMNS, COLUMNS)]


def test_each_branch_has_shardings_of_its_own():
    def step(x, w, which):
        branches = [
            lambda x, w: pin(x @ w, None, "model"),
            lambda x, w: pin(pin(x) @ w, None, "model"),
        ]
        return lax.switch(which, branches, x, w)

    shardings = read(step, X, W, 0)
    assert shardings == [(ROWS, COLUMNS, COLUMNS), (WHOLE, COLUMNS, COLUMNS)]


def test_one_function_called_twice_is_read_twice():
    product = jax.jit(lambda x, w: x @ w)

    def step(x, w):
        return pin(product(x, w), None, "model"), pin(product(pin(x), w), None, "model")

    assert read(step, X, W) == [(ROWS, COLUMNS, COLUMNS), (WHOLE, COLUMNS, COLUMNS)]


def test_the_body_of_a_shard_map_is_not_read():
    def step(x, w):
        specs = dict(in_specs=(P("model"), P(None, None)), out_specs=P("model"))
        y = jax.shard_map(lambda x, w: x @ w, mesh=MESH, **specs)(x, w)
        return pin(y.T @ w[:16], None, "model")

    inside, after = read(step, X, W)
    assert inside is None
    assert after[1:] == (COLUMNS, COLUMNS)


@pytest.mark.parametrize("manual", [MODEL, BOTH], ids=str)
def test_the_result_of_a_shard_map_lies_where_it_says(manual: tuple[str, ...]):
    def step(x, w):
        specs = dict(in_specs=P("model"), out_specs=P("model"), axis_names={*manual})
        return pin(jax.shard_map(lambda x: 2 * x, mesh=MESH, **specs)(x) @ w, None, "model")

    assert read(step, X, W) == [(ROWS, COLUMNS, COLUMNS)]


# -- operations on the way ------------------------------------------------------------------------

OPERATIONS = {
    "gelu": jax.nn.gelu,
    "exact gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "softmax": jax.nn.softmax,
    "sort": lambda x: jnp.sort(x, axis=-1),
    "cumulative sum": lambda x: jnp.cumsum(x, axis=-1),
    "dropout": lambda x: x * jax.random.bernoulli(jax.random.key(0), 0.5, x.shape),
    "optimization barrier": lax.optimization_barrier,
    "concatenate": lambda x: jnp.concatenate([x[:, 16:], x[:, :16]], axis=1),
    "reshape": lambda x: x.reshape(16, 4, 8).reshape(16, 32),
    "transpose": lambda x: x.T.copy().T,
    "convert": lambda x: x.astype(jnp.bfloat16).astype(x.dtype),
}
# These are lowered to CHLO, whose operations XLA turns into others before it partitions.
CHLO = {
    "square": jnp.square,
    "erf": jax.scipy.special.erf,
    "sinh": jnp.sinh,
    "digamma": jax.scipy.special.digamma,
}


def through(operation):
    return read(lambda x, w: pin(operation(x) @ w, None, "model"), X, W)


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_sharding_passes_through(name: str):
    assert through(OPERATIONS[name]) == [(ROWS, COLUMNS, COLUMNS)]


@pytest.mark.parametrize("name", CHLO)
def test_a_sharding_passes_through_chlo(name: str):
    assert through(CHLO[name]) == [(ROWS, COLUMNS, COLUMNS)]


def test_a_sharding_passes_through_top_k():
    """A sharding also passes through what is computed from it, as in a mixture of experts."""
    routed = through(lambda x: jax.nn.softmax(lax.top_k(x, 32)[0]))
    assert routed == [(ROWS, COLUMNS, COLUMNS)]


def test_what_xla_makes_whole_is_read_as_whole():
    assert through(lambda x: x[jnp.arange(16)[::-1]])[0][0] == WHOLE


# -- what cannot be said, and what is not there ---------------------------------------------------


def test_shardings_that_contradict_are_each_read_where_they_hold():
    """x is wanted at two places: the matmul gets it where it was pinned last."""

    def step(x, w):
        return pin(pin(pin(x, None, "model"), "data") @ w, "model")

    x, w = struct((16, 32), "model"), struct((32, 64), "model")
    assert read(step, x, w) == [((DATA, ()), ROWS, ROWS)]


def test_a_part_of_an_axis_is_none():
    """Eight devices shard a dim that is reshaped to 2 x 16: a part of the axis ends on each."""
    mesh = jax.make_mesh((8,), ("model",), axis_types=(AxisType.Auto,))
    x = jax.ShapeDtypeStruct((32, 16), "float32", sharding=NamedSharding(mesh, P("model")))
    w = jax.ShapeDtypeStruct((16, 8), "float32", sharding=NamedSharding(mesh, P()))
    traced = jax.jit(lambda x, w: x.reshape(2, 16, 16) @ w).trace(x, w)
    (lhs, rhs, out, *_) = partitioned(traced, traced.jaxpr, mesh).shardings[0]
    assert lhs is None and out is None
    assert rhs == WHOLE


def test_a_matmul_that_nobody_needs_is_missing():
    def step(x, w):
        _ = x @ w
        return pin((2 * x) @ w, None, "model")

    assert read(step, X, W) == [None, (ROWS, COLUMNS, COLUMNS)]


def test_a_step_without_matmuls():
    traced = jax.jit(jnp.sin).trace(X)
    assert partitioned(traced, traced.jaxpr, MESH).shardings == {}


def test_tags_leave_the_step_as_it_was():
    jitted = jax.jit(mlp)
    traced = jitted.trace(X, W, V)
    before = str(traced.jaxpr)
    partitioned(traced, traced.jaxpr, MESH)
    assert str(traced.jaxpr) == before
    assert "jaxoverlap_site" not in jitted.lower(X, W, V).as_text()


def test_a_failure_of_the_partitioner_is_named(monkeypatch):
    def ask(*_):
        raise partitioner.NoAnswerError("INTERNAL: no such pass")

    monkeypatch.setattr(partitioner, "ask", ask)
    with pytest.raises(RewriteError, match=r"no answer about mlp: INTERNAL: no such pass"):
        read(mlp, X, W, V)


# -- results, and what moves ----------------------------------------------------------------------


def spmd(step, *args, **options):
    traced = jax.jit(step, **options).trace(*args)
    return partitioned(traced, traced.jaxpr, MESH)


def test_results_lie_as_the_compiled_step_gives_them():
    def step(x, w):
        y = x @ w
        return y, y.sum(), jnp.sum(y, axis=1), {"x": x + 1}

    args = (jax.device_put(np.ones(s.shape, np.float32), s.sharding) for s in (X, W))
    given = jax.tree.leaves(jax.jit(step)(*args))
    specs = spmd(step, X, W).results
    assert len(specs) == len(given)
    for spec, array in zip(specs, given, strict=True):
        assert spec is not None
        assert array.sharding.is_equivalent_to(at(*spec), array.ndim)


REDUCED = """HloModule jit_step

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}

ENTRY %main (x: f32[16,32]) -> f32[SIZE,32] {
  %x = f32[16,32]{1,0} parameter(0)
  %i = s32[] constant(0)
  %r = f32[16,32]{1,0} all-reduce(%x), replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%sum, frontend_attributes={is_spmd_generated="true"}
  ROOT %s = f32[SIZE,32]{1,0} OPCODE
}
"""


@pytest.mark.parametrize(
    ("opcode", "size", "kind", "sent"),
    [
        ("dynamic-slice(%r, %i, %i), dynamic_slice_sizes={4,32}", 4, "reduce_scatter", 1536),
        ("negate(%r)", 16, "all_reduce", 3072),
    ],
)
def test_an_all_reduce_that_is_only_sliced_is_a_scatter(opcode, size, kind, sent):
    text = REDUCED.replace("OPCODE", opcode).replace("SIZE", str(size))
    (collective,) = partitioner_collectives(hlo.parse_partitioned(text, 8), dict(MESH.shape))
    assert (collective.kind, collective.axes, collective.bytes_moved) == (kind, MODEL, sent)


def test_a_loop_counts_by_its_trips():
    def step(x, w, v):
        return lax.scan(lambda c, _: (mlp(c, w, v), None), x, None, length=5)[0]

    moved = partitioner_collectives(spmd(step, X, W, V).module, dict(MESH.shape))
    assert {(r.kind, r.runs) for r in moved} == {("all_gather", 5), ("all_reduce", 5)}


# -- what XLA:GPU has made of a matmul before its partitioner -------------------------------------


def square(mesh) -> dict:
    """Return what is read of a layer and its gradients, all of whose dims are of one size or 1."""

    def layer(x, ws):
        wq, wk, w = ws
        q, k = jnp.einsum("bsd,dgh->bgsh", x, wq), jnp.einsum("bsd,dgh->bgsh", x, wk)
        scores = jax.nn.softmax(jnp.einsum("bgsh,bgth->bgst", q, k))
        out = jnp.einsum("bgst,bgth->bsh", scores, k)
        return jnp.tanh(jnp.einsum("bsh,hd->bsd", out, w.T)), None

    def loss(ws, x):
        return jnp.sum(lax.scan(jax.checkpoint(layer), x, ws)[0] ** 2)

    def struct(shape, *spec):
        sharding = NamedSharding(mesh, P(*spec))
        return jax.ShapeDtypeStruct(shape, "float32", sharding=sharding)

    heads = struct((2, 64, 1, 64), None, "data", None, "model")
    ws = (heads, heads, struct((2, 64, 64), None, "model", "data"))
    traced = jax.jit(jax.grad(loss)).trace(ws, struct((64, 64, 64), "data"))
    return dict(partitioned(traced, traced.jaxpr, mesh).shardings)


@needs_plugin
@pytest.mark.pods
def test_a_matmul_is_read_as_it_was_written():
    """XLA:GPU folds transposes, turns matmuls around and drops dims of size 1; XLA:CPU does not."""
    gpus = square(jaxoverlap.pod_mesh("h100-sxm:1x8", {"data": 2, "model": 4}))
    cpus = square(MESH)
    assert len(gpus) >= 12
    assert gpus == cpus
