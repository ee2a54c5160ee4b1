"""Estimate a step's seconds by term, with ConfigTuner's formula and the terms that it lacks.

T = compute + recompute + model + context + expert + fsdp + pipeline + data + bubble + optimizer
(arXiv 2512.24750 publishes the sum and its term for tensor parallelism, here `model`; the others
are reconstructions, each from how that parallelism works). Effective bandwidth goes by a message's
bytes and its group's placement, utilisation by a matmul's shape: both are the cost model's.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, replace

from jaxoverlap.cost.groups import Group, pair
from jaxoverlap.cost.kernels import AttentionKernel, MatmulKernel
from jaxoverlap.cost.model import CostModel
from jaxoverlap.parallelism import traffic, work
from jaxoverlap.parallelism.configuration import Configuration
from jaxoverlap.parallelism.memory import StageParams, layer_activation_bytes, zero_ways
from jaxoverlap.parallelism.model import Transformer
from jaxoverlap.parallelism.parts import Parts
from jaxoverlap.parallelism.placement import Placement
from jaxoverlap.parallelism.stack import Stack
from jaxoverlap.parallelism.traffic import Sent
from jaxoverlap.plan.collectives import PERMUTE


@dataclass(frozen=True)
class StepTerms(Parts):
    """Seconds of a step by term: exposed, plus what hidden FSDP and data collectives cost it.

    They add up to the step. The cost of hidden collectives is contention (`Stack.hidden_cost`).

    Attributes:
        compute: kernels of the slowest stage, all micro-batches, with the additions of their
            gradients (`Stack.lockstep`), without recompute.
        recompute: kernels that its backward passes run again.
        model, context, expert, fsdp: collectives along that axis; for embedding and head `fsdp`
            may run over `model` too (`Stack.gathers_tables`).
        pipeline: sends between stages, and the sum of a tied table's gradients; with `lockstep`
            the gather of all tables and the scatter of their gradients.
        data: sums of gradients over replicas, and all-reduces of fp8 scales.
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


class IterationTime:
    """Estimates the seconds of a step; caches those of kernels and collectives.

    Args:
        model: the model that is trained.
        cost: gives the seconds of kernels and collectives on one cluster.
        stack: the training software (MaxText, Megatron, ...) as fitted factors and switches.
        global_batch: sequences of a step.
    """

    def __init__(self, model: Transformer, cost: CostModel, stack: Stack, *, global_batch: int):
        self.model, self.cost, self.stack = model, cost, stack
        self.global_batch = global_batch
        self._kernel_s = functools.cache(self._kernel_uncached)
        self._alone_s = functools.cache(cost.collective_s)
        self._layer = functools.cache(self._layer_uncached)
        self._forward_s = functools.cache(self._forward_uncached)
        self._head = functools.cache(self._head_uncached)
        self._sends = dict[tuple[object, ...], StepTerms]()
        self._least_fsdp = dict[tuple[Configuration, int], float]()

    def terms(self, config: Configuration, placement: Placement) -> StepTerms:
        """Return a configuration's seconds by term.

        The stage that takes longest runs all micro-batches; the others take their one pass while
        the pipeline fills and drains, which interleaving by v divides by v.
        """
        micro_batches = config.micro_batches(self.global_batch)
        layer = self._layer(_kernels_key(config)) + self._layer_sends(config, placement)
        once = replace(StepTerms(), pipeline=self._stage_sends(config, placement))
        once += replace(StepTerms(), fsdp=self._unhidden_s(config, placement))
        once += replace(StepTerms(), compute=self._added_s(config))
        middle_layers, last_layers = self._stage_layers(config)
        middle = layer * middle_layers + once
        last = layer * last_layers + once + self._head(_kernels_key(config))
        slowest = max(middle, last, key=lambda stage: stage.step_s)
        bubble_s = (config.pipeline - 1) * middle.step_s / config.interleave
        return slowest * micro_batches + StepTerms(
            bubble=bubble_s,
            data=self._data_s(config, placement, slowest),
            pipeline=self._table_s(config, placement),
            optimizer=self._optimizer_s(config),
        )

    def _stage_layers(self, config: Configuration) -> tuple[int, int]:
        """Layers of the stage that has most, and of the last; equal in an SPMD pipeline."""
        if self.stack.lockstep:
            most = config.interleave * max(config.chunk_layers(self.model))
            return most, most
        return config.stage_layers(self.model), config.stage_layers(self.model, config.pipeline - 1)

    def bound_s(self, config: Configuration, placement: Placement) -> float:
        """Return a lower bound of the seconds on any placement.

        Kernels and their bubble, what tensor parallelism adds, and what hidden FSDP costs at least.

        Args:
            placement: any; tensor parallelism is innermost in all of them.
        """
        layer_s = self._layer(_kernels_key(config)).step_s
        layer_s += self._layer_sends(config, placement).model
        layer_s += self._least_fsdp_s(config, placement.domain)
        middle, last = self._stage_layers(config)
        slowest_s = max(layer_s * middle, layer_s * last + self._head(_kernels_key(config)).step_s)
        bubble_s = (config.pipeline - 1) * layer_s * middle / config.interleave
        return slowest_s * config.micro_batches(self.global_batch) + bubble_s

    def _least_fsdp_s(self, config: Configuration, domain: int) -> float:
        """Return what hidden collectives of FSDP cost a layer on the fewest domains they fit."""
        if config.fsdp == 1 or (config.pipeline > 1 and self.stack.keeps_gathered):
            return 0.0
        domains = min(-(-config.fsdp * config.model // domain), config.fsdp)
        key = (_kernels_key(config), domains)
        if key not in self._least_fsdp:
            sends = traffic.of_layer(self.model, config, self.stack)
            group = Group(config.fsdp, domains)
            self._least_fsdp[key] = sum(
                s.count * self._in_group_s(s, group) for s in sends if s.term == "fsdp"
            )
        return min(self.stack.hidden_cost, 1.0) * self._least_fsdp[key]

    # -- kernels ----------------------------------------------------------------------------------

    def _layer_uncached(self, config: Configuration) -> StepTerms:
        """Seconds of a layer's kernels for one micro-batch."""
        counted = work.layer(self.model, config, self.stack)
        forward_s, backward_s = self._forward_s(config), self._work_s(counted.backward)
        again_s = {
            "none": 0.0,
            "selective": self._work_s(counted.again),
            "full": forward_s,
        }[config.recompute]
        if self.stack.lockstep and config.pipeline > 1:
            again_s += forward_s
        stacked_s = 0.0
        if self.stack.saved > 1 and config.recompute != "full":
            # A scan copies residuals into stacked ones, and out of them: four more passes.
            saved = layer_activation_bytes(self.model, config, self.stack)
            stacked_s = self._work_s(work.Work(memory_bytes=4 * saved))
        # A layer with experts takes at least as long as the host launches its kernels.
        launched_s = self.stack.expert_launch_s if self.model.experts else 0.0
        compute_s = max(forward_s + backward_s + stacked_s, launched_s - again_s)
        return StepTerms(compute=compute_s, recompute=again_s)

    def _forward_uncached(self, config: Configuration) -> float:
        return self._work_s(work.layer(self.model, config, self.stack).forward)

    def _head_uncached(self, config: Configuration) -> StepTerms:
        counted = work.head(self.model, config)
        return StepTerms(compute=self._work_s(counted.forward) + self._work_s(counted.backward))

    def _work_s(self, counted: work.Work) -> float:
        """Return the seconds of kernels, one after the other."""
        matmuls_s = sum(map(self._kernel_s, counted.matmuls))
        attention_s = self.stack.attention_factor * sum(map(self._kernel_s, counted.attention))
        memory = self.cost.tables.memory
        moved = self.stack.memory_factor * counted.memory_bytes
        memory_s = counted.kernels * memory.launch_s + moved / memory.bytes_per_s
        return self.stack.compute_factor * (matmuls_s + attention_s + memory_s)

    def _kernel_uncached(self, kernel: MatmulKernel | AttentionKernel) -> float:
        """Return the seconds of a kernel.

        Attention on a chip that has no such table gets the rate of a square matmul of 4096, halved:
        FlashAttention-2 reaches 0.5 to 0.7 of that on A100s (Dao 2023, figure 4).
        """
        if isinstance(kernel, MatmulKernel):
            grouped = kernel.batch > 1 and self.model.experts
            factor = self.stack.expert_factor if grouped else 1.0
            return factor * self.cost.matmul_s(**vars(kernel))
        if self.cost.tables.attention is not None:
            return self.cost.attention_s(**vars(kernel))
        square = MatmulKernel(4096, 4096, 4096)
        return 2 * kernel.flops / square.flops * self._kernel_s(square)

    def _added_s(self, config: Configuration) -> float:
        """Seconds of adding a micro-batch's gradients up, where the stack has kernels for that."""
        if not self.stack.lockstep or config.micro_batches(self.global_batch) == 1:
            return 0.0
        params = StageParams.largest(self.model, config, even=True)
        stored = (params.total - params.tables) * config.shard_share(self.model)
        return self._work_s(work.added_gradients(stored, in_pipeline=config.pipeline > 1))

    def _optimizer_s(self, config: Configuration) -> float:
        params = StageParams.largest(self.model, config, even=self.stack.lockstep)
        elements = 0.0
        for part, shards in zip((params.dense, params.experts), zero_ways(config), strict=True):
            elements += part * config.shard_share(self.model) / (shards if config.zero_stage else 1)
        return self._work_s(work.optimizer(elements, self.stack))

    # -- collectives ------------------------------------------------------------------------------

    def _sent_s(self, sent: Sent, placement: Placement, pieces: int | None = None) -> float:
        """Return the seconds of one collective, alone on its links.

        Args:
            pieces: messages of equal size that it is; None: as many as the stack sends.
        """
        group = placement.group(*sent.axes)
        if sent.kind == PERMUTE:
            group = pair(group)
        elif sent.term == "pipeline" and sent.kind == "all-reduce":
            group = Group(2, min(group.domains, 2))
        return self._in_group_s(sent, group, pieces)

    def _in_group_s(self, sent: Sent, group: Group, pieces: int | None = None) -> float:
        """Return the seconds of one collective of a group; `pieces` as in `_sent_s`."""
        if pieces is None:
            apart = sent.term == "fsdp" and self.stack.gathers_matrices
            pieces = 4 + self.model.mlp_matrices if apart else 1  # of about equal size
        piece_bytes = sent.sent_bytes / pieces
        if sent.kind == "all-to-all" and self.stack.sends_once:
            targets = group.domains if group.domains > 1 else group.size
            piece_bytes *= _distinct(targets, self.model.choices) / self.model.choices
        return pieces * self._collective_s(sent.kind, piece_bytes, group)

    def _collective_s(self, kind: str, sent_bytes: float, group: Group) -> float:
        if group.size == 1 or not sent_bytes:
            return 0.0
        seconds = self._alone_s(kind, int(sent_bytes), group)
        return seconds if group.domains == 1 else seconds / self.stack.network_share

    def _layer_sends(self, config: Configuration, placement: Placement) -> StepTerms:
        """Return what a layer's collectives add to one micro-batch, in seconds by term."""
        groups = tuple(placement.group(axis) for axis in ("model", "context", "expert", "fsdp"))
        key = (_kernels_key(config), config.fsdp, config.data, config.overlap, groups)
        if key not in self._sends:
            self._sends[key] = self._layer_sends_uncached(config, placement)
        return self._sends[key]

    def _layer_sends_uncached(self, config: Configuration, placement: Placement) -> StepTerms:
        seconds = dict[str, float]()
        sends = traffic.of_layer(self.model, config, self.stack)
        if self.stack.scale_syncs:
            seconds["data"] = self._scales_s(config, placement)
        for sent in sends:
            sent_s = sent.count * self._sent_s(sent, placement)
            seconds[sent.term] = seconds.get(sent.term, 0.0) + sent_s
        if "model" in seconds and self.stack.tensor_exposed is not None:
            seconds["model"] *= self.stack.tensor_exposed
        elif "model" in seconds and self._hides(config):
            plain_s = seconds["model"]
            rings_s = self._rings_s(config, placement, sends)
            halves_s = self._halves_s(config, placement, plain_s)
            seconds["model"] = min(plain_s, rings_s, halves_s)
        if "fsdp" in seconds and self._gathers_ahead(config):
            phases = self._fsdp_phases(config, placement, sends)
            seconds["fsdp"] = sum(self._paid_s(*phase) for phase in phases)
        if "fsdp" in seconds and config.pipeline > 1 and self.stack.keeps_gathered:
            seconds["fsdp"] /= config.micro_batches(self.global_batch)
        return StepTerms(**seconds)

    def _scales_s(self, config: Configuration, placement: Placement) -> float:
        """Seconds of a layer's all-reduces of fp8 scales, each of which waits for all hosts."""
        group = placement.group("data", "fsdp", "expert", "context")
        waited_s = _WAIT_S * min(group.domains, _MOST_WAITED_FOR) if group.domains > 1 else 0.0
        each_s = self._collective_s("all-reduce", 8, group) + waited_s
        return self.stack.scale_syncs * each_s

    def _hides(self, config: Configuration) -> bool:
        """Return whether rings and gathers ahead hide collectives.

        In an SPMD pipeline (`Stack.lockstep`) they do not: its stages run in loops over ticks, into
        which `jaxoverlap.overlap` does not reach.
        """
        return config.overlap and not (self.stack.lockstep and config.pipeline > 1)

    def _paid_s(self, sent_s: float, kernels_s: float) -> float:
        """Return what a step takes longer for collectives under kernels, contention included."""
        exposed_s = max(0.0, sent_s - kernels_s)
        return exposed_s + self.stack.hidden_cost * (sent_s - exposed_s)

    def _gathers_ahead(self, config: Configuration) -> bool:
        """Return whether FSDP's gathers run under the layer before."""
        return self.stack.prefetches or self._hides(config)

    def _unhidden_s(self, config: Configuration, placement: Placement) -> float:
        """Seconds of FSDP's collectives at the ends of a micro-batch, which no layer hides.

        Those are the tables', the gather before the first layer of the forward pass, and the
        scatter after the last layer of the backward pass.
        """
        tables = traffic.of_tables(self.model, config, self.stack)
        seconds = sum(self._sent_s(s, placement, pieces=1) for s in tables)
        if config.fsdp > 1 and self._gathers_ahead(config):
            sends = traffic.of_layer(self.model, config, self.stack)
            ends = [s for s in sends if s.term == "fsdp" and (s.phase, s.kind) in _ENDS]
            hidden = [kernels_s for _, kernels_s in self._fsdp_phases(config, placement, sends)]
            seconds += sum(
                min(self._sent_s(s, placement), kernels_s)
                for s, kernels_s in zip(ends, hidden, strict=True)
            )
        return seconds

    def _rings_s(self, config: Configuration, placement: Placement, sends: Iterable[Sent]) -> float:
        """Seconds that rings along the tensor axis leave exposed in a layer, or add to its matmuls.

        A collective next to a matmul becomes n chunks of it and n - 1 hops: chunk + (n - 1)
        max(chunk, hop), whatever of it is more than the matmul (`jaxoverlap.passes.rings`). The
        backward pass has two matmuls over each hop. The collective stays where that takes less.
        """
        n, group = config.model, placement.group("model")
        counted = work.layer(self.model, config, self.stack)
        mine = [s for s in sends if s.term == "model"]
        if not config.splits_sequence or not counted.forward.matmuls:
            return float("inf")
        exposed_s = 0.0
        for sent in mine:
            hop_s = self._collective_s(PERMUTE, sent.sent_bytes / (n - 1), pair(group))
            plain_s = self._sent_s(sent, placement)
            matmuls = counted.forward.matmuls[:4]
            per_hop = 2 if sent.phase == "backward" else 1
            for i in range(sent.count):
                matmul = _matmul_of(sent.kind, i, matmuls)
                matmul_s = per_hop * self._matmul_s(matmul)
                chunk_s = per_hop * self._matmul_s(replace(matmul, m=max(matmul.m // n, 1)))
                ring_s = chunk_s + (n - 1) * max(chunk_s, hop_s) - matmul_s
                exposed_s += min(plain_s, max(ring_s, 0.0))
        return exposed_s

    def _halves_s(self, config: Configuration, placement: Placement, plain_s: float) -> float:
        """Seconds that tensor parallelism adds to a layer if the batch is split in two.

        Within one NVLink domain alone, where the share that stays exposed was found.

        Args:
            plain_s: seconds of its collectives, unhidden.
        """
        near = placement.group("model").domains == 1
        if self.stack.halves_exposed is None or config.micro_batch % 2 or not near:
            return float("inf")
        layer_s = self._layer(_kernels_key(config)).step_s
        exposed_s = max(plain_s - layer_s, self.stack.halves_exposed * plain_s)
        return exposed_s + self.stack.halves_compute * layer_s

    def _matmul_s(self, matmul: MatmulKernel) -> float:
        return self.stack.compute_factor * self._kernel_s(matmul)

    def _fsdp_phases(
        self, config: Configuration, placement: Placement, sends: Iterable[Sent]
    ) -> list[tuple[float, float]]:
        """Return FSDP's seconds in a layer and those of the layer's kernels; forward, backward.

        Gathers run one layer ahead; forward and backward apart, as neither hides the other's.
        """
        layer = self._layer(_kernels_key(config))
        forward_s = self._forward_s(_kernels_key(config))
        backward_s = layer.compute + layer.recompute - forward_s
        return [
            (
                sum(
                    s.count * self._sent_s(s, placement)
                    for s in sends
                    if s.term == "fsdp" and s.phase == phase
                ),
                kernels_s,
            )
            for phase, kernels_s in (("forward", forward_s), ("backward", backward_s))
        ]

    def _stage_sends(self, config: Configuration, placement: Placement) -> float:
        sends = traffic.of_stage(self.model, config, self.stack)
        return config.interleave * sum(self._sent_s(s, placement) for s in sends)

    def _data_s(self, config: Configuration, placement: Placement, slowest: StepTerms) -> float:
        """Seconds that sums of gradients add, if backward passes hide them; at least one layer's.

        The last micro-batch's backward pass hides them; with ZeRO-2, which sums every micro-batch,
        every one's does. The first layer's sum, `seconds / layers`, always follows the kernels.
        """
        sums = [s for s in self._of_step(config) if s.term == "data"]
        seconds = sum(s.count * self._sent_s(s, placement) for s in sums)
        micro_batches = config.micro_batches(self.global_batch)
        layers = config.stage_layers(self.model)
        if not self.stack.hides_data or (self.stack.lockstep and micro_batches > 1):
            return seconds
        passes = micro_batches if config.zero_stage == 2 else 1
        hidden_s = passes * slowest.compute * 2 / 3 * (layers - 1) / layers
        return max(self._paid_s(seconds, hidden_s), seconds / layers)

    def _of_step(self, config: Configuration) -> list[Sent]:
        return traffic.of_step(
            self.model, config, self.stack, config.micro_batches(self.global_batch)
        )

    def _table_s(self, config: Configuration, placement: Placement) -> float:
        sums = [s for s in self._of_step(config) if s.term == "pipeline"]
        return sum(self._sent_s(s, placement) for s in sums)


# Seconds that a small all-reduce of all hosts waits for the slowest, for each host, and the hosts
# from which on it waits no longer: an assumption of form and size, as nobody published the jitter
# of hosts. Fitted to MaxText's fp8 steps of Llama2-70B on 64 and 256 GPUs, and to their not growing
# from 512 to 2048 (NVIDIA/dgxc-benchmarking, maxtext/README_70b.md).
_WAIT_S, _MOST_WAITED_FOR = 15e-6, 32

# FSDP's collectives that no layer hides: (phase, kind), in the order of `_fsdp_phases`.
_ENDS = (("forward", "all-gather"), ("backward", "reduce-scatter"))


def _kernels_key(config: Configuration) -> Configuration:
    """Return a configuration with only those fields that its kernels depend on."""
    return Configuration(
        pipeline=min(config.pipeline, 2),
        model=config.model,
        expert=config.expert,
        context=config.context,
        micro_batch=config.micro_batch,
        recompute=config.recompute,
        sequence_parallel=config.sequence_parallel,
        fsdp=config.fsdp,
    )


def _distinct(targets: int, choices: int) -> float:
    """Return on how many of so many hosts, or devices of one, a token's experts are, on average."""
    return targets * (1 - (1 - 1 / targets) ** choices)


def _matmul_of(kind: str, index: int, matmuls: tuple[MatmulKernel, ...]) -> MatmulKernel:
    """Return the matmul next to a collective: gathers precede 0 and 2, scatters follow 1 and 3.

    Args:
        matmuls: qkv, attention out, MLP in, MLP out.
    """
    first = 0 if kind == "all-gather" else 1
    return matmuls[first + 2 * (index % 2)]
