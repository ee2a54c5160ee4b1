"""Estimate a step's seconds by term, with ConfigTuner's formula and the terms that it lacks.

T = compute + recompute + model + context + expert + fsdp + pipeline + data + bubble + optimizer
(arXiv 2512.24750 publishes the sum and its term for tensor parallelism, here `model`; the others
are reconstructions, each from how that parallelism works). Effective bandwidth goes by a message's
bytes and its group's placement, utilisation by a matmul's shape: both are the cost model's.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from jaxoverlap.cost.groups import Group, pair
from jaxoverlap.cost.kernels import AttentionKernel, MatmulKernel
from jaxoverlap.cost.model import CostModel
from jaxoverlap.parallelism import traffic, work
from jaxoverlap.parallelism.configuration import AXES, Configuration
from jaxoverlap.parallelism.memory import LayerValues, StageParams, zero_ways
from jaxoverlap.parallelism.model import ELEMENT, Transformer
from jaxoverlap.parallelism.parts import Parts
from jaxoverlap.parallelism.placement import Densest, Placement
from jaxoverlap.parallelism.recompute import VALUES
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
        offload: copies of activations to the host's memory and back, as far as no layer hides them.
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
    offload: float = 0.0
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
        self._kernels = functools.cache(self._kernels_uncached)
        self._forward_cached = functools.cache(self._forward_uncached)
        self._backward_s = functools.cache(self._backward_uncached)
        self._again_by_value_s = functools.cache(self._again_uncached)
        self._head = functools.cache(self._head_uncached)
        self._sends = dict[tuple[object, ...], StepTerms]()
        self._least_fsdp_cached = functools.cache(self._least_fsdp_uncached)
        self._passes = functools.cache(self._passes_uncached)
        self._values = functools.cache(self._values_uncached)
        self._casts_cached = functools.cache(self._casts_uncached)
        self.bound_of_layer_s = functools.cache(self._bound_uncached)

    def terms(self, config: Configuration, placement: Placement) -> StepTerms:
        """Return a configuration's seconds by term.

        The stage that takes longest runs all micro-batches; the others take their one pass while
        the pipeline fills and drains, which interleaving by v divides by v.
        """
        micro_batches = config.micro_batches(self.global_batch)
        layer = self._layer(config) + self._layer_sends(config, placement)
        once = replace(StepTerms(), pipeline=self._stage_sends(config, placement))
        once += replace(StepTerms(), fsdp=self._unhidden_s(config, placement))
        once += replace(StepTerms(), compute=self._added_s(config))
        once += replace(StepTerms(), offload=config.offload * self._offload_s(config))
        middle_layers, last_layers = self._stage_layers(config)
        middle = layer * middle_layers + once
        last = layer * last_layers + once + self._head(_unrecomputed(config))
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

    def bound_s(self, config: Configuration, domain: int, layer_s: float | None = None) -> float:
        """Return a lower bound of the seconds on any placement.

        Kernels and their bubble, what tensor, expert and context parallelism add in the densest
        placement, and what hidden FSDP costs at least.

        Args:
            domain: GPUs of an NVLink domain; tensor parallelism is innermost in all placements.
            layer_s: `bound_of_layer_s`; None: the configuration's.
        """
        if layer_s is None:
            layer_s = self.bound_of_layer_s(kernels_of(config), domain, config.overlap)
        layer_s += self._least_fsdp_s(config, domain) + sum(self._casts_s(config))
        middle, last = self._stage_layers(config)
        head_s = self._head(_unrecomputed(config)).step_s
        slowest_s = max(layer_s * middle, layer_s * last + head_s)
        bubble_s = (config.pipeline - 1) * layer_s * middle / config.interleave
        return slowest_s * config.micro_batches(self.global_batch) + bubble_s

    def _bound_uncached(self, config: Configuration, domain: int, overlap: bool) -> float:
        """Return a layer's seconds without FSDP in its densest placement, for `bound_s`."""
        layer_s = self._kernels(config).step_s
        if config.model == config.expert == config.context == 1:
            return layer_s
        inner = Densest(AXES, tuple(config.axes.values()), domain)
        sends = self._layer_sends(replace(config, overlap=overlap), inner)
        return layer_s + sends.model + sends.expert + sends.context

    def _least_fsdp_s(self, config: Configuration, domain: int) -> float:
        """Return what hidden collectives of FSDP cost a layer on the fewest domains they fit."""
        if config.fsdp == 1 or (config.pipeline > 1 and self.stack.keeps_gathered):
            return 0.0
        return self._least_fsdp_cached(config.fsdp, config.model, config.expert, domain)

    def _least_fsdp_uncached(self, fsdp: int, model: int, expert: int, domain: int) -> float:
        config = Configuration(fsdp=fsdp, model=model, expert=expert)
        group = Group(fsdp, min(-(-fsdp * model // domain), fsdp))
        sends = traffic.of_weights(self.model, config)
        sent_s = sum(s.count * self._in_group_s(s, group) for s in sends)
        return min(self.stack.hidden_cost, 1.0) * sent_s

    def cost_of_choices(
        self, key: Configuration, choices: Iterable[str]
    ) -> Iterator[tuple[float, float, str]]:
        """Yield what each choice of recompute costs a layer: seconds, saved bytes; and the choice.

        Seconds are those of kernels, and of what goes along the tensor axis and to experts, in the
        densest placement, of which the same part stays exposed with all choices.

        Args:
            key: what `kernels_of` gives.
            choices: as `Configuration` takes them.
        """
        sent_s = self._sent_again_s(key)
        for recompute in choices:
            config = with_recompute(key, recompute)
            again = zip(traffic.again(config, self.stack), sent_s, strict=True)
            seconds = self._kernels(config).step_s + sum(s for sends, s in again if sends)
            yield seconds, self._kept_bytes(config), recompute

    def _sent_again_s(self, key: Configuration) -> list[float]:
        """Return the seconds of the collectives that go with each part of `traffic.again`."""
        if key.model == key.expert == 1:
            return [0.0] * 5
        inner = Densest(AXES, tuple(key.axes.values()), self.cost.cluster.gpus_per_nvlink_domain)

        def sent_s(recompute: str) -> float:
            config = with_recompute(key, recompute)
            sends = traffic.of_layer(self.model, config, self.stack)
            exposed = {"model": _EXPOSED, "expert": self.stack.expert_exposed}
            return sum(exposed.get(s.term, 0.0) * s.count * self._sent_s(s, inner) for s in sends)

        none_s = sent_s("none")
        apart = (("qkv",), ("up",), ("norms", "out"), ("dispatch",))
        parts = [
            sent_s("saves " + "+".join(v for v in VALUES if v not in of)) - none_s for of in apart
        ]
        return [*parts, sent_s("full") - none_s - sum(parts)]

    def _kept_bytes(self, config: Configuration) -> float:
        values = self._values(_unrecomputed(config))
        return values.kept(config.recompute, config.saved, self.stack)

    def _values_uncached(self, config: Configuration) -> LayerValues:
        return LayerValues.of(self.model, config, self.stack)

    # -- kernels ----------------------------------------------------------------------------------

    def _layer(self, config: Configuration) -> StepTerms:
        """Seconds of a layer's kernels for one micro-batch, with the casts of its weights."""
        forward_s, backward_s = self._casts_s(config)
        kernels = self._kernels(kernels_of(config))
        if not forward_s:
            return kernels
        # XLA casts again where it computes again, and a pipeline of one program always does.
        again = (
            config.recompute != "none" if self.stack.skips_unread else config.recompute == "full"
        )
        times = again + (self.stack.lockstep and config.pipeline > 1)
        return kernels + StepTerms(compute=forward_s + backward_s, recompute=times * forward_s)

    def _casts_s(self, config: Configuration) -> tuple[float, float]:
        """Return the seconds of casting a layer's weights, and their gradients."""
        if self.stack.weight_bytes <= ELEMENT:
            return 0.0, 0.0
        return self._casts_cached(config.fsdp, config.model, config.expert)

    def _casts_uncached(self, fsdp: int, model: int, expert: int) -> tuple[float, float]:
        config = Configuration(fsdp=fsdp, model=model, expert=expert)
        casts = work.weight_casts(self.model, config, self.stack)
        return self._work_s(casts.forward), self._work_s(casts.backward)

    def _kernels_uncached(self, config: Configuration) -> StepTerms:
        """Seconds of a layer's kernels for one micro-batch, without casts of weights."""
        forward_s = self._forward_cached(_unrecomputed(config))
        again_s = self._again_s(config)
        if self.stack.lockstep and config.pipeline > 1:
            again_s += forward_s
        stacked_s = 0.0
        if self.stack.saved > 1 and config.recompute != "full":
            # A scan copies residuals into stacked ones, and out of them: four more passes.
            stacked_s = self._work_s(work.Work(memory_bytes=4 * self._kept_bytes(config)))
        kernels_s = forward_s + self._backward_s(_unrecomputed(config))
        # A layer with experts takes at least as long as the host launches its kernels.
        experts = sum(count for count, kind in self.model.kinds if kind.experts)
        launched_s = self.stack.expert_launch_s * experts / self.model.layers
        compute_s = max(kernels_s + stacked_s, launched_s - again_s)
        return StepTerms(compute=compute_s, recompute=again_s)

    def _again_s(self, config: Configuration) -> float:
        """Return the seconds of the kernels that a layer's backward pass runs again."""
        if config.recompute == "none":
            return 0.0
        if config.recompute == "full" and not self.stack.skips_unread:
            return self._forward_cached(_unrecomputed(config))
        by_value = self._again_by_value_s(_unrecomputed(config))
        saved = config.saved | ({"out"} if "norms" in config.saved else set())
        if not self.stack.fuses(config.context):
            saved -= {"attention"}  # its scores, which the backward pass reads, are not kept
        return sum(by_value[name] for name in VALUES if name not in saved)

    def _again_uncached(self, config: Configuration) -> dict[str, float]:
        seconds = dict.fromkeys(VALUES, 0.0)
        for share, counted in self._passes(config):
            for name, again in counted.again.items():
                seconds[name] += share * self._work_s(again)
        return seconds

    def kernels_s(self, key: Configuration) -> float:
        """Return the seconds of a layer's kernels, without casts of weights."""
        return self._kernels(key).step_s

    def _passes_uncached(self, config: Configuration) -> tuple[tuple[float, work.Pass], ...]:
        """Return the passes of each kind of layer, and its share of the layers."""
        model, stack = self.model, self.stack
        return tuple(
            (count / model.layers, work.layer(model, config, stack, kind))
            for count, kind in model.kinds
        )

    def _forward_uncached(self, config: Configuration) -> float:
        return sum(share * self._work_s(of.forward) for share, of in self._passes(config))

    def _backward_uncached(self, config: Configuration) -> float:
        return sum(share * self._work_s(of.backward) for share, of in self._passes(config))

    def _forward_s(self, config: Configuration) -> float:
        """Seconds of a layer's forward pass, the mean of its kinds."""
        return self._forward_cached(_unrecomputed(config)) + self._casts_s(config)[0]

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

    def _offload_s(self, config: Configuration) -> float:
        """Seconds by which the copy of a layer's activations exceeds the layer, there and back."""
        if not config.offload:
            return 0.0
        copy_s = self._kept_bytes(config) / self.cost.cluster.chip.host_link.bandwidth_bytes_per_s
        layer, forward_s = self._layer(config), self._forward_s(config)
        return max(0.0, copy_s - forward_s) + max(0.0, copy_s - layer.step_s + forward_s)

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
        groups = tuple(placement.group(*axes) for axes in _LAYERS_AXES)
        waits = placement.group(*_REPLICAS) if self.stack.scale_syncs else None
        key = (kernels_of(config), config.fsdp, config.overlap, groups, waits)
        if key not in self._sends:
            self._sends[key] = self._layer_sends_uncached(config, placement)
        return self._sends[key]

    def _layer_sends_uncached(self, config: Configuration, placement: Placement) -> StepTerms:
        seconds = dict[str, float]()
        sends = traffic.of_layer(self.model, config, self.stack)
        if self.stack.scale_syncs and self.stack.matmul_dtype == "fp8":
            seconds["data"] = self._scales_s(config, placement)
        for sent in sends:
            sent_s = sent.count * self._sent_s(sent, placement)
            seconds[sent.term] = seconds.get(sent.term, 0.0) + sent_s
        if "expert" in seconds:
            seconds["expert"] *= self.stack.expert_exposed
        if "model" in seconds and self.stack.tensor_exposed is not None:
            seconds["model"] *= self.stack.tensor_exposed
        elif "model" in seconds and self._hides(config):
            plain_s = seconds["model"]
            rings_s = self._rings_s(config, placement)
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
        group = placement.group(*_REPLICAS)
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

    def _rings_s(self, config: Configuration, placement: Placement) -> float:
        """Seconds that rings along the tensor axis leave exposed in a layer, or add to its matmuls.

        A collective next to a matmul becomes n chunks of it and n - 1 hops: chunk + (n - 1)
        max(chunk, hop), whatever of it is more than the matmul (`jaxoverlap.passes.rings`). The
        backward pass has two matmuls over each hop. The collective stays where that takes less.
        """
        n, group = config.model, placement.group("model")
        plain = all(kind.mixer == "attention" and kind.has_mlp for _, kind in self.model.kinds)
        if not config.splits_sequence or not plain or self.model.kv_rank:
            return float("inf")
        exposed_s = 0.0
        passes = self._passes(_unrecomputed(config))
        for (share, counted), (_, kind) in zip(passes, self.model.kinds, strict=True):
            for sent in traffic.of_tensor(self.model, config, self.stack, kind):
                hop_s = self._collective_s(PERMUTE, sent.sent_bytes / (n - 1), pair(group))
                plain_s = self._sent_s(sent, placement)
                matmuls = counted.forward.matmuls[:4]
                per_hop = 2 if sent.phase == "backward" else 1
                for i in range(int(sent.count)):
                    matmul = _matmul_of(sent.kind, i, matmuls)
                    matmul_s = per_hop * self._matmul_s(matmul)
                    chunk_s = per_hop * self._matmul_s(replace(matmul, m=max(matmul.m // n, 1)))
                    ring_s = chunk_s + (n - 1) * max(chunk_s, hop_s) - matmul_s
                    exposed_s += share * min(plain_s, max(ring_s, 0.0))
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
        layer_s = self._layer(config).step_s
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
        layer = self._layer(config)
        forward_s = self._forward_s(config)
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

# Share of tensor collectives that stays exposed, as choices of recompute are compared.
_EXPOSED = 0.25

# FSDP's collectives that no layer hides: (phase, kind), in the order of `_fsdp_phases`.
_ENDS = (("forward", "all-gather"), ("backward", "reduce-scatter"))


# The groups of devices over which a layer's collectives run.
_REPLICAS = ("data", "fsdp", "expert", "context")
_LAYERS_AXES = (("model",), ("context",), ("expert",), ("expert", "model"), ("fsdp",))


def kernels_of(config: Configuration) -> Configuration:
    """Return a configuration with only those fields that its kernels depend on."""
    return _key(
        min(config.pipeline, 2), config.model, config.expert, config.context, config.micro_batch,
        config.recompute, config.sequence_parallel, config.experts_on_model,
    )  # fmt: skip


def _unrecomputed(config: Configuration) -> Configuration:
    """Return what its passes depend on: all that its kernels do, but for recompute."""
    return _key(
        1, config.model, config.expert, config.context, config.micro_batch, "none",
        config.sequence_parallel, config.experts_on_model,
    )  # fmt: skip


def with_recompute(key: Configuration, recompute: str) -> Configuration:
    """Return what `kernels_of` gives, with another choice of recompute."""
    return _key(
        key.pipeline, key.model, key.expert, key.context, key.micro_batch, recompute,
        key.sequence_parallel, key.experts_on_model,
    )  # fmt: skip


@functools.cache  # a search asks for the same few again and again
def _key(
    pipeline: int, model: int, expert: int, context: int, micro_batch: int, recompute: str,
    sequence_parallel: bool, experts_on_model: bool,
) -> Configuration:  # fmt: skip
    return Configuration(
        pipeline=pipeline, model=model, expert=expert, context=context, micro_batch=micro_batch,
        recompute=recompute, sequence_parallel=sequence_parallel,
        experts_on_model=experts_on_model,
    )  # fmt: skip


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
