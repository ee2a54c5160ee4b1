"""Ring attention by cuDNN's kernel: numbers by a stand-in of its signature, schedules for pods."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoverlap
from jaxoverlap import ring
from jaxoverlap._jax import fused_attention
from jaxoverlap.flags import options_for
from tests.support.attention import plain, stand_in, stand_in_backward
from tests.support.engine import AXIS, assert_close, jitted, normal, per_device, shards
from tests.support.pods import pytestmark as pods

BATCH, PER_DEVICE, HEADS, HEAD = 2, 4, 4, 8


@pytest.fixture
def emulated(monkeypatch):
    monkeypatch.setattr(fused_attention, "refusal", lambda q, k, v: None)
    kernel = fused_attention.BlockKernel(stand_in, stand_in_backward)
    monkeypatch.setattr(fused_attention, "CUDNN", kernel)


@pytest.mark.parametrize(
    ("n", "causal", "balanced", "kv_heads", "variant", "keys"),
    [
        (8, True, True, 2, "one_way", 4),
        (8, True, False, 2, "one_way", 4),
        (8, False, True, 4, "two_way", 4),
        (4, True, True, 4, "two_way", 4),
        (4, True, False, 4, "two_way", 4),
        (3, True, True, 1, "direct", 4),
        (4, False, True, 2, "direct x 2", 6),
        (1, True, True, 2, "one_way", 4),
    ],
)
def test_numbers_and_gradients(emulated, n, causal, balanced, kv_heads, variant, keys):
    """In float64 to the last digits, of unsharded attention."""

    def body(q, k, v, cotangent):
        def attention(q, k, v):
            return ring.ring_attention(
                q, k, v, AXIS, causal=causal, variant=variant, implementation="cudnn",
                balanced=balanced,
            )  # fmt: skip

        y, transpose = jax.vjp(attention, q, k, v)
        return (y, *transpose(cotangent))

    with jax.enable_x64(True):
        sizes = (PER_DEVICE, HEADS), (keys, kv_heads), (keys, kv_heads), (PER_DEVICE, HEADS)
        q, k, v, cotangent = (
            normal(BATCH, n * s, h, HEAD, seed=i, dtype=np.float64)
            for i, (s, h) in enumerate(sizes)
        )
        y, transpose = jax.vjp(lambda *a: plain(*a, causal, HEAD**-0.5), q, k, v)
        expected = [np.asarray(x) for x in (y, *transpose(cotangent))]
        got = per_device(n, body, *(shards(x, 1, n) for x in (q, k, v, cotangent)))
    for g, wanted in zip(got, expected, strict=True):
        assert_close(g, shards(wanted, 1, n), 1e-14)


def test_each_device_has_the_same_work(emulated, monkeypatch):
    """Under a causal mask: the own block, then half a block a hop, two pairs of halves at once."""
    shapes = []

    def counted(q, k, v, *, causal, scale):
        shapes.append((q.shape, k.shape, causal))
        return stand_in(q, k, v, causal=causal, scale=scale)

    kernel = fused_attention.BlockKernel(counted, stand_in_backward)
    monkeypatch.setattr(fused_attention, "CUDNN", kernel)
    x = np.ones((4, BATCH, PER_DEVICE, HEADS, HEAD), np.float32)
    body = lambda q: ring.ring_attention(q, q, q, AXIS, causal=True, implementation="cudnn")  # noqa: E731
    jitted(4, body).trace(x)
    full, half = (BATCH, 4, HEADS, HEAD), (2 * BATCH, 2, HEADS, HEAD)
    assert shapes == [(full, full, True)] + [(half, half, False)] * 3


Q = jnp.ones((4, 2, 4, 4, 8), jnp.bfloat16)
MISTAKES = {
    "implementation='flash': expected None, 'xla' or 'cudnn'": (Q, {"implementation": "flash"}),
    "expected an even sequence on each device": (Q[:, :, :3], {"causal": True}),
    "variant one_way x 2: expected no slices with a causal mask": (
        Q,
        {"causal": True, "variant": "one_way x 2"},
    ),
}


@pytest.mark.parametrize("problem", MISTAKES)
def test_mistakes(problem: str, monkeypatch):
    monkeypatch.setattr(fused_attention, "refusal", lambda q, k, v: None)
    q, options = MISTAKES[problem]
    options = {"implementation": "cudnn"} | options
    with pytest.raises(ValueError, match=problem):
        per_device(4, lambda q: ring.ring_attention(q, q, q, AXIS, **options), np.asarray(q))


# -- for pods -------------------------------------------------------------------------------------


N = 4


def compiled(causal: bool, *, heads=(16, 16), dtype=jnp.bfloat16, pod="1x4", **options):
    """Compile the ring there and back for a pod; q has 4096 positions on a device."""
    mesh = jaxoverlap.pod_mesh(f"h100-sxm:{pod}", {AXIS: N})

    def body(q, k, v, dy):
        def attention(q, k, v):
            return ring.ring_attention(
                q, k, v, AXIS, causal=causal, implementation="cudnn", **options
            )

        y, transpose = jax.vjp(attention, q, k, v)
        return (y, *transpose(dy))

    spec = P(None, AXIS)
    mapped = jax.shard_map(
        body, mesh=mesh, in_specs=spec, out_specs=spec, axis_names={AXIS}, check_vma=False
    )
    q, k = (
        jax.ShapeDtypeStruct((2, N * 4096, h, 128), dtype, sharding=NamedSharding(mesh, spec))
        for h in heads
    )
    return jax.jit(mapped, compiler_options=options_for(mesh)).lower(q, k, k, q).compile()


class TestOnPods:
    pytestmark = pods

    @pytest.mark.parametrize(("causal", "balanced"), [(False, False), (True, False), (True, True)])
    def test_hops_are_hidden(self, causal: bool, balanced: bool):
        """All but the last two sums, which go home; a balanced ring exchanges halves, exposed."""
        done = compiled(causal, balanced=balanced, heads=(16, 4))
        text = done.as_text()
        assert text.count('custom_call_target="__cudnn$fmhaSoftmax"') == N
        assert text.count('custom_call_target="__cudnn$fmhaSoftmaxBackward"') == N
        assert not re.search(r"f32\[[^]]*4096,4096", text)  # no scores
        hops = jaxoverlap.audit(text).collectives
        assert [hop.kind for hop in hops] == ["collective-permute"] * len(hops)
        exchanges = 16 if balanced else 0
        assert len(hops) == 6 * (N - 1) + exchanges
        assert sum(not hop.covered for hop in hops) <= 2 + exchanges

    def test_what_cannot_be_is_a_mistake(self):
        with pytest.raises(ValueError, match=r"'cudnn' with q float32.*give implementation='xla'"):
            compiled(False, dtype=jnp.float32)

    def test_other_axes_must_be_manual(self):
        mesh = jaxoverlap.pod_mesh("h100-sxm:1x8", {"data": 2, AXIS: 4})
        spec = P(None, AXIS)

        def body(q):
            return ring.ring_attention(q, q, q, AXIS, implementation="cudnn")

        mapped = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, axis_names={AXIS})
        q = jax.ShapeDtypeStruct((2, 512, 4, 64), jnp.bfloat16)
        with pytest.raises(ValueError, match="axes data not manual: XLA cannot partition"):
            jax.eval_shape(mapped, q)
