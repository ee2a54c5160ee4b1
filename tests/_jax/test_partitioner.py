"""jax and XLA are as `_jax/partitioner.py` takes them to be, each on its own."""

from __future__ import annotations

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxoverlap._jax import jits, partitioner

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


def test_part_of_an_axis_is_said_in_xlas_words():
    mesh = jax.make_mesh((8,), ("model",), axis_types=(AxisType.Auto,))
    x = jax.ShapeDtypeStruct((32, 16), "float32", sharding=NamedSharding(mesh, P("model")))
    answers: dict[str, object] = {}

    def step(x):
        return jnp.tanh(x.reshape(2, 16, 16))

    traced = jax.jit(step).trace(x)
    (reshape, *rest) = traced.jaxpr.eqns
    probe = partitioner.probe(reshape.outvars[0], "reshaped", answers, mesh.shape, reshape)
    jaxpr = traced.jaxpr.jaxpr if hasattr(traced.jaxpr, "jaxpr") else traced.jaxpr
    jaxpr = jaxpr.replace(eqns=[reshape, probe, *rest])
    params = jits.with_jaxpr(jits.traced_params(traced), jaxpr, {})
    params["name"] = partitioner.new_name()
    partitioner.ask(jits.traced_with(traced, params).lower(), mesh)
    assert answers == {"reshaped": None}
