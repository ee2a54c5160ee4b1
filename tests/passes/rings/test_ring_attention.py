"""Ring attention gives what plain attention does, forward and backward."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxoverlap import ring
from tests.support.attention import plain
from tests.support.engine import AXIS, assert_close, normal, per_device, sent, shards

VARIANTS = ["one_way", "two_way", "direct", "one_way x 2", "two_way x 2", "direct x 2"]
BATCH, PER_DEVICE, HEADS, HEAD = 2, 4, 4, 5


def operands(n: int, kv_heads: int, keys: int = PER_DEVICE) -> list[np.ndarray]:
    """Return whole q, k, v and a cotangent."""
    of = {"q": (PER_DEVICE, HEADS), "k": (keys, kv_heads), "v": (keys, kv_heads), "y": (PER_DEVICE, HEADS)}  # fmt: skip
    return [normal(BATCH, n * s, h, HEAD, seed=i) for i, (s, h) in enumerate(of.values())]


def exactly(q, k, v, cotangent, causal: bool, scale: float) -> list[np.ndarray]:
    """Return the result and the gradients of q, k and v, in float64."""
    with jax.enable_x64(True):
        wide = [np.asarray(a, np.float64) for a in (q, k, v)]
        y, transpose = jax.vjp(lambda *a: plain(*a, causal, scale), *wide)
        return [np.asarray(a) for a in (y, *transpose(np.asarray(cotangent, np.float64)))]


def ringed(n: int, whole: list[np.ndarray], variants: list[str], **options) -> list[list]:
    """Return, by variant, the result and the gradients of every device."""

    def body(q, k, v, cotangent):
        by_variant = []
        for variant in variants:

            def attention(q, k, v, variant=variant):
                return ring.ring_attention(q, k, v, AXIS, variant=variant, **options)

            y, transpose = jax.vjp(attention, q, k, v)
            by_variant.append((y, *transpose(cotangent)))
        return by_variant

    return per_device(n, body, *(shards(a, 1, n) for a in whole))


@pytest.mark.parametrize(("n", "causal"), [(2, False), (4, True)])
def test_numbers_and_gradients(n: int, causal: bool):
    whole = operands(n, kv_heads=2)
    expected = exactly(*whole, causal, HEAD**-0.5)
    for got in ringed(n, whole, VARIANTS, causal=causal):
        for g, wanted in zip(got, expected, strict=True):
            assert_close(g, shards(wanted, 1, n))


@pytest.mark.parametrize("variant", ["one_way", "two_way"])
def test_a_longer_ring(variant: str):
    whole = operands(8, kv_heads=HEADS)
    expected = exactly(*whole, True, 0.3)
    (got,) = ringed(8, whole, [variant], causal=True, scale=0.3)
    for g, wanted in zip(got, expected, strict=True):
        assert_close(g, shards(wanted, 1, 8))


def test_cross_attention_has_keys_of_another_length():
    whole = operands(4, kv_heads=1, keys=6)
    expected = exactly(*whole, False, HEAD**-0.5)
    (got,) = ringed(4, whole, ["one_way"])
    for g, wanted in zip(got, expected, strict=True):
        assert_close(g, shards(wanted, 1, 4))


def test_bfloat16_keeps_its_sums_in_float32():
    whole = [a.astype(jnp.bfloat16) for a in operands(4, kv_heads=2)]
    expected = exactly(*whole, True, HEAD**-0.5)
    (got,) = ringed(4, whole, ["one_way"], causal=True)
    for g, wanted in zip(got, expected, strict=True):
        assert g.dtype == jnp.bfloat16
        assert_close(g, shards(wanted, 1, 4), 0.02)


def test_scores_of_any_size():
    """Scores of a thousand are beyond what exp takes: the greatest score is taken away first."""
    q, k, v, cotangent = operands(4, kv_heads=2)
    whole = [q * 300, k, v, cotangent]
    expected = exactly(*whole, True, 1.0)
    (got,) = ringed(4, whole, ["two_way"], causal=True, scale=1.0)
    assert_close(got[0], shards(expected[0], 1, 4), 1e-4)
    assert all(np.isfinite(g).all() for g in got)


def test_one_device_needs_no_hop():
    whole = operands(1, kv_heads=2)
    expected = exactly(*whole, True, HEAD**-0.5)
    (got,) = ringed(1, whole, ["one_way"], causal=True)
    for g, wanted in zip(got, expected, strict=True):
        assert_close(g, wanted[None])


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_is_sent(variant: str):
    """k and v go round once; backward they do again, and as many permutes bring their sums home."""
    n, slices = 4, 2 if " x 2" in variant else 1
    q, k, v, cotangent = (shards(a, 1, n) for a in operands(n, kv_heads=2))

    def forward(q, k, v):
        return ring.ring_attention(q, k, v, AXIS, variant=variant)

    def backward(q, k, v, cotangent):
        return jax.vjp(forward, q, k, v)[1](cotangent)

    once = 2 * (n - 1)
    assert sent(n, forward, q, k, v) == (once * slices, once * k[0].nbytes)
    assert sent(n, backward, q, k, v, cotangent) == (3 * once * slices, 3 * once * k[0].nbytes)


Q = np.ones((4, 2, 4, 4, 8), np.float32)
MISTAKES = {
    r"expected \[batch, sequence/N, heads, head\] each": (Q[:, 0], Q, Q, {}),
    r"expected k and v alike, with q's batch and head sizes": (Q, Q, Q[:, :, :2], {}),
    r"expected kv heads \(3\) to divide 4 heads": (Q, Q[:, :, :, :3], Q[:, :, :, :3], {}),
    r"a causal mask wants as many keys as queries": (Q[:, :, :2], Q, Q, {"causal": True}),
    r"variant sliced x 2: expected one_way, two_way or direct": (Q, Q, Q, {"variant": "sliced x 2"}),
    r"size 4 does not divide into 1 chunks of 3 pieces": (Q, Q, Q, {"variant": "direct x 3"}),
}  # fmt: skip


@pytest.mark.parametrize("problem", MISTAKES)
def test_mistakes(problem: str):
    *arrays, options = MISTAKES[problem]
    with pytest.raises(ValueError, match=problem):
        per_device(4, lambda q, k, v: ring.ring_attention(q, k, v, AXIS, **options), *arrays)
