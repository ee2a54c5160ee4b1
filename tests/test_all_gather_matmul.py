"""Gathering rings give the right numbers; `Ring` also serves the tests of the other two kinds."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoverlap

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


def error(got, exact: np.ndarray) -> float:
    """Return the error of all elements together, relative to their size."""
    difference = np.asarray(got).astype(np.float64) - exact
    return float(np.linalg.norm(difference) / np.linalg.norm(exact))


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
    found = zip(
        gradients(step)(x, y),
        gradients(plain)(x, y),
        ring.exact_gradients(x, y, cotangent),
        strict=True,
    )
    rounding = float(jnp.finfo(dtype).eps) / 2
    for got, expected, exact in found:
        assert error(got, exact) <= 2 * error(expected, exact) + rounding


KIND = "all_gather_matmul"
RINGS = {
    "lhs free": Ring("ab,bc->ac", P("model"), P(None, "model"), P(None, "model")),
    "rhs free": Ring("ab,bc->ac", P("model"), P(None, "model"), P("model")),
    "lhs contracted": Ring("ab,bc->ac", P(None, "model"), P(None, "model"), P(None, "model")),
    "rhs contracted": Ring("ab,bc->ac", P("model"), P("model"), P("model")),
    "batch": Ring(
        "gab,gbc->gac", P("model"), P(None, None, "model"), P(None, None, "model")
    ),
    "one of two contracted dims, batched": Ring(
        "gabd,gbcd->gac", P("data", None, "model"), P("data", None, "model"), P("data", None, "model")
    ),
    "four dims and three, as attention's q": Ring(
        "gab,bhd->gahd", P("data", "model"), P(None, "model"), P("data", None, "model")
    ),
    "vector": Ring("b,bc->c", P("model"), P(None, "model"), P("model")),
    "a second axis gathers": Ring(
        "gab,bc->gac",
        P("data", "model"),
        P("data", "model"),
        P("data", None, "model"),
        others=("data all_gather",),
    ),
    "a second axis sums up": Ring(
        "gab,gac->bc", P("data", "model"), P("data", None, "model"), P("data", "model"),
        others=("data reduce_scatter",),
    ),
    "a dim that both axes shard": Ring(
        "ab,bc->ac", P(("data", "model")), P(None, "model"), P("data", "model")
    ),
    "a dim that both axes gather, model the major": Ring(
        "ab,bc->ac", P(("model", "data")), P(None, ("data", "model")), P(None, ("data", "model")),
        others=("data all_gather",),
    ),
    "a contracted dim that both axes gather": Ring(
        "ab,bc->ac", P(("data", "model")), P(("model", "data")), P(("data", "model")),
        others=("data all_gather",),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RINGS)
def test_numbers(name: str):
    check_numbers(RINGS[name], KIND, 4, np.float32)


@pytest.mark.parametrize("axis_size", [2, 8])
@pytest.mark.parametrize("name", ["lhs free", "rhs free", "lhs contracted", "rhs contracted"])
def test_rings_of_other_lengths(name: str, axis_size: int):
    check_numbers(RINGS[name], KIND, axis_size, np.float32)


@pytest.mark.parametrize("name", ["lhs free", "rhs contracted", "a second axis sums up"])
def test_bfloat16(name: str):
    check_numbers(RINGS[name], KIND, 4, jnp.bfloat16)


@pytest.mark.parametrize("name", ["rhs free", "lhs contracted"])
def test_float64(name: str):
    with jax.enable_x64(True):
        check_numbers(RINGS[name], KIND, 4, np.float64)


@pytest.mark.parametrize(
    "name",
    [
        "lhs free",
        "rhs contracted",
        "a second axis gathers",
        "a contracted dim that both axes gather",
    ],
)
def test_gradients(name: str):
    check_gradients(RINGS[name], KIND, 4)


@pytest.mark.parametrize("name", ["lhs free", "lhs contracted"])
def test_the_results_dtype_is_the_one_asked_for(name: str):
    plain, step = RINGS[name].overlapped(mesh_of(4), KIND, preferred_element_type=jnp.float32)
    x, y = RINGS[name].operands(jnp.bfloat16)
    assert step(x, y).dtype == plain(x, y).dtype == jnp.float32
    assert error(step(x, y), RINGS[name].exact(x, y)) < 1e-6


def test_contracted_chunks_are_added_up_in_float32():
    """Sums are in float32: 256 + 1 is 256 in bfloat16, so one device would stay at 256."""
    ring = RINGS["lhs contracted"]
    _, step = ring.overlapped(mesh_of(8), KIND)
    x = np.tile(np.array([256, *[1] * 7], jnp.bfloat16), (8, 1))
    got = step(x, np.ones((8, 8), jnp.bfloat16))
    np.testing.assert_array_equal(got, np.full((8, 8), 263, jnp.bfloat16))
