"""Describe training software: what it stores, what it sends, and what it hides."""

from __future__ import annotations

from dataclasses import dataclass


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
        hides_data: whether sums over data run under the last micro-batch's backward pass.
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
    hides_data: bool = False
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
)
STACKS = {"jax": JAX, "megatron": MEGATRON}  # by the name of the command line
