"""The training software of published steps, where it is no stack of the package."""

from __future__ import annotations

from dataclasses import replace

from jaxoverlap.parallelism.stack import (
    JAX_LHS,
    MAXTEXT,
    MEGATRON_CORE,
    STACKS,
    TORCH,
    Stack,
)

# Megatron-DeepSpeed as vTrain's authors ran it: gradients are summed in 16 bits. Nothing is fitted;
# network_share is what NCCL's rings usually reach of a NIC.
MEGATRON_DEEPSPEED = Stack(
    name="Megatron-DeepSpeed",
    fused_attention=False,
    causal=False,
    dropout=True,
    reduced_bytes=2,
    gradient_passes=11,
    network_share=0.92,
)
# llm-foundry of 2023: PyTorch's FSDP1 without a compiler, Triton's first FlashAttention. Fitted to
# its bf16 steps of MPT 1B, 3B and 7B on each chip, by least squares of the relative error.
_FOUNDRY = Stack(
    name="llm-foundry (2023)",
    weight_bytes=4,
    optimizer_bytes=8,
    zero_stages=(),
    prefetches=True,
    hides_data=True,
    logit_bytes=4,  # flash-attn's fused cross-entropy, in place
    reserve=1.1,
)
FOUNDRY_H100 = replace(
    _FOUNDRY, memory_factor=2.0, attention_factor=3.0, hidden_cost=0.2, unhidden=0.7
)
FOUNDRY_A100 = replace(
    _FOUNDRY, memory_factor=1.35, attention_factor=1.5, hidden_cost=0.2, unhidden=1.0
)


# Containers of Megatron-Bridge whose recipes have a later stack, where models have experts: by a
# word of the column date. 26.06.01 took GPT-OSS back to the older one, as its steps show.
_LATER = ("26.06", "26.08")


def is_later(framework: str, model: str, chip: str, dtype: str, date: str) -> bool:
    """Return whether a step with experts ran in a container with Megatron-Core's stack of 2026."""
    if framework != "Megatron-Bridge" or dtype != "mxfp8" or not chip.startswith(("gb", "b3")):
        return False
    if model == "gpt-oss-120b" and "26.06.01" in date:
        return False
    fused = ("gpt-oss-120b", "deepseek-v3", "qwen3-30b-a3b", "qwen3-235b-a22b")
    return model in fused and any(container in date for container in _LATER)


def stack_of(framework: str, chip: str, dtype: str, *, later: bool = False) -> Stack | None:
    """Return the stack of a published row's framework on a chip; None for one not described.

    Args:
        later: whether it is Megatron-Core's of 2026 (`is_later`).
    """
    stacks = {
        "MaxText": MAXTEXT,
        "Pax": replace(JAX_LHS, scale_syncs=0),
        "AxLearn": JAX_LHS,
        "torchtitan": TORCH,
        "NeMo/Megatron": MEGATRON_CORE,
        "Megatron-Bridge": STACKS["megatron-core-2026"] if later else MEGATRON_CORE,
        "llm-foundry (Composer, torch FSDP1)": (
            FOUNDRY_A100 if chip.startswith("a100") else FOUNDRY_H100
        ),
    }
    stack = stacks.get(framework)
    return replace(stack, matmul_dtype=dtype) if stack else None
