"""Layers that are written out and alike are traced once, and the work grows with the step."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxoverlap import overlap
from jaxoverlap._jax import inlining
from jaxoverlap.passes.analysis.fingerprint import fingerprint
from jaxoverlap.passes.rewriting import rewrite, ring_functions

MESH = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
EXPLICIT = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)


def struct(shape: tuple[int, ...], *spec: Any, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(MESH, P(*spec)))


def layers(x, weights):
    """Apply layers that are gathered and scattered by turns, with FSDP's gathers before that."""
    for up, down in weights:
        h = lax.with_sharding_constraint(jnp.tanh(x @ up), NamedSharding(MESH, P("data", "model")))
        x = x + lax.with_sharding_constraint(h @ down, NamedSharding(MESH, P(("data", "model"))))
    return x


def gradient(x, weights):
    return jax.grad(lambda x, weights: layers(x, weights).sum(), (0, 1))(x, weights)


def many(depth: int) -> tuple[Any, list[Any]]:
    up, down = struct((64, 128), "data", "model"), struct((128, 64), "model", "data")
    return struct((64, 64), ("data", "model")), [(up, down)] * depth


@pytest.fixture
def traced(monkeypatch) -> Counter[str]:
    """Count how often the functions of rings are traced."""
    calls: Counter[str] = Counter()

    def counting(name: str, fn: Any) -> Any:
        return lambda *args: calls.update([name]) or fn(*args)

    for name in ("_arriving", "_leaving"):
        monkeypatch.setattr(ring_functions, name, counting(name, getattr(ring_functions, name)))
    return calls


def test_rings_of_equal_layers_are_traced_once(traced):
    counts = []
    for depth in (2, 8):
        inlining._TRACES.cache_clear()
        traced.clear()
        plan = overlap(jax.jit(gradient)).explain(*many(depth))
        assert len({d.ring for d in plan.decisions}) >= 4 * depth
        counts.append(dict(traced))
    assert counts[0] == counts[1]
    assert sum(counts[0].values()) < 20


def of_two(first: dict[str, Any], second: dict[str, Any]) -> Any:
    """Return a step of two matmuls that differ."""

    def product(x, w, *, rows=("model",), precision=None, wide=None, transposed=False, dtype=None):
        x, w = (x.astype(dtype), w.astype(dtype)) if dtype else (x, w)
        y = lax.dot(x, w, precision=precision, preferred_element_type=wide)
        y = y.T if transposed else y
        spec = P(None, *rows) if transposed else P(*rows)
        return lax.with_sharding_constraint(y, NamedSharding(MESH, spec))

    return lambda x, w: (product(x, w, **first), product(x, w, **second))


DIFFERENCES = [
    {"precision": "highest"},
    {"transposed": True},
    {"dtype": jnp.bfloat16},
    {"dtype": jnp.bfloat16, "wide": jnp.float32},
    {"rows": ("model", "data")},
    {"rows": (None, "model")},
    {"rows": ()},
]


@pytest.mark.parametrize("different", DIFFERENCES, ids=str)
def test_what_differs_is_traced_for_itself(different: dict[str, Any], monkeypatch):
    """Each matmul gets the ring that it gets where nothing is shared."""
    step = of_two({}, different)
    args = struct((32, 64), None, "model"), struct((64, 32), "model")
    inlining._TRACES.cache_clear()
    shared = [fingerprint(overlap(step).trace(*args).jaxpr) for _ in range(2)]
    monkeypatch.setattr(rewrite, "likeness", lambda ring: object())
    assert shared == [fingerprint(overlap(step).trace(*args).jaxpr)] * 2


@pytest.mark.parametrize("mesh", [MESH, EXPLICIT], ids=["automatic", "explicit"])
def test_a_shared_trace_is_the_same_program(mesh, monkeypatch):
    """A shared trace is the same down to the names and source lines of every operation."""

    def lies(value, *spec):
        at = NamedSharding(mesh, P(*spec))
        move = jax.sharding.reshard if mesh is EXPLICIT else lax.with_sharding_constraint
        return move(value, at)

    def step(x, *weights):
        rows = [lies(jnp.sin(i * x), "model", None) for i in range(len(weights))]
        return [lies(r, None, None) @ w for r, w in zip(rows, weights, strict=True)]

    def placed(*spec: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=NamedSharding(mesh, P(*spec)))

    args = placed("model", None), *[placed(None, "model")] * 3

    def text() -> str:
        lowered = overlap(jax.jit(lambda *args: step(*args))).lower(*args)
        assert len(lowered.plan.decisions) >= 3
        return lowered.as_text(debug_info=True)

    inlining._TRACES.cache_clear()
    texts = []
    for likeness in (rewrite.likeness, rewrite.likeness, lambda ring: object()):
        monkeypatch.setattr(rewrite, "likeness", likeness)
        texts.append(text())
    shared, again, unshared = texts
    assert shared == again == unshared
    assert "all_gather_matmul.0" in shared and "all_gather_matmul.1" in shared
