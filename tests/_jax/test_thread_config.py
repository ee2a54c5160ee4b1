"""A thread that inherits JAX's configuration sees each context that the caller's thread has."""

from __future__ import annotations

import threading
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxoverlap._jax.thread_config import inheriting

MESH = jax.make_mesh((8,), ("x",))
DEVICE = jax.devices()[3]
CONTEXTS = {
    "precision": (
        lambda: jax.default_matmul_precision("highest"),
        lambda: jax.make_jaxpr(jnp.dot)(jnp.ones(2), jnp.ones(2)).eqns[-1].params["precision"],
    ),
    "x64": (lambda: jax.enable_x64(True), lambda: jnp.arange(2).dtype),
    "mesh": (lambda: jax.set_mesh(MESH), lambda: jax.sharding.get_abstract_mesh().shape),
    "device": (lambda: jax.default_device(DEVICE), lambda: jnp.ones(2).device),
    "no jit": (jax.disable_jit, lambda: jax.config.jax_disable_jit),
    "promotion": (
        lambda: jax.numpy_dtype_promotion("strict"),
        lambda: jax.config.jax_numpy_dtype_promotion,
    ),
}


def in_thread(work: Any) -> Any:
    seen: list[Any] = []
    thread = threading.Thread(target=lambda: seen.append(work()))
    thread.start()
    thread.join()
    return seen[0]


@pytest.mark.parametrize("name", CONTEXTS)
def test_a_context_of_the_callers_thread_holds(name):
    context, look = CONTEXTS[name]
    without = look()
    with context():
        work = inheriting(look)
        here, uninherited = look(), in_thread(look)
        assert in_thread(work) == here != uninherited
    assert in_thread(look) == look() == without, "nothing stays"
