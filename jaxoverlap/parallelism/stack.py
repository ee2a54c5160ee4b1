"""Describe training software: what it stores, what it sends, and what it hides."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class Stack:
    """The training software, as far as time and memory depend on it.

    Attributes:
        name: for people.
        fused_attention: whether scores never reach memory (FlashAttention).
        fused_in_context: whether it is fused where `context` splits the sequence, too.
        score_bytes: bytes of a score, where scores reach memory, without dropout.
        causal: whether masked scores are left out of the work.
        dropout: whether activations and scores are dropped at random, as the first GPTs were.
        weight_bytes: a stored weight's, in the precision of matmuls.
        gradient_bytes: a stored gradient's.
        reduced_bytes: a gradient's, as it is summed over data.
        optimizer_bytes: the state's of a parameter: Adam's moments, and master weights.
        gradient_passes: reads and writes of all gradients between backward pass and Adam: scaling,
            a search for infinities, the norm, clipping.
        split_sends: whether stages send each device's part of an activation (scatter and gather,
            Narayanan et al., arXiv 2104.04473, section 4.1) and not whole copies.
        lockstep: whether stages share a clock, as those of `jaxoverlap.parallelism.pipeline`: a
            piece keeps its input alone, and its backward pass runs it forward again.
        sums_every_micro_batch: axes over which gradients are summed in every micro-batch: XLA's
            automatic axes have no partial sums that wait for the last one.
        gathers_tables: whether embedding and head gather their table over the tensor axis too, and
            split tokens over it, where Megatron splits rows of the table.
        even_shards: whether only shards of equal size are possible, as of jax.Arrays.
        zero_stages: the stages of ZeRO that it has.
        gathers_matrices: whether FSDP moves each matrix of a layer by itself, as XLA does, and not
            the layer as one message: that many times the latency.
        prefetches: whether FSDP's gathers run a layer ahead without `jaxoverlap.overlap`, as XLA's
            latency-hiding scheduler and PyTorch's FSDP make them.
        keeps_gathered: whether stages of a pipeline keep what FSDP gathers, and their sums of
            gradients, for all micro-batches of a step.
        tensor_exposed: share of tensor parallelism's collectives that stays exposed under kernels
            that send and multiply at once (Transformer Engine's userbuffers); None: there are none.
        selective: what "selective" computes again in the backward pass: "attention", "pointwise",
            and the matmuls "qkv", "out", "up" (of a gated MLP both), "gate" (one of both), "down".
        attention_factor: seconds of fused attention, over those of the chip's tables.
        memory_factor: bytes of kernels that are no matmuls, over those counted here: what runs
            operation by operation writes and reads what a compiler fuses.
        bias_passes: how often a matmul's result is read or written for its bias, forward and
            backward, where the model has biases.
        hidden_cost: seconds that a step takes longer for each second of FSDP's collectives and of
            sums over data that runs under kernels: contention, and gaps before and behind it.
        scale_syncs: small all-reduces over all replicas, in a layer and micro-batch, that nothing
            hides: those of the scales of fp8, where each matmul has its own.
        matmul_dtype: dtype of a layer's matmuls, as the cost model names it: "bf16", "fp8", "mxfp8"
            or "nvfp4".
        hides_data: whether sums over data run under the last micro-batch's backward pass.
        sends_once: whether a token goes to each host once, and on one host to each device once,
            whatever the number of its experts there (DeepEP, HybridEP); False: a copy for each
            expert.
        expert_factor: seconds of experts' matmuls, over those of one matmul of as many rows: they
            are grouped, and their loads uneven.
        expert_launch_s: seconds that the host takes to launch the kernels of a layer with experts,
            forward and backward: small micro-batches take no less.
        permutes: how often a token's copy for each of its experts is read and written as it is
            sorted by expert and back, forward; as often backward.
        capacity: slots of experts over the tokens that choose them: what is computed and sent.
        dispatch_group: tokens of a group that matmuls with a mask dispatch to experts (GShard,
            arXiv 2006.16668); 0: tokens are sorted and moved without.
        saved: bytes of activations that a layer keeps, over Korthikanti et al.'s count; the copies
            of a scan's stacked residuals are counted where it is above 1.
        halves_exposed: share of tensor parallelism's collectives that stays exposed, or slows
            kernels, where the batch runs in two halves, one's collectives under the other's
            kernels; None: it never does.
        halves_compute: seconds that halves add, over those of a layer's kernels.
        compute_factor: seconds of kernels, over those of the chip's tables.
        network_share: bytes per second over the network, over those of NCCL's model for the
            cluster's links.
        buffer_bytes: buffers of collectives, and what else does not grow.
        micro_batch_bytes: what a micro-batch in flight keeps beside its layers' activations.
        reserve: memory that the allocator takes from the device, over what the step needs.
        source: where fitted factors come from; "" if nothing was fitted.
    """

    name: str
    fused_attention: bool = True
    fused_in_context: bool = True
    score_bytes: int = 2
    causal: bool = True
    dropout: bool = False
    weight_bytes: int = 2
    gradient_bytes: int = 4
    reduced_bytes: int = 4
    optimizer_bytes: int = 12
    gradient_passes: int = 3
    split_sends: bool = True
    lockstep: bool = False
    sums_every_micro_batch: tuple[str, ...] = ()
    gathers_tables: bool = False
    even_shards: bool = False
    zero_stages: tuple[int, ...] = (1, 2)
    gathers_matrices: bool = False
    prefetches: bool = False
    keeps_gathered: bool = False
    tensor_exposed: float | None = None
    selective: tuple[str, ...] = ("attention",)
    attention_factor: float = 1.0
    memory_factor: float = 1.0
    bias_passes: tuple[int, int] = (0, 0)
    hidden_cost: float = 0.0
    scale_syncs: int = 0
    matmul_dtype: str = "bf16"
    hides_data: bool = False
    sends_once: bool = False
    expert_factor: float = 1.0
    expert_launch_s: float = 0.0
    permutes: int = 0
    capacity: float = 1.0
    dispatch_group: int = 0
    saved: float = 1.0
    halves_exposed: float | None = None
    halves_compute: float = 0.0
    compute_factor: float = 1.0
    network_share: float = 1.0
    buffer_bytes: float = 0.0
    micro_batch_bytes: float = 0.0
    reserve: float = 1.0
    source: str = ""

    def fuses(self, context: int) -> bool:
        """Return whether attention is one kernel on a context axis of a size."""
        return self.fused_attention and (context == 1 or self.fused_in_context)


# Megatron-LM of 2022, as Korthikanti et al. (arXiv 2205.05198) timed it: unfused attention that
# computes all scores, dropout, main gradients of 32 bits; between backward pass and Adam gradients
# are scaled, searched, normed, clipped and zeroed. Nothing is fitted.
MEGATRON = Stack(
    name="Megatron-LM (2022)",
    fused_attention=False,
    causal=False,
    dropout=True,
    gradient_passes=11,
)
# This project's trainers: 32-bit weights that are cast, Adam without master weights. Attention is
# counted as a kernel that keeps no scores; the trainers' own einsums take longer.
JAX = Stack(
    name="JAX",
    weight_bytes=4,
    optimizer_bytes=8,
    fused_in_context=False,
    score_bytes=4,
    lockstep=True,
    sums_every_micro_batch=("expert", "context"),
    gathers_tables=True,
    even_shards=True,
    zero_stages=(1,),
    gathers_matrices=True,
    hides_data=True,
    # Fitted to two steps by simulation of XLA's schedule (a GPT of four layers on H100s, tensor
    # parallel over 8, and over 4 beside FSDP over 2), not to steps on GPUs.
    capacity=1.25,
    dispatch_group=1024,
    saved=2.0,
    halves_exposed=0.25,
    halves_compute=0.12,
    reserve=1.05,
    # Fitted to MaxText's published steps of Llama2-70B on 64 to 2048 H100s, whose schedule
    # XLA made with a profile (NVIDIA/dgxc-benchmarking, maxtext/README_70b.md).
    hidden_cost=0.2,
    bias_passes=(2, 1),
)
# XLA's latency-hiding scheduler alone: what it hides without a profile costs most of what it takes.
# Fitted to Pax's published steps of GPT-3 5B on 16 to 128 H100s (the same, paxml/README_5b.md).
JAX_LHS = replace(
    JAX,
    name="JAX, XLA's latency-hiding scheduler without a profile",
    prefetches=True,
    hidden_cost=0.75,
    selective=("attention", "pointwise"),
)
# torchtitan: FSDP2, torch.compile, PyTorch's own attention; every second matmul again. Fitted to
# its published steps of Llama3.1-8B with FSDP (benchmarks/llama3_h100_202412_torchtitan.md).
TORCH = Stack(
    name="PyTorch FSDP2",
    weight_bytes=4,
    optimizer_bytes=8,
    zero_stages=(),
    prefetches=True,
    keeps_gathered=True,
    hides_data=True,
    selective=("out", "gate"),
    memory_factor=2.0,
    attention_factor=1.4,
    hidden_cost=0.9,
)
# Megatron-Core of 2025 with Transformer Engine, as NeMo and Megatron-Bridge run it. Fitted to
# NeMo's published steps of Llama3.1-8B in bf16 (NVIDIA/dgxc-benchmarking, llama3.1/README_8b.md);
# tensor_exposed is the JAX stack's share of halves, and agrees with Megatron-Bridge's Llama3-70B;
# expert_factor and expert_launch_s are fitted to Megatron-Bridge's Qwen3 30B-A3B: in bf16 with
# HybridEP on 16 H100s, and with a micro-batch of one on B200s, where four take 1.4 times as long.
MEGATRON_CORE = Stack(
    name="Megatron-Core (2025)",
    prefetches=True,
    hides_data=True,
    tensor_exposed=0.25,
    sends_once=True,
    expert_factor=2.0,
    expert_launch_s=7.5e-3,
    permutes=4,
    memory_factor=1.3,
    hidden_cost=0.2,
)
STACKS = {  # by the name of the command line
    "jax": JAX,
    "jax-lhs": JAX_LHS,
    "megatron": MEGATRON,
    "megatron-core": MEGATRON_CORE,
    "torch": TORCH,
}
