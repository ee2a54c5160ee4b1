"""Every variant of every engine gives the right numbers and gradients, and sends its bytes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxoverlap.passes.rings import orders
from jaxoverlap.passes.rings.all_gather_matmul import Reader, all_gather_matmul
from jaxoverlap.passes.rings.all_to_all_matmul import all_to_all_matmul, matmul_all_to_all
from jaxoverlap.passes.rings.matmul_all_reduce import matmul_all_reduce
from jaxoverlap.passes.rings.matmul_reduce_scatter import Term, matmul_reduce_scatter
from jaxoverlap.plan.plan import Variant
from tests.support.engine import (
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

lengths_and_outers = pytest.mark.parametrize(("n", "outer"), [(2, 1), (4, 2), (8, 1)])
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
    """Return sizes by letter; a chunk of dim a divides by 2 outer shares of 4 pieces."""
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


@lengths_and_outers
def test_one_gather_serves_every_reader(n: int, outer: int):
    x = operand("gab", n, 0)
    others = [operand(other_letters(*r), n, 1 + i) for i, r in enumerate(READERS.items())]
    variants = EVERY if outer == 1 else [RINGS[0], RINGS[4], SLICED[0]]

    def body(shard):
        return [read(shard, others, v, n, outer, keep=True) for v in variants]

    by_variant = per_device(n, body, shards(x, 1, n, outer))
    for results, whole in by_variant:
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
    """Return, by term, both operands of every device: each has partial sums of its own."""
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


@lengths_and_outers
def test_terms_are_added_and_scattered(n: int, outer: int):
    operands = term_operands(n)
    variants = EVERY if outer == 1 else [RINGS[0], RINGS[4], RINGS[5], SLICED[0]]

    def body(*flat):
        pairs = list(zip(flat[::2], flat[1::2], strict=True))
        options = {"dim": 1, "axis": AXIS, "axis_size": n, "dtype": jnp.float32, "outer": outer}
        return [
            matmul_reduce_scatter(terms_of(pairs, outer), variant=v, **options) for v in variants
        ], [
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


@lengths_and_outers
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


@lengths_and_outers
def test_a_result_is_exchanged(n: int, outer: int):
    letters = [spec.split("->")[0].split(",") for spec in COMPUTED]
    operands = [
        [operand(side, n, 4 * t + s) for s, side in enumerate(of)] for t, of in enumerate(letters)
    ]
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


# -- one matmul of each kind: gradients, what is sent, dtypes --------------------------------------


def matmul(kind: str, n: int, variant: Variant, dtype=None):
    """Return f(x, w) on one device for x [a, b] and w [b, c]."""
    spec, at = "ab,bc->ac", {"axis": AXIS, "axis_size": n, "variant": variant}

    def one_reader(pass_, x, w, **options):
        reader = Reader(w, einsum(spec), "lhs", dot(spec), dtype or x.dtype)
        (result,), _ = pass_(x, [reader], dim=0, **at, **options)
        return result

    def one_term(pass_, x, w, **options):
        terms = [Term(x, w, einsum(spec), dot(spec))]
        return pass_(terms, dim=0, dtype=dtype or x.dtype, **at, **options)

    def body(x, w):
        if kind == "all_gather":
            return one_reader(all_gather_matmul, x, w)
        if kind == "all_to_all":
            return one_reader(all_to_all_matmul, x, w, wanted=1)
        if kind == "result all_to_all":
            return one_term(matmul_all_to_all, x, w, wanted=1)
        return one_term(matmul_all_reduce if kind == "all_reduce" else matmul_reduce_scatter, x, w)

    return body


def arguments(kind: str, n: int, dtype=np.float32) -> tuple[np.ndarray, np.ndarray]:
    """Return every device's x and w; if an operand is exchanged, each has its own rows of w."""
    rows, inner, columns = 4 * n, 4 * n, 4 * n
    x = normal(n, rows, inner, dtype=dtype)
    w = normal(n, inner // n if kind == "all_to_all" else inner, columns, seed=1, dtype=dtype)
    return (x[:, : rows // n] if kind == "all_gather" else x), w


def whole_of(kind: str, x, w):
    """Return what all devices together should give, in numpy or in jax.numpy; stacked."""
    n = x.shape[0]
    if kind == "all_gather":
        return x.reshape(-1, x.shape[2]) @ w
    if kind in ("reduce_scatter", "all_reduce"):
        total = (x @ w).sum(0)
        return (
            total.reshape(n, -1, total.shape[1])
            if kind == "reduce_scatter"
            else total[None].repeat(n, 0)
        )
    array = x if kind == "all_to_all" else x @ w  # what is exchanged: [device, a, wanted]
    rows, columns = array.shape[1:]
    moved = array.reshape(n, rows, n, columns // n).swapaxes(0, 2).swapaxes(1, 2)
    moved = moved.reshape(n, n * rows, columns // n)
    return moved @ w if kind == "all_to_all" else moved


KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "result all_to_all")


def variants_of(kind: str) -> list[Variant]:
    return EXCHANGES if "all_to_all" in kind else EVERY


@pytest.mark.parametrize("kind", KINDS)
def test_gradients(kind: str):
    n = 4
    x, w = arguments(kind, n)
    expected = whole_of(kind, x.astype(np.float64), w.astype(np.float64))
    cotangent = normal(*expected.shape, seed=2)

    def loss(x, w):
        return jnp.vdot(whole_of(kind, x, w), cotangent)

    with jax.enable_x64(True):
        wanted = jax.grad(loss, (0, 1))(x.astype(np.float64), w.astype(np.float64))

    def gradients(x, w, cotangent):
        by_variant = []
        for variant in variants_of(kind):
            result, transpose = jax.vjp(matmul(kind, n, variant), x, w)
            by_variant.append((result, *transpose(cotangent)))
        return by_variant

    for result, *got in per_device(n, gradients, x, w, cotangent):
        assert_close(result, expected)
        for g, exactly in zip(got, wanted, strict=True):
            assert_close(g, np.asarray(exactly))


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_sent_is_what_ring_says(kind: str):
    for n in (2, 5, 8):
        x, w = arguments(kind, n)
        moved = x[0] if kind in ("all_gather", "all_to_all") else whole_of(kind, x, w)[0]
        chunk_bytes = moved.nbytes // (1 if kind in ("all_gather", "reduce_scatter") else n)
        for variant in variants_of(kind):
            if variant.style == "sliced":
                continue
            hops, carried = sent(n, matmul(kind, n, variant), x, w)
            assert hops == orders.num_hops(variant, n)
            collective = kind.removeprefix("result ")
            total = orders.bytes_sent(collective, n, chunk_bytes)  # type: ignore[arg-type]
            assert carried == (total // 2 if kind == "all_reduce" else total)


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_is_added_with_care(kind: str):
    """No variant loses more than the rounding of operands' products and of each travelling sum."""
    n = 4
    x, w = arguments(kind, n, jnp.bfloat16)
    expected = whole_of(kind, x.astype(np.float64), w.astype(np.float64))
    bodies = [matmul(kind, n, v) for v in variants_of(kind)]
    for got in per_device(n, lambda x, w: [body(x, w) for body in bodies], x, w):
        assert got.dtype == jnp.bfloat16
        assert_close(got, expected, 0.008)


def test_direct_sums_are_kept_in_float32():
    """256 + 1 is 256 in bfloat16, so a sum that travels there would stay at it."""
    n = 8
    x = np.array([256, *[1] * (n - 1)], jnp.bfloat16).reshape(n, 1, 1).repeat(n, 1)
    got = per_device(
        n, matmul("reduce_scatter", n, Variant("direct")), x, np.ones((n, 1, 1), jnp.bfloat16)
    )
    np.testing.assert_array_equal(got, np.full((n, 1, 1), np.array(263, jnp.bfloat16)))


@pytest.mark.parametrize("kind", KINDS)
def test_a_chunk_that_does_not_divide_is_refused(kind: str):
    x, w = arguments(kind, 4)
    with pytest.raises(ValueError, match=r"size \d+ does not divide.* of 3 pieces.*fewer slices"):
        per_device(4, matmul(kind, 4, Variant("direct", 3)), x, w)


@pytest.mark.parametrize("kind", ["all_to_all", "result all_to_all"])
@pytest.mark.parametrize("style", ["one_way", "two_way"])
def test_an_exchange_has_no_ring(kind: str, style):
    x, w = arguments(kind, 2)
    with pytest.raises(ValueError, match=f"variant {style}.*no ring.*expected direct or sliced"):
        per_device(2, matmul(kind, 2, Variant(style)), x, w)
