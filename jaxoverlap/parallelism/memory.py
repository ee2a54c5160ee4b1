"""Count a device's parameters and its memory.

Parameters are exact: they reproduce the integers that Megatron-DeepSpeed printed on Frontier
(sajal-vt/Megatron-DeepSpeed-ORNL, branch frontier-sd, a run of 175B on 128 GCDs).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from jaxoverlap.parallelism.configuration import Configuration
from jaxoverlap.parallelism.model import ELEMENT, Kind, Transformer
from jaxoverlap.parallelism.parts import Parts
from jaxoverlap.parallelism.pipeline.schedule import PipelineSchedule
from jaxoverlap.parallelism.recompute import VALUES
from jaxoverlap.parallelism.stack import Stack


@dataclass(frozen=True)
class StageParams(Parts):
    """The parameters of one device of a stage, before FSDP and ZeRO split them.

    Attributes:
        dense: matrices, biases and norms outside experts; the stage's tables among them.
        experts: the experts' matrices and biases.
        tables: those of `dense` that are embeddings or the head.
    """

    dense: float
    experts: float = 0
    tables: float = 0

    @property
    def total(self) -> float:
        """All of them."""
        return self.dense + self.experts

    @classmethod
    def of_layer(cls, model: Transformer, config: Configuration) -> StageParams:
        """Count a layer's parameters: matrices on the tensor axis; norms, row biases replicated."""
        return cls(*model.layer_params(config.model, config.expert))

    @classmethod
    def of_stage(
        cls, model: Transformer, config: Configuration, stage: int, *, even: bool = False
    ) -> StageParams:
        """Count a stage's; the last has a copy of a tied table, as Megatron's has, with positions.

        Args:
            even: whether the stages are one program: all have as many layers, empty ones among
                them, and an equal share of the tables, as `models.configured` shards them.
        """
        table = model.vocab * model.hidden // config.model
        embedding = table + model.learned_positions * model.hidden
        if even or config.pipeline == 1:
            layers = config.interleave * max(config.chunk_layers(model))
            tables = (embedding + (0 if model.tied else table)) // config.pipeline
            ends = cls(tables + model.norm_params, tables=tables)
            return cls.of_layer(model, config) * layers + ends
        params = cls.of_layer(model, config) * config.stage_layers(model, stage)
        if stage == 0:
            params += cls(embedding, tables=embedding)
        if stage == config.pipeline - 1:
            own = embedding if model.tied else table
            params += cls(own + model.norm_params, tables=own)
        return params

    @classmethod
    def largest(
        cls, model: Transformer, config: Configuration, *, even: bool = False
    ) -> StageParams:
        """Return the stage's that has most."""
        stages = (cls.of_stage(model, config, s, even=even) for s in distinct_stages(model, config))
        return max(stages, key=lambda params: params.total)


def distinct_stages(model: Transformer, config: Configuration) -> list[int]:
    """Return the stages of which one has most: the ends, and the second if the first is lighter."""
    uneven = model.layers % (config.pipeline * config.interleave)
    second = min(1, config.pipeline - 1) if uneven else 0
    return sorted({0, second, config.pipeline - 1})


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
        return sum(self.by_term.values())

    @property
    def by_term(self) -> dict[str, float]:
        """Return the bytes of each term, by name."""
        return {name: size for name, size in vars(self).items() if name != "stage"}


def state_bytes(
    model: Transformer, config: Configuration, stack: Stack, params: StageParams
) -> tuple[float, float, float]:
    """Return the bytes of a device's weights, gradients and optimizer state.

    `fsdp` splits all of them. ZeRO splits states and gradients over the devices that have the same
    weights besides: of experts, those along `expert` have other ones.
    """
    weights = gradients = states = 0.0
    for elements, ways in zip((params.dense, params.experts), zero_ways(config), strict=True):
        shard = elements * config.shard_share(model)
        weights += stack.weight_bytes * shard
        gradients += stack.gradient_bytes * shard / (ways if config.zero_stage >= 2 else 1)
        states += stack.optimizer_bytes * shard / (ways if config.zero_stage >= 1 else 1)
    return weights, gradients, states


def zero_ways(config: Configuration) -> tuple[int, int]:
    """Return over how many devices ZeRO splits states: of weights outside experts, of experts."""
    ways = config.replicas // config.fsdp
    return ways, ways // config.expert


def in_flight(config: Configuration, micro_batches: int, stage: int = 0) -> int:
    """Count the micro-batches of a piece that a stage keeps at most under 1F1B, in pieces.

    Plain: pipeline - stage. Interleaved by v: the warm-up's 2 (pipeline - stage - 1) +
    (v - 1) pipeline passes, and the one that runs (Narayanan et al., arXiv 2104.04473, section
    2.2, as Megatron-LM counts it).
    """
    p, v = config.pipeline, config.interleave
    if v == 1:
        return min(p - stage, micro_batches)
    return min(2 * (p - stage - 1) + (v - 1) * p + 1, micro_batches * v)


LATENT = "latent"  # the compressed queries, keys and values: kept wherever anything is
_NARROW_BYTES = {"fp8": 1.0, "mxfp8": 1 + 1 / 32, "nvfp4": 1 / 2 + 1 / 16}  # of an element


def kept_bytes(
    model: Transformer, config: Configuration, stack: Stack
) -> tuple[float, dict[str, float]]:
    """Count what a layer saves for its backward pass, for a micro-batch: its input, and by value.

    Without recompute that is Korthikanti et al.'s count (arXiv 2205.05198, equations 1 to 4) for
    attention that is fused. What only matmuls read is kept in their dtype by a stack that says so.
    Of a model with several kinds of layers it is the mean.
    """
    tokens = config.micro_batch * model.sequence / config.context
    t = config.model
    stream = model.hidden / (t if config.splits_sequence else 1)
    narrow = _NARROW_BYTES.get(stack.matmul_dtype, ELEMENT) if stack.saves_narrow else ELEMENT
    masks = 1 if stack.dropout else 0  # bytes
    layer_input, values = 0.0, dict.fromkeys((*VALUES, LATENT), 0.0)
    for count, kind in model.kinds:
        share = count / model.layers * tokens
        blocks = bool(kind.mixer) + kind.has_mlp
        layer_input += share * ELEMENT * stream
        # Norms, each in the dtype of the matmul that reads it; the sum between two blocks.
        values["norms"] += share * (blocks * (narrow + masks) + (blocks - 1) * ELEMENT) * stream
        if kind.mixer:
            mixed = model.mamba_inner if kind.mixer == "mamba" else model.value_hidden
            read_twice = narrow if narrow < ELEMENT else 0  # by the scan's gradient, and by `out`'s
            values["qkv"] += share * ELEMENT * _mixer_columns(model, kind, t)
            latent = model.latent if kind.mixer == "attention" else 0
            values[LATENT] += share * ELEMENT * latent
            values["attention"] += share * (ELEMENT + read_twice) * mixed / t
            values["out"] += share * ELEMENT * stream if kind.has_mlp else 0.0
        inner = (model.active_inner if kind.experts else kind.inner) / t
        wide = narrow if stack.matmul_dtype == "fp8" else ELEMENT  # Transformer Engine's own store
        values["up"] += share * wide * inner
        values["gate"] += share * wide * inner if model.gated else 0.0
        values["activation"] += share * narrow * inner
        if kind.experts:
            split = t if config.splits_sequence or config.experts_on_model else 1
            routed = stack.capacity * model.choices * model.routed_hidden / split
            values["dispatch"] += share * narrow * routed
    return layer_input, values


def _mixer_columns(model: Transformer, kind: Kind, t: int) -> float:
    """Elements of a token that its mixer reads: queries, keys and values, or a scan's columns."""
    if kind.mixer == "mamba":
        return model.mamba_columns / t
    if model.kv_rank:  # keys and values have as many heads as queries
        return (2 * model.query_hidden + model.value_hidden) / t
    return model.query_hidden / t + 2 * max(model.kv_hidden / t, model.head_size)


def layer_activation_bytes(model: Transformer, config: Configuration, stack: Stack) -> float:
    """Count the bytes that a layer saves for its backward pass, for a micro-batch."""
    return LayerValues.of(model, config, stack).kept(config.recompute, config.saved, stack)


@dataclass(frozen=True)
class LayerValues:
    """What a layer makes of a micro-batch that its backward pass reads.

    Attributes:
        layer_input: bytes of its input.
        values: bytes by value (`recompute.VALUES`), and of latents.
        scores: bytes of attention's scores, where they are saved.
    """

    layer_input: float
    values: dict[str, float]
    scores: float

    @classmethod
    def of(cls, model: Transformer, config: Configuration, stack: Stack) -> LayerValues:
        """Count a configuration's; its recompute does not matter."""
        layer_input, values = kept_bytes(model, config, stack)
        return cls(layer_input, values, _score_bytes(model, config, stack))

    def kept(self, recompute: str, saved: frozenset[str], stack: Stack) -> float:
        """Return the bytes that are saved.

        The sum before the second norm is read, not what is added to it: where norms are kept, `out`
        is not. Without any recompute a stack may keep more than it has to (`Stack.saved`), and
        scores where attention is not fused.
        """
        if recompute == "full":
            return self.layer_input
        kept = self.layer_input + self.values[LATENT]
        for name in VALUES:
            if name == "out" and "norms" in saved:
                continue
            if name in saved or name in stack.keeps_anyway:
                kept += self.values[name]
        return kept if recompute != "none" else stack.saved * (kept + self.scores)


def _score_bytes(model: Transformer, config: Configuration, stack: Stack) -> float:
    """Count the bytes of a layer's scores, where they are saved."""
    if stack.fuses(config.context):
        return 0.0
    each = 5 if stack.dropout else stack.score_bytes
    queries = config.micro_batch * model.sequence / config.context
    share = sum(n for n, kind in model.kinds if kind.mixer == "attention") / model.layers
    return share * each * queries * model.sequence * model.heads / config.model


@dataclass(frozen=True)
class Kept:
    """What a layer saves of a micro-batch for its backward pass.

    Attributes:
        each: bytes that it keeps, its input among them.
        again: bytes of what it computes again, while it runs.
    """

    each: float
    again: float

    @classmethod
    def of(cls, model: Transformer, config: Configuration, stack: Stack) -> Kept:
        """Count what a layer of a configuration saves."""
        each = layer_activation_bytes(model, config, stack)
        return cls.of_choice(each, config.recompute, everything(model, config, stack))

    @classmethod
    def of_choice(cls, each: float, recompute: str, everything: float) -> Kept:
        """Return what a choice of recompute leaves to compute again of all that a layer has."""
        if recompute == "none":
            return cls(each, 0.0)
        return cls(each, everything if recompute == "full" else everything - each)


def everything(model: Transformer, config: Configuration, stack: Stack) -> float:
    """Count the bytes that a layer saves without any recompute."""
    return layer_activation_bytes(model, replace(config, recompute="none"), stack)


class StageMemory:
    """A stage's memory at its peak, for any choice of recompute.

    Args:
        model, config, stack: as of `memory`; the configuration's recompute does not matter.
        global_batch: sequences of a step.
        stage: which.
    """

    def __init__(
        self, model: Transformer, config: Configuration, stack: Stack, global_batch: int, stage: int
    ):
        self.model, self.config, self.stack, self.stage = model, config, stack, stage
        self.micro_batches = micro_batches = config.micro_batches(global_batch)
        self.one_program = stack.lockstep and config.pipeline > 1
        params = StageParams.of_stage(model, config, stage, even=self.one_program)
        self.states = state_bytes(model, config, stack, params)
        tokens = config.micro_batch * model.sequence / config.context
        split = config.model if config.splits_sequence else 1
        self.stream = ELEMENT * tokens * model.hidden / split
        self.layers = (config.stage_layers(model, stage) - config.offload) / config.interleave
        # Of the embedding's dropout a mask is kept.
        self.beside = self.stream / ELEMENT if stage == 0 and stack.dropout else 0.0
        self.beside += stack.micro_batch_bytes
        schedule = PipelineSchedule(config.pipeline, micro_batches, config.interleave)
        self.kept = (
            schedule.live_pieces(stage)
            if self.one_program
            else in_flight(config, micro_batches, stage)
        )
        self.running = 0.0
        if stack.lockstep and micro_batches > 1:
            # Gradients of a micro-batch, before they are added; XLA copies a chunk's sums where it
            # adds to them.
            own = stack.gradient_bytes * (params.total - params.tables) * config.shard_share(model)
            self.running = own / config.interleave + (own if self.one_program else 0.0)
        self.flying = 0.0
        if config.splits_sequence and stack.halves_exposed is not None:
            self.flying = 4 * ELEMENT * tokens * model.hidden  # gathered rows of both halves
        layer = StageParams.of_layer(model, config).total
        self.gathered = ELEMENT * (1 - config.shard_share(model)) * 2 * layer
        last = stage == config.pipeline - 1
        logits = tokens * model.vocab / config.model * stack.logit_bytes if last else 0.0
        self.head = logits + _gathered_tables(model, config, stack, params) - self.gathered
        self.scattered = None
        if stack.lockstep and micro_batches == 1:
            self.scattered = _scattered_gradients(model, config, stack, params, layer)

    def peak(self, kept: Kept) -> Memory:
        """Return the memory at the stage's peak."""
        weights, gradients, states = self.states
        piece, running = self.layers * kept.each + self.beside, self.running + kept.again
        if self.one_program:
            running, piece = running + piece, self.stream
        activations, busy = self.kept * piece, max(running, self.head) + self.flying
        if self.scattered is not None:
            # One backward pass: gradients grow as activations go; the logits precede all of them.
            gradients = self.scattered
            busy = max(
                running + self.flying - min(activations, gradients), self.head - gradients, 0.0
            )
        return Memory(
            self.stage,
            weights=weights,
            gradients=gradients,
            optimizer=states,
            activations=activations,
            working=busy + 2 * self.stream + self.stack.buffer_bytes,
            gathered=self.gathered,
        )


def memory(
    model: Transformer, config: Configuration, stack: Stack, global_batch: int, stage: int = 0
) -> Memory:
    """Count a stage's memory at its peak."""
    kept = Kept.of(model, config, stack)
    return StageMemory(model, config, stack, global_batch, stage).peak(kept)


def _scattered_gradients(
    model: Transformer, config: Configuration, stack: Stack, params: StageParams, layer: float
) -> float:
    """Count the gradients where XLA scatters each layer's as soon as they are there.

    It does so for every ZeRO stage, as nothing is added to them; one layer's are still unsharded,
    and those of the tables, which wait for the embedding's.
    """
    if not config.zero_stage:
        return state_bytes(model, config, stack, params)[1]
    scattered = state_bytes(model, replace(config, zero_stage=2), stack, params)[1]
    return scattered + stack.gradient_bytes * (layer + params.tables) * config.shard_share(model)


def _gathered_tables(
    model: Transformer, config: Configuration, stack: Stack, params: StageParams
) -> float:
    """Count the bytes of tables while they are used: gathered, and their gradients before a sum."""
    if not stack.gathers_tables:
        return ELEMENT * (1 - config.shard_share(model)) * params.tables
    ways = config.fsdp * config.model * config.pipeline
    if ways == 1:
        return 0.0
    used = model.vocab * model.hidden * (ELEMENT + stack.gradient_bytes)
    if config.pipeline == 1:
        return used
    whole = model.vocab * model.hidden * (1 if model.tied else 2) / (config.fsdp * config.model)
    return used + whole * (stack.weight_bytes + stack.gradient_bytes)


def stages_memory(
    model: Transformer, config: Configuration, stack: Stack, global_batch: int
) -> tuple[StageMemory, ...]:
    """Return the memory of the stages of which one needs most."""
    stages = distinct_stages(model, config)
    return tuple(StageMemory(model, config, stack, global_batch, stage) for stage in stages)


def peak_of(stages: Iterable[StageMemory], kept: Kept) -> Memory:
    """Return the memory of the stage that needs most."""
    return max((stage.peak(kept) for stage in stages), key=lambda m: m.total)


def peak(model: Transformer, config: Configuration, stack: Stack, global_batch: int) -> Memory:
    """Return the memory of the stage that needs most."""
    kept = Kept.of(model, config, stack)
    return peak_of(stages_memory(model, config, stack, global_batch), kept)
