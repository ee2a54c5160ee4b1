"""Describe training software: what it stores, what it sends, and what it hides."""

from __future__ import annotations

from dataclasses import dataclass

from jaxoverlap._util.files import converted, entries


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
            Narayanan et al., arXiv 2104.04473, section 4.1) and not full copies.
        lockstep: whether a pipeline is one SPMD program whose stages share a clock, as those of
            `jaxoverlap.parallelism.pipeline`: a virtual stage keeps its input alone, and its
            backward pass runs it forward again.
        sums_every_micro_batch: axes over which gradients are summed in every micro-batch: XLA's
            automatic axes have no partial sums that wait for the last one.
        gathers_tables: whether embedding and head gather their table over the tensor axis too, and
            split tokens over it, where Megatron splits rows of the table.
        overlaps_stages: whether sends between interleaved stages run under the next chunk's kernels
            (Megatron's overlap_p2p_comm).
        fsdp_dtypes: dtypes of matmuls with which it shards weights or gradients (FSDP, ZeRO-2).
        fsdp_in_pipelines: whether it shards weights or gradients in a pipeline too.
        one_queue: whether, before Blackwell, its FSDP and its hidden tensor parallelism ask for
            different numbers of CUDA's queues (CUDA_DEVICE_MAX_CONNECTIONS), so that beside FSDP
            tensor collectives are counted as exposed.
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
        overlaps: whether `jaxoverlap.overlap` hides its steps' collectives.
        recomputes: values of a layer that are computed again, or are not, together
            (`recompute.VALUES`); any of these groups, or the whole layer.
        recomputes_experts, recomputes_latent: more of these groups where a model has experts, and
            where its attention is latent.
        keeps_anyway: values that are kept though they are computed again: Megatron runs attention
            again for what its kernel keeps, and keeps its result.
        skips_unread: whether the backward pass leaves out what it does not read: of a layer that is
            computed again as a whole, the MLP's last matmul.
        experts_on_model: whether the tensor axis can split experts whole.
        saves_narrow: whether what only matmuls read is kept in their dtype.
        attention_factor: seconds of fused attention, over those of the chip's tables.
        memory_factor: bytes of kernels that are no matmuls, over those counted here: what runs
            operation by operation writes and reads what a compiler fuses.
        bias_passes: how often a matmul's result is read or written for its bias, forward and
            backward, where the model has biases.
        hidden_cost: seconds that a step takes longer for each second of FSDP's collectives and of
            sums over data that runs under kernels: contention, less where NCCL has few channels.
        unhidden: the same for each of FSDP's seconds, whatever its channels: copies before and
            behind a collective, or what XLA's schedule leaves exposed, of sums over data too.
        scale_syncs: small all-reduces over all replicas, in a layer and micro-batch, that nothing
            hides: those of the scales of fp8, where each matmul has its own.
        matmul_dtype: dtype of a layer's matmuls, as the cost model names it: "bf16", "fp8", "mxfp8"
            or "nvfp4".
        casts_once: whether the first micro-batch of a step alone casts weights to narrow dtypes.
        hides_data: whether sums over data run under the last micro-batch's backward pass.
        sends_once: whether a token goes to each host once, and on one host to each device once,
            whatever the number of its experts there (DeepEP, HybridEP); False: a copy for each
            expert.
        expert_exposed: share of the sends to experts that stays exposed, at least; 1: all. Another
            micro-batch's kernels hide the rest, if they take as long.
        expert_factor: seconds of experts' matmuls, over those of one matmul of as many rows: they
            are grouped, and their loads uneven.
        expert_launch_s: seconds that the host takes to launch a layer with experts, forward and
            backward, in bf16: small micro-batches take no less.
        narrow_launches: launches in narrower dtypes, whose casts are kernels too, over bf16's.
        permutes: how often a token's copy for each of its experts is read and written as it is
            sorted by expert and back, forward; as often backward.
        capacity: slots of experts over the tokens that choose them: what is computed and sent.
        dispatch_group: tokens of a group that matmuls with a mask dispatch to experts (GShard,
            arXiv 2006.16668); 0: tokens are sorted and moved without.
        saved: bytes of activations that a layer keeps without recompute, over Korthikanti et al.'s
            count; the copies of a scan's stacked residuals are counted where it is above 1.
        logit_bytes: bytes of a logit at the peak: in 16 bits, in 32, and its gradient.
        halves_exposed: share of tensor parallelism's collectives that stays exposed, or slows
            kernels, where the batch runs in two halves, one's collectives under the other's
            kernels; None: it never does.
        halves_compute: seconds that halves add, over those of a layer's kernels.
        compute_factor: seconds of kernels, over those of the chip's tables.
        network_share: bytes per second over the network, over those of NCCL's model for the
            cluster's links.
        buffer_bytes: buffers of collectives, and what else does not grow.
        pool: share of a GPU's memory that the allocator takes unless it is told another.
        most_pool: the largest share that leaves room for what is not its: contexts, NCCL, graphs.
        micro_batch_bytes: what a micro-batch in flight keeps besides its layers' activations.
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
    overlaps_stages: bool = False
    fsdp_dtypes: tuple[str, ...] = ("bf16", "fp8", "mxfp8", "nvfp4")
    fsdp_in_pipelines: bool = True
    one_queue: bool = False
    even_shards: bool = False
    zero_stages: tuple[int, ...] = (1, 2)
    gathers_matrices: bool = False
    prefetches: bool = False
    keeps_gathered: bool = False
    tensor_exposed: float | None = None
    overlaps: bool = False
    recomputes: tuple[tuple[str, ...], ...] = (("attention",),)
    recomputes_experts: tuple[tuple[str, ...], ...] = ()
    recomputes_latent: tuple[tuple[str, ...], ...] = ()
    keeps_anyway: tuple[str, ...] = ()
    skips_unread: bool = False
    experts_on_model: bool = False
    saves_narrow: bool = False
    attention_factor: float = 1.0
    memory_factor: float = 1.0
    bias_passes: tuple[int, int] = (0, 0)
    hidden_cost: float = 0.0
    unhidden: float = 0.0
    scale_syncs: int = 0
    matmul_dtype: str = "bf16"
    casts_once: bool = False
    hides_data: bool = False
    sends_once: bool = False
    expert_exposed: float = 1.0
    expert_factor: float = 1.0
    expert_launch_s: float = 0.0
    narrow_launches: float = 1.0
    permutes: int = 0
    capacity: float = 1.0
    dispatch_group: int = 0
    saved: float = 1.0
    logit_bytes: float = 10.0
    halves_exposed: float | None = None
    halves_compute: float = 0.0
    compute_factor: float = 1.0
    network_share: float = 1.0
    buffer_bytes: float = 0.0
    micro_batch_bytes: float = 0.0
    reserve: float = 1.0
    pool: float = 1.0
    most_pool: float = 1.0
    source: str = ""

    def fuses(self, context: int) -> bool:
        """Return whether attention is one kernel on a context axis of a size."""
        return self.fused_attention and (context == 1 or self.fused_in_context)


STACKS = {  # by the name of the command line
    name: converted(Stack, fields)
    for name, fields in entries("jaxoverlap.parallelism", "stacks.toml").items()
}
JAX, JAX_LHS, MAXTEXT = STACKS["jax"], STACKS["jax-lhs"], STACKS["maxtext"]
TORCH = STACKS["torch"]
MEGATRON, MEGATRON_CORE = STACKS["megatron"], STACKS["megatron-core"]
