"""Count the work of one device: kernels of a layer, of the head and of the optimizer.

The unit is one micro-batch. Kernels are those of Megatron's layer (Korthikanti et al., arXiv
2205.05198, sections 3 and 4): what is no matmul is counted by the bytes that it reads and writes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from jaxoverlap.cost.kernels import AttentionKernel, MatmulKernel
from jaxoverlap.parallelism.configuration import Configuration
from jaxoverlap.parallelism.model import ELEMENT, Kind, Transformer
from jaxoverlap.parallelism.parts import Parts
from jaxoverlap.parallelism.recompute import VALUES
from jaxoverlap.parallelism.stack import Stack

# Bytes moved to cast an element from 16 bits: 2 read, and it is written twice, once transposed; of
# nvfp4 it is read once more for the tensor's scale, and again for the transposed copy, which a
# Hadamard transform precedes (Transformer Engine's recipe NVFP4BlockScaling).
_CAST_BYTES = {"fp8": 4.0, "mxfp8": 4.0, "nvfp4": 2 + 2 + 2 + 2 * (1 / 2 + 1 / 16)}


@dataclass(frozen=True)
class Work(Parts):
    """The kernels of a part of a step.

    Attributes:
        matmuls: each matmul.
        attention: each kernel of fused attention.
        memory_bytes: bytes that other kernels read and write.
        kernels: how many other kernels there are.
    """

    matmuls: tuple[MatmulKernel, ...] = ()
    attention: tuple[AttentionKernel, ...] = ()
    memory_bytes: float = 0.0
    kernels: int = 0

    @property
    def flops(self) -> int:
        """Floating-point operations of matmuls and attention, a multiply-add counted as two."""
        return sum(m.flops for m in self.matmuls) + sum(a.flops for a in self.attention)


@dataclass(frozen=True)
class Pass:
    """One part of a model, forward and backward.

    Attributes:
        forward: the forward pass.
        backward: the backward pass, without what it computes again.
        again: what computes each value again, by its name (`recompute.VALUES`).
    """

    forward: Work
    backward: Work
    again: Mapping[str, Work] = field(default_factory=dict)


def layer(
    model: Transformer, config: Configuration, stack: Stack, kind: Kind | None = None
) -> Pass:
    """Count the kernels of a layer of a kind on one device, for one micro-batch.

    Casts of weights, which go by what a device stores of them, are apart (`weight_casts`).

    Args:
        kind: one of `model.kinds`; None: the first.
    """
    kind = kind or model.kinds[0][1]
    tokens = config.micro_batch * model.sequence // config.context
    scores = _mixed(model, config, stack, kind)
    mixer = _mixer_matmuls(model, config, kind, tokens)
    mlp = _mlp_matmuls(model, config, stack, kind, tokens)
    matmuls = tuple(replace(m, dtype=stack.matmul_dtype) for m in (*mixer, *mlp))
    mixer, mlp = matmuls[: len(mixer)], matmuls[len(mixer) :]
    pointwise, memory_backward = _pointwise(model, config, stack, kind, tokens)
    casts, gradients = _fp8_casts(matmuls, stack)
    forward = Work(matmuls) + casts + scores.forward
    for part in pointwise.values():
        forward += part
    return Pass(
        forward,
        Work(tuple(_gradients(matmuls))) + gradients + memory_backward + scores.backward,
        _again(model, mixer, mlp, pointwise, scores.forward),
    )


def weight_casts(model: Transformer, config: Configuration, stack: Stack) -> Pass:
    """Count the casts of a layer's weights: those that a device stores, and their gradients.

    Each pass casts what a device stores of the weights; gradients are cast into zeros.
    """
    if stack.weight_bytes <= ELEMENT:
        return Pass(Work(), Work())
    stored = sum(model.layer_params(config.model, config.expert)) * config.shard_share(model)
    return Pass(
        Work(memory_bytes=stored * (stack.weight_bytes + ELEMENT), kernels=4),
        Work(memory_bytes=stored * (2 * stack.gradient_bytes + ELEMENT), kernels=4),
    )


def _again(
    model: Transformer,
    mixer: tuple[MatmulKernel, ...],
    mlp: tuple[MatmulKernel, ...],
    pointwise: Mapping[str, Work],
    scores: Work,
) -> dict[str, Work]:
    """Count what computes each value of a layer again.

    Args:
        mixer: its matmuls before and after tokens are mixed, in their order.
        mlp: those of the MLP or the experts, each "up" (with the gate) followed by its "down";
            then those of dispatch.
    """
    again = {name: pointwise.get(name, Work()) for name in VALUES}
    if mixer:
        # Of latent attention the compressed values are kept: its first matmul is not run again.
        again["qkv"] += Work(mixer[1:-1] if model.kv_rank and len(mixer) > 2 else mixer[:-1])
        again["attention"] += scores
        again["out"] += Work(mixer[-1:])
    halves = model.mlp_matrices - 1
    ups, dispatch = _ups_and_dispatch(model, mlp)
    for name in ("gate", "up")[-halves:]:
        again[name] += Work(tuple(replace(m, n=max(m.n // halves, 1)) for m in ups))
    again["dispatch"] += Work(dispatch)
    return again


def _ups_and_dispatch(
    model: Transformer, mlp: tuple[MatmulKernel, ...]
) -> tuple[tuple[MatmulKernel, ...], tuple[MatmulKernel, ...]]:
    """Return an MLP's matmuls of gate and up, and those that bring tokens to their experts."""
    blocks = 2 if model.shared_mlp and len(mlp) > 2 else 1
    return mlp[: 2 * blocks : 2], mlp[2 * blocks : 2 * blocks + 1]


def _fp8_casts(matmuls: tuple[MatmulKernel, ...], stack: Stack) -> tuple[Work, Work]:
    """Count the casts of fp8 matmuls: of both operands forward, of the cotangent backward.

    A cast reads 16 bits and writes 8, twice: fp8 matmuls on Hopper read along the contracted dim
    only (NVIDIA cuBLAS documentation, cublasLtMatmul), so that gradients want transposed copies.
    Where a step's first micro-batch alone casts weights, these are not counted.
    """
    fp8 = [m for m in matmuls if m.dtype != "bf16"]
    operands = sum(m.batch * m.k * (m.m + (0 if stack.casts_once else m.n)) for m in fp8)
    cotangents = sum(m.batch * m.m * m.n for m in fp8)
    kernels = len(fp8) * (1 if stack.casts_once else 2)
    each = _CAST_BYTES.get(stack.matmul_dtype, 0.0)
    forward = Work(memory_bytes=each * operands, kernels=kernels)
    return forward, Work(memory_bytes=each * cotangents, kernels=len(fp8))


def head(model: Transformer, config: Configuration) -> Pass:
    """Count the head's kernels: logits, and the loss in 32 bits."""
    tokens, columns = (
        config.micro_batch * model.sequence // config.context,
        model.vocab // config.model,
    )
    matmul = MatmulKernel(tokens, max(columns, 1), model.hidden)
    logits = tokens * max(columns, 1)
    # Cast to 32 bits, maximum, exponentials and their sum; backward reads and writes them once.
    forward = Work((matmul,), memory_bytes=18.0 * logits, kernels=4)
    backward = Work(tuple(_gradients((matmul,))), memory_bytes=10.0 * logits, kernels=2)
    return Pass(forward * (1 + model.predictions), backward * (1 + model.predictions))


def optimizer(params: float, stack: Stack) -> Work:
    """Count Adam's bytes for so many parameters of a device: state, gradient and weight."""
    moved = 2 * stack.optimizer_bytes + stack.weight_bytes
    return Work(memory_bytes=params * (moved + stack.gradient_passes * 4), kernels=1)


def added_gradients(params: float, *, in_pipeline: bool) -> Work:
    """Count the bytes of adding a micro-batch's gradients to their sums, both in 32 bits.

    The sum is read and written, the gradient read. In a pipeline a stage that is idle masks its
    gradients first, and picks the chunk's row of the sums.
    """
    return Work(memory_bytes=params * (24 if in_pipeline else 12), kernels=12)


def _gradients(matmuls: Iterable[MatmulKernel]) -> Iterable[MatmulKernel]:
    """Yield each matmul's two gradients: of its input, and of its weight."""
    for m in matmuls:
        yield MatmulKernel(m.m, m.k, m.n, m.batch, m.dtype)
        yield MatmulKernel(m.k, m.n, m.m, m.batch, m.dtype)


def _mixer_matmuls(
    model: Transformer, config: Configuration, kind: Kind, tokens: int
) -> tuple[MatmulKernel, ...]:
    """List the matmuls before tokens are mixed, and last the one behind it."""
    h, t = model.hidden, config.model
    if kind.mixer == "mamba":
        inner = model.mamba_inner // t
        return MatmulKernel(tokens, model.mamba_columns // t, h), MatmulKernel(tokens, h, inner)
    if not kind.mixer:
        return ()
    out = MatmulKernel(tokens, h, model.value_hidden // t)
    own = model.query_hidden // t
    if not model.kv_rank:
        columns = own + 2 * max(model.kv_hidden // t, model.head_size)
        return MatmulKernel(tokens, columns, h), out
    keys = model.heads * (model.head_size - model.rope_dim + model.value_size) // t
    queries = MatmulKernel(tokens, own, model.query_rank or h)
    return (
        MatmulKernel(tokens, model.latent, h),
        queries,
        MatmulKernel(tokens, keys, model.kv_rank),
        out,
    )


def _dispatch_slots(model: Transformer, stack: Stack, kind: Kind, tokens: int) -> tuple[int, int]:
    """Return tokens of a group that masks dispatch to experts, and slots of all experts for it."""
    group = min(stack.dispatch_group, tokens) if kind.experts else 0
    return group, int(stack.capacity * model.choices * group)


def _mlp_matmuls(
    model: Transformer, config: Configuration, stack: Stack, kind: Kind, tokens: int
) -> tuple[MatmulKernel, ...]:
    """List an MLP's matmuls, up before down; then those that bring tokens to experts and back.

    Experts get equal loads: a device's experts serve as many choices as it has tokens.
    """
    if not kind.has_mlp:
        return ()
    h, wide = model.hidden, model.mlp_matrices - 1

    def block(inner: int, hidden: int, rows: int, batch: int = 1) -> tuple[MatmulKernel, ...]:
        up = MatmulKernel(rows, inner * wide, hidden, batch)
        return up, MatmulKernel(rows, hidden, inner, batch)

    if not kind.experts:
        return block(kind.inner // config.model, h, tokens)
    whole = config.experts_on_model
    batch = max(model.experts // config.expert_ways, 1)
    sent = tokens * stack.capacity * model.choices / (config.model if whole else 1)
    rows = max(int(sent) // batch, 1)
    inner = model.inner // (1 if whole else config.model)
    matmuls = block(inner, model.routed_hidden, rows, batch)
    if model.shared_mlp:
        matmuls += block(model.shared_mlp // config.model, h, tokens)
    group, slots = _dispatch_slots(model, stack, kind, tokens)
    if group:
        there = MatmulKernel(slots, model.routed_hidden, group, tokens // group)
        matmuls += there, MatmulKernel(group, model.routed_hidden, slots, tokens // group)
    if model.expert_hidden:  # into the latent size and back
        matmuls += (
            MatmulKernel(tokens, model.expert_hidden, h),
            MatmulKernel(tokens, h, model.expert_hidden),
        )
    return matmuls


def _mixed(model: Transformer, config: Configuration, stack: Stack, kind: Kind) -> Pass:
    """Count the kernels that mix tokens, between the matmuls on both sides."""
    if kind.mixer == "attention":
        return _attention(model, config, stack)
    return _scan(model, config) if kind.mixer else Pass(Work(), Work())


_SCAN_CHUNK = 256  # tokens of a chunk of Mamba-2's scan, its published default


def _scan(model: Transformer, config: Configuration) -> Pass:
    """Count the kernels of Mamba-2's convolution and scan in chunks (arXiv 2405.21060, section 6).

    In a chunk each head has three matmuls: scores by x, B by x (its state), C by a state. The rest
    reads and writes x, z, B, C, dt and the states a few times.
    """
    tokens, t = config.micro_batch * model.sequence // config.context, config.model
    size, state = model.mamba_head_dim, model.mamba_state
    chunk = min(_SCAN_CHUNK, tokens)
    chunks = tokens // chunk * max(model.mamba_heads // t, 1)
    matmuls = (
        MatmulKernel(chunk, size, chunk, chunks),
        MatmulKernel(state, size, chunk, chunks),
        MatmulKernel(chunk, size, state, chunks),
    )
    moved = ELEMENT * tokens / t * (3 * model.mamba_columns + 2 * model.mamba_inner)
    moved += 4.0 * 4 * chunks * state * size  # states in 32 bits, written, passed on, read
    return Pass(Work(matmuls, (), moved, 6), Work(tuple(_gradients(matmuls)), (), 2 * moved, 10))


def _attention(model: Transformer, config: Configuration, stack: Stack) -> Pass:
    """Count the kernels between q, k, v and what attention gives."""
    heads = max(config.micro_batch * model.heads // config.model, 1)
    queries, keys = model.sequence // config.context, model.sequence
    size = (model.head_size + model.value_size) // 2
    if stack.fuses(config.context):
        kernel = AttentionKernel(queries, keys, heads, size, stack.causal)
        backward = AttentionKernel(queries, keys, heads, size, stack.causal, backward=True)
        return Pass(Work((), (kernel,)), Work((), (backward,)))
    scores = MatmulKernel(queries, keys, size, heads)
    values = MatmulKernel(queries, size, keys, heads)
    elements = heads * queries * keys
    # Softmax reads and writes a score; dropout reads it, writes it, and a byte of mask. Backward
    # softmax reads its result and a cotangent, and writes one.
    drop = (2 * ELEMENT + 1) * elements if stack.dropout else 0
    forward = Work((scores, values), (), 2.0 * stack.score_bytes * elements + drop, 3)
    backward = Work(
        (*_gradients((scores, values)),), (), 3.0 * stack.score_bytes * elements + drop, 3
    )
    return Pass(forward, backward)


def _pointwise(
    model: Transformer, config: Configuration, stack: Stack, kind: Kind, tokens: int
) -> tuple[dict[str, Work], Work]:
    """Count norms, residuals, dropout and the MLP's activation: forward by value, and backward."""
    blocks = (bool(kind.mixer) + kind.has_mlp) / 2
    full = ELEMENT * tokens * model.hidden / (config.model if config.splits_sequence else 1)
    full *= blocks
    inner = ELEMENT * tokens * _active_inner(model, kind) / config.model
    inner *= model.mlp_matrices - 1
    # Forward: two norms (read, write), two residuals (two reads, a write), two masks of a byte;
    # the activation (read, write). Backward: norms read twice and write, cotangents are added.
    masks = full if stack.dropout else 0.0
    # Masks of dispatch are made in 32 bits, choice by choice: written, added to two sums, cast.
    group, slots = _dispatch_slots(model, stack, kind, tokens)
    routed = (20.0 * model.choices + 12) * tokens * slots if group else 0.0
    split = config.model if config.experts_on_model else 1
    if kind.experts:
        moved = 2 * ELEMENT * tokens * model.choices * model.routed_hidden / split
        routed += stack.permutes * moved
    biased = _biased_bytes(model, config, kind, tokens) if model.biases else 0.0
    passes_forward, passes_backward = stack.bias_passes
    forward = {
        "norms": Work(memory_bytes=10 * full + masks + passes_forward * biased, kernels=4),
        "activation": Work(memory_bytes=2 * inner, kernels=1),
        "dispatch": Work(memory_bytes=routed),
    }
    grown = (12 + (4 if stack.dropout else 0)) * full + 3 * inner + routed
    grown += passes_backward * biased
    backward = Work(memory_bytes=grown, kernels=7)
    return forward, backward


def _active_inner(model: Transformer, kind: Kind) -> int:
    """Inner size of all the MLPs that a token goes through in a layer of a kind."""
    return model.active_inner if kind.experts else kind.inner


def _biased_bytes(model: Transformer, config: Configuration, kind: Kind, tokens: int) -> float:
    """Bytes of the results of a layer's matmuls, each of which has a bias."""
    columns = _active_inner(model, kind) * (model.mlp_matrices - 1)
    columns += model.query_hidden + 2 * model.kv_hidden if kind.mixer == "attention" else 0
    blocks = bool(kind.mixer) + kind.has_mlp
    return ELEMENT * tokens * (columns / config.model + blocks * model.hidden)
