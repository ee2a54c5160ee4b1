"""Count a device's parameters and its memory.

Parameters are exact: they reproduce the integers that Megatron-DeepSpeed printed on Frontier
(sajal-vt/Megatron-DeepSpeed-ORNL, branch frontier-sd, a run of 175B on 128 GCDs).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from jaxoverlap.parallelism.configuration import Configuration
from jaxoverlap.parallelism.model import Transformer
from jaxoverlap.parallelism.pipeline.schedule import Schedule
from jaxoverlap.parallelism.stack import Stack

_ELEMENT = 2  # bytes of an activation


@dataclass(frozen=True)
class StageParams:
    """The parameters of one device of a stage, before FSDP and ZeRO split them.

    Attributes:
        dense: matrices, biases and norms outside experts; the stage's tables among them.
        experts: the experts' matrices and biases.
        tables: those of `dense` that are embeddings or the head.
    """

    dense: int
    experts: int = 0
    tables: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.dense + self.experts

    def __add__(self, other: StageParams) -> StageParams:
        return StageParams(
            self.dense + other.dense, self.experts + other.experts, self.tables + other.tables
        )

    def __mul__(self, count: int) -> StageParams:
        return StageParams(self.dense * count, self.experts * count, self.tables * count)

    @classmethod
    def of_layer(cls, model: Transformer, of: Configuration) -> StageParams:
        """Count a layer's: matrices over the tensor axis; norms and biases of rows whole."""
        return _layer_params(model, of.model, of.expert)

    @classmethod
    def of_stage(cls, model: Transformer, of: Configuration, stage: int) -> StageParams:
        """Count a stage's; the last has a copy of a tied table, as Megatron's has, with positions.

        Without a pipeline a tied table is there once.
        """
        last = stage == of.pipeline - 1
        params = cls.of_layer(model, of) * of.stage_layers(model)
        table = model.vocab * model.hidden // of.model
        embedding = table + model.learned_positions * model.hidden
        if stage == 0:
            params += cls(embedding, tables=embedding)
        if last:
            if of.pipeline > 1:
                own = embedding if model.tied else table
            else:
                own = 0 if model.tied else table
            params += cls(own + model.norm_params, tables=own)
        return params

    @classmethod
    def largest(cls, model: Transformer, of: Configuration) -> StageParams:
        """Return the stage's that has most."""
        ends = (cls.of_stage(model, of, stage) for stage in (0, of.pipeline - 1))
        return max(ends, key=lambda params: params.total)


@functools.cache
def _layer_params(model: Transformer, t: int, expert: int) -> StageParams:
    h, kv = model.hidden, max(model.kv_hidden // t, model.head_size)
    attention = 2 * h * h // t + 2 * h * kv
    mlp = model.mlp_matrices * h * model.inner // t
    dense = attention + 2 * model.norm_params
    if model.biases:
        dense += h // t + 2 * kv + h
        mlp += (model.mlp_matrices - 1) * model.inner // t + h
    if not model.experts:
        return StageParams(dense + mlp)
    return StageParams(dense + h * model.experts, mlp * model.experts // expert)


@dataclass(frozen=True)
class Memory:
    """The bytes of one device of a stage.

    Attributes:
        stage: which.
        weights, gradients, optimizer: of its parameters.
        activations: what the backward pass needs of micro-batches in flight.
        working: of one layer, or of the logits, while it runs; and of buffers.
        gathered: of weights that FSDP gathers: the layer that runs, and the one after it.
    """

    stage: int
    weights: float
    gradients: float
    optimizer: float
    activations: float
    working: float
    gathered: float

    @property
    def total(self) -> float:
        """All of them."""
        state = self.weights + self.gradients + self.optimizer
        return state + self.activations + self.working + self.gathered

    @property
    def by_term(self) -> dict[str, float]:
        """Return the bytes of each term, by name."""
        names = ("weights", "gradients", "optimizer", "activations", "working", "gathered")
        return {name: getattr(self, name) for name in names}


def state_bytes_per_param(of: Configuration, stack: Stack) -> tuple[float, float, float]:
    """Return the bytes of a parameter's weight, gradient and optimizer state on a device.

    Before `fsdp` splits all of them.
    """
    ways = of.replicas // of.fsdp
    gradient = stack.gradient_bytes / (ways if of.zero_stage >= 2 else 1)
    state = stack.optimizer_bytes / (ways if of.zero_stage >= 1 else 1)
    return stack.weight_bytes, gradient, state


def in_flight(of: Configuration, micro_batches: int, stage: int = 0) -> int:
    """Count the micro-batches of a piece that a stage keeps at most under 1F1B, in pieces.

    Plain: pipeline - stage. Interleaved by v: the warm-up's 2 (pipeline - stage - 1) +
    (v - 1) pipeline passes, and the one that runs (Narayanan et al., arXiv 2104.04473, section
    2.2, as Megatron-LM counts it).
    """
    p, v = of.pipeline, of.interleave
    if v == 1:
        return min(p - stage, micro_batches)
    return min(2 * (p - stage - 1) + (v - 1) * p + 1, micro_batches * v)


def layer_activation_bytes(model: Transformer, of: Configuration, stack: Stack) -> float:
    """Count the bytes that a layer keeps for its backward pass, for a micro-batch.

    Korthikanti et al. (arXiv 2205.05198), equations 1 to 4: s b h (10 + 24/t + 5 a s / (h t))
    with dropout and plain attention, (34 + ...) / t with the sequence split; without dropout its
    masks are gone, and without the scores' term where attention is fused or computed again.
    """
    tokens = of.micro_batch * model.sequence / of.context
    h, t = model.hidden, of.model
    whole = (10 if stack.dropout else 8) * tokens * h / (t if of.splits_rows else 1)
    kv = max(model.kv_hidden / t, model.head_size)
    inner = max(model.choices, 1) * model.inner / t * model.mlp_matrices * _ELEMENT
    split = tokens * (2 * _ELEMENT * h / t + 2 * _ELEMENT * kv + inner)
    scores = 0.0
    if not stack.fused_attention and of.recompute == "none":
        scores = (5 if stack.dropout else 2) * tokens * model.sequence * model.heads / t
    return whole + split + scores


def memory(
    model: Transformer, of: Configuration, stack: Stack, global_batch: int, stage: int = 0
) -> Memory:
    """Count a stage's memory at its peak."""
    params = StageParams.of_stage(model, of, stage).total / of.fsdp
    weight, gradient, state = state_bytes_per_param(of, stack)
    tokens = of.micro_batch * model.sequence / of.context
    split = of.model if of.splits_rows else 1
    micro_batches, layers = of.micro_batches(global_batch), of.stage_layers(model) / of.interleave
    kept = in_flight(of, micro_batches, stage)
    one = layer_activation_bytes(model, of, stack)
    stream = _ELEMENT * tokens * model.hidden / split
    per_layer = stream if of.recompute == "full" else one
    last = stage == of.pipeline - 1
    logits = tokens * model.vocab / of.model * (2 + 4 + 4) if last else 0.0
    mask = stream / _ELEMENT if stage == 0 and stack.dropout else 0.0  # of the embedding's dropout
    layer = StageParams.of_layer(model, of).total
    piece = layers * per_layer + mask + stack.micro_batch_bytes
    running = one if of.recompute == "full" else 0.0
    if stack.lockstep and of.pipeline > 1:
        kept = Schedule(of.pipeline, micro_batches, of.interleave).live_pieces(stage)
        running, piece = running + piece, stream
    return Memory(
        stage,
        weights=weight * params,
        gradients=gradient * params,
        optimizer=state * params,
        activations=kept * piece,
        working=max(running, logits) + 2 * stream + stack.buffer_bytes,
        gathered=2 * _ELEMENT * layer * (1 - 1 / of.fsdp),
    )


def resting_bytes(model: Transformer, of: Configuration, stack: Stack, stage: int = 0) -> float:
    """Count a stage's bytes between steps: its state, and of gradients what ZeRO leaves it."""
    weight, gradient, state = state_bytes_per_param(of, stack)
    if of.zero_stage == 1:
        gradient /= of.replicas // of.fsdp
    params = StageParams.of_stage(model, of, stage).total / of.fsdp
    return (weight + gradient + state) * params


def peak(model: Transformer, of: Configuration, stack: Stack, global_batch: int) -> Memory:
    """The memory of the stage that needs most: the first, or the last with its logits."""
    stages = sorted({0, of.pipeline - 1})
    return max(
        (memory(model, of, stack, global_batch, stage) for stage in stages), key=lambda m: m.total
    )
