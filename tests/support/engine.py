"""Run engines on a few devices, and compute in numpy what they should give."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxoverlap.passes.analysis.einsum import Einsum
from jaxoverlap.plan.plan import Variant

AXIS = "x"
RINGS = [
    Variant.parse(text)
    for text in ("one_way", "two_way", "direct", "one_way x 2", "two_way x 2", "direct x 2")
]
SLICED = [Variant("sliced", 2), Variant("sliced", 4)]


def per_device(n: int, body: Callable, *stacked: np.ndarray) -> Any:
    """Run `body` on each of n devices, with its own row of every argument; stack the results."""
    return jitted(n, body)(*stacked)


def jitted(n: int, body: Callable) -> Callable:
    mesh = Mesh(np.array(jax.devices()[:n]), (AXIS,))

    def on_device(*args):
        return jax.tree.map(lambda out: out[None], body(*(a[0] for a in args)))

    mapped = jax.shard_map(
        on_device, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS), check_vma=False
    )
    # XLA optimizes little here because these tests spend their time on compiling.
    return jax.jit(mapped, compiler_options={"xla_backend_optimization_level": 0})


def einsum(spec: str) -> Einsum:
    operands, out = spec.split("->")
    return Einsum(*operands.split(","), out, {})


def dot(spec: str) -> Callable:
    """Return a `LocalDot` of an einsum."""

    def multiply(lhs, rhs, dtype):
        return jnp.einsum(spec, lhs, rhs, preferred_element_type=dtype)

    return multiply


def normal(*shape: int, seed: int = 0, dtype: Any = np.float32) -> np.ndarray:
    """Return random values that are exact in `dtype`."""
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def shards(whole: np.ndarray, dim: int, n: int, outer: int = 1) -> np.ndarray:
    """Return each device's chunk of a dim, stacked: view(outer, n, size)[:, k]."""
    shape = whole.shape
    view = whole.reshape(*shape[:dim], outer, n, -1, *shape[dim + 1 :])
    chunks = [view.take(k, axis=dim + 1) for k in range(n)]
    return np.stack([c.reshape(*shape[:dim], -1, *shape[dim + 1 :]) for c in chunks])


def exact(spec: str, *operands: np.ndarray) -> np.ndarray:
    return np.einsum(spec, *(o.astype(np.float64) for o in operands))


def assert_close(got: Any, expected: np.ndarray, epsilon: float = 2e-6) -> None:
    """Check the error of all elements together, relative to their size; float32 unless said."""
    got = np.asarray(got).astype(np.float64)
    assert got.shape == expected.shape
    error = np.linalg.norm(got - expected) / np.linalg.norm(expected)
    assert error < epsilon, error


def equations(jaxpr: Any) -> Iterator[Any]:
    """Yield every equation at any depth."""
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from equations(inner)


def sent(n: int, body: Callable, *stacked: np.ndarray) -> tuple[int, int]:
    """Count the permutes in the jaxpr of a body, and the bytes that they carry."""
    permuted = [
        eqn.invars[0].aval
        for eqn in equations(jitted(n, body).trace(*stacked).jaxpr.jaxpr)
        if eqn.primitive.name == "ppermute"
    ]
    return len(permuted), sum(a.size * a.dtype.itemsize for a in permuted)
