"""Estimate the seconds of collectives alone, and of what a layer's add to its kernels.

Effective bandwidth goes by a message's bytes and its group's placement: both are the cost model's.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import replace

from jaxoverlap.cost.groups import CROWDING_SMS, Group, pair
from jaxoverlap.cost.kernels import MatmulKernel
from jaxoverlap.parallelism import traffic
from jaxoverlap.parallelism.configuration import Configuration
from jaxoverlap.parallelism.kernel_time import KernelTime
from jaxoverlap.parallelism.keys import kernels_of
from jaxoverlap.parallelism.placement import Placement
from jaxoverlap.parallelism.terms import StepTerms
from jaxoverlap.parallelism.traffic import Sent
from jaxoverlap.plan.collectives import PERMUTE

# Seconds that a small all-reduce of all hosts waits for the slowest, for each host, and the hosts
# from which on it waits no longer: an assumption of form and size, as nobody published the jitter
# of hosts. Fitted to MaxText's fp8 steps of Llama2-70B on 64 and 256 GPUs, and to their not growing
# from 512 to 2048 (NVIDIA/dgxc-benchmarking, maxtext/README_70b.md).
_WAIT_S, _MOST_WAITED_FOR = 15e-6, 32

# FSDP's collectives that no layer hides: (phase, kind), in the order of `_fsdp_phases`.
_ENDS = (("forward", "all-gather"), ("backward", "reduce-scatter"))

# The groups of devices over which a layer's collectives run.
_REPLICAS = ("data", "fsdp", "expert", "context")
_LAYERS_AXES = (("model",), ("context",), ("expert",), ("expert", "model"), ("fsdp",))


class SendTime:
    """Estimates and caches the seconds of collectives.

    Args:
        kernels: of the same model, stack and cluster: what collectives hide under.
    """

    def __init__(self, kernels: KernelTime):
        self.kernels = kernels
        self.model, self.stack = kernels.model, kernels.stack
        self.global_batch = kernels.global_batch
        self._alone_s = functools.cache(kernels.cost.collective_s)
        self._crowding = functools.cache(self._crowding_uncached)
        self._sends = dict[tuple[object, ...], StepTerms]()

    # -- alone ------------------------------------------------------------------------------------

    def sent_s(self, sent: Sent, placement: Placement, pieces: int | None = None) -> float:
        """Return the seconds of one collective, alone on its links.

        Args:
            pieces: messages of equal size that it is; None: as many as the stack sends.
        """
        group = placement.group(*sent.axes)
        if sent.kind == PERMUTE:
            group = pair(group)
        elif sent.term == "pipeline" and sent.kind == "all-reduce":
            group = Group(2, min(group.domains, 2))
        return self.in_group_s(sent, group, pieces)

    def in_group_s(self, sent: Sent, group: Group, pieces: int | None = None) -> float:
        """Return the seconds of one collective of a group; `pieces` as in `sent_s`."""
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

    # -- beside kernels ---------------------------------------------------------------------------

    def paid_s(self, sent_s: float, kernels_s: float) -> float:
        """Return what a step takes longer for FSDP's collectives under kernels."""
        return exposed_s(sent_s, kernels_s, self.stack.unhidden + self.stack.hidden_cost)

    def crowding(self, sent: Sent, placement: Placement) -> float:
        """Return how much a collective is in kernels' way: by its SMs, one where it has many.

        NCCL gives a group few channels where it has few of a host's NICs.
        """
        return self._crowding(sent.kind, int(sent.sent_bytes), placement.group(*sent.axes))

    def _crowding_uncached(self, kind: str, sent_bytes: int, group: Group) -> float:
        return min(self.kernels.cost.share(kind, sent_bytes, group).sms / CROWDING_SMS, 1.0)

    def of_layer(self, config: Configuration, placement: Placement) -> StepTerms:
        """Return what a layer's collectives add to one micro-batch, in seconds by term."""
        groups = tuple(placement.group(*axes) for axes in _LAYERS_AXES)
        waits = placement.group(*_REPLICAS) if self.stack.scale_syncs else None
        key = (kernels_of(config), config.fsdp, config.overlap, groups, waits)
        if key not in self._sends:
            self._sends[key] = self._of_layer_uncached(config, placement)
        return self._sends[key]

    def of_ends_s(self, config: Configuration, placement: Placement) -> float:
        """Seconds of FSDP's collectives at the ends of a micro-batch, which no layer hides.

        Those are the tables', the gather before the first layer of the forward pass, and the
        scatter after the last layer of the backward pass.
        """
        tables = traffic.of_tables(self.model, config, self.stack)
        seconds = sum(self.sent_s(s, placement, pieces=1) for s in tables)
        if config.fsdp > 1 and self._gathers_ahead(config):
            sends = traffic.of_layer(self.model, config, self.stack)
            ends = [s for s in sends if s.term == "fsdp" and (s.phase, s.kind) in _ENDS]
            hidden = [kernels_s for _, kernels_s in self._fsdp_phases(config, placement, sends)]
            seconds += sum(
                min(self.sent_s(s, placement), kernels_s)
                for s, kernels_s in zip(ends, hidden, strict=True)
            )
        return seconds

    def between_stages_s(self, config: Configuration, placement: Placement) -> tuple[float, float]:
        """Return the seconds of a chunk's sends between stages, forward and backward.

        They are those that it waits for in the middle of a step, and those of its ends, where the
        pipeline fills and drains and nothing hides them.
        """
        sends = traffic.of_stage(self.model, config, self.stack)
        sent_s = sum(self.sent_s(s, placement) for s in sends)
        if not self.stack.overlaps_stages or config.interleave == 1:
            return sent_s, sent_s
        chunk_s = self.kernels.layer(config).step_s * max(config.chunk_layers(self.model))
        cost = self.stack.hidden_cost * max(self.crowding(s, placement) for s in sends)
        return exposed_s(sent_s, chunk_s, cost), sent_s

    def _of_layer_uncached(self, config: Configuration, placement: Placement) -> StepTerms:
        seconds = dict[str, float]()
        sends = traffic.of_layer(self.model, config, self.stack)
        if self.stack.scale_syncs and self.stack.matmul_dtype == "fp8":
            seconds["data"] = self._scales_s(config, placement)
        for sent in sends:
            sent_s = sent.count * self.sent_s(sent, placement)
            seconds[sent.term] = seconds.get(sent.term, 0.0) + sent_s
        if "expert" in seconds and self.stack.expert_exposed < 1.0:
            beside_s = seconds["expert"] - self.kernels.layer(config).step_s
            seconds["expert"] = max(self.stack.expert_exposed * seconds["expert"], beside_s)
        if "model" in seconds and self.stack.tensor_exposed is not None:
            seconds["model"] *= 1.0 if self._queues_apart(config) else self.stack.tensor_exposed
        elif "model" in seconds and config.overlap and not self._in_ticks(config):
            plain_s = seconds["model"]
            rings_s = self._rings_s(config, placement)
            halves_s = self._halves_s(config, placement, plain_s)
            seconds["model"] = min(plain_s, rings_s, halves_s)
        if "fsdp" in seconds and self._gathers_ahead(config):
            phases = self._fsdp_phases(config, placement, sends)
            seconds["fsdp"] = sum(self.paid_s(*phase) for phase in phases)
        if "fsdp" in seconds and config.pipeline > 1 and self.stack.keeps_gathered:
            seconds["fsdp"] /= config.micro_batches(self.global_batch)
        return StepTerms(**seconds)

    def _scales_s(self, config: Configuration, placement: Placement) -> float:
        """Seconds of a layer's all-reduces of fp8 scales, each of which waits for all hosts."""
        group = placement.group(*_REPLICAS)
        waited_s = _WAIT_S * min(group.domains, _MOST_WAITED_FOR) if group.domains > 1 else 0.0
        each_s = self._collective_s("all-reduce", 8, group) + waited_s
        return self.stack.scale_syncs * each_s

    def fsdp_backward_s(self, config: Configuration, placement: Placement) -> float:
        """Seconds of FSDP's collectives in a layer's backward pass."""
        sends = traffic.of_layer(self.model, config, self.stack)
        return self._fsdp_phases(config, placement, sends)[1][0]

    def _in_ticks(self, config: Configuration) -> bool:
        """Return whether layers run in loops over ticks, as those of an SPMD pipeline do.

        There nothing hides collectives: `jaxoverlap.overlap` does not reach into these loops, and
        XLA's scheduler starts no gather before the loop that reads it.
        """
        return self.stack.lockstep and config.pipeline > 1

    def _queues_apart(self, config: Configuration) -> bool:
        """Return whether FSDP takes the setting away that hides tensor collectives."""
        old = self.kernels.cost.cluster.chip.compute_capability < (10, 0)
        return self.stack.one_queue and old and config.fsdp > 1

    def _gathers_ahead(self, config: Configuration) -> bool:
        """Return whether FSDP's gathers run under the layer before."""
        return (self.stack.prefetches or config.overlap) and not self._in_ticks(config)

    def _fsdp_phases(
        self, config: Configuration, placement: Placement, sends: Iterable[Sent]
    ) -> list[tuple[float, float]]:
        """Return FSDP's seconds in a layer and those of the layer's kernels; forward, backward.

        Gathers run one layer ahead; forward and backward apart, as neither hides the other's.
        """
        forward_s, backward_s = self.kernels.forward_s(config), self.kernels.backward_s(config)
        return [
            (
                sum(
                    s.count * self.sent_s(s, placement)
                    for s in sends
                    if s.term == "fsdp" and s.phase == phase
                ),
                kernels_s,
            )
            for phase, kernels_s in (("forward", forward_s), ("backward", backward_s))
        ]

    # -- tensor parallelism as overlap() hides it -------------------------------------------------

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
        passes = self.kernels.passes(config)
        for (share, counted), (_, kind) in zip(passes, self.model.kinds, strict=True):
            for sent in traffic.of_tensor(self.model, config, self.stack, kind):
                hop_s = self._collective_s(PERMUTE, sent.sent_bytes / (n - 1), pair(group))
                plain_s = self.sent_s(sent, placement)
                matmuls = counted.forward.matmuls[:4]
                per_hop = 2 if sent.phase == "backward" else 1
                for i in range(int(sent.count)):
                    matmul = _matmul_of(sent.kind, i, matmuls)
                    matmul_s = per_hop * self.kernels.matmul_s(matmul)
                    chunk = replace(matmul, m=max(matmul.m // n, 1))
                    chunk_s = per_hop * self.kernels.matmul_s(chunk)
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
        layer_s = self.kernels.layer(config).step_s
        exposed_s = max(plain_s - layer_s, self.stack.halves_exposed * plain_s)
        return exposed_s + self.stack.halves_compute * layer_s


def exposed_s(sent_s: float, kernels_s: float, cost: float) -> float:
    """Return what kernels do not hide of collectives, and the cost of each second that they do."""
    alone_s = max(0.0, sent_s - kernels_s)
    return alone_s + cost * (sent_s - alone_s)


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
