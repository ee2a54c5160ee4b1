"""Every variant of every engine: numbers against float64, gradients, and what is sent."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxoverlap.passes import ring
from jaxoverlap.passes.all_gather_matmul import Reader, all_gather_matmul
from jaxoverlap.passes.all_to_all_matmul import all_to_all_matmul, matmul_all_to_all
from jaxoverlap.passes.matmul_all_reduce import matmul_all_reduce
from jaxoverlap.passes.matmul_reduce_scatter import Term, matmul_reduce_scatter
from jaxoverlap.plan import Variant
from tests.engine import (
    AXIS,
    RINGS,
    SLICED,
    assert_close,
    dot,
    einsum,
    exact,
    normal,
    per_device,
    sent,
    shards,
)

lengths = pytest.mark.parametrize("n", [2, 4, 8])
EXCHANGES = [Variant("direct"), Variant("direct", 2), *SLICED]
EVERY = [*RINGS, *SLICED]
# The travelling operand is x [g, a, b] and its dim a is gathered: free, contracted, batch, and on
# the other side.
READERS = {
    "gab,bc->gac": "lhs",
    "gab,gac->gbc": "lhs",
    "gab,acb->gac": "lhs",
    "ca,gab->gcb": "rhs",
}


def sizes_of(n: int) -> dict[str, int]:
    """By letter; a chunk of dim a divides by 2 outer shares of 4 pieces."""
    return {"g": 2, "a": 8 * n, "b": 3, "c": 5, "d": 8 * n}


def operand(letters: str, n: int, seed: int, dtype=np.float32) -> np.ndarray:
    return normal(*(sizes_of(n)[c] for c in letters), seed=seed, dtype=dtype)


def other_letters(spec: str, side: str) -> str:
    lhs, rhs = spec.split("->")[0].split(",")
    return rhs if side == "lhs" else lhs


def expected_of(spec: str, side: str, x: np.ndarray, other: np.ndarray) -> np.ndarray:
    return exact(spec, *((x, other) if side == "lhs" else (other, x)))


def read(shard, others, variant: Variant, n: int, outer: int = 1, **options):
    readers = [
        Reader(other, einsum(spec), side, dot(spec), other.dtype, outer, outer)  # type: ignore[arg-type]
        for (spec, side), other in zip(READERS.items(), others, strict=True)
    ]
    options = {"dim": 1, "axis": AXIS, "axis_size": n, "variant": variant, "outer": outer} | options
    return all_gather_matmul(shard, readers, **options)


@lengths
@pytest.mark.parametrize("outer", [1, 2])
def test_one_gather_serves_every_reader(n: int, outer: int):
    x = operand("gab", n, 0)
    others = [operand(other_letters(*r), n, 1 + i) for i, r in enumerate(READERS.items())]
    variants = EVERY if outer == 1 else [RINGS[0], RINGS[4], SLICED[0]]

    def body(shard):
        return [read(shard, others, v, n, outer, keep=True) for v in variants]

    found = per_device(n, body, shards(x, 1, n, outer))
    for results, whole in found:
        for device in range(n):
            np.testing.assert_array_equal(whole[device], x)
            for got, (spec, side), other in zip(results, READERS.items(), others, strict=True):
                assert_close(got[device], expected_of(spec, side, x, other))


# Matmuls whose results [g, a, c] are added and scattered along a: free in each operand, batch.
TERMS = ["gab,bc->gac", "gbc,ab->gac", "gab,acb->gac"]


def terms_of(operands, outer: int = 1) -> list[Term]:
    return [
        Term(lhs, rhs, einsum(spec), dot(spec), outer, outer)
        for spec, (lhs, rhs) in zip(TERMS, operands, strict=True)
    ]


def term_operands(n: int, dtype=np.float32) -> list[list[np.ndarray]]:
    """By term, both operands of every device: each has partial sums of its own."""
    lhs_rhs = [spec.split("->")[0].split(",") for spec in TERMS]
    return [
        [
            np.stack([operand(side, n, 10 * t + 2 * d + s, dtype) for d in range(n)])
            for s, side in enumerate(sides)
        ]
        for t, sides in enumerate(lhs_rhs)
    ]


def total_of(operands) -> np.ndarray:
    pairs = zip(TERMS, operands, strict=True)
    return sum(exact(spec, x, y) for spec, of in pairs for x, y in zip(*of, strict=True))  # type: ignore[return-value]


@lengths
@pytest.mark.parametrize("outer", [1, 2])
def test_terms_are_added_and_scattered(n: int, outer: int):
    operands = term_operands(n)
    variants = EVERY if outer == 1 else [RINGS[0], RINGS[4], RINGS[5], SLICED[0]]

    def body(*flat):
        pairs = list(zip(flat[::2], flat[1::2], strict=True))
        options = {"dim": 1, "axis": AXIS, "axis_size": n, "dtype": jnp.float32, "outer": outer}
        return [matmul_reduce_scatter(terms_of(pairs, outer), variant=v, **options) for v in variants], [
            matmul_all_reduce(terms_of(pairs, outer), variant=v, **options)
            for v in (variants[0], variants[-1])
        ]

    scattered, reduced = per_device(n, body, *(o for pair in operands for o in pair))
    whole = total_of(operands)
    for got in scattered:
        assert_close(got, shards(whole, 1, n, outer))
    for got in reduced:
        for device in range(n):
            assert_close(got[device], whole)


# x [g, a, d] is sharded along a and wanted along d: a free, contracted or batch, d contracted, free
# or batch.
EXCHANGED = {
    "gad,dc->gac": "lhs",
    "gad,gac->gdc": "lhs",
    "gad,dac->gdac": "lhs",
    "ca,gad->gcd": "rhs",
}


@lengths
@pytest.mark.parametrize("outer", [1, 2])
def test_one_exchange_serves_every_reader(n: int, outer: int):
    x = operand("gad", n, 0)
    letters = [other_letters(*r) for r in EXCHANGED.items()]
    others = [operand(side, n, 1 + i) for i, side in enumerate(letters)]
    variants = EXCHANGES if outer == 1 else EXCHANGES[1:3]

    def body(shard, *mine):
        readers = [
            Reader(other, einsum(spec), side, dot(spec), jnp.float32, outer, outer)  # type: ignore[arg-type]
            for (spec, side), other in zip(EXCHANGED.items(), mine, strict=True)
        ]
        options = {"dim": 1, "wanted": 2, "axis": AXIS, "axis_size": n, "keep": True}
        outers = {"outer": outer, "wanted_outer": outer}
        return [all_to_all_matmul(shard, readers, variant=v, **options, **outers) for v in variants]

    mine = [
        shards(other, side.index("d"), n, outer) if "d" in side else np.stack([other] * n)
        for other, side in zip(others, letters, strict=True)
    ]
    wanted = shards(x, 2, n, outer)
    for results, whole in per_device(n, body, shards(x, 1, n, outer), *mine):
        np.testing.assert_array_equal(whole, wanted)
        for got, (spec, side), other in zip(results, EXCHANGED.items(), mine, strict=True):
            for device in range(n):
                assert_close(got[device], expected_of(spec, side, wanted[device], other[device]))


# Matmuls whose results [g, a, d] are computed along a and wanted along d: d free, a free; d free,
# a batch; d batch, a free.
COMPUTED = ["gab,bd->gad", "gab,adb->gad", "gadb,dgb->gad"]


@lengths
@pytest.mark.parametrize("outer", [1, 2])
def test_a_result_is_exchanged(n: int, outer: int):
    letters = [spec.split("->")[0].split(",") for spec in COMPUTED]
    operands = [[operand(side, n, 4 * t + s) for s, side in enumerate(of)] for t, of in enumerate(letters)]
    variants = EXCHANGES if outer == 1 else EXCHANGES[1:3]

    def body(*flat):
        pairs = zip(COMPUTED, flat[::2], flat[1::2], strict=True)
        terms = [Term(x, y, einsum(spec), dot(spec), outer, outer) for spec, x, y in pairs]
        options = {"dim": 1, "wanted": 2, "axis": AXIS, "axis_size": n, "dtype": jnp.float32}
        outers = {"outer": outer, "wanted_outer": outer}
        return [matmul_all_to_all(terms, variant=v, **options, **outers) for v in variants]

    stacked = [
        shards(o, side.index("a"), n, outer) if "a" in side else np.stack([o] * n)
        for of, sides in zip(operands, letters, strict=True)
        for o, side in zip(of, sides, strict=True)
    ]
    whole = sum(exact(spec, *of) for spec, of in zip(COMPUTED, operands, strict=True))
    for got in per_device(n, body, *stacked):
        assert_close(got, shards(whole, 2, n, outer))  # type: ignore[arg-type]
