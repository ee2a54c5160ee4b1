"""`overlap` at the call site: the step it returns is used as the step it was given."""

from __future__ import annotations

import copy
import inspect
import logging
import threading
import warnings
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoverlap
from jaxoverlap import Overlapped, RewriteError, overlap
from jaxoverlap.passes.rewriting import rewrite

MESH = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
N = 4  # devices along "model": a gather has a hop less
ROWS, COLUMNS, WHOLE = (NamedSharding(MESH, P(*s)) for s in (("model",), (None, "model"), ()))
HERE = Path(__file__).name


def product(x, w):
    """Multiply from sequence parallel to column parallel: an all-gather of x, under the matmul."""
    return lax.with_sharding_constraint(x @ w, COLUMNS)


def operands() -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(shape).astype(np.float32) for shape in ((16, 32), (32, 64)))
    return jax.device_put(x, ROWS), jax.device_put(w, COLUMNS)


X, W = operands()
XW = np.asarray(X) @ np.asarray(W)


def check(got, expected=XW) -> None:
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


def hops(traced_or_jaxpr) -> int:
    return str(getattr(traced_or_jaxpr, "jaxpr", traced_or_jaxpr)).count("ppermute")


def abstract(array: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)


# -- ways to write it -----------------------------------------------------------------------------


def test_a_jitted_function_and_a_plain_one():
    for step in (overlap(jax.jit(product)), overlap(product)):
        assert isinstance(step, Overlapped)
        check(step(X, W))
        assert hops(step.trace(X, W)) == N - 1


def test_as_a_decorator():
    @overlap
    @jax.jit
    def bare(x, w):
        return product(x, w)

    @overlap(cluster="h100-sxm:1x8", granularity="one_way")
    @jax.jit
    def of_a_cluster(x, w):
        return product(x, w)

    @overlap(
        cluster=jaxoverlap.parse_cluster("h100-sxm:2x4"), on_error="plain", granularity="one_way"
    )
    def plain(x, w):
        return product(x, w)

    for step in (bare, of_a_cluster, plain):
        check(step(X, W))
        assert len(step.explain(X, W).decisions) == 1


def test_the_name_and_the_docstring_stay():
    @overlap
    @jax.jit
    def train_step(x, w):
        """One step."""
        return product(x, w)

    assert (train_step.__name__, train_step.__doc__) == ("train_step", "One step.")
    assert train_step.__module__ == __name__
    assert list(inspect.signature(train_step).parameters) == ["x", "w"]
    assert train_step.explain(X, W).step == "train_step"
    lowered = train_step.lower(X, W)
    assert "module @jit_train_step" in lowered.as_text()
    compiled = lowered.compile()
    assert repr(lowered) == f"<Lowered train_step, lowered: {lowered.plan.verdict}>"
    assert repr(compiled) == "<Compiled train_step, compiled>"
    text = compiled.as_text()
    assert text.startswith("HloModule jit_train_step")
    assert 'op_name="jit(train_step)/' in text


# -- what jit was told ----------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["static_argnums", "static_argnames"])
def test_static_arguments(how: str):
    traces = []

    def step(x, scale, w):
        traces.append(scale)
        return product(x * scale, w)

    static = {"static_argnums": 1} if how == "static_argnums" else {"static_argnames": "scale"}
    step = overlap(jax.jit(step, **static))
    for scale in (2, 2, 3, 2):
        got = step(X, scale, W) if how == "static_argnums" else step(X, w=W, scale=scale)
        check(got, scale * XW)
    assert traces == [2, 3], "one trace a static value"


def test_donated_buffers_are_donated():
    @overlap
    @partial(jax.jit, donate_argnums=0)
    def step(state, x, w):
        return {"sum": state["sum"] + product(x, w), "step": state["step"] + 1}

    def new():
        return {"sum": jax.device_put(jnp.zeros_like(XW), COLUMNS), "step": jnp.int32(0)}

    compiled = step.lower(new(), X, W).compile()
    assert "input_output_alias" in compiled.as_text()
    for call in (step, compiled):
        state = new()
        result = call(state, X, W)
        assert state["sum"].is_deleted() and not X.is_deleted()
        check(result["sum"])


def test_in_and_out_shardings_stay():
    """Arguments come from the host: only the jit knows where they and the result belong."""
    plain = jax.jit(
        lambda x, w: (x @ w, x.sum()), in_shardings=(ROWS, COLUMNS), out_shardings=(COLUMNS, WHOLE)
    )
    step = overlap(plain)
    assert step.explain(np.asarray(X), np.asarray(W)).decisions[0].kind == "all_gather_matmul"
    for got, expected in zip(step(np.asarray(X), np.asarray(W)), plain(X, W), strict=True):
        check(got, expected)
        assert got.sharding.is_equivalent_to(expected.sharding, got.ndim)


def test_compiler_options_of_the_jit_stay():
    step = overlap(jax.jit(product, compiler_options={"xla_embed_ir_in_executable": True}))
    lowered = step.lower(X, W)
    assert lowered.compile() is not None
    wrong = overlap(jax.jit(product, compiler_options={"xla_no_such_option": "1"}))
    with pytest.raises(Exception, match="xla_no_such_option"):
        wrong(X, W)


def test_options_of_jaxoverlap_yield_to_the_jits_own(monkeypatch):
    monkeypatch.setattr(
        "jaxoverlap.search.found.options_for",
        lambda mesh, **_: {"xla_embed_ir_in_executable": "ours", "xla_dump_max_hlo_modules": "1"},
    )
    step = overlap(jax.jit(product, compiler_options={"xla_embed_ir_in_executable": True}))
    check(step(X, W))  # "ours" is no boolean: XLA would refuse it


def test_a_mesh_from_the_context():
    def step(x, w):
        return lax.with_sharding_constraint(x @ w, P(None, "model"))

    with jax.set_mesh(MESH):
        check(overlap(step)(X, W))
        assert len(overlap(step).explain(X, W).decisions) == 1


# -- arguments and results ------------------------------------------------------------------------


class Pair(NamedTuple):
    x: Any
    scale: Any


@jax.tree_util.register_dataclass
@dataclass
class Layer:
    w: Any
    bias: Any


def test_pytrees_keyword_arguments_and_scalars():
    @jax.jit
    def plain(pair, *, layer, rest):
        y = product(pair.x * pair.scale, layer.w)
        return Layer(w=y, bias=layer.bias), Pair(x=None, scale=rest["shift"] + y.sum()), 7

    args = (Pair(x=X, scale=2.0),)
    kwargs = dict(layer=Layer(w=W, bias=None), rest={"shift": np.float32(1), "none": None})
    step = overlap(plain)
    expected, got = plain(*args, **kwargs), step(*args, **kwargs)
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    assert isinstance(got[0], Layer) and isinstance(got[1], Pair)
    assert (got[0].bias, got[1].x, int(got[2])) == (None, None, 7)
    check(got[0].w, 2 * XW)
    assert got[1].scale.weak_type == expected[1].scale.weak_type
    again = step.lower(*args, **kwargs).compile()(*args, **kwargs)
    assert jax.tree.structure(again) == jax.tree.structure(expected)


def test_arrays_that_the_step_closes_over():
    def step(x):
        return product(x, W)

    overlapped = overlap(step)
    assert len(overlapped.explain(X).decisions) == 1
    check(overlapped(X))
    check(overlapped(2 * X), 2 * XW)
    check(overlapped.lower(X).compile()(X))


def test_random_keys_and_debug_prints(capfd):
    def step(key, x, w):
        jax.debug.print("mean {}", jnp.round(x.mean()))
        return product(x + jax.random.normal(key, x.shape), w)

    key = jax.random.key(0)
    check(overlap(step)(key, X, W), jax.jit(step)(key, X, W))
    jax.effects_barrier()
    assert capfd.readouterr().out.count("mean ") == 2


def test_wrong_arguments_are_jits_own_errors():
    step = overlap(product)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'w'"):
        step(X)
    with pytest.raises(TypeError, match="dot_general"):
        step(X, X)


# -- how often it traces --------------------------------------------------------------------------


def test_it_traces_once_a_signature():
    traces = []

    def step(x, w):
        traces.append(x.shape)
        return product(x, w)

    step = overlap(step)
    for _ in range(3):
        check(step(X, W))
    step.explain(X, W)
    step.lower(abstract(X), abstract(W)).compile()
    assert traces == [X.shape]
    wide = jax.device_put(np.ones((32, 32), np.float32), ROWS)
    for _ in range(2):
        step(wide, W)
    assert traces == [X.shape, wide.shape]


def test_another_sharding_is_another_plan():
    step = overlap(jax.jit(lambda x, w: x @ w, out_shardings=COLUMNS))
    x = jax.device_put(X, NamedSharding(MESH, P(None, "model")))
    w = jax.device_put(W, ROWS)
    for _ in range(2):
        assert step.explain(X, W).decisions[0].kind == "all_gather_matmul"
        assert step.explain(x, w).decisions[0].kind == "matmul_reduce_scatter"
        check(step(X, W))
        check(step(x, w))


def test_a_step_is_rewritten_once_for_each_sharding(monkeypatch):
    calls, original = [], rewrite.rewrite
    monkeypatch.setattr(rewrite, "rewrite", lambda *args: calls.append(1) or original(*args))
    step = overlap(product)
    for _ in range(3):
        step(X, W)
        step.explain(abstract(X), abstract(W))
    assert len(calls) == 1
    step(jax.device_put(X, WHOLE), jax.device_put(W, ROWS))
    assert len(calls) == 2


def test_two_threads_may_call_it_first():
    step, start, outcomes = overlap(product), threading.Barrier(2), []

    def call():
        start.wait()
        try:
            outcomes.append(np.asarray(step(X, W)))
        except BaseException as error:
            outcomes.append(error)

    threads = [threading.Thread(target=call) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len(outcomes) == 2
    for got in outcomes:
        check(got)


# -- inside other transformations -----------------------------------------------------------------

PLACED = overlap(jax.jit(product, in_shardings=(ROWS, COLUMNS)))
"""Its own shardings hold inside another jit, where those of its arguments are not known."""


def test_inside_another_jit():
    outer = jax.jit(lambda x, w: 2 * PLACED(x, w))
    check(outer(X, W), 2 * XW)
    assert hops(outer.trace(X, W)) == N - 1
    assert "collective-permute" in outer.lower(X, W).compile().as_text()


def test_inside_another_overlapped_step():
    outer = overlap(lambda x, w: PLACED(x, w) + product(x, w))
    check(outer(X, W), 2 * XW)
    reasons = [
        getattr(e, "reason", e.kind if hasattr(e, "kind") else "")
        for e in outer.explain(X, W).entries
    ]
    assert sum("inside shard_map" in r for r in reasons) == N
    assert "all_gather_matmul" in reasons


def test_under_grad_its_backward_pass_is_ringed_too():
    cotangent = np.random.default_rng(1).standard_normal(XW.shape).astype(np.float32)

    def loss(x, w):
        return jnp.sum(PLACED(x, w) * cotangent)

    to_x, to_w = jax.grad(loss, (0, 1))(X, W)
    check(to_x, cotangent @ np.asarray(W).T)
    check(to_w, np.asarray(X).T @ cotangent)
    assert hops(jax.make_jaxpr(jax.grad(loss, (0, 1)))(X, W)) > N - 1


def test_under_jvp_vmap_scan_and_remat():
    tangent = jax.jvp(PLACED, (X, W), (X, jnp.zeros_like(W)))[1]
    check(tangent)
    stacked = jnp.stack([X, 2 * X])
    check(jax.vmap(PLACED, (0, None))(stacked, W), np.stack([XW, 2 * XW]))
    check(lax.map(lambda x: PLACED(x, W), stacked), np.stack([XW, 2 * XW]))
    gradient = jax.grad(lambda x: jax.checkpoint(PLACED)(x, W).sum())(X)
    check(gradient, np.broadcast_to(np.asarray(W).sum(1), X.shape))


def test_other_functions_of_jax_take_it():
    assert jax.eval_shape(PLACED, X, W).shape == XW.shape
    assert isinstance(PLACED, jax.stages.Wrapped)


# -- ahead of time --------------------------------------------------------------------------------


@pytest.mark.parametrize("of", ["arrays", "structs"])
def test_lower_and_compile(of: str):
    step = overlap(product)
    args = (X, W) if of == "arrays" else (abstract(X), abstract(W))
    traced = step.trace(*args)
    assert hops(traced) == N - 1
    assert traced.out_info.shape == XW.shape
    lowered = step.lower(*args)
    assert lowered.as_text().count("collective_permute") == N - 1
    assert lowered.plan == step.explain(*args)
    assert lowered.out_info.shape == XW.shape
    compiled = lowered.compile()
    check(compiled(X, W))
    assert compiled.plan == lowered.plan
    assert compiled.output_shardings == COLUMNS or compiled.output_shardings.is_equivalent_to(
        COLUMNS, 2
    )
    assert compiled.memory_analysis() is not None


def test_lower_takes_compiler_options():
    lowered = overlap(product).lower(X, W)
    assert lowered.compile({"xla_embed_ir_in_executable": True}) is not None
    with pytest.raises(Exception, match="xla_no_such_option"):
        lowered.compile(compiler_options={"xla_no_such_option": "1"})


def test_audit_finds_the_rings_hops():
    """On a CPU no collective is asynchronous, so none is covered; but all are found."""
    step = overlap(product)
    audit = step.lower(X, W).compile().audit()
    assert audit.module == "jit_product"
    assert [c.ring for c in audit.collectives] == ["all_gather_matmul.0"] * (N - 1)
    assert {c.source for c in audit.collectives} == {step.explain(X, W).entries[0].source}
    assert {c.kind for c in audit.collectives} == {"collective-permute"}
    assert {c.group_size for c in audit.collectives} == {N}
    assert audit.total.bytes_moved == step.explain(X, W).decisions[0].bytes_moved
    assert audit.rest.count == audit.total.covered == 0
    plain = jaxoverlap.audit(jax.jit(product).lower(X, W).compile())
    assert [c.kind for c in plain.collectives] == ["all-gather"]
    assert plain.total.bytes_moved == audit.total.bytes_moved


# -- explain --------------------------------------------------------------------------------------


def test_explain_compiles_and_runs_nothing(caplog, capfd):
    def step(x, w):
        jax.debug.print("it runs")
        return product(x, w)

    overlapped = overlap(step)
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        plan = overlapped.explain(X, W)
        compiled = [m for m in caplog.messages if "Finished XLA compilation" in m]
        assert not compiled
        overlapped(X, W)
        assert any("Finished XLA compilation" in m for m in caplog.messages), "the log is on"
    jax.effects_barrier()
    assert capfd.readouterr().out.count("it runs") == 1
    assert plan.mesh == {"data": 2, "model": 4}
    (ring,) = plan.decisions
    assert (ring.axis, ring.letter, ring.num_chunks, ring.runs) == ("model", "a", N, 1)
    assert ring.bytes_moved == X.nbytes * (N - 1) // N
    assert ring.einsum == "ab,bc->ac"


def two_lines(x, w):
    first = lax.with_sharding_constraint(x @ w, COLUMNS)  # the first
    second = lax.with_sharding_constraint((2 * x) @ w, COLUMNS)  # the second
    return first, second


def line_of(mark: str) -> int:
    lines, start = inspect.getsourcelines(two_lines)
    return start + next(i for i, line in enumerate(lines) if mark in line)


@pytest.mark.parametrize("form", [f"{HERE}:", f"api/{HERE}:", f"{Path(__file__)}:"], ids=["file", "folder", "absolute"])  # fmt: skip
def test_skip_leaves_one_line_alone(form: str):
    step = overlap(two_lines, skip=[f"{form}{line_of('# the first')}"])
    first, second = step.explain(X, W).entries
    assert isinstance(first, jaxoverlap.Skip) and "by skip=" in first.reason
    assert isinstance(second, jaxoverlap.Decision)
    assert second.source == f"api/{HERE}:{line_of('# the second')}"
    assert hops(step.trace(X, W)) == N - 1
    check(step(X, W)[0])
    check(step(X, W)[1], 2 * XW)


def test_a_step_without_a_ring_says_so_and_runs():
    step = overlap(lambda x: x @ x.T)
    x = jax.device_put(np.ones((16, 32), np.float32), WHOLE)
    with pytest.warns(UserWarning, match="overlap\\(\\) rewrites nothing") as caught:
        check(step(x), np.full((16, 16), 32))
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(x)  # once is enough


def test_it_says_so_once_a_step_and_not_once_a_signature():
    step = overlap(lambda x: x @ x.T)
    with pytest.warns(UserWarning, match="rewrites nothing") as caught:
        for rows in (16, 24, 32):
            step(jax.device_put(np.ones((rows, 32), np.float32), WHOLE))
    assert len(caught) == 1


def test_asked_for_no_rings_it_does_not_say_that_there_are_none():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(overlap(two_lines, granularity="plain")(X, W)[0])


def test_of_a_long_step_it_names_the_reasons():
    def step(x):
        for _ in range(50):
            x = jnp.sin(x @ x)
        return x

    x = jax.ShapeDtypeStruct((16, 16), np.float32, sharding=WHOLE)
    with pytest.warns(UserWarning, match="rewrites nothing in step; explain") as caught:
        overlap(step).lower(x)
    assert str(caught[0].message).splitlines()[1:] == ["  50 matmuls: no collective"]


# -- when the rewrite fails -----------------------------------------------------------------------


@pytest.fixture
def broken(monkeypatch):
    def fail(*_, **__):
        raise TypeError("rings are out")

    monkeypatch.setattr(rewrite, "ringed", fail)


@pytest.mark.usefixtures("broken")
def test_on_error_raise_names_the_matmul_and_the_way_out():
    step = overlap(two_lines)
    source = f"api/{HERE}:{line_of('# the first')}"
    for call in (step, step.explain, step.lower, step):
        with pytest.raises(RewriteError) as error:
            call(X, W)
        message = str(error.value)
        for part in (
            "matmul 0",
            "ab,bc->ac",
            "dot_general",
            source,
            "TypeError: rings are out",
            f"skip=('{source}',)",
            "on_error='plain'",
        ):
            assert part in message
        assert isinstance(error.value.__cause__, TypeError)


@pytest.mark.usefixtures("broken")
def test_the_way_out_works():
    sources = [f"api/{HERE}:{line_of(mark)}" for mark in ("# the first", "# the second")]
    with pytest.warns(UserWarning, match="rewrites nothing"):
        check(overlap(two_lines, skip=sources)(X, W)[0])


@pytest.mark.usefixtures("broken")
def test_on_error_plain_warns_once_and_runs_the_step_as_it_is():
    step = overlap(jax.jit(product), on_error="plain")
    with pytest.warns(
        UserWarning, match=r"(?s)product runs without overlap: .*rings are out"
    ) as caught:
        got = step(X, W)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    np.testing.assert_array_equal(got, jax.jit(product)(X, W))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(X, W)
        lowered = step.lower(X, W)
        assert lowered.plan is None and lowered.compile().plan is None
        assert hops(step.trace(X, W)) == 0
    with pytest.raises(RewriteError):
        step.explain(X, W)


# -- where it is not yet as a jitted function is --------------------------------------------------


def test_the_options_of_an_outer_overlap_count():
    inner = overlap(jax.jit(product), cluster="h100-sxm:1x8")
    with pytest.raises(ValueError, match="h100-sxm:8x8 has 64"):
        overlap(inner, cluster="h100-sxm:8x8").explain(X, W)


def test_a_method():
    class Trainer:
        @overlap
        @partial(jax.jit, static_argnums=0)
        def step(self, x, w):
            return product(x, w)

    check(Trainer().step(X, W))


def test_a_lowered_step_can_be_copied():
    copied = copy.copy(overlap(product).lower(X, W))
    assert copied.plan is not None


def test_a_warning_of_lower_points_at_the_caller():
    x = jax.device_put(np.ones((16, 32), np.float32), WHOLE)
    with pytest.warns(UserWarning, match="rewrites nothing") as caught:
        overlap(lambda x: x @ x.T).lower(x)
    assert caught[0].filename == __file__
