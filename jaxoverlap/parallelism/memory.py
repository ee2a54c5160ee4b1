"""Count a device's parameters and its memory.

Parameters are exact: they reproduce the integers that Megatron-DeepSpeed printed on Frontier
(sajal-vt/Megatron-DeepSpeed-ORNL, branch frontier-sd, a run of 175B on 128 GCDs).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from jaxoverlap.parallelism.configuration import Configuration
from jaxoverlap.parallelism.model import ELEMENT, Transformer
from jaxoverlap.parallelism.parts import Parts
from jaxoverlap.parallelism.pipeline.schedule import PipelineSchedule
from jaxoverlap.parallelism.stack import Stack


@dataclass(frozen=True)
class StageParams(Parts):
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


def layer_activation_bytes(model: Transformer, config: Configuration, stack: Stack) -> float:
    """Count the bytes that a layer keeps for its backward pass, for a micro-batch.

    Korthikanti et al. (arXiv 2205.05198), equations 1 to 4: s b h (10 + 24/t + 5 a s / (h t))
    with dropout and plain attention, (34 + ...) / t with the sequence split; without dropout its
    masks are gone, and without the scores' term where attention is fused or computed again.
    """
    if config.recompute == "selective" and "pointwise" in stack.selective:
        return _kept_results_bytes(model, config, stack)
    tokens = config.micro_batch * model.sequence / config.context
    h, t = model.hidden, config.model
    unsplit = (10 if stack.dropout else 8) * tokens * h / (t if config.splits_sequence else 1)
    kv = max(model.kv_hidden / t, model.head_size)
    inner = model.active_inner / t * model.mlp_matrices * ELEMENT
    split = tokens * (2 * ELEMENT * model.query_hidden / t + 2 * ELEMENT * kv + inner)
    scores = 0.0
    if not stack.fuses(config.context) and (config.recompute == "none" or stack.saved > 1):
        scores = (
            (5 if stack.dropout else stack.score_bytes) * tokens * model.sequence * model.heads / t
        )
    return stack.saved * (unsplit + split + scores)


def _kept_results_bytes(model: Transformer, config: Configuration, stack: Stack) -> float:
    """Count a layer's input and the results that a stack does not compute again."""
    wide = model.active_inner * (model.mlp_matrices - 1)
    columns = {
        "qkv": (model.query_hidden + 2 * model.kv_hidden) / config.model,
        "attention": model.query_hidden / config.model,
        "out": model.hidden,
        "up": wide / config.model,
        "down": model.hidden,
    }
    elements = model.hidden + sum(n for part, n in columns.items() if part not in stack.selective)
    return ELEMENT * config.micro_batch * model.sequence / config.context * elements


def memory(
    model: Transformer, config: Configuration, stack: Stack, global_batch: int, stage: int = 0
) -> Memory:
    """Count a stage's memory at its peak."""
    one_program = stack.lockstep and config.pipeline > 1
    params = StageParams.of_stage(model, config, stage, even=one_program)
    weights, gradients, states = state_bytes(model, config, stack, params)
    tokens = config.micro_batch * model.sequence / config.context
    split = config.model if config.splits_sequence else 1
    micro_batches = config.micro_batches(global_batch)
    layers = config.stage_layers(model, stage) / config.interleave
    kept = in_flight(config, micro_batches, stage)
    one = layer_activation_bytes(model, config, stack)
    stream = ELEMENT * tokens * model.hidden / split
    per_layer = stream if config.recompute == "full" else one
    last = stage == config.pipeline - 1
    logits = tokens * model.vocab / config.model * (2 + 4 + 4) if last else 0.0
    mask = stream / ELEMENT if stage == 0 and stack.dropout else 0.0  # of the embedding's dropout
    layer = StageParams.of_layer(model, config).total
    piece = layers * per_layer + mask + stack.micro_batch_bytes
    running = one if config.recompute == "full" else 0.0
    if one_program:
        kept = PipelineSchedule(config.pipeline, micro_batches, config.interleave).live_pieces(
            stage
        )
        running, piece = running + piece, stream
    if stack.lockstep and micro_batches > 1:  # gradients of a micro-batch, before they are added
        own = (params.total - params.tables) * config.shard_share(model)
        running += stack.gradient_bytes * own / config.interleave
        if one_program:  # XLA copies a chunk's sums where it adds to them
            running += stack.gradient_bytes * own
    flying = 0.0
    if config.splits_sequence and stack.halves_exposed is not None:
        flying = 4 * ELEMENT * tokens * model.hidden  # gathered rows of both halves
    gathered = ELEMENT * (1 - config.shard_share(model)) * 2 * layer
    head = logits + _gathered_tables(model, config, stack, params) - gathered
    activations, busy = kept * piece, max(running, head) + flying
    if stack.lockstep and micro_batches == 1:
        # One backward pass: gradients grow as activations go, and the logits precede all of them.
        gradients = _scattered_gradients(model, config, stack, params, layer)
        busy = max(running + flying - min(activations, gradients), head - gradients, 0.0)
    return Memory(
        stage,
        weights=weights,
        gradients=gradients,
        optimizer=states,
        activations=activations,
        working=busy + 2 * stream + stack.buffer_bytes,
        gathered=gathered,
    )


def _scattered_gradients(
    model: Transformer, config: Configuration, stack: Stack, params: StageParams, layer: int
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


def peak(model: Transformer, config: Configuration, stack: Stack, global_batch: int) -> Memory:
    """The memory of the stage that needs most."""
    stages = distinct_stages(model, config)
    return max(
        (memory(model, config, stack, global_batch, stage) for stage in stages),
        key=lambda m: m.total,
    )
