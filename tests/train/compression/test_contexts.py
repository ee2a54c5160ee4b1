"""Programs that are compiled in a thread are those of the thread that needs them."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen

from jaxoverlap.train import compression
from jaxoverlap.train.compression import lgreco, none, power_sgd, uniform
from jaxoverlap.train.programs import Programs
from tests.train.compression.problem import mesh_of

PARAMS = [np.eye(64, dtype=np.float32)] * 3
BATCH = np.random.default_rng(0).normal(size=(8, 64)).astype(np.float32)


def loss(params: Any, batch: Any) -> Any:
    for w in params:
        batch = jnp.tanh(batch @ w)
    return jnp.mean(batch**2)


def step_of(loss: Any, sync: Any) -> Any:
    gradients = jax.value_and_grad(loss)
    return compression.data_parallel(gradients, optax.sgd(1e-2), mesh_of(), sync=sync)


def test_a_program_is_lowered_in_the_callers_thread_and_compiled_in_another():
    programs, threads = Programs(), []

    def compiled() -> Any:
        threads.append(threading.get_ident())
        return jax.config.jax_default_matmul_precision

    def lower() -> Any:
        threads.append(threading.get_ident())
        return SimpleNamespace(compile=compiled)

    with jax.default_matmul_precision("highest"):
        programs.beside("key", lower)
    assert programs.get("key", lambda: "made here") == "highest"
    assert threads[0] == threading.get_ident() != threads[1]


def test_axis_rules_of_flax_hold_for_the_programs_of_later_settings():
    """They are in a threading.local of flax's, which no other thread has."""
    seen = []

    def with_rules(params: Any, batch: Any) -> Any:
        seen.append(linen.get_logical_axis_rules())
        return loss(params, batch)

    rules = (("batch", "data"),)
    step = step_of(with_rules, lgreco(power_sgd(4), every=9, start=2))
    state = step.init(PARAMS)
    with linen.logical_axis_rules(rules):
        for _ in range(3):  # the program of the third is compiled in a thread from the first on
            state, _ = step(state, BATCH)
    assert len(seen) == 2
    assert {tuple(one) for one in seen} == {rules}


def test_another_context_of_jax_is_another_program():
    """A compiled program was found by its arguments alone, whatever precision was requested."""
    seen = []

    def at_precision(params: Any, batch: Any) -> Any:
        seen.append(jax.config.jax_default_matmul_precision)
        return loss(params, batch)

    step = step_of(at_precision, uniform(none()))
    state = step.init(PARAMS)
    for precision in (None, "highest", None, "highest"):
        with jax.default_matmul_precision(precision):
            state, _ = step(state, BATCH)
    assert list(dict.fromkeys(seen)) == [None, "highest"]
    assert len(step._programs) == 2
