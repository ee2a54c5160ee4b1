"""Add up a step's seconds by term: ConfigTuner's form, completed.

T = compute + model + context + expert + fsdp + pipeline + data + bubble + optimizer (arXiv
2512.24750 publishes the sum and its term for tensor parallelism; the others are reconstructions,
each from how that parallelism works). Effective bandwidth goes by a message's bytes and its
group's placement, utilisation by a matmul's shape: both are the cost model's.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

from jaxoverlap.cost.groups import Group, pair
from jaxoverlap.cost.kernels import MatmulKernel
from jaxoverlap.parallelism import traffic, work
from jaxoverlap.parallelism.configuration import Configuration
from jaxoverlap.parallelism.memory import StageParams
from jaxoverlap.parallelism.model import Transformer
from jaxoverlap.parallelism.placement import Placement
from jaxoverlap.parallelism.rates import Rates, work_s
from jaxoverlap.parallelism.stack import Stack
from jaxoverlap.parallelism.traffic import Sent
from jaxoverlap.plan.collectives import PERMUTE


@dataclass(frozen=True)
class Terms:
    """Seconds of a step by term, each as far as nothing hides it; they add up to the step.

    Attributes:
        compute: kernels of the stage that has most, all micro-batches, recompute apart.
        recompute: kernels that its backward passes run again.
        model, context, expert, fsdp: collectives along that axis.
        pipeline: sends between stages, and the sum of a tied table's gradients.
        data: sums of gradients over replicas.
        bubble: what the stage waits while the pipeline fills and drains.
        optimizer: the update.
    """

    compute: float = 0.0
    recompute: float = 0.0
    model: float = 0.0
    context: float = 0.0
    expert: float = 0.0
    fsdp: float = 0.0
    pipeline: float = 0.0
    data: float = 0.0
    bubble: float = 0.0
    optimizer: float = 0.0

    @property
    def step_s(self) -> float:
        """Seconds of the step."""
        return sum(self.by_term.values())

    @property
    def by_term(self) -> dict[str, float]:
        """Return the seconds of each term, by name."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def __add__(self, other: Terms) -> Terms:
        mine = self.by_term
        return Terms(**{name: mine[name] + s for name, s in other.by_term.items()})

    def __mul__(self, times: float) -> Terms:
        return Terms(**{name: s * times for name, s in self.by_term.items()})


class IterationTime:
    """The form, for one model on one cluster by one stack; it keeps what it has counted.

    Args:
        model: what is trained.
        rates: seconds of kernels and collectives.
        stack: what trains it.
        global_batch: sequences of a step.
    """

    def __init__(self, model: Transformer, rates: Rates, stack: Stack, *, global_batch: int):
        self.model, self.rates, self.stack = model, rates, stack
        self.global_batch = global_batch
        self._layer = functools.cache(self._layer_uncached)
        self._head = functools.cache(self._head_uncached)
        self._sends = dict[tuple[object, ...], Terms]()

    def terms(self, of: Configuration, placement: Placement) -> Terms:
        """Return a configuration's seconds by term.

        The stage that takes longest (the last: it has the head) runs all micro-batches; the
        others take their one pass while the pipeline fills and drains, which interleaving by v
        divides by v.
        """
        micro_batches = of.micro_batches(self.global_batch)
        layers = self._layer(_kernels_key(of)) + self._layer_sends(of, placement)
        stage = layers * of.stage_layers(self.model)
        sends = self._stage_sends(of, placement)
        stage += replace(Terms(), pipeline=sends)
        head = self._head(_kernels_key(of))
        slowest = stage + head
        bubble_s = (of.pipeline - 1) * stage.step_s / of.interleave
        return slowest * micro_batches + Terms(
            bubble=bubble_s,
            data=self._data_s(of, placement, slowest),
            pipeline=self._table_s(of, placement),
            optimizer=self._optimizer_s(of),
        )

    def bound_s(self, of: Configuration, placement: Placement) -> float:
        """Return seconds that no placement goes below: kernels, their bubble, and rings.

        Args:
            placement: any; tensor parallelism stands innermost in all of them.
        """
        layer_s = self._layer(_kernels_key(of)).step_s + self._layer_sends(of, placement).model
        stage_s, head_s = layer_s * of.stage_layers(self.model), self._head(_kernels_key(of)).step_s
        bubble_s = (of.pipeline - 1) * stage_s / of.interleave
        return (stage_s + head_s) * of.micro_batches(self.global_batch) + bubble_s

    # -- kernels ----------------------------------------------------------------------------------

    def _layer_uncached(self, of: Configuration) -> Terms:
        """Seconds of a layer's kernels for one micro-batch."""
        counted = work.layer(self.model, of, self.stack)
        forward_s, backward_s = (self._work_s(w) for w in (counted.forward, counted.backward))
        again_s = {
            "none": 0.0,
            "selective": self._work_s(counted.again),
            "full": forward_s,
        }[of.recompute]
        if self.stack.lockstep and of.pipeline > 1:
            again_s += forward_s
        passes = 3 if of.recompute == "full" else 2
        host_s = passes * self.stack.host_s
        return Terms(compute=forward_s + backward_s + host_s, recompute=again_s)

    def _head_uncached(self, of: Configuration) -> Terms:
        counted = work.head(self.model, of)
        return Terms(compute=self._work_s(counted.forward) + self._work_s(counted.backward))

    def _work_s(self, counted: work.Work) -> float:
        return self.stack.compute_factor * work_s(self.rates, counted)

    def _optimizer_s(self, of: Configuration) -> float:
        params = StageParams.largest(self.model, of).total / of.fsdp
        if of.zero_stage:
            params /= of.replicas // of.fsdp
        return self._work_s(work.optimizer(params, self.stack))

    # -- collectives ------------------------------------------------------------------------------

    def _sent_s(self, sent: Sent, placement: Placement) -> float:
        """Return the seconds of one collective, alone on its links."""
        group = placement.group(*sent.axes)
        if sent.kind == PERMUTE:
            group = pair(group)
        elif sent.term == "pipeline":
            group = Group(2, min(group.domains, 2))
        pieces = 1
        if sent.term == "fsdp" and self.stack.gathers_matrices:
            pieces = 4 + self.model.mlp_matrices  # of about equal size
        piece_bytes = sent.sent_bytes / pieces
        return pieces * self._collective_s(sent.kind, piece_bytes, group, placement)

    def _collective_s(
        self, kind: str, sent_bytes: float, group: Group, placement: Placement
    ) -> float:
        seconds = self.rates.collective_s(kind, sent_bytes, group)
        if group.domains == 1:
            return seconds
        here = group.size / group.domains
        partial = kind != PERMUTE and 1 < here < placement.domain
        return seconds / (self.stack.partial_host_share if partial else self.stack.network_share)

    def _layer_sends(self, of: Configuration, placement: Placement) -> Terms:
        """Seconds of a layer's collectives that nothing hides, for one micro-batch."""
        groups = tuple(placement.group(axis) for axis in ("model", "context", "expert", "fsdp"))
        key = (_kernels_key(of), of.fsdp, of.overlap, groups)
        if key not in self._sends:
            self._sends[key] = self._layer_sends_uncached(of, placement)
        return self._sends[key]

    def _layer_sends_uncached(self, of: Configuration, placement: Placement) -> Terms:
        seconds = dict[str, float]()
        sends = traffic.of_layer(self.model, of)
        for sent in sends:
            whole_s = sent.count * self._sent_s(sent, placement)
            seconds[sent.term] = seconds.get(sent.term, 0.0) + whole_s
        if of.overlap and "model" in seconds:
            seconds["model"] = min(seconds["model"], self._rings_s(of, placement, sends))
        if of.overlap and "fsdp" in seconds:
            seconds["fsdp"] = self._gathers_s(of, placement, sends)
        return Terms(**seconds)

    def _rings_s(self, of: Configuration, placement: Placement, sends: Iterable[Sent]) -> float:
        """Seconds that rings along the tensor axis leave exposed in a layer, or add to its matmuls.

        A collective beside a matmul becomes n chunks of it and n - 1 hops: chunk + (n - 1)
        max(chunk, hop), whatever of it is more than the matmul (`jaxoverlap.passes.rings`). The
        backward pass has two matmuls over each hop. A site keeps its collective where that is less.
        """
        n, group = of.model, placement.group("model")
        counted = work.layer(self.model, of, self.stack)
        mine = [s for s in sends if s.term == "model"]
        if not of.splits_rows or not counted.forward.matmuls:
            return float("inf")
        exposed_s = 0.0
        for sent in mine:
            hop_s = self._collective_s(PERMUTE, sent.sent_bytes / (n - 1), pair(group), placement)
            plain_s = self._sent_s(sent, placement)
            matmuls = counted.forward.matmuls[:4]
            per_hop = 2 if sent.phase == "backward" else 1
            for i in range(sent.count):
                matmul = _beside(sent.kind, i, matmuls)
                whole_s = per_hop * self._matmul_s(matmul)
                chunk_s = per_hop * self._matmul_s(replace(matmul, m=max(matmul.m // n, 1)))
                ring_s = chunk_s + (n - 1) * max(chunk_s, hop_s) - whole_s
                exposed_s += min(plain_s, max(ring_s, 0.0))
        return exposed_s

    def _matmul_s(self, matmul: MatmulKernel) -> float:
        return self.stack.compute_factor * self.rates.matmul_s(matmul)

    def _gathers_s(self, of: Configuration, placement: Placement, sends: Iterable[Sent]) -> float:
        """Seconds that FSDP's collectives last longer than the layer whose kernels they run under.

        Gathers run one layer ahead; forward and backward apart, as neither hides the other's.
        """
        layer = self._layer(_kernels_key(of))
        forward_s = layer.recompute if of.recompute == "full" else layer.compute / 3
        under = {"forward": forward_s, "backward": layer.compute + layer.recompute - forward_s}
        exposed_s = 0.0
        for phase, kernels_s in under.items():
            sent_s = sum(
                s.count * self._sent_s(s, placement)
                for s in sends
                if s.term == "fsdp" and s.phase == phase
            )
            exposed_s += max(0.0, sent_s - kernels_s)
        return exposed_s

    def _stage_sends(self, of: Configuration, placement: Placement) -> float:
        sends = traffic.of_stage(self.model, of, self.stack)
        return of.interleave * sum(self._sent_s(s, placement) for s in sends)

    def _data_s(self, of: Configuration, placement: Placement, slowest: Terms) -> float:
        """Seconds of the sums of gradients, less what the last backward pass hides of them."""
        sums = [s for s in self._of_step(of) if s.term == "data"]
        seconds = sum(s.count * self._sent_s(s, placement) for s in sums)
        if not self.stack.hides_data:
            return seconds
        layers = of.stage_layers(self.model)
        every = of.zero_stage == 2 or self.stack.sums_every_micro_batch
        passes = of.micro_batches(self.global_batch) if every else 1
        hidden_s = passes * slowest.compute * 2 / 3 * (layers - 1) / layers
        return max(seconds - hidden_s, seconds / layers)

    def _of_step(self, of: Configuration) -> list[Sent]:
        return traffic.of_step(self.model, of, self.stack, of.micro_batches(self.global_batch))

    def _table_s(self, of: Configuration, placement: Placement) -> float:
        sums = [s for s in self._of_step(of) if s.term == "pipeline"]
        return sum(self._sent_s(s, placement) for s in sums)


def _kernels_key(of: Configuration) -> Configuration:
    """Return a configuration with only those fields that its kernels depend on."""
    return Configuration(
        pipeline=min(of.pipeline, 2),
        model=of.model,
        expert=of.expert,
        context=of.context,
        micro_batch=of.micro_batch,
        recompute=of.recompute,
        sequence_parallel=of.sequence_parallel,
    )


def _beside(kind: str, index: int, matmuls: tuple[MatmulKernel, ...]) -> MatmulKernel:
    """Return a collective's matmul: gathers stand before 0 and 2, scatters after 1 and 3."""
    first = 0 if kind == "all-gather" else 1
    return matmuls[first + 2 * (index % 2)]
