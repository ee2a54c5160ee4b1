"""JAX's questions about cuDNN and the GPU are answered for a pod's chip, and for nothing else."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoverlap
from jaxoverlap._jax import fused_attention
from jaxoverlap._jax.fused_attention import cudnn
from tests.support.pods import needs_plugin

ASKS = ("check_cudnn_version", "check_compute_capability", "is_cuda_compute_capability_equal")


@pytest.fixture
def fresh(monkeypatch):
    """JAX's own functions again, and no pod that was described."""
    for name in ASKS:
        own = getattr(cudnn, name)
        monkeypatch.setattr(cudnn, name, getattr(own, "__wrapped__", own))
    monkeypatch.setattr(fused_attention, "_last_described", [])
    fused_attention._installed.cache_clear()
    yield
    fused_attention._installed.cache_clear()


def asked() -> tuple[object, bool, bool]:
    try:
        version: object = cudnn.check_cudnn_version()
    except RuntimeError as error:
        version = str(error)
    return (
        "an error" if isinstance(version, str) else version,
        cudnn.check_compute_capability("9.0"),
        cudnn.is_cuda_compute_capability_equal("9.0"),
    )


def test_without_a_pod_jax_answers(fresh):
    assert asked() == ("an error", False, False)
    with fused_attention.tracing_for(None):
        assert asked() == ("an error", False, False)


def test_the_last_described_pod_is_answered_for_where_there_is_no_gpu(fresh):
    fused_attention.answers_for((10, 0))
    assert asked() == (fused_attention.CUDNN_VERSION, True, False)
    fused_attention.answers_for((8, 0))
    assert asked() == (fused_attention.CUDNN_VERSION, False, False)


def test_a_real_gpu_answers_for_itself_unless_a_pod_is_traced_for(fresh, monkeypatch):
    monkeypatch.setattr(fused_attention, "_has_gpu", lambda: True)
    fused_attention.answers_for((9, 0))
    assert asked() == ("an error", False, False)  # JAX's own, here without a GPU
    with fused_attention.tracing_for((9, 0)):
        assert asked() == (fused_attention.CUDNN_VERSION, True, True)


@needs_plugin
def test_the_step_of_each_pod_is_traced_for_its_own_chip():
    """An A100 has no heads of 256; of two pods the last described is not the one that counts."""

    def step(q):
        return jax.nn.dot_product_attention(q, q, q, implementation="cudnn")

    def traced(pod: str):
        mesh = jaxoverlap.pod_mesh(pod, {"data": 8})
        q = jax.ShapeDtypeStruct(
            (8, 128, 2, 256), jnp.bfloat16, sharding=NamedSharding(mesh, P("data"))
        )
        jaxoverlap.pod_mesh(
            "h100-sxm:1x8" if pod.startswith("a100") else "a100-sxm-80:1x8", {"data": 8}
        )
        return jaxoverlap.overlap(jax.jit(step)).trace(q)

    assert traced("h100-sxm:1x8")
    with pytest.raises(NotImplementedError, match="head dim must be <= 128"):
        traced("a100-sxm-80:1x8")


def test_the_block_kernels_are_jax_s_own(fresh):
    """The backward primitive takes what `jax.vjp` gives it, and the log of sums is per query."""
    fused_attention.answers_for((9, 0))
    q, k = (jax.ShapeDtypeStruct((2, 128, heads, 64), jnp.bfloat16) for heads in (4, 2))
    sums = jax.ShapeDtypeStruct((2, 4, 128), jnp.float32)
    how = dict(causal=True, scale=0.5)
    assert jax.eval_shape(lambda *a: fused_attention.block_forward(*a, **how), q, k, k) == (q, sums)
    mine = jax.make_jaxpr(lambda *a: fused_attention.block_backward(*a, **how))(q, k, k, q, sums, q)

    def theirs(q, k, v, to_out):
        def attend(*qkv):
            return jax.nn.dot_product_attention(
                *qkv, scale=0.5, is_causal=True, implementation="cudnn"
            )

        return jax.vjp(attend, q, k, v)[1](to_out)

    (own,) = (e for e in mine.eqns if "bwd" in e.primitive.name)
    (jax_s,) = (e for e in jax.make_jaxpr(theirs)(q, k, k, q).eqns if "bwd" in e.primitive.name)
    assert own.primitive is jax_s.primitive
    assert [v.aval.shape for v in own.invars] == [v.aval.shape for v in jax_s.invars]
    assert own.params == jax_s.params


def test_what_the_kernel_does_not_take_is_said(fresh):
    fused_attention.answers_for((9, 0))
    like = lambda size, dtype: jax.ShapeDtypeStruct((2, 128, 4, size), dtype)  # noqa: E731
    assert fused_attention.refusal(*[like(64, jnp.bfloat16)] * 3) is None
    assert "head dim must be" in str(fused_attention.refusal(*[like(60, jnp.bfloat16)] * 3))
    assert "must be fp16/bf16" in str(fused_attention.refusal(*[like(64, jnp.float32)] * 3))
