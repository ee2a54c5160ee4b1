"""Count the bytes that a device sends: by what for, along which axes, how often.

Traffic of a transformer follows from the model and its configuration (ConfigTuner, arXiv
2512.24750), and from what the training software sends (`Stack`). The paper's formula for tensor
parallelism is published; the other terms are reconstructions from how each parallelism works.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from jaxoverlap.parallelism.configuration import Configuration
from jaxoverlap.parallelism.memory import StageParams
from jaxoverlap.parallelism.model import ELEMENT, Kind, Transformer
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
    count: float = 1


def activation_bytes(model: Transformer, config: Configuration) -> float:
    """Bytes of a micro-batch's residual stream, as each device of a tensor group needs it."""
    return ELEMENT * config.micro_batch * model.sequence / config.context * model.hidden


def of_layer(model: Transformer, config: Configuration, stack: Stack) -> list[Sent]:
    """List a layer's collectives for one micro-batch, recompute included.

    Of a model with several kinds of layers they are those of all kinds, each as often as its share.
    """
    sent = of_weights(model, config)
    for count, kind in model.kinds:
        share = count / model.layers
        mine = [*_model(model, config, stack, kind), *_expert(model, config, stack, kind)]
        mine += _context(model, config) if kind.mixer == "attention" else []
        sent += mine if share == 1 else [replace(s, count=s.count * share) for s in mine]
    return [s for s in sent if s.sent_bytes and s.count]


def of_tensor(model: Transformer, config: Configuration, stack: Stack, kind: Kind) -> list[Sent]:
    """List the collectives along the tensor axis of a layer of one kind, for one micro-batch."""
    return [s for s in _model(model, config, stack, kind) if s.sent_bytes and s.count]


def _model(model: Transformer, config: Configuration, stack: Stack, kind: Kind) -> Iterator[Sent]:
    """Yield, for attention and the MLP, an all-reduce per direction; else gathers and scatters.

    ConfigTuner's six in a layer: two forward, two backward, two again under full recompute. With
    the sequence split, the backward pass gathers once more for each gradient of a weight. What is
    computed again before attention or the MLP is gathered again, what is behind it scattered.
    Experts that the tensor axis splits whole need neither.
    """
    full = activation_bytes(model, config) * (config.model - 1) / config.model
    in_mlp = kind.has_mlp and not (kind.experts and config.experts_on_model)
    blocks = bool(kind.mixer) + in_mlp
    qkv, up, out, _, down = again(config, stack)
    before = (bool(kind.mixer) and qkv) + (in_mlp and up)
    behind = (bool(kind.mixer) and out) + (in_mlp and down)
    if not config.splits_sequence:
        yield Sent("model", "forward", "all-reduce", ("model",), 2 * full, blocks)
        yield Sent("model", "backward", "all-reduce", ("model",), 2 * full, blocks + behind)
        return
    yield Sent("model", "forward", "all-gather", ("model",), full, blocks)
    yield Sent("model", "forward", "reduce-scatter", ("model",), full, blocks)
    yield Sent("model", "backward", "all-gather", ("model",), full, 2 * blocks + before)
    yield Sent("model", "backward", "reduce-scatter", ("model",), full, blocks + behind)


def again(config: Configuration, stack: Stack) -> tuple[bool, bool, bool, bool, bool]:
    """Return what the backward pass computes again that goes with a collective.

    That is qkv, the MLP's gate or up, attention's projection, dispatch, and the MLP's result.
    """
    saved = config.saved
    return (
        "qkv" not in saved,
        "up" not in saved or "gate" not in saved,
        "out" not in saved and "norms" not in saved,  # norms are kept with the sum that it was for
        "dispatch" not in saved,
        config.recompute == "full" and not stack.skips_unread,
    )


def _context(model: Transformer, config: Configuration) -> list[Sent]:
    """Gather keys and values for attention; backward gathers them again and scatters gradients."""
    kv = max(model.kv_hidden // config.model, model.head_size)
    part = ELEMENT * config.micro_batch * model.sequence / config.context * 2 * kv
    sent = part * (config.context - 1)
    return _gathered_twice("context", sent)


def _expert(model: Transformer, config: Configuration, stack: Stack, kind: Kind) -> Iterator[Sent]:
    """Yield the sends of tokens to their experts and back; the backward pass likewise."""
    if not kind.experts:
        return
    axes = ("expert", "model") if config.experts_on_model else ("expert",)
    tokens = activation_bytes(model, config) * model.routed_hidden / model.hidden
    tokens *= model.choices * stack.capacity
    split = config.model if config.splits_sequence else 1
    sent = tokens * (config.expert_ways - 1) / config.expert_ways / split
    *_, dispatched, down = again(config, stack)
    more = dispatched + down
    yield Sent("expert", "forward", "all-to-all", axes, sent, 2)
    yield Sent("expert", "backward", "all-to-all", axes, sent, 2 + more)


def of_weights(model: Transformer, config: Configuration) -> list[Sent]:
    """List what FSDP sends in a layer: its weights for each pass, and its gradients."""
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
    # XLA sums a matmul's result in its dtype; of several micro-batches it sums what it added up.
    added = stack.lockstep and micro_batches > 1
    each = config.shard_share(model) * (stack.gradient_bytes if added else stack.reduced_bytes)
    sent = _gradient_sums(config, stack, params.dense * each, "dense", micro_batches)
    sent += _gradient_sums(config, stack, params.experts * each, "experts", micro_batches)
    if config.pipeline > 1 and (model.tied or stack.lockstep):
        # The first and the last stage have a copy of a tied table; an SPMD pipeline has parts of
        # all tables on each stage, gathers them, and scatters their gradients.
        table = params.tables * each
        if stack.lockstep:
            sent += [
                Sent("pipeline", "end", kind, ("pipeline",), table * (config.pipeline - 1))
                for kind in ("all-gather", "reduce-scatter")
            ]
        else:
            sent.append(Sent("pipeline", "end", "all-reduce", ("pipeline",), table))
    return sent


def _gradient_sums(
    config: Configuration, stack: Stack, size: float, part: str, micro_batches: int
) -> list[Sent]:
    """List the sums of so many bytes of gradients; those of experts differ along `expert`."""
    axes = [axis for axis in ("data", "expert", "context") if getattr(config, axis) > 1]
    if part == "experts":
        axes = [axis for axis in axes if axis != "expert"]
    if not axes or not size:
        return []

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
