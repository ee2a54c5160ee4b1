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
