"""Count the bytes that a device sends: by what for, along which axes, how often.

Traffic of a transformer follows from the model and its configuration (ConfigTuner, arXiv
2512.24750), and from what the training software sends (`Stack`). The paper's formula for tensor
parallelism is published; the other terms are reconstructions from how each parallelism works.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from jaxoverlap.parallelism.configuration import Configuration
from jaxoverlap.parallelism.memory import StageParams
from jaxoverlap.parallelism.model import ELEMENT, Transformer
from jaxoverlap.parallelism.stack import Stack
from jaxoverlap.plan.collectives import PERMUTE


@dataclass(frozen=True)
class Sent:
    """One collective, repeated.

    Attributes:
        term: what it is for: "model" (tensor parallelism), "context", "expert", "fsdp", "pipeline"
            or "data".
        phase: "forward", "backward", or "end" of the step or of a micro-batch.
        kind: as HLO writes it.
        axes: the axes whose devices take part.
        sent_bytes: bytes that each device sends; a gather, scatter or sum by a ring algorithm.
        count: how often, in a layer and micro-batch; of tables in a micro-batch; of sends between
            stages in a virtual stage and micro-batch; of "end" in a step.
    """

    term: str
    phase: str
    kind: str
    axes: tuple[str, ...]
    sent_bytes: float
    count: int = 1


def activation_bytes(model: Transformer, config: Configuration) -> float:
    """Bytes of a micro-batch's residual stream, as each device of a tensor group needs it."""
    return ELEMENT * config.micro_batch * model.sequence / config.context * model.hidden


def of_layer(model: Transformer, config: Configuration, stack: Stack) -> list[Sent]:
    """List a layer's collectives for one micro-batch, recompute included."""
    sent = [
        *_model(model, config),
        *_context(model, config),
        *_expert(model, config, stack),
        *_fsdp(model, config),
    ]
    return [s for s in sent if s.sent_bytes]


def _model(model: Transformer, config: Configuration) -> list[Sent]:
    """Two all-reduces per direction; with sequence parallelism gathers and scatters.

    ConfigTuner's six in a layer: two forward, two backward, two again under full recompute. With
    the sequence split, the backward pass gathers once more for each gradient of a weight.
    """
    full = activation_bytes(model, config) * (config.model - 1) / config.model
    again = 2 if config.recompute == "full" else 0
    if not config.splits_sequence:
        return [
            Sent("model", "forward", "all-reduce", ("model",), 2 * full, 2),
            Sent("model", "backward", "all-reduce", ("model",), 2 * full, 2 + again),
        ]
    return [
        Sent("model", "forward", "all-gather", ("model",), full, 2),
        Sent("model", "forward", "reduce-scatter", ("model",), full, 2),
        Sent("model", "backward", "all-gather", ("model",), full, 4 + again),
        Sent("model", "backward", "reduce-scatter", ("model",), full, 2 + again),
    ]


def _context(model: Transformer, config: Configuration) -> list[Sent]:
    """Gather keys and values for attention; backward gathers them again and scatters gradients."""
    kv = max(model.kv_hidden // config.model, model.head_size)
    part = ELEMENT * config.micro_batch * model.sequence / config.context * 2 * kv
    sent = part * (config.context - 1)
    return _gathered_twice("context", sent)


def _expert(model: Transformer, config: Configuration, stack: Stack) -> list[Sent]:
    """Send tokens to their experts and back; the backward pass likewise."""
    tokens = activation_bytes(model, config) * max(model.choices, 1) * stack.capacity
    split = config.model if config.splits_sequence else 1
    sent = tokens * (config.expert - 1) / config.expert / split
    again = 2 if config.recompute == "full" else 0
    return [
        Sent("expert", "forward", "all-to-all", ("expert",), sent, 2),
        Sent("expert", "backward", "all-to-all", ("expert",), sent, 2 + again),
    ]


def _fsdp(model: Transformer, config: Configuration) -> list[Sent]:
    """Gather a layer's weights for each pass, and scatter its gradients."""
    sent = _gathered(model, config, StageParams.of_layer(model, config).total)
    return _gathered_twice("fsdp", sent)


def _gathered_twice(axis: str, sent: float) -> list[Sent]:
    """List what is gathered for each pass, and the scatter of its gradients."""
    return [
        Sent(axis, "forward", "all-gather", (axis,), sent),
        Sent(axis, "backward", "all-gather", (axis,), sent),
        Sent(axis, "backward", "reduce-scatter", (axis,), sent),
    ]


def _gathered(model: Transformer, config: Configuration, elements: float) -> float:
    """Return the bytes that a device sends to gather weights over `fsdp`: padded shards."""
    return ELEMENT * elements * config.shard_share(model) * (config.fsdp - 1)


def of_tables(model: Transformer, config: Configuration, stack: Stack) -> list[Sent]:
    """List what the embedding and the head send for a micro-batch: gathers, and their gradients.

    Backward uses what forward gathered. Of a pipeline's stages the last one's.
    """
    if not stack.gathers_tables:
        tables = StageParams.of_stage(model, config, config.pipeline - 1).tables
        sent, axes = _gathered(model, config, tables), ("fsdp",)
    else:
        axes = tuple(axis for axis in ("fsdp", "model") if getattr(config, axis) > 1)
        shards = config.fsdp * config.model
        tables = model.vocab * (1 if model.tied or config.pipeline > 1 else 2)
        sent = ELEMENT * tables * model.hidden * (shards - 1) / shards
    return [
        Sent("fsdp", phase, kind, axes, sent)
        for phase, kind in (("forward", "all-gather"), ("backward", "reduce-scatter"))
        if sent
    ]


def of_stage(model: Transformer, config: Configuration, stack: Stack) -> list[Sent]:
    """List what a virtual stage (a model chunk of interleaving) sends on, forward and backward."""
    if config.pipeline == 1:
        return []
    sent = activation_bytes(model, config)
    if config.splits_sequence or stack.split_sends:
        sent /= config.model
    return [
        Sent("pipeline", "forward", PERMUTE, ("pipeline",), sent),
        Sent("pipeline", "backward", PERMUTE, ("pipeline",), sent),
    ]


def of_step(
    model: Transformer, config: Configuration, stack: Stack, micro_batches: int
) -> list[Sent]:
    """List the sums of gradients and what follows them, on the device that has most to sum.

    ZeRO-1 scatters gradients and gathers weights: listed as an all-reduce, which has as many bytes.
    ZeRO-2 keeps only its part of the gradients, so that it scatters them after every micro-batch;
    sums over `Stack.sums_every_micro_batch` come as often. A pipeline's tied tables are listed too.
    """
    params = StageParams.largest(model, config, even=stack.lockstep)
    shard = config.shard_share(model)
    sent = _gradient_sums(config, stack, params.dense * shard, "dense", micro_batches)
    sent += _gradient_sums(config, stack, params.experts * shard, "experts", micro_batches)
    if config.pipeline > 1 and (model.tied or stack.lockstep):
        # The first and the last stage have a copy of a tied table; an SPMD pipeline has parts of
        # all tables on each stage, gathers them, and scatters their gradients.
        table = stack.reduced_bytes * params.tables * shard
        if stack.lockstep:
            sent += [
                Sent("pipeline", "end", kind, ("pipeline",), table * (config.pipeline - 1))
                for kind in ("all-gather", "reduce-scatter")
            ]
        else:
            sent.append(Sent("pipeline", "end", "all-reduce", ("pipeline",), table))
    return sent


def _gradient_sums(
    config: Configuration, stack: Stack, elements: float, part: str, micro_batches: int
) -> list[Sent]:
    """List the sums of gradients of so many elements; those of experts differ along `expert`."""
    axes = [axis for axis in ("data", "expert", "context") if getattr(config, axis) > 1]
    if part == "experts":
        axes = [axis for axis in axes if axis != "expert"]
    if not axes or not elements:
        return []
    size = stack.reduced_bytes * elements

    def reduce_scatter_bytes(over: tuple[str, ...]) -> float:
        shards = math.prod(getattr(config, axis) for axis in over)
        return size * (shards - 1) / shards

    if config.zero_stage == 2:
        over = tuple(axes)
        sent = reduce_scatter_bytes(over)
        return [
            Sent("data", "end", "reduce-scatter", over, sent, micro_batches),
            Sent("data", "end", "all-gather", over, sent),
        ]
    every = tuple(axis for axis in axes if axis in stack.sums_every_micro_batch)
    once = tuple(axis for axis in axes if axis not in every)
    return [
        Sent("data", "end", "all-reduce", over, 2 * reduce_scatter_bytes(over), times)
        for over, times in ((every, micro_batches), (once, 1))
        if over
    ]
