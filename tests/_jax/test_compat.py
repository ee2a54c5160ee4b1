"""jax is as `_jax/compat.py` takes it to be: a failure here says what jax changed."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxoverlap._jax import compat, inlining, jits
from jaxoverlap.passes.analysis import jaxprs

MESH = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
ROWS, COLUMNS = NamedSharding(MESH, P("model")), NamedSharding(MESH, P(None, "model"))
X, W = np.ones((16, 32), np.float32), np.ones((32, 64), np.float32)


def product(x, w):
    return x @ w


def the_dot(fn=product, *args):
    (eqn,) = jax.make_jaxpr(fn)(*(args or (X, W))).eqns
    return eqn


# -- jitted functions -----------------------------------------------------------------------------


def test_jitted_functions_are_recognized():
    jitted = jax.jit(product)
    assert jits.is_jitted(jitted), "jax.jit's result no longer has .trace, ._fun and ._jit_info"
    assert jits.is_jitted(jax.jit(product, static_argnums=0, donate_argnums=1))
    for other in (product, functools.partial(jitted, X), jnp.add, np.add, jax.checkpoint(jitted)):
        assert not jits.is_jitted(other), other


def test_infer_gives_the_equations_parameters():
    call = jits.infer(jax.jit(product), (X, W), {})
    params, flat, out_tree = call.params, call.flat, call.out_tree
    missing = {
        "jaxpr",
        "name",
        "in_shardings",
        "out_shardings",
        "donated_invars",
        "ctx_mesh",
        "compiler_options_kvs",
    } - set(params)
    assert not missing, f"the jit equation lost its parameters {missing}"
    assert compat.is_jaxpr(params["jaxpr"])
    assert params["name"] == "product"
    assert flat[0] is X and flat[1] is W
    assert out_tree.num_leaves == 1


def test_infer_gives_one_jaxpr_a_signature():
    """The identity of the jaxpr is the key under which a rewritten step is kept."""
    jitted = jax.jit(product)
    first = jits.infer(jitted, (X, W), {}).params["jaxpr"]
    assert jits.infer(jitted, (2 * X, W), {}).params["jaxpr"] is first, "jit traced again"
    struct = jax.ShapeDtypeStruct(X.shape, X.dtype)
    assert jits.infer(jitted, (struct, W), {}).params["jaxpr"] is first
    assert jitted.trace(X, W).jaxpr is first, "trace() no longer shares the call's jaxpr"
    assert jits.infer(jitted, (X[:8], W), {}).params["jaxpr"] is not first
    placed = (jits.infer(jitted, (jax.device_put(X, s), W), {}).params for s in (ROWS, COLUMNS))
    one, other = (params["jaxpr"] for params in placed)
    assert one is other, "jit traces again for another placement on one mesh"


def test_static_arguments_leave_and_constants_stay_in_the_jaxpr():
    captured = jnp.asarray(W)
    jitted = jax.jit(lambda scale, x: scale * x @ captured, static_argnums=0)
    call = jits.infer(jitted, (3, X), {})
    params, flat = call.params, call.flat
    assert len(flat) == len(params["jaxpr"].invars) == 1
    assert flat[0] is X
    assert [c is captured for c in params["jaxpr"].consts] == [True]


def test_shardings_of_the_jit_are_namedshardings():
    jitted = jax.jit(product, in_shardings=(ROWS, COLUMNS), out_shardings=COLUMNS)
    params = jits.infer(jitted, (X, W), {}).params
    assert params["in_shardings"] == (ROWS, COLUMNS)
    assert params["out_shardings"] == (COLUMNS,)
    free = jits.infer(jax.jit(product), (X, W), {}).params
    assert not any(isinstance(s, NamedSharding) for s in free["in_shardings"])


def test_the_context_mesh_is_a_parameter():
    with jax.set_mesh(MESH):
        params = jits.infer(jax.jit(product), (X, W), {}).params
    assert params["ctx_mesh"] == MESH


def test_only_committed_arrays_are_bound():
    assert jits.bound_sharding(jax.device_put(X, ROWS)) == ROWS
    assert jits.bound_sharding(jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=ROWS)) == ROWS
    for free in (jnp.ones(3), X, 1.0, jax.ShapeDtypeStruct(X.shape, X.dtype)):
        assert jits.bound_sharding(free) is None, free
    seen = []
    jax.jit(lambda x: seen.append(jits.bound_sharding(x)) or x)(jax.device_put(X, ROWS))
    assert seen == [None], "a tracer has a sharding"


def test_a_jit_equation_can_be_called():
    call = jits.infer(jax.jit(product), (X, W), {})
    params, flat = call.params, call.flat
    np.testing.assert_array_equal(jits.bind_jit(flat, params)[0], X @ W)
    inside = jax.make_jaxpr(lambda x, w: jits.bind_jit([x, w], params))(X, W)
    assert [e.primitive.name for e in inside.eqns] == ["jit"]


def test_another_jaxpr_in_the_equation_is_what_runs():
    call = jits.infer(jax.jit(product), (X, W), {})
    params, flat = call.params, call.flat
    other = jax.jit(lambda x, w: 2 * (x @ w)).trace(X, W).jaxpr
    changed = jits.with_jaxpr(params, other, {})
    np.testing.assert_array_equal(jits.bind_jit(flat, changed)[0], 2 * (X @ W))
    np.testing.assert_array_equal(jits.bind_jit(flat, params)[0], X @ W)


def test_compiler_options_are_pairs_and_the_jits_own_win():
    jitted = jax.jit(product, compiler_options={"a": "theirs"})
    params = jits.infer(jitted, (X, W), {}).params
    assert dict(params["compiler_options_kvs"]) == {"a": "theirs"}
    merged = jits.with_jaxpr(params, params["jaxpr"], {"a": "ours", "b": "ours"})
    assert dict(merged["compiler_options_kvs"]) == {"a": "theirs", "b": "ours"}


def test_a_traced_step_with_other_parameters_lowers_the_other_jaxpr():
    traced = jax.jit(product).trace(X, W)
    traced.lower()  # what it caches on the way must not reach the copy
    params = jits.traced_params(traced)
    other = jax.jit(lambda x, w: jnp.sin(x @ w)).trace(X, W).jaxpr
    changed = jits.traced_with(traced, jits.with_jaxpr(params, other, {}))
    assert changed.jaxpr is other
    assert "stablehlo.sine" in changed.lower().as_text()
    assert "stablehlo.sine" not in traced.lower().as_text()
    assert "@jit_product" in changed.lower().as_text()


# -- jaxprs ---------------------------------------------------------------------------------------

BODIES = {
    "jit": lambda f: jax.jit(f),
    "scan": lambda f: lambda x: lax.scan(lambda c, _: (f(c), None), x, None, length=2)[0],
    "while": lambda f: lambda x: lax.while_loop(lambda c: c.sum() < 0, f, x),
    "cond": lambda f: lambda x: lax.cond(x.sum() > 0, f, lambda x: x, x),
    "checkpoint": lambda f: jax.checkpoint(f),
    "custom_jvp": lambda f: with_rules(jax.custom_jvp(f)),
    "custom_vjp": lambda f: with_rules(jax.custom_vjp(f)),
}


def with_rules(f):
    if isinstance(f, jax.custom_vjp):
        f.defvjp(lambda x: (f(x), None), lambda _, g: (g,))
    else:
        f.defjvp(lambda x, t: (f(*x), *t))
    return f


@pytest.mark.parametrize("name", BODIES)
def test_bodies_stand_where_the_walk_looks(name: str):
    """Bodies are in primitives' parameters, where the walk looks: a jaxpr or a tuple of jaxprs."""
    jaxpr = jax.make_jaxpr(BODIES[name](lambda x: x @ x))(np.ones((8, 8), np.float32))
    (dot,) = jaxprs.dots(jaxpr)
    assert dot.inside is None, f"{name} became the primitive {dot.inside}"
    assert dot.runs == (2 if name == "scan" else 1), "a scan no longer gives its length"


def test_a_body_can_be_replaced():
    jaxpr = jax.make_jaxpr(BODIES["scan"](jax.checkpoint(jnp.sin)))(1.0)
    assert compat.is_jaxpr(jaxpr)
    new = jaxpr.replace(eqns=[e.replace(params=dict(e.params)) for e in jaxpr.eqns])
    assert str(new) == str(jaxpr)


def test_inline_keeps_operands_results_and_source():
    def step(x, w):
        with jax.named_scope("layer"):
            return x @ w

    eqn = the_dot(step)

    def ring(x, w):
        return jax.jit(lambda x: jnp.sin(x) + 1)(x @ w)

    new = inlining.inline(jax.named_call(ring, name="ring"), eqn.invars, eqn.outvars, eqn)
    used = {v for e in new for v in e.invars if not hasattr(v, "val")}
    assert set(eqn.invars) <= used, "the operands are no longer the user's variables"
    assert [*new[-1].outvars] == [*eqn.outvars]
    for inner in (*new, *new[-1].params["jaxpr"].eqns):
        assert compat.source_line(inner) == compat.source_line(eqn)
    assert {str(e.source_info.name_stack) for e in new} == {"layer/ring"}


def test_functions_that_are_alike_are_traced_once_and_share_no_variable():
    eqn, traces = the_dot(), []

    def inlined(alike, scope=""):
        def ring(x, w):  # a new one each time: jax traces one and the same once anyway
            traces.append(x.shape)
            return jnp.sin(x) @ w

        out = compat.like_var(eqn.outvars[0])
        return inlining.inline(ring, eqn.invars, [out], eqn, alike=alike, scope=scope)

    one, other, unlike, alone = (inlined(alike) for alike in (("a",), ("a",), ("b",), None))
    assert len(traces) == 3
    made = [v for eqns in (one, other, unlike, alone) for e in eqns for v in e.outvars]
    assert len(set(made)) == len(made)
    assert [e.primitive for e in one] == [e.primitive for e in other]
    assert other[-1].invars[0] is other[0].outvars[0]
    with jax.default_matmul_precision("highest"):  # part of what is traced
        assert inlined(("a",))[-1].params["precision"] != one[-1].params["precision"]
    assert {str(e.source_info.name_stack) for e in inlined(("a",), "ring.7")} == {"ring.7"}
    jax.clear_caches()
    inlined(("a",))
    assert len(traces) == 5, "one more for the precision, and one after the caches were cleared"


def test_the_axes_that_types_state():
    meshes = {
        kind: jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind,) * 2)
        for kind in (AxisType.Auto, AxisType.Explicit)
    }
    stated = {}
    for kind, mesh in meshes.items():
        whole = NamedSharding(mesh, P())
        args = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=whole) for a in (X, W)]
        (eqn,) = jax.make_jaxpr(lax.dot)(*args).eqns
        stated[kind] = compat.stated_axes(eqn)
    assert stated == {AxisType.Auto: (), AxisType.Explicit: ("data", "model")}
    assert not compat.stated_axes(the_dot())


def test_source_lines_are_the_users():
    file, line, function = compat.source_line(the_dot())
    assert (Path(file).name, function) == ("test_compat.py", "product")
    assert line == product.__code__.co_firstlineno + 1
    lost: Any = SimpleNamespace(source_info=SimpleNamespace(traceback=None))
    assert compat.source_line(lost) == ("<unknown>", 0, "")


def test_a_tag_reaches_stablehlo_as_a_frontend_attribute():
    jitted = jax.jit(product)
    jaxpr = jitted.trace(X, W).jaxpr
    tagged = jaxpr.replace(eqns=[compat.with_tag(e, colour="red") for e in jaxpr.eqns])
    traced = jitted.trace(X, W)
    params = jits.with_jaxpr(jits.traced_params(traced), tagged, {})
    text = jits.traced_with(traced, params).lower().as_text()
    (line,) = (line for line in text.splitlines() if "stablehlo.dot_general" in line)
    assert 'mhlo.frontend_attributes = {colour = "red"}' in line
    assert "colour" not in traced.lower().as_text()


def test_jaxprs_variables_and_equations_have_the_fields_in_use():
    eqn = the_dot()
    assert {"dimension_numbers", "precision", "preferred_element_type"} <= set(eqn.params)
    assert [v.aval.shape for v in (*eqn.invars, *eqn.outvars)] == [(16, 32), (32, 64), (16, 64)]
    assert hasattr(eqn.ctx, "manager")
    assert dataclasses.is_dataclass(eqn.source_info) or hasattr(eqn.source_info, "replace")


def in_a_shard_map(check: bool):
    """Return a shard_map over all of the mesh, and the equations of its body."""

    def body(x):
        return jax.lax.psum(2 * jax.lax.all_gather(x, "model", tiled=True), "model")

    specs = dict(in_specs=P("model"), out_specs=P(), check_vma=check)
    (eqn,) = jax.make_jaxpr(jax.shard_map(body, mesh=MESH, **specs))(X).eqns
    return eqn, eqn.params["jaxpr"].eqns


@pytest.mark.parametrize("check", [True, False])
def test_equations_are_made_as_in_the_body_of_a_shard_map(check: bool):
    eqn, (gather, *_) = in_a_shard_map(check)

    def ring(x):
        return jnp.tile(jax.lax.ppermute(x, "model", [(0, 1)]), (4, 1)) * jax.lax.axis_index(
            "model"
        )

    with compat.in_shard_maps([eqn]):
        new = inlining.inline(ring, gather.invars, gather.outvars, gather)
    assert new[-1].outvars == gather.outvars
    with pytest.raises(NameError):  # the axis has no name any more
        inlining.inline(ring, gather.invars, gather.outvars, gather)


def test_what_devices_do_together():
    _, body = in_a_shard_map(True)
    together = [e.primitive.name for e in body if compat.is_collective(e)]
    assert together == ["all_gather", "psum_invariant"]
    assert not any(map(compat.ordered_effects, body))


def test_a_result_of_another_type_is_refused():
    eqn, (gather, *_) = in_a_shard_map(True)
    with compat.in_shard_maps([eqn]), pytest.raises(AssertionError, match="in the place of"):
        inlining.inline(lambda x: x + 1, gather.invars, gather.outvars, gather)


# -- compiler options -----------------------------------------------------------------------------


def test_xla_says_which_options_it_knows():
    device = jax.devices()[0]
    known, unknown = {"xla_embed_ir_in_executable": "True"}, {"xla_gpu_that_never_was": "True"}
    assert jits.accepted_options(known, device) == known
    assert jits.accepted_options({**known, **unknown}, device) == known, (
        "XLA words its refusal in another way"
    )
    with pytest.raises(jax.errors.JaxRuntimeError):
        jits.accepted_options({"xla_embed_ir_in_executable": "neither"}, device)


def test_options_are_tried_where_a_mesh_is_set():
    device = jax.devices()[0]
    with jax.set_mesh(MESH):
        assert jits._accept.__wrapped__((("xla_embed_ir_in_executable", "True"),), device)


# -- types and processes --------------------------------------------------------------------------


def test_the_text_of_a_type_names_no_device():
    """The text still tells apart what the types tell apart."""
    x = jax.ShapeDtypeStruct((8, 4), "float32")
    explicit = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Explicit,))
    rows = NamedSharding(explicit, P("x"))
    typed = jax.ShapeDtypeStruct((8, 4), "float32", sharding=rows)
    texts = [compat.type_text(jax.make_jaxpr(lambda x: x)(a).invars[0]) for a in (x, typed, 1.0)]
    assert texts == ["float32[8, 4] []", "float32[8, 4] P('x', None) []", "~float32[] []"]
    # Manual axes along which values may differ are part of their types.
    gathered = in_a_shard_map(True)[1][0]
    assert [compat.type_text(v)[-9:] for v in gathered.invars] == ["['model']"]


def test_one_process_has_no_store():
    assert jits.key_value_store() is None


@pytest.mark.parametrize("callback", [False, True])
def test_a_compiled_step_can_be_called_with_flat_arguments(callback: bool):
    """By JAX's fast path, or without it where Python is called back; donations are taken."""
    seen = list[float]()

    @functools.partial(jax.jit, donate_argnums=0, static_argnums=2)
    def step(state: Any, key: Any, times: int, *, unused: Any) -> Any:
        if callback:
            jax.debug.callback(lambda x: seen.append(float(x)), state["a"].sum())
        return {"a": state["a"] * times}, (2.0 * state["b"], key)

    def arguments() -> tuple[Any, Any, int]:
        return {"a": jnp.arange(3.0), "b": jnp.ones(2)}, jax.random.key(0), 4

    args, unused = arguments(), {"unused": jnp.zeros(())}
    call = jits.infer(step, args, unused)
    flat = call.flat
    compiled = call.traced().lower().compile()
    results = jax.block_until_ready(jits.flat_call(compiled)(flat))
    assert [x.is_deleted() for x in flat[:2]] == [True, True] and not flat[2].is_deleted()
    expected = step(*arguments(), **unused)
    assert jax.tree.structure(expected) == call.out_tree
    for made, wanted in zip(results, jax.tree.leaves(expected), strict=True):
        assert jits.type_of(made) == jits.type_of(wanted)
        assert bool((made == wanted).all())
    types = [kind for kind, _ in jits.results_of(compiled)]
    assert types == [jits.type_of(x) for x in results]
    assert bool(seen) == callback


@pytest.mark.parametrize("ordered", [False, True])
def test_which_arguments_a_program_takes_is_known(ordered: bool):
    """Unused arguments have no parameter, and an ordered callback has one, before all others.

    The first that is donated fits no result: it stays. So does, on CPUs, one that NumPy reads.
    """

    @functools.partial(jax.jit, donate_argnums=(1, 2, 3, 4))
    def step(key: Any, unused: Any, odd: Any, w: Any, count: Any) -> Any:
        if ordered:
            io_callback(lambda x: None, None, count, ordered=True)
        return w * odd.sum(), count + key.sum().astype(count.dtype)

    def arguments() -> tuple[Any, ...]:
        return jnp.zeros(2), jnp.ones(3), jnp.ones(7), jnp.ones(5), jnp.int32(3)

    args = arguments()
    compiled = step.lower(*args).compile()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX's own: an argument cannot be donated
        step(*args)
        assert [n for n, x in enumerate(args) if x.is_deleted()] == [3, 4]
        assert jits.donated(compiled) == {3, 4}
        read = arguments()
        view = np.asarray(read[4])
        step(*read)
    assert not read[4].is_deleted() and view == 3


def test_a_call_without_arrays_is_the_same_call():
    class Own:  # a static argument, equal to itself alone
        pass

    step = jax.jit(lambda w, key, own, x, scale: w + x * scale, static_argnums=2)
    mesh = jax.make_mesh((8,), ("data",), (AxisType.Auto,))
    w = jax.device_put(np.ones(8, "f"), NamedSharding(mesh, P("data")))
    args = w, jax.random.key(0), Own(), np.ones(8, "f"), 2.0
    call = jits.infer(step, args, {})
    shapes = jits.without_arrays(call)
    assert not any(isinstance(x, jax.Array) for x in jax.tree.leaves((shapes.args, shapes.flat)))
    assert shapes.args[2] is args[2] and shapes.args[3] is args[3]
    assert shapes.flat[0].sharding == w.sharding and shapes.flat[1].sharding is None
    again = jits.infer(step, shapes.args, shapes.kwargs)
    assert again.params["jaxpr"] is call.params["jaxpr"]
    assert jits.traced_params(shapes.traced())["jaxpr"] is call.params["jaxpr"]
