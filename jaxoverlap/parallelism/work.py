"""Count the work of one device: kernels of a layer, of the head and of the optimizer.

The unit is one micro-batch. Kernels are those of Megatron's layer (Korthikanti et al., arXiv
2205.05198, sections 3 and 4): what is no matmul is counted by the bytes that it reads and writes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from jaxoverlap.cost.kernels import AttentionKernel, MatmulKernel
from jaxoverlap.parallelism.configuration import Configuration
from jaxoverlap.parallelism.model import ELEMENT, Transformer
from jaxoverlap.parallelism.parts import Parts
from jaxoverlap.parallelism.stack import Stack

_FP8_CAST_BYTES = 4  # of an element: 2 read, 1 written, and 1 written transposed


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
        again: what the backward pass computes again under "selective" (`Stack.selective`).
    """

    forward: Work
    backward: Work
    again: Work = Work()


def layer(model: Transformer, config: Configuration, stack: Stack) -> Pass:
    """Count a layer's kernels on one device, for one micro-batch."""
    tokens = config.micro_batch * model.sequence // config.context
    scores = _attention(model, config, stack)
    mlp = (*_mlp_matmuls(model, config, stack, tokens), *_dispatch_matmuls(model, stack, tokens))
    matmuls = (*_attention_matmuls(model, config, tokens), *mlp)
    matmuls = tuple(replace(m, dtype=stack.matmul_dtype) for m in matmuls)
    memory_forward, memory_backward = _pointwise(model, config, stack, tokens)
    casts, gradients = _fp8_casts(matmuls)
    if stack.weight_bytes > ELEMENT:
        # Each pass casts what a device stores of the weights; gradients are cast into zeros.
        stored = sum(model.layer_params(config.model, config.expert)) * config.shard_share(model)
        casts += Work(memory_bytes=stored * (stack.weight_bytes + ELEMENT), kernels=4)
        gradients += Work(memory_bytes=stored * (2 * stack.gradient_bytes + ELEMENT), kernels=4)
    return Pass(
        Work(matmuls) + casts + memory_forward + scores.forward,
        Work(tuple(_gradients(matmuls))) + gradients + memory_backward + scores.backward,
        _again(model, stack, matmuls, memory_forward, scores.forward),
    )


def _again(
    model: Transformer,
    stack: Stack,
    matmuls: tuple[MatmulKernel, ...],
    pointwise: Work,
    scores: Work,
) -> Work:
    """Count what a stack's "selective" computes again."""
    qkv, out, up, down = matmuls[:4]
    gate = replace(up, n=max(up.n // (model.mlp_matrices - 1), 1))
    parts = {"qkv": qkv, "out": out, "up": up, "gate": gate, "down": down}
    again = Work(tuple(m for name, m in parts.items() if name in stack.selective))
    again += scores if "attention" in stack.selective else Work()
    return again + (pointwise if "pointwise" in stack.selective else Work())


def _fp8_casts(matmuls: tuple[MatmulKernel, ...]) -> tuple[Work, Work]:
    """Count the casts of fp8 matmuls: of both operands forward, of the cotangent backward.

    A cast reads 16 bits and writes 8, twice: fp8 matmuls on Hopper read along the contracted dim
    only (NVIDIA cuBLAS documentation, cublasLtMatmul), so that gradients want transposed copies.
    """
    fp8 = [m for m in matmuls if m.dtype != "bf16"]
    operands = sum(m.batch * m.k * (m.m + m.n) for m in fp8)
    cotangents = sum(m.batch * m.m * m.n for m in fp8)
    forward = Work(memory_bytes=_FP8_CAST_BYTES * operands, kernels=2 * len(fp8))
    return forward, Work(memory_bytes=_FP8_CAST_BYTES * cotangents, kernels=len(fp8))


def head(model: Transformer, config: Configuration) -> Pass:
    """Count the head's kernels: logits, and the loss in 32 bits."""
    tokens, columns = (
        config.micro_batch * model.sequence // config.context,
        model.vocab // config.model,
    )
    matmul = MatmulKernel(tokens, max(columns, 1), model.hidden)
    logits = tokens * max(columns, 1)
    # Cast to 32 bits, maximum, exponentials and their sum; backward reads and writes them once.
    return Pass(
        Work((matmul,), memory_bytes=18.0 * logits, kernels=4),
        Work(tuple(_gradients((matmul,))), memory_bytes=10.0 * logits, kernels=2),
    )


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


def _attention_matmuls(
    model: Transformer, config: Configuration, tokens: int
) -> tuple[MatmulKernel, ...]:
    h, own = model.hidden, model.query_hidden // config.model
    columns = own + 2 * max(model.kv_hidden // config.model, model.head_size)
    return MatmulKernel(tokens, columns, h), MatmulKernel(tokens, h, own)


def _dispatch_slots(model: Transformer, stack: Stack, tokens: int) -> tuple[int, int]:
    """Return tokens of a group that masks dispatch to experts, and slots of all experts for it."""
    group = min(stack.dispatch_group, tokens) if model.experts else 0
    return group, int(stack.capacity * model.choices * group)


def _dispatch_matmuls(model: Transformer, stack: Stack, tokens: int) -> tuple[MatmulKernel, ...]:
    """Count the matmuls with masks that bring tokens to their experts' slots, and back."""
    group, slots = _dispatch_slots(model, stack, tokens)
    if not group:
        return ()
    there = MatmulKernel(slots, model.hidden, group, tokens // group)
    return there, MatmulKernel(group, model.hidden, slots, tokens // group)


def _mlp_matmuls(
    model: Transformer, config: Configuration, stack: Stack, tokens: int
) -> tuple[MatmulKernel, ...]:
    """Experts get equal loads: a device's experts serve as many choices as it has tokens."""
    h, inner = model.hidden, model.inner // config.model
    batch = max(model.experts // config.expert, 1)
    choices = stack.capacity * model.choices if model.experts else 1
    rows = max(int(tokens * choices) // batch, 1)
    up = MatmulKernel(rows, inner * (model.mlp_matrices - 1), h, batch)
    experts = up, MatmulKernel(rows, h, inner, batch)
    if not model.shared_mlp:
        return experts
    inner = model.shared_mlp // config.model
    up = MatmulKernel(tokens, inner * (model.mlp_matrices - 1), h)
    return *experts, up, MatmulKernel(tokens, h, inner)


def _attention(model: Transformer, config: Configuration, stack: Stack) -> Pass:
    """Count the kernels between q, k, v and what attention gives."""
    heads = max(config.micro_batch * model.heads // config.model, 1)
    queries, keys, size = model.sequence // config.context, model.sequence, model.head_size
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
    model: Transformer, config: Configuration, stack: Stack, tokens: int
) -> tuple[Work, Work]:
    """Count norms, residuals, dropout and the MLP's activation, forward and backward."""
    full = ELEMENT * tokens * model.hidden / (config.model if config.splits_sequence else 1)
    inner = ELEMENT * tokens * model.active_inner / config.model
    inner *= model.mlp_matrices - 1
    # Forward: two norms (read, write), two residuals (two reads, a write), two masks of a byte;
    # the activation (read, write). Backward: norms read twice and write, cotangents are added.
    masks = full if stack.dropout else 0.0
    # Masks of dispatch are made in 32 bits, choice by choice: written, added to two sums, cast.
    group, slots = _dispatch_slots(model, stack, tokens)
    routed = (20.0 * model.choices + 12) * tokens * slots if group else 0.0
    routed += stack.permutes * 2 * ELEMENT * tokens * model.choices * model.hidden
    biased = _biased_bytes(model, config, tokens) if model.biases else 0.0
    passes_forward, passes_backward = stack.bias_passes
    forward = 10 * full + masks + 2 * inner + routed + passes_forward * biased
    forward = Work(memory_bytes=forward, kernels=5)
    grown = (12 + (4 if stack.dropout else 0)) * full + 3 * inner + routed
    grown += passes_backward * biased
    backward = Work(memory_bytes=grown, kernels=7)
    return forward, backward


def _biased_bytes(model: Transformer, config: Configuration, tokens: int) -> float:
    """Bytes of the results of a layer's matmuls, each of which has a bias."""
    columns = (
        model.query_hidden + 2 * model.kv_hidden + model.active_inner * (model.mlp_matrices - 1)
    )
    return ELEMENT * tokens * (columns / config.model + 2 * model.hidden)
