"""Query-split attention gives what plain attention does, forward and backward."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxoverlap import ring
from jaxoverlap.passes.rings import orders as forms
from jaxoverlap.plan.plan import Variant
from tests.support.attention import plain
from tests.support.engine import AXIS, RINGS, SLICED, assert_close, normal, per_device, sent, shards

EVERY = [str(v) for v in (*RINGS, *SLICED[:1])]
BATCH, PER_DEVICE, HEADS, HEAD, D = 2, 4, 4, 5, 6  # HEADS on each device


def operands(n: int, kv_heads: int, keys: int = PER_DEVICE) -> list[np.ndarray]:
    """Return whole q, k, v, wo and a cotangent; kv_heads are on each device."""
    kv = (BATCH, n * keys, n * kv_heads, HEAD)
    q = (BATCH, n * PER_DEVICE, n * HEADS, HEAD)
    shapes = (q, kv, kv, (n * HEADS, HEAD, D), (BATCH, n * PER_DEVICE, D))
    return [normal(*shape, seed=i) for i, shape in enumerate(shapes)]


def split(n: int, whole: list) -> list[np.ndarray]:
    """Return each device's heads of q, k, v and wo, and rows of the result, of as many as given."""
    return [shards(a, dim, n) for a, dim in zip(whole, (2, 2, 2, 0, 1), strict=False)]


def exactly(n: int, whole: list[np.ndarray], causal: bool, scale: float) -> list[np.ndarray]:
    """Return the result and the gradients of q, k, v and wo in float64, each device's part."""

    def projected(q, k, v, wo):
        return jnp.einsum("bshd,hdm->bsm", plain(q, k, v, causal, scale), wo)

    with jax.enable_x64(True):
        *args, cotangent = (np.asarray(a, np.float64) for a in whole)
        y, transpose = jax.vjp(projected, *args)
        gradients = [np.asarray(g) for g in transpose(cotangent)]
        return [shards(np.asarray(y), 1, n), *split(n, gradients)]


def ringed(n: int, whole: list[np.ndarray], variants: list[str], **options) -> list[list]:
    """Return, by variant, the result and the gradients of every device."""

    def body(*args):
        *mine, cotangent = args
        by_variant = []
        for variant in variants:

            def attention(*a, variant=variant):
                return ring.query_split_attention(*a, AXIS, variant=variant, **options)

            y, transpose = jax.vjp(attention, *mine)
            by_variant.append((y, *transpose(cotangent)))
        return by_variant

    return per_device(n, body, *split(n, whole))


def check(got, expected: list[np.ndarray], epsilon: float = 2e-6) -> None:
    for g, wanted in zip(got, expected, strict=True):
        assert_close(g, wanted, epsilon)


@pytest.mark.parametrize("causal", [False, True])
def test_numbers_and_gradients(causal: bool):
    whole = operands(4, kv_heads=2)
    expected = exactly(4, whole, causal, HEAD**-0.5)
    for got in ringed(4, whole, EVERY if causal else EVERY[:1], causal=causal):
        check(got, expected)


@pytest.mark.parametrize(("n", "variant"), [(1, "one_way"), (2, "two_way"), (8, "sliced x 4")])
def test_rings_of_other_lengths(n: int, variant: str):
    whole = operands(n, kv_heads=HEADS)
    expected = exactly(n, whole, True, 0.3)
    (got,) = ringed(n, whole, [variant], causal=True, scale=0.3)
    check(got, expected)


def test_cross_attention_has_keys_of_another_length():
    whole = operands(4, kv_heads=1, keys=3)
    expected = exactly(4, whole, False, HEAD**-0.5)
    (got,) = ringed(4, whole, ["sliced x 2"])
    check(got, expected)


def test_bfloat16():
    """No variant loses more than the rounding of what is multiplied and of each travelling sum."""
    whole = [a.astype(jnp.bfloat16) for a in operands(4, kv_heads=2)]
    expected = exactly(4, whole, True, HEAD**-0.5)
    for got in ringed(4, whole, ["one_way", "direct"], causal=True):
        assert {g.dtype for g in got} == {jnp.dtype(jnp.bfloat16)}
        check(got, expected, 0.01)


def test_scores_of_any_size():
    """Scores of a thousand are beyond what exp takes: the greatest score is taken away first."""
    q, *others = operands(4, kv_heads=2)
    whole = [q * 300, *others]
    expected = exactly(4, whole, True, 1.0)
    (got,) = ringed(4, whole, ["two_way"], causal=True, scale=1.0)
    assert_close(got[0], expected[0], 1e-4)
    assert all(np.isfinite(g).all() for g in got)


@pytest.mark.parametrize("check_vma", [True, False])
def test_between_projections_under_shard_map(check_vma: bool):
    """Users write it so: x and keys of the whole sequence are on each device, heads are split."""
    n, mesh = 4, Mesh(np.array(jax.devices()[:4]), (AXIS,))
    q, k, v, wo, cotangent = operands(n, kv_heads=HEADS)
    heads, rows = P(None, None, AXIS), P(None, AXIS)

    def loss(*args):
        y = jax.shard_map(
            lambda *a: ring.query_split_attention(*a, AXIS, causal=True),
            mesh=mesh,
            in_specs=(heads, heads, heads, P(AXIS)),
            out_specs=rows,
            check_vma=check_vma,
        )(*args)
        return jnp.vdot(y, cotangent)

    whole = [q, k, v, wo]
    gradients = jax.jit(jax.grad(loss, (0, 1, 2, 3)))(*whole)
    expected = exactly(n, [*whole, cotangent], True, HEAD**-0.5)[1:]
    check(split(n, [np.asarray(g) for g in gradients]), expected)


@pytest.mark.parametrize("variant", [str(v) for v in RINGS])
def test_what_is_sent(variant: str):
    """Sums go round once, as in the projection's own ring; then, backward, their gradient does."""
    n = 4
    *mine, cotangent = split(n, operands(n, kv_heads=2))

    def forward(*mine):
        return ring.query_split_attention(*mine, AXIS, variant=variant)

    def there_and_back(*args):
        return jax.vjp(forward, *args[:-1])[1](args[-1])

    chunk_bytes = cotangent[0].nbytes
    hops = forms.num_hops(Variant.parse(variant), n)
    carried = forms.bytes_sent("reduce_scatter", n, chunk_bytes)
    assert sent(n, forward, *mine) == (hops, carried)
    assert sent(n, there_and_back, *mine, cotangent) == (2 * hops, 2 * carried)


def test_backward_keeps_only_its_operands():
    """The forward pass hands on no scores, but only what it was given."""
    n = 4
    *mine, _ = split(n, operands(n, kv_heads=HEADS))

    def kept(*mine):
        _, transpose = jax.vjp(lambda *a: ring.query_split_attention(*a, AXIS), *mine)
        return jax.tree.leaves(transpose)

    residuals = per_device(n, kept, *mine)
    assert sum(f[0].nbytes for f in residuals) == sum(m[0].nbytes for m in mine)


Q = np.ones((4, 2, 8, 4, 5), np.float32)
WO = np.ones((4, 4, 5, 6), np.float32)
MISTAKES = {
    r"expected q, k and v \[batch.*\] and wo \[heads/N, head, d\]": (Q, Q, Q, WO[:, 0], {}),
    r"expected k and v alike, with q's batch and head sizes": (Q, Q, Q[:, :, :4], WO, {}),
    r"expected kv heads \(3\) to divide 4 heads": (Q, Q[..., :3, :], Q[..., :3, :], WO, {}),
    r"expected wo to have q's heads and head size \(4, 5\)": (Q, Q, Q, WO[:, :3], {}),
    r"wo has dtype int32": (Q, Q, Q, WO.astype(np.int32), {}),
    r"wants as many keys as queries": (Q, Q[:, :, :6], Q[:, :, :6], WO, {"causal": True}),
    r"4 devices of axis 'x' divide, not 6": (Q[:, :, :6], Q, Q, WO, {}),
    r"size 8 does not divide into 4 chunks of 3 pieces": (Q, Q, Q, WO, {"variant": "direct x 3"}),
    r"variant plain: expected a ring": (Q, Q, Q, WO, {"variant": "plain"}),
}  # fmt: skip


@pytest.mark.parametrize("problem", MISTAKES)
def test_mistakes(problem: str):
    *arrays, options = MISTAKES[problem]
    with pytest.raises(ValueError, match=problem):
        per_device(4, lambda *a: ring.query_split_attention(*a, AXIS, **options), *arrays)
