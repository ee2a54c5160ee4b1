"""The training software of published steps, where it is no stack of the package."""

from __future__ import annotations

from dataclasses import replace

from jaxoverlap.parallelism.stack import JAX, JAX_LHS, MEGATRON_CORE, TORCH, Stack

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
# MaxText under XLA's scheduler with a profile, which gathers a layer ahead.
MAXTEXT = replace(JAX, prefetches=True, selective=("attention", "pointwise"))
# Each fp8 matmul of flax has a scale for each operand and for its cotangent, from all devices; XLA
# combines those that are ready together: 12 in a layer is an assumption.
MAXTEXT_FP8 = replace(MAXTEXT, matmul_dtype="fp8", scale_syncs=12)

# llm-foundry of 2023: PyTorch's FSDP1 without a compiler, Triton's first FlashAttention. Fitted to
# its bf16 steps of MPT 1B, 3B and 7B on each chip, by least squares of the relative error.
_FOUNDRY = Stack(
    name="llm-foundry (2023)",
    weight_bytes=4,
    optimizer_bytes=8,
    zero_stages=(),
    prefetches=True,
    hides_data=True,
)
FOUNDRY_H100 = replace(_FOUNDRY, memory_factor=2.0, attention_factor=3.0, hidden_cost=0.9)
FOUNDRY_A100 = replace(_FOUNDRY, memory_factor=1.35, attention_factor=1.5, hidden_cost=1.2)


def stack_of(framework: str, chip: str, dtype: str) -> Stack | None:
    """Return the stack of a published row's framework on a chip; None for one not described."""
    if framework == "MaxText":
        return MAXTEXT if dtype == "bf16" else replace(MAXTEXT_FP8, matmul_dtype=dtype)
    stacks = {
        "Pax": JAX_LHS,
        "AxLearn": JAX_LHS,
        "torchtitan": TORCH,
        "NeMo/Megatron": MEGATRON_CORE,
        "Megatron-Bridge": MEGATRON_CORE,
        "llm-foundry (Composer, torch FSDP1)": (
            FOUNDRY_A100 if chip.startswith("a100") else FOUNDRY_H100
        ),
    }
    stack = stacks.get(framework)
    return replace(stack, matmul_dtype=dtype) if stack else None
