"""Operations with rules of their own: what they are in all the places that JAX has."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax import export, lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoverlap
from jaxoverlap import Decision, Skip
from jaxoverlap.ops.local import local_group
from jaxoverlap.passes.analysis.jaxprs import bodies
from jaxoverlap.passes.analysis.matmul_group import MatmulGroup, Product
from jaxoverlap.passes.analysis.partitioned import Shardings
from jaxoverlap.passes.planning.decide import decide
from jaxoverlap.passes.planning.terms import Terms


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def array(mesh: Mesh | None, spec: P, *shape: int, dtype: Any = np.float32) -> Any:
    values = np.random.default_rng(len(shape)).standard_normal(shape)
    values = np.asarray(jnp.asarray(values, dtype))
    return values if mesh is None else jax.device_put(values, NamedSharding(mesh, spec))


def operands(mesh: Mesh | None) -> tuple[Any, Any]:
    """A sequence to gather, and a column-parallel weight."""
    x = array(mesh, P("data", "model", None), 4, 64, 64)
    return x, array(mesh, P(None, "model"), 64, 256)


def up(x: Any, w: Any) -> jax.Array:
    return jaxoverlap.einsum("bsd,df->bsf", x, w)


def usual(x: Any, w: Any) -> jax.Array:
    return jnp.einsum("bsd,df->bsf", x, w)


def pinned(mesh: Mesh, fn: Any) -> Any:
    at = NamedSharding(mesh, P("data", None, "model"))
    return lambda *args: lax.with_sharding_constraint(fn(*args), at)


def close(a: Any, b: Any, tolerance: float = 2e-5) -> None:
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        x, y = (
            np.asarray(v, np.result_type(v.dtype if v.dtype.kind == "c" else np.float64))
            for v in (x, y)
        )
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance * max(np.abs(y).max(), 1.0))


# -- what is decided ------------------------------------------------------------------------------


def test_says_what_was_decided(mesh: Mesh):
    compiled = jax.jit(pinned(mesh, up)).lower(*operands(mesh)).compile()
    (entry,) = jaxoverlap.decisions(compiled)
    assert isinstance(entry, Decision)
    assert (entry.kind, entry.axis, entry.einsum) == ("all_gather_matmul", "model", "abc,cd->abd")
    assert entry.source.startswith("ops/test_operations.py:")
    assert entry.bytes_moved == 3 * 4 * 64 * 64 * 4 // 2 // 4
    assert jaxoverlap.decisions(compiled.as_text()) == (entry,)
    report = jaxoverlap.audit(compiled)
    (ring,) = {hop.ring for hop in report.collectives if hop.ring}
    assert dict(report.operations)[ring].startswith("all_gather_matmul of abc,cd->abd over model")
    assert sum(hop.bytes_moved for hop in report.collectives if hop.ring) == entry.bytes_moved
    assert f"{ring}: all_gather_matmul of" in str(report)


def test_says_why_a_matmul_has_no_ring(mesh: Mesh):
    x, w = array(mesh, P("data", None, None), 4, 64, 64), array(mesh, P(None, "model"), 64, 256)
    compiled = jax.jit(pinned(mesh, up)).lower(x, w).compile()
    (entry,) = jaxoverlap.decisions(compiled)
    assert isinstance(entry, Skip)
    assert entry.reason == "no collective"


# -- one gather for several readers ---------------------------------------------------------------


def hops(compiled: Any) -> int:
    return sum(c.bytes_moved for c in jaxoverlap.audit(compiled).collectives if c.ring)


@pytest.mark.parametrize("together", [True, False], ids=["right sides", "operations"])
def test_what_several_read_moves_once(mesh: Mesh, together: bool):
    x, w = operands(mesh)
    ws = [w, w + 1, array(mesh, P(None, "model"), 64, 32)]

    def three(x: Any, ws: Any) -> Any:
        ys = jaxoverlap.einsum("bsd,df->bsf", x, ws) if together else [up(x, w) for w in ws]
        return [pinned(mesh, lambda y: y)(y) for y in ys]

    one = jax.jit(pinned(mesh, up)).lower(x, w).compile()
    compiled = jax.jit(three).lower(x, ws).compile()
    assert hops(compiled) == hops(one)
    close(compiled(x, ws), [usual(x, w) for w in ws])


def test_gradients_gather_and_scatter_once(mesh: Mesh):
    x, w = operands(mesh)
    ws = [w, w + 1]

    def loss(x: Any, ws: Any, einsum: Any) -> Any:
        return sum(jnp.mean(pinned(mesh, lambda y: y)(y) ** 2) for y in einsum(x, ws))

    gradient = jax.jit(jax.grad(jax.checkpoint(
        lambda x, ws: loss(x, ws, lambda x, ws: jaxoverlap.einsum("bsd,df->bsf", x, ws))
    ), argnums=(0, 1)), out_shardings=(x.sharding, [w.sharding, w.sharding]))  # fmt: skip
    compiled = gradient.lower(x, ws).compile()
    made = [d for d in jaxoverlap.decisions(compiled) if isinstance(d, Decision) and d.bytes_moved]
    # x is gathered for the results, and kept for the weights' gradients; x's own is scattered.
    kinds = sorted(d.kind for d in made if d.axis == "model")
    assert kinds == ["all_gather_matmul", "matmul_reduce_scatter"]
    wanted = jax.grad(lambda x, ws: loss(x, ws, lambda x, ws: [usual(x, w) for w in ws]), (0, 1))
    close(compiled(x, ws), jax.jit(wanted)(x, ws))


def test_sums_of_matmuls_that_contract_nothing(mesh: Mesh):
    """The gradients of x send one sum of outer products back, which no dim can join."""
    both = P(("data", "model"))
    x, ws = array(mesh, both, 8, 8), [array(mesh, both, 8, 8), array(mesh, both, 8, 8) + 1]

    def of(einsum: Any) -> Any:
        def loss(x: Any, ws: Any) -> Any:
            return sum(jnp.mean(y**2) for y in einsum(x, ws))

        return jax.jit(jax.grad(loss, (0, 1)))

    ours = of(lambda x, ws: jaxoverlap.einsum("ab,ba->a", x, ws))
    theirs = of(lambda x, ws: [jnp.einsum("ab,ba->a", x, w) for w in ws])
    close(ours(x, ws), theirs(x, ws))


# -- derivatives and transformations --------------------------------------------------------------


def test_a_sum_of_terms_that_are_sharded_apart(mesh: Mesh):
    """The group is written without rings then, and in an order without rings."""
    numbers = (((1,), (0,)), ((), ()))
    pairs = (0, 1), (0, 2), (3, 4), (5, 6)
    one, two, *terms = (Product(lhs, rhs, numbers, None, jnp.float32) for lhs, rhs in pairs)
    group = MatmulGroup(((one,), (two,), tuple(terms)))
    (body,) = bodies(group.jaxpr([jax.ShapeDtypeStruct((16, 16), "float32")] * 7))
    full, rows, columns = ((), ()), (("model",), ()), ((), ("model",))
    read = Shardings(rows, columns, columns)  # both gather operand 0 in one ring
    told = {0: read, 1: read, 2: Shardings(full, full, full), 3: Shardings(rows, full, full)}
    _, rings_by_body = decide([body], told, Terms(axis_sizes=dict(mesh.shape)))
    assert [len(ring.members) for ring in rings_by_body[body.index].rings] == [2]
    made = local_group(body, told, rings_by_body[body.index], (), mesh)
    assert made.results == (columns, columns, full)


def test_gradients_of_gradients(mesh: Mesh):
    def of(fn: Any) -> Any:
        def loss(x: Any, w: Any) -> Any:
            return jnp.mean(jnp.tanh(fn(x, w) / 8) ** 2)

        def norm(x: Any, w: Any) -> Any:
            return sum(jnp.sum(g**2) for g in jax.grad(loss, (0, 1))(x, w))

        return jax.jit(jax.grad(norm, (0, 1)))

    args = operands(mesh)
    close(of(up)(*args), of(usual)(*args), 1e-4)


def test_forward_mode_and_hessians(mesh: Mesh):
    def of(fn: Any) -> Any:
        def hvp(x: Any, w: Any) -> Any:
            gradient = jax.grad(lambda w: jnp.mean(jnp.tanh(fn(x, w)) ** 2))
            return jax.jvp(gradient, (w,), (jnp.ones_like(w),))

        return jax.jit(hvp)

    args = operands(mesh)
    close(of(up)(*args), of(usual)(*args), 1e-4)
    x, w = (a[:2, :2, :2] if a.ndim == 3 else a[:2, :2] for a in operands(None))
    close(
        jax.hessian(lambda w: jnp.sum(up(x, w) ** 2))(w),
        jax.hessian(lambda w: jnp.sum(usual(x, w) ** 2))(w),
    )


def test_linear_transpose_and_eval_shape():
    x, w = operands(None)
    (ours,) = jax.linear_transpose(lambda w: up(x, w), w)(up(x, w))
    (theirs,) = jax.linear_transpose(lambda w: usual(x, w), w)(usual(x, w))
    close(ours, theirs)
    assert jax.eval_shape(up, x, w) == jax.eval_shape(usual, x, w)


def test_disable_jit_and_eager_calls(mesh: Mesh):
    args = operands(mesh)
    close(up(*args), usual(*args))
    with jax.disable_jit():
        close(
            jax.grad(lambda w: up(args[0], w).sum())(args[1]),
            jax.grad(lambda w: usual(args[0], w).sum())(args[1]),
        )


def test_exports_as_plain(mesh: Mesh):
    args = operands(mesh)
    exported = export.export(jax.jit(pinned(mesh, up)))(*args)
    assert "CustomSPMDPartitioning" not in exported.mlir_module()
    close(jax.jit(exported.call)(*args), usual(*args))


def test_plain_on_one_device_and_without_a_mesh():
    args = operands(None)
    text = jax.jit(up).lower(*args).as_text()
    assert "CustomSPMDPartitioning" not in text
    one = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
    close(jax.jit(up)(*(jax.device_put(a, NamedSharding(one, P())) for a in args)), usual(*args))


def test_plain_in_manual_code_and_on_explicit_meshes(mesh: Mesh):
    args = operands(mesh)
    body = jax.shard_map(
        up, mesh=mesh, in_specs=(P("data", "model"), P()), out_specs=P("data", "model")
    )
    jaxpr = str(jax.make_jaxpr(body)(*args))
    assert "dot_general" in jaxpr and "matmul_group" not in jaxpr
    explicit = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    x, w = (
        array(explicit, P("data", None, None), 4, 64, 64),
        array(explicit, P(None, "model"), 64, 256),
    )
    ours, theirs = jax.jit(up)(x, w), jax.jit(usual)(x, w)
    assert ours.sharding == theirs.sharding
    close(ours, theirs)


@pytest.mark.parametrize("summed", [False, True])
@pytest.mark.parametrize("dtype", ["int32", "bool", "complex64", "int8", "float8_e4m3fn"])
def test_other_dtypes(mesh: Mesh, dtype: str, summed: bool):
    x = array(mesh, P("data", *(None, "model")[:: 1 if summed else -1]), 4, 8, 16).astype(dtype)
    w = array(mesh, P("model", None) if summed else P(None, "model"), 16, 32).astype(dtype)
    rounded = 0.125 if dtype.startswith("float8") else 1e-5  # of chunks, and not of the whole
    close(jax.jit(up)(x, w), jax.jit(usual)(x, w), rounded)


@pytest.mark.parametrize(
    "dtypes, wanted",
    [(("bfloat16", "float32"), None), (("float16", "bfloat16"), None), (("int8", "bfloat16"), None),
     (("float8_e4m3fn", "float8_e5m2"), "float32")],
)  # fmt: skip
def test_operands_of_two_dtypes(mesh: Mesh, dtypes: tuple[str, str], wanted: str | None):
    x = array(mesh, P("data", "model", None), 4, 8, 16).astype(dtypes[0])
    w = array(mesh, P(None, "model"), 16, 32).astype(dtypes[1])
    numbers = ((2,), (0,)), ((), ())
    for ours, theirs, given in (
        (jaxoverlap.matmul, jnp.matmul, ()),
        (jaxoverlap.dot_general, lax.dot_general, (numbers,)),
    ):
        of = [
            jax.jit(
                lambda x, w, fn=fn, given=given: fn(x, w, *given, preferred_element_type=wanted)
            )
            for fn in (ours, theirs)
        ]
        a, b = (fn(x, w) for fn in of)
        assert a.dtype == b.dtype
        close(a.astype("float32"), b.astype("float32"), 3e-2)


def test_each_right_side_has_its_own_dtype(mesh: Mesh):
    x, w = (a.astype(jnp.bfloat16) for a in operands(mesh))
    several = (w, w.astype(jnp.float32))

    def of(einsum: Any) -> Any:
        def loss(x: Any, ws: Any) -> Any:
            ys = einsum(x, ws)
            return sum(jnp.mean(y.astype(jnp.float32) ** 2) for y in ys), [y.dtype for y in ys]

        return loss

    ours = of(lambda x, ws: jaxoverlap.einsum("bsd,df->bsf", x, ws))
    theirs = of(lambda x, ws: [jnp.einsum("bsd,df->bsf", x, w) for w in ws])
    assert ours(x, several)[1] == theirs(x, several)[1]
    a, b = (jax.jit(jax.grad(lambda *a, f=f: f(*a)[0], (0, 1)))(x, several) for f in (ours, theirs))
    close(a, b, 3e-2)


def test_uneven_dims(mesh: Mesh):
    x, w = array(mesh, P("data", None, None), 4, 7, 10), array(mesh, P(), 10, 9)

    def both(fn: Any) -> Any:
        def run(x: Any, w: Any) -> Any:
            y = fn(x, jnp.concatenate([w, w[:, :5]], 1))
            return jnp.sum(y * y), y[:, :, :13]

        return jax.jit(jax.value_and_grad(lambda *a: run(*a)[0], (0, 1)))

    close(both(up)(x, w), both(usual)(x, w))


def test_precision_and_preferred_element_type(mesh: Mesh):
    x, w = (a.astype(jnp.bfloat16) for a in operands(mesh))
    wide = jax.jit(lambda x, w: jaxoverlap.matmul(x, w, preferred_element_type=jnp.float32))(x, w)
    assert wide.dtype == jnp.float32
    with jax.default_matmul_precision("highest"):
        jaxpr = jax.make_jaxpr(up)(x, w)
    (eqn,) = [e for e in jaxpr.eqns if e.primitive.name == "matmul_group"]
    (product,) = eqn.params["group"].products
    assert product.precision == (lax.Precision.HIGHEST, lax.Precision.HIGHEST)


# -- layers of other libraries --------------------------------------------------------------------


def test_unmodified_nnx_linear(mesh: Mesh):
    layer = nnx.Linear(64, 256, dot_general=jaxoverlap.dot_general, rngs=nnx.Rngs(0))
    plain = nnx.Linear(64, 256, rngs=nnx.Rngs(0))
    x, _ = operands(mesh)
    check_layer(
        mesh, layer, plain, x, lambda shape: P(None, "model") if len(shape) == 2 else P("model")
    )


def test_unmodified_nnx_attention(mesh: Mesh):
    def make(**own: Any) -> Any:
        return nnx.MultiHeadAttention(
            8, 64, deterministic=True, decode=False, rngs=nnx.Rngs(0), **own
        )

    own = dict.fromkeys(("qkv_dot_general", "out_dot_general"), jaxoverlap.dot_general)
    x, _ = operands(mesh)
    heads = {(64, 8, 8): P(None, "model"), (8, 8): P("model"), (8, 8, 64): P("model")}
    check_layer(mesh, make(**own), make(), x, lambda shape: heads.get(shape, P()))


def check_layer(mesh: Mesh, layer: Any, plain: Any, x: Any, position: Any) -> None:
    """Compare a layer's loss and gradients with its plain twin's, and ask for a ring."""

    def step(model: Any) -> Any:
        definition, state = nnx.split(model)
        state = jax.tree.map(
            lambda v: jax.device_put(v, NamedSharding(mesh, position(v.shape))), state
        )

        def loss(state: Any, x: Any) -> Any:
            y = nnx.merge(definition, state)(x)
            out = P("data", "model", None) if y.shape == x.shape else P("data", None, "model")
            return jnp.mean(lax.with_sharding_constraint(y, NamedSharding(mesh, out)) ** 2)

        return jax.jit(jax.value_and_grad(loss)).lower(state, x).compile(), state

    (ours, state), (theirs, same) = step(layer), step(plain)
    assert [d for d in jaxoverlap.decisions(ours) if isinstance(d, Decision)]
    assert hops(ours)
    close(ours(state, x), theirs(same, x), 1e-4)


def test_unmodified_linen_dense(mesh: Mesh):
    x, w = operands(mesh)
    layer, plain = linen.Dense(256, dot_general=jaxoverlap.dot_general), linen.Dense(256)
    variables = {"params": {"kernel": w, "bias": jax.device_put(np.zeros(256, np.float32))}}
    run = jax.jit(pinned(mesh, lambda v, x: layer.apply(v, x)))
    compiled = run.lower(variables, x).compile()
    assert hops(compiled)
    close(compiled(variables, x), plain.apply(variables, x))


# -- matmul and einsum as such --------------------------------------------------------------------


@pytest.mark.parametrize(
    "shapes",
    [((3,), (3,)), ((2, 3), (3,)), ((3,), (3, 4)), ((5, 2, 3), (3, 4)), ((5, 2, 3), (5, 3, 4)),
     ((1, 2, 3), (5, 3, 4)), ((6, 1, 2, 3), (5, 3, 4)), ((5, 2, 3), (1, 1, 3, 4)),
     ((1, 2, 3), (1, 3, 4)), ((2, 3), (5, 3, 4)), ((5, 2, 3), (3,)), ((3,), (5, 3, 4))],
)  # fmt: skip
def test_matmul_is_numpys(shapes: Any):
    x, w = (
        np.random.default_rng(i).standard_normal(s).astype(np.float32) for i, s in enumerate(shapes)
    )
    close(jax.jit(jaxoverlap.matmul)(x, w), jnp.matmul(x, w))
    with pytest.raises(TypeError) as ours:
        jaxoverlap.matmul(x, np.ones((7, 7), np.float32))
    with pytest.raises(TypeError) as theirs:
        jnp.matmul(x, np.ones((7, 7), np.float32))
    assert str(ours.value) == str(theirs.value)


@pytest.mark.parametrize(
    "spec, shapes",
    [("...d,df->...f", ((2, 3, 4), (4, 5))), ("ab,bc", ((2, 3), (3, 4))), ("ii->i", ((3, 3),)),
     ("ab,bc,cd->ad", ((2, 3), (3, 4), (4, 5))), ("ab,cb->", ((2, 3), (4, 3))), ("ab,ab->ab", ((2, 3), (2, 3))),
     ("...ab,...bc->...ac", ((5, 2, 3), (5, 3, 4))), ("bd,fd->fb", ((2, 3), (4, 3))),
     ("ab,bc->ac", ((2, 1), (3, 4))), ("ab,bc->ac", ((2, 3), (1, 4)))],
)  # fmt: skip
def test_einsum_is_numpys(spec: str, shapes: Any):
    xs = [
        np.random.default_rng(i).standard_normal(s).astype(np.float32) for i, s in enumerate(shapes)
    ]
    close(jax.jit(lambda *xs: jaxoverlap.einsum(spec, *xs))(*xs), jnp.einsum(spec, *xs))


@pytest.mark.parametrize("optimize", [True, False, "greedy", "optimal", [(0, 1)]], ids=str)
def test_einsum_takes_an_order_of_contractions(mesh: Mesh, optimize: Any):
    x, w = operands(mesh)
    v = array(mesh, P("model", None), 256, 8)
    if isinstance(optimize, str | bool):
        fns = [
            jax.jit(lambda *a, f=f: f("bsd,df,fe->bse", *a, optimize=optimize))
            for f in (jaxoverlap.einsum, jnp.einsum)
        ]
        close(fns[0](x, w, v), fns[1](x, w, v))
    compiled = jax.jit(
        pinned(mesh, lambda *a: jaxoverlap.einsum("bsd,df->bsf", *a, optimize=optimize))
    )
    assert hops(compiled.lower(x, w).compile())
    close(compiled(x, w), usual(x, w))


@pytest.mark.parametrize("optimize", [["einsum_path", (0, 1)], [(0, 3)]], ids=str)
def test_einsum_refuses_an_order_as_numpys_does(optimize: Any):
    x, w = np.ones((2, 3), np.float32), np.ones((3, 4), np.float32)
    raised = []
    for fn in (jnp.einsum, jaxoverlap.einsum):
        with pytest.raises(Exception) as info:
            fn("ab,bc->ac", x, w, optimize=optimize)
        raised.append((info.type, str(info.value)))
    assert raised[0] == raised[1]


@pytest.mark.parametrize(
    "labels",
    [([0, 1, 2], [2, 3], [0, 1, 3]), ([0, 1, 2], [2, 3]), ([7, 1, 2], [2, 3]), ([..., 2], [2, 3], [..., 3]),
     ([..., 2], [2, 3]), ((0, 1, 2), range(2, 4)), (np.arange(3), np.array([2, 3]), [3, 1, 0]),
     ("abc", "cd", "abd"), ([30, 40, 50], [50, -1], [-1, 30, 40])],
    ids=str,
)  # fmt: skip
def test_einsum_takes_the_interleaved_form(mesh: Mesh, labels: Any):
    x, w = operands(mesh)

    def of(fn: Any) -> Any:
        def run(x: Any, w: Any) -> Any:
            return fn(x, labels[0], w, labels[1], *labels[2:])

        return jax.jit(run)

    close(of(jaxoverlap.einsum)(x, w), of(jnp.einsum)(x, w))


def test_interleaved_operands_have_a_ring_and_right_sides(mesh: Mesh):
    x, w = operands(mesh)
    run = jax.jit(pinned(mesh, lambda x, w: jaxoverlap.einsum(x, [0, 1, 2], w, [2, 3], [0, 1, 3])))
    assert hops(run.lower(x, w).compile())
    several = jaxoverlap.einsum(x, [0, 1, 2], (w, w + 1), [2, 3], [0, 1, 3])
    close(several, (usual(x, w), usual(x, w + 1)))
    v = array(mesh, P(), 256, 8)
    three = jaxoverlap.einsum(
        x, [0, 1, 2], w, [2, 3], v, [3, 4], [0, 1, 4], optimize=[(1, 2), (0, 1)]
    )
    close(three, jnp.einsum("bsd,df,fe->bse", x, w, v), 1e-4)
    close(jaxoverlap.einsum(w, [0, 1], [1, 0]), w.T)


@pytest.mark.parametrize("given", [(), ([0, 1], 2), ([[0, 1]],), ([0.5, 1],)], ids=str)
def test_einsum_without_labels_is_refused(given: Any):
    with pytest.raises(ValueError, match="expected operands that are each followed by a list"):
        jaxoverlap.einsum(np.ones((2, 3), np.float32), *given)


def test_einsum_names_what_does_not_fit():
    x, w = np.ones((2, 3), np.float32), np.ones((4, 5), np.float32)
    with pytest.raises(ValueError, match="letter b has size 3"):
        jaxoverlap.einsum("ab,bc->ac", x, w)
    with pytest.raises(ValueError, match="expected one right side or more"):
        jaxoverlap.einsum("ab,bc->ac", x, ())
