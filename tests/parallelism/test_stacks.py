"""Training software has rules of what it combines and hides: Megatron-Core's, with sources."""

from dataclasses import replace

import pytest

from jaxoverlap.cost.find import cost_model
from jaxoverlap.parallelism import work
from jaxoverlap.parallelism.bounds import LowerBounds
from jaxoverlap.parallelism.configuration import Configuration
from jaxoverlap.parallelism.iteration_time import IterationTime
from jaxoverlap.parallelism.placement import place
from jaxoverlap.parallelism.published.models import named_model
from jaxoverlap.parallelism.recompute import saved_by
from jaxoverlap.parallelism.search import menu, values_of
from jaxoverlap.parallelism.stack import JAX, MEGATRON, MEGATRON_CORE, STACKS, TORCH

LATER = STACKS["megatron-core-2026"]


def terms(name, config, stack, pod, batch, sequence=None):
    cost = cost_model(pod)
    times = IterationTime(named_model(name, sequence=sequence), cost, stack, global_batch=batch)
    return times.terms(config, place(config, cost.cluster))


def again(name, stack=MEGATRON_CORE):
    """Return what each choice of a menu computes again."""
    model = named_model(name)
    values = values_of(model)
    return {frozenset(values - saved_by(choice)) for choice in menu(stack, model)}


def test_recompute_is_by_architecture():
    """moe_act is of experts, mla_up_proj of latent attention; a dense model has neither."""
    assert {"activation"} in again("qwen3-30b-a3b") and {"qkv"} in again("deepseek-v3")
    dense = again("llama3-70b")
    assert {"activation"} not in dense and {"qkv"} not in dense
    assert {"norms"} in dense and {"gate", "up", "activation"} in dense
    assert {"qkv"} not in again("qwen3-30b-a3b")
    assert {"qkv"} in again("llama3-70b", JAX)


@pytest.mark.parametrize(
    ("axes", "dtype", "reason"),
    [
        ({"fsdp": 64}, "mxfp8", "with bf16, fp8 only"),
        ({"data": 64, "zero_stage": 2}, "nvfp4", "with bf16, fp8 only"),
        ({"fsdp": 16, "pipeline": 4}, "fp8", "without a pipeline only"),
        ({"data": 16, "pipeline": 4, "zero_stage": 2}, "bf16", "without a pipeline only"),
    ],
)
def test_megatrons_fsdp_has_limits(axes, dtype, reason):
    model, stack = named_model("llama3-70b"), replace(MEGATRON_CORE, matmul_dtype=dtype)
    assert reason in Configuration(**axes).illegal(model, 256, stack)
    whole = replace(Configuration(**axes), zero_stage=1, fsdp=1, data=64 // axes.get("pipeline", 1))
    assert not whole.illegal(model, 256, stack)
    assert not Configuration(**axes).illegal(model, 256, replace(TORCH, matmul_dtype=dtype))


def test_later_containers_shard_with_mxfp8():
    stack = replace(LATER, matmul_dtype="mxfp8")
    assert not Configuration(fsdp=64).illegal(named_model("llama3-70b"), 256, stack)


def test_sends_between_interleaved_stages_run_under_kernels():
    """Without interleaving they are waited for, as they are where the pipeline fills."""
    config = Configuration(data=4, pipeline=16, model=4, interleave=8, sequence_parallel=True)
    ask = ("llama3-405b", config, MEGATRON_CORE, "gb200:64x4", 1536)
    hidden = terms(*ask)
    waited = terms(*ask[:2], replace(MEGATRON_CORE, overlaps_stages=False), *ask[3:])
    assert 0 < hidden.pipeline < 0.1 * waited.pipeline
    plain = replace(config, interleave=1)
    one, other = (
        terms(ask[0], plain, stack, *ask[3:]).pipeline
        for stack in (MEGATRON_CORE, replace(MEGATRON_CORE, overlaps_stages=False))
    )
    assert one == other > 0
    assert terms("gpt-175b", Configuration(pipeline=16, interleave=2), MEGATRON, "a100-sxm-80:2x8",
                 64).pipeline > 0  # fmt: skip


def test_a_slow_network_is_not_hidden_between_stages():
    config = Configuration(pipeline=16, model=8, interleave=2, sequence_parallel=True)
    fast, slow = (
        terms("llama3-70b", config, MEGATRON_CORE, f"h100-sxm:16x8@{gbit}", 64).pipeline
        for gbit in (3200, 40)
    )
    assert slow > 50 * fast


def test_beside_fsdp_tensor_collectives_are_exposed_before_blackwell():
    config = Configuration(fsdp=16, model=4, sequence_parallel=True)
    for pod, times in (("h100-sxm:8x8", 1 / MEGATRON_CORE.tensor_exposed), ("gb200:16x4", 1.0)):
        beside, alone = (
            terms("llama3-70b", config, stack, pod, 256).model
            for stack in (MEGATRON_CORE, replace(MEGATRON_CORE, one_queue=False))
        )
        assert beside == pytest.approx(times * alone)


def test_kernels_hide_no_more_sends_to_experts_than_they_take():
    """Over 40 Gbit/s a host they take longer than the layer: the rest is exposed."""
    config = Configuration(expert=64, recompute="none")
    stack = replace(LATER, matmul_dtype="mxfp8")
    near, far = (terms("qwen3-30b-a3b", config, stack, pod, 64).expert
                 for pod in ("gb200:16x4", "b200:8x8@40"))  # fmt: skip
    assert near == 0 < far
    cost = cost_model("b200:8x8@40")
    times = IterationTime(named_model("qwen3-30b-a3b"), cost, stack, global_batch=64)
    step = times.terms(config, place(config, cost.cluster))
    assert LowerBounds(times).step_s(config) <= step.step_s


def test_nvfp4_is_read_more_often_as_it_is_cast():
    model, config = named_model("llama3-70b"), Configuration()
    moved = {
        dtype: work.layer(model, config, replace(MEGATRON_CORE, matmul_dtype=dtype)).backward
        for dtype in ("bf16", "mxfp8", "nvfp4")
    }
    bare = moved["bf16"].memory_bytes
    casts = {d: moved[d].memory_bytes - bare for d in ("mxfp8", "nvfp4")}
    assert casts["nvfp4"] == pytest.approx(casts["mxfp8"] * 7.125 / 4)


def test_four_splits_of_llama_70b_have_the_order_that_was_measured():
    """Megatron-Bridge, skills/mbridge-perf-memory-tuning: 704, 668, 594 and 509 TFLOP/s of a GPU.

    32 H100s, fp8, 4096 tokens; nothing is fitted to them.
    """
    stack = replace(MEGATRON_CORE, matmul_dtype="fp8")
    split = Configuration(model=4, pipeline=4, interleave=5, data=2, sequence_parallel=True,
                          recompute="none", zero_stage=1)  # fmt: skip
    splits = (
        split,
        replace(split, pipeline=8, data=1),
        replace(split, recompute="mlp"),
        replace(split, model=8, data=1),
    )
    seconds = [terms("llama3-70b", s, stack, "h100-sxm:4x8", 32, 4096).step_s for s in splits]
    assert seconds == sorted(seconds)
    assert seconds[1] / seconds[0] == pytest.approx(704 / 668, rel=0.05)
