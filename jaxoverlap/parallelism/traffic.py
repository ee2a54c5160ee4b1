"""Count the bytes that a device sends: by what for, along which axes, how often.

Traffic of a transformer follows from the model and its configuration alone (ConfigTuner, arXiv
2512.24750). The paper's formula for tensor parallelism is published; the other terms are completed
from how each kind of parallelism works, and are reconstructions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from jaxoverlap.parallelism.configuration import Configuration
from jaxoverlap.parallelism.memory import StageParams
from jaxoverlap.parallelism.model import Transformer
from jaxoverlap.parallelism.placement import Placement
from jaxoverlap.parallelism.stack import Stack
from jaxoverlap.plan.collectives import PERMUTE

if TYPE_CHECKING:
    from jaxoverlap.parallelism.search import Scored

_ELEMENT = 2  # bytes of an activation


@dataclass(frozen=True)
class Sent:
    """One collective, repeated.

    Attributes:
        term: what it is for: "model", "context", "expert", "fsdp", "pipeline" or "data".
        phase: "forward", "backward", or "end" of the step.
        kind: as HLO writes it.
        axes: the axes whose devices take part.
        sent_bytes: bytes that each device sends, by a ring.
        count: how often in a layer and micro-batch; of "pipeline" in a piece and micro-batch; of
            "end" in a step.
    """

    term: str
    phase: str
    kind: str
    axes: tuple[str, ...]
    sent_bytes: float
    count: int = 1


def activation_bytes(model: Transformer, of: Configuration) -> float:
    """Bytes of a micro-batch's residual stream, as each device of a tensor group needs it."""
    return _ELEMENT * of.micro_batch * model.sequence / of.context * model.hidden


def of_layer(model: Transformer, of: Configuration) -> list[Sent]:
    """List a layer's collectives for one micro-batch, recompute included."""
    sent = [*_model(model, of), *_context(model, of), *_expert(model, of), *_fsdp(model, of)]
    return [s for s in sent if s.sent_bytes]


def _model(model: Transformer, of: Configuration) -> list[Sent]:
    """Two all-reduces each way; or gathers and scatters around matmuls, if the rows are split.

    ConfigTuner's six in a layer: two forward, two backward, two again under full recompute. With
    the sequence split, the backward pass gathers once more for each gradient of a weight.
    """
    whole = activation_bytes(model, of) * (of.model - 1) / of.model
    again = 2 if of.recompute == "full" else 0
    if not of.splits_rows:
        return [
            Sent("model", "forward", "all-reduce", ("model",), 2 * whole, 2),
            Sent("model", "backward", "all-reduce", ("model",), 2 * whole, 2 + again),
        ]
    return [
        Sent("model", "forward", "all-gather", ("model",), whole, 2),
        Sent("model", "forward", "reduce-scatter", ("model",), whole, 2),
        Sent("model", "backward", "all-gather", ("model",), whole, 4 + again),
        Sent("model", "backward", "reduce-scatter", ("model",), whole, 2 + again),
    ]


def _context(model: Transformer, of: Configuration) -> list[Sent]:
    """Gather keys and values for attention; backward gathers them again and scatters gradients."""
    kv = max(model.kv_hidden // of.model, model.head_size)
    part = _ELEMENT * of.micro_batch * model.sequence / of.context * 2 * kv
    sent = part * (of.context - 1)
    return [
        Sent("context", "forward", "all-gather", ("context",), sent),
        Sent("context", "backward", "all-gather", ("context",), sent),
        Sent("context", "backward", "reduce-scatter", ("context",), sent),
    ]


def _expert(model: Transformer, of: Configuration) -> list[Sent]:
    """Send tokens to their experts and back; the backward pass likewise."""
    tokens = activation_bytes(model, of) * max(model.choices, 1)
    sent = tokens * (of.expert - 1) / of.expert / (of.model if of.splits_rows else 1)
    again = 2 if of.recompute == "full" else 0
    return [
        Sent("expert", "forward", "all-to-all", ("expert",), sent, 2),
        Sent("expert", "backward", "all-to-all", ("expert",), sent, 2 + again),
    ]


def _fsdp(model: Transformer, of: Configuration) -> list[Sent]:
    """Gather a layer's weights for each pass, and scatter its gradients."""
    params = StageParams.of_layer(model, of).total
    sent = _ELEMENT * params * (of.fsdp - 1) / of.fsdp
    return [
        Sent("fsdp", "forward", "all-gather", ("fsdp",), sent),
        Sent("fsdp", "backward", "all-gather", ("fsdp",), sent),
        Sent("fsdp", "backward", "reduce-scatter", ("fsdp",), sent),
    ]


def of_stage(model: Transformer, of: Configuration, stack: Stack) -> list[Sent]:
    """List what a piece of a stage sends to the next, forward, and to the one before, backward."""
    if of.pipeline == 1:
        return []
    sent = activation_bytes(model, of)
    if of.splits_rows or stack.split_sends:
        sent /= of.model
    return [
        Sent("pipeline", "forward", PERMUTE, ("pipeline",), sent),
        Sent("pipeline", "backward", PERMUTE, ("pipeline",), sent),
    ]


def of_step(model: Transformer, of: Configuration, stack: Stack, micro_batches: int) -> list[Sent]:
    """List the sums of gradients at a step's end, on the device that has most to sum.

    ZeRO-1 scatters gradients and gathers weights: as many bytes as an all-reduce. ZeRO-2 keeps
    only its part of the gradients, so that it scatters them after every micro-batch.
    """
    params = StageParams.largest(model, of)
    axes = tuple(axis for axis in ("data", "expert", "context") if getattr(of, axis) > 1)
    expert_axes = tuple(axis for axis in axes if axis != "expert")
    sent = []
    for elements, over in ((params.dense, axes), (params.experts, expert_axes)):
        ways = _product(of, over)
        if ways > 1 and elements:
            summed = stack.reduced_bytes * elements / of.fsdp * (ways - 1) / ways
            if of.zero_stage < 2:
                times = micro_batches if stack.sums_every_micro_batch else 1
                sent.append(Sent("data", "end", "all-reduce", over, 2 * summed, times))
                continue
            sent.append(Sent("data", "end", "reduce-scatter", over, summed, micro_batches))
            sent.append(Sent("data", "end", "all-gather", over, summed))
    if of.pipeline > 1 and model.tied:  # the first and the last stage have a copy of the table
        table = stack.reduced_bytes * params.tables / of.fsdp
        sent.append(Sent("pipeline", "end", "all-reduce", ("pipeline",), table))
    return sent


def _product(of: Configuration, axes: tuple[str, ...]) -> int:
    product = 1
    for axis in axes:
        product *= getattr(of, axis)
    return product


def matrix(
    model: Transformer, scored: Scored, stack: Stack, global_batch: int, devices: int
) -> np.ndarray:
    """Bytes that each of the first devices sends to each other in a step: [from, to].

    Rings send to the next device of their group; an all-to-all sends each its part.
    """
    of, at = scored.configuration, scored.placement
    micro_batches = of.micro_batches(global_batch)
    total = np.zeros((devices, devices))
    for sent, times in (
        *((s, micro_batches * of.stage_layers(model)) for s in of_layer(model, of)),
        *((s, micro_batches * of.interleave) for s in of_stage(model, of, stack)),
        *((s, 1) for s in of_step(model, of, stack, micro_batches)),
    ):
        each = sent.sent_bytes * sent.count * times
        for device in range(devices):
            for peer, share in _receivers(sent, at, device).items():
                if peer < devices:
                    total[device, peer] += share * each
    return total


def _receivers(sent: Sent, at: Placement, device: int) -> dict[int, float]:
    """Return who receives what share of the bytes that a device sends."""
    members = at.members(device, sent.axes)
    place, size = members.index(device), len(members)
    if sent.term == "pipeline" and sent.phase == "end":
        ends = {0: members[-1], size - 1: members[0]}
        return {ends[place]: 1.0} if place in ends else {}
    if sent.kind == "all-to-all":
        return {peer: 1 / (size - 1) for peer in members if peer != device}
    step = -1 if sent.kind == PERMUTE and sent.phase == "backward" else 1
    return {members[(place + step) % size]: 1.0}
