"""Rings on a mesh of CPU devices, held against the plain matmul."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoverlap
from tests.support.precision import error

SIZES = {"a": 16, "b": 32, "c": 16, "d": 24, "g": 8, "h": 8}


@cache
def mesh_of(axis_size: int) -> Mesh:
    """Return a mesh of all eight devices: `axis_size` along "model", the others along "data"."""
    auto = (AxisType.Auto,) * 2
    return jax.make_mesh((8 // axis_size, axis_size), ("data", "model"), axis_types=auto)


@dataclass(frozen=True)
class Ring:
    """One matmul that must become a ring: its einsum, and the specs of operands and result.

    The einsum's result letters stand in `lax.dot_general`'s order: batch, left free, right free.
    """

    einsum: str
    lhs: P
    rhs: P
    out: P
    others: tuple[str, ...] = ()

    @property
    def sides(self) -> tuple[str, str, str]:
        operands, out = self.einsum.split("->")
        return (*operands.split(","), out)  # type: ignore[return-value]

    def operands(self, dtype, count: int = 2) -> list[np.ndarray]:
        """Return random operands and, third, a cotangent of the result; all exact in `dtype`."""
        rng = np.random.default_rng(0)
        shapes = [[SIZES[c] for c in side] for side in self.sides]
        return [rng.standard_normal(s).astype(dtype) for s in shapes[:count]]

    def step(self, mesh: Mesh, **options):
        """Return the matmul as a jitted step, with the specs as its shardings."""
        lhs, rhs, out = self.sides
        contracted = [c for c in lhs if c in rhs and c not in out]
        batch = [c for c in out if c in lhs and c in rhs]
        dims = tuple(
            tuple(tuple(map(s.index, cs)) for s in (lhs, rhs)) for cs in (contracted, batch)
        )
        at = [NamedSharding(mesh, spec) for spec in (self.lhs, self.rhs, self.out)]

        def matmul(x, y):
            return jax.lax.dot_general(x, y, dims, **options)

        return jax.jit(matmul, in_shardings=(at[0], at[1]), out_shardings=at[2])

    def overlapped(self, mesh: Mesh, kind: str, **options) -> tuple:
        """Return (plain, overlapped) steps, and check that the second has the wanted ring."""
        plain = self.step(mesh, **options)
        step = jaxoverlap.overlap(plain)
        plan = step.explain(*self.operands(np.float32))
        (ring,) = plan.decisions
        assert (ring.kind, ring.axis) == (kind, "model"), plan
        assert tuple(o.split(",")[0] for o in ring.others) == self.others, plan
        return plain, step

    def exact(self, x, y) -> np.ndarray:
        return np.einsum(self.einsum, x.astype(np.float64), y.astype(np.float64))

    def exact_gradients(self, x, y, cotangent) -> tuple[np.ndarray, np.ndarray]:
        lhs, rhs, out = self.sides
        x, y, cotangent = (v.astype(np.float64) for v in (x, y, cotangent))
        to_lhs = np.einsum(f"{out},{rhs}->{lhs}", cotangent, y)
        return to_lhs, np.einsum(f"{out},{lhs}->{rhs}", cotangent, x)


def check_numbers(ring: Ring, kind: str, axis_size: int, dtype) -> None:
    """Check the ring against the plain matmul: at most twice its error, and one rounding more."""
    plain, step = ring.overlapped(mesh_of(axis_size), kind)
    x, y = ring.operands(dtype)
    exact = ring.exact(x, y)
    expected, got = plain(x, y), step(x, y)
    assert got.dtype == expected.dtype == dtype
    assert got.sharding.is_equivalent_to(expected.sharding, got.ndim)
    rounding = float(jnp.finfo(dtype).eps) / 2
    assert error(got, exact) <= 2 * error(expected, exact) + rounding
    assert error(got, exact) < 8 * rounding


def check_gradients(ring: Ring, kind: str, axis_size: int, dtype=np.float32) -> None:
    plain, step = ring.overlapped(mesh_of(axis_size), kind)
    x, y, cotangent = ring.operands(dtype, 3)

    def gradients(f):
        return jax.jit(jax.grad(lambda x, y: jnp.sum(f(x, y) * cotangent), (0, 1)))

    assert "ppermute" in str(jax.make_jaxpr(gradients(step))(x, y))
    triples = zip(
        gradients(step)(x, y),
        gradients(plain)(x, y),
        ring.exact_gradients(x, y, cotangent),
        strict=True,
    )
    rounding = float(jnp.finfo(dtype).eps) / 2
    for got, expected, exact in triples:
        assert error(got, exact) <= 2 * error(expected, exact) + rounding
