"""jax and XLA are as `_jax/partitioner.py` takes them to be, each on its own."""

from __future__ import annotations

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxoverlap._jax import jits, partitioner, propagated

MESH = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
X = jax.ShapeDtypeStruct((16, 32), "float32", sharding=NamedSharding(MESH, P("model")))
W = jax.ShapeDtypeStruct((32, 64), "float32", sharding=NamedSharding(MESH, P(None, "model")))


def lowered(step, *args, name: str = ""):
    traced = jax.jit(step).trace(*args)
    params = jits.with_jaxpr(jits.traced_params(traced), traced.jaxpr, {})
    params["name"] = name or partitioner.new_name()
    return jits.traced_with(traced, params).lower()


def test_a_question_compiles_nothing_that_jax_counts():
    events: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__: events.append(name))
    answer = partitioner.ask(lowered(lambda x, w: x @ w, X, W), MESH)
    assert "f32[16,16]" in answer.text and "all-gather" in answer.text
    assert not [name for name in events if "backend_compile" in name]


def test_results_are_specs_of_the_mesh():
    answer = partitioner.ask(lowered(lambda x, w: (x + 1, w.sum(), w), X, W), MESH)
    assert answer.results == ((("model",), ()), (), ((), ("model",)))


def test_questions_of_several_threads_are_told_apart():
    sizes, texts = (8, 16, 24, 32, 40, 48), dict[int, str]()

    def ask(n: int) -> None:
        x = jax.ShapeDtypeStruct((n, 32), "float32", sharding=X.sharding)
        texts[n] = partitioner.ask(lowered(lambda x, w: x @ w, x, W), MESH).text
        # A compile that asks no question runs beside the others as ever.
        jax.block_until_ready(jax.jit(lambda x: x * n)(np.ones(n)))

    threads = [threading.Thread(target=ask, args=(n,)) for n in sizes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert {n for n in sizes if f"f32[{n},16]" in texts[n]} == {*sizes}


def test_what_does_not_compile_says_why():
    def step(x, w):
        return jax.lax.with_sharding_constraint(x @ w, NamedSharding(MESH, P()))

    given = lowered(step, X, W)
    given._lowering._compiler_options_kvs = (("xla_no_such_option", "1"),)
    with pytest.raises(partitioner.NoAnswerError, match="xla_no_such_option"):
        partitioner.ask(given, MESH)


def tagged(step, *args, mesh=MESH):
    """Return what is read of a step's matmuls, by tag."""
    return dict(partitioner.ask(lowered(step, *args), mesh, "tag").tagged)


def test_a_tagged_matmul_says_how_its_values_lie():
    def step(x, w):
        x = jax.lax.with_sharding_constraint(x, NamedSharding(MESH, P("data")))
        with set_xla_metadata(tag="here"):
            y = x @ w
        return jax.lax.with_sharding_constraint(y.T, NamedSharding(MESH, P("model", "data")))

    ((tag, found),) = tagged(step, X, W).items()
    data, model = ("data",), ("model",)
    assert tag == "here"
    assert found.lhs == propagated.Side((16, 32), (data, ()), ((model, ()),))
    assert found.rhs == propagated.Side((32, 64), ((), model), ())
    assert found.out == propagated.Side((16, 64), (data, model), ((data, model),))
    assert (found.contracted, found.batched) == (((1, 0),), ())


def test_values_of_loops_branches_and_manual_bodies_have_shardings():
    def body(x, w):
        with set_xla_metadata(tag="loop"):
            return jnp.tanh(x @ w), None

    def manual(x, w):
        with set_xla_metadata(tag="manual"):
            return x @ w

    def step(x, w):
        x, _ = jax.lax.scan(body, x, jnp.stack([w, w]))
        specs = dict(in_specs=(P(None, None), P(None, None)), out_specs=P(None, None))
        inside = jax.shard_map(manual, mesh=MESH, axis_names={"data"}, **specs)
        with set_xla_metadata(tag="branch"):
            return jax.lax.cond(x.sum() > 0, lambda: inside(x, w), lambda: x @ w)

    w = jax.ShapeDtypeStruct((32, 32), "float32", sharding=NamedSharding(MESH, P(None, "model")))
    found = tagged(step, X, w)
    assert {*found} == {"loop", "manual", "branch"}
    assert found["loop"].rhs.spec == ((), ("model",))
    assert found["manual"].rhs.spec == ((), ("model",)), "data is manual there"


def test_part_of_an_axis_has_no_spec():
    mesh = jax.make_mesh((8,), ("model",), axis_types=(AxisType.Auto,))
    x = jax.ShapeDtypeStruct((32, 16), "float32", sharding=NamedSharding(mesh, P("model")))
    w = jax.ShapeDtypeStruct((16, 8), "float32", sharding=NamedSharding(mesh, P()))

    def step(x, w):
        with set_xla_metadata(tag="split"):
            return jnp.tanh(x.reshape(2, 16, 16) @ w)

    found = tagged(step, x, w, mesh=mesh)["split"]
    assert (found.lhs.spec, found.out.spec) == (None, None)
    assert found.rhs.spec == ((), ())


def test_a_step_of_which_shardy_leaves_nothing_has_no_answer(monkeypatch):
    monkeypatch.setattr(propagated, "_FILE", "no such file")
    with pytest.raises(partitioner.NoAnswerError, match="Shardy left no module of jit_jaxoverlap"):
        tagged(lambda x, w: x @ w, X, W)
