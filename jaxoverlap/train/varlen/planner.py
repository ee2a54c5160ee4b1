"""Plan batches of sequences of any lengths."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike

from jaxoverlap.hardware.cluster import Cluster, parse_cluster
from jaxoverlap.train.varlen.arrays import pieces_of, widths_of
from jaxoverlap.train.varlen.costs import AttentionCosts
from jaxoverlap.train.varlen.partition import GOOD, Sharing, bound_s, partition, prices_of
from jaxoverlap.train.varlen.plan import BatchPlan
from jaxoverlap.train.varlen.remap import even_tokens, token_costs, transport
from jaxoverlap.train.varlen.rings import Bounds, Nodes, bounds_of, exchanged_sizes

_MANY = 4096  # sequences for which one kind of groups is tried alone, as planning takes its time
_SEQUENCES = 32  # of one size on a device; a power of two from there on
# Bounds are in sixteenths of the capacity, and those of rings, whose blocks cost their square and
# their size, in 32nds: so often they can grow.
_STEPS, _RING_STEPS = 16, 32


class Planner:
    """Plans batches, one after the other, for one compiled step.

        planner = Planner(attention_costs("h100-sxm:2x8", heads=32, head_size=128), "h100-sxm:2x8",
                          capacity=10240)
        plan = planner([9000, 300, 1200, 512])

    The step's static sizes grow with what batches need, in sixteenths of the capacity, and never
    shrink: after a few batches nothing is compiled any more. `bounds` has them; given at the start,
    from the last run, nothing is compiled twice.

    Args:
        costs: prices of one layer's attention.
        nodes: the devices, or a cluster.
        capacity: tokens that a device can hold in attention.
        bounds: static sizes to begin with.

    Raises:
        ValueError: for a capacity below two.
    """

    def __init__(
        self,
        costs: AttentionCosts,
        nodes: Nodes | Cluster | str,
        *,
        capacity: int,
        bounds: Bounds | None = None,
    ):
        if capacity < 2:
            raise ValueError(f"capacity={capacity}: expected 2 tokens a device or more")
        self.nodes, self.capacity = nodes_of(nodes), capacity + capacity % 2
        self.bounds = bounds
        better = exchanged_sizes(self.nodes, costs, tokens=capacity)
        if bounds:  # what is compiled already stays as it is
            better = (*bounds.exchanged, *(g for g in better if not bounds.width(g)))
        self.costs = replace(costs, exchanged=better)
        self.growths = 0

    def __call__(self, lengths: ArrayLike) -> BatchPlan:
        """Plan a batch.

        Attention and linear layers balanced together, or attention alone and tokens then moved:
        whichever layer is shorter by price. Where linear layers have no price, tokens move.

        Args:
            lengths: i[sequences], tokens of each.

        Raises:
            Infeasible: a ValueError; the batch does not fit.
            ValueError: for lengths that are no whole numbers of one or more.
        """
        checked = _checked(lengths)
        kinds = [self.costs]
        if self.bounds is None and len(checked) < _MANY:  # nothing is compiled yet
            kinds += self._other_kinds()
        least_s = min(self._least_s(checked, costs) for costs in kinds)
        best = self._best(checked, kinds[0])
        for costs in kinds[1:]:
            if best.layer_seconds > GOOD * least_s:
                best = min(best, self._best(checked, costs), key=lambda plan: plan.layer_seconds)
        self.costs = replace(self.costs, exchanged=self._settled(best))
        return replace(best, bounds=self._grown(best.bounds))

    def _other_kinds(self) -> list[AttentionCosts]:
        """Return prices with other choices of the groups that exchange heads.

        Once something is compiled, by the first batch, that stays as it is.
        """
        can = [g for g in self.nodes.ring_sizes[1:] if self.costs.kv_heads % g == 0]
        inside = [g for g in can if not self.nodes.crosses(g)]
        choices = {tuple(inside), tuple(can)} - {self.costs.exchanged}
        return [replace(self.costs, exchanged=sizes) for sizes in sorted(choices)]

    def _settled(self, plan: BatchPlan) -> tuple[int, ...]:
        """Return who exchanges heads: as the plan has it, and as before where it has no group."""
        used = {size for size, _ in plan.bounds.widths}
        return tuple(
            size
            for size in self.nodes.ring_sizes
            if size in (plan.costs if size in used else self.costs).exchanged
        )

    def _least_s(self, lengths: np.ndarray, costs: AttentionCosts) -> float:
        """Return what no layer whose tokens stay is faster than."""
        return bound_s(prices_of(lengths, self.nodes, costs, token_s=costs.linear_s), self.nodes)

    def _best(self, lengths: np.ndarray, costs: AttentionCosts) -> BatchPlan:
        """Return the better of two plans, one that moves no token and one that evens them out."""
        share = functools.partial(partition, lengths, self.nodes, costs, capacity=self.capacity)
        even_s = costs.linear_s * -(-int(lengths.sum()) // self.nodes.total)
        best: BatchPlan | None = None
        if costs.linear_s:
            best = self.plan_of(share(token_s=costs.linear_s), remap=False)
        least_s = bound_s(prices_of(lengths, self.nodes, costs), self.nodes) + even_s
        if best is None or best.layer_seconds > GOOD * least_s:
            shared = share()
            if best is None or shared.makespan_s() + even_s < best.layer_seconds:
                moves = self.plan_of(shared)
                if best is None or moves.layer_seconds < best.layer_seconds:
                    best = moves
        return best

    def plan_of(self, shared: Sharing, *, remap: bool = True) -> BatchPlan:
        """Return the plan of sequences that are shared out already; its bounds are its own.

        Without `remap` tokens stay for the linear layers where attention has them.
        """
        sizes, lengths, costs = self.nodes.ring_sizes, shared.lengths, shared.costs
        size, total = np.array(sizes)[shared.size], self.nodes.total
        pieces = pieces_of(lengths, size, shared.ring)
        held = np.zeros(total, int)
        np.add.at(held, pieces.device, pieces.length)
        flow = self._flow(held) if remap else np.zeros((total, total), int)
        tokens = held - flow.sum(axis=1) + flow.sum(axis=0)
        needed = self._rounded(widths_of(pieces, self.nodes), int(tokens.max()), flow)
        whole = [shared.ring[size == g] for g in (1, *costs.exchanged)]
        most = max((int(np.bincount(ring).max()) for ring in whole if ring.size), default=0)
        needed = replace(
            needed,
            exchanged=tuple(g for g, _ in needed.widths if g in costs.exchanged),
            sequences=max(_SEQUENCES, 1 << (most - 1).bit_length()) if most else 0,
        )
        seconds = {g: np.repeat(shared.attention_seconds(i), g) for i, g in enumerate(sizes)}
        return BatchPlan(lengths, size, shared.ring, seconds, flow, self.nodes, costs, needed)

    def _flow(self, held: np.ndarray) -> np.ndarray:
        """Return who sends how many tokens to whom so that all have equally many."""
        over = held - even_tokens(int(held.sum()), self.nodes.total)
        cost = token_costs(
            self.nodes, 1 / self.costs.intra.bytes_per_s, 1 / self.costs.network.bytes_per_s
        )
        at_once = self.bounds.sent if self.bounds else 1
        return transport(np.maximum(over, 0), np.maximum(-over, 0), cost, at_once=at_once)

    def _grown(self, needed: Bounds) -> Bounds:
        """Return the step's static sizes, grown if a plan needs more."""
        if self.bounds is None or not self.bounds.fits(needed):
            self.bounds = self.bounds.joined(needed) if self.bounds else needed
            self.growths += 1
        return self.bounds

    def _rounded(self, widths: dict[int, int], tokens: int, flow: np.ndarray) -> Bounds:
        """Round sizes up, so that they seldom grow."""

        def up(need: int, steps: int = _STEPS) -> int:
            step = max(2, 2 * -(-self.capacity // (2 * steps)))
            return -(-need // step) * step

        most = int(flow.max(initial=0))
        sent = 1 << (most - 1).bit_length() if most else 0
        wide = {g: up(w, _RING_STEPS if g > 1 else _STEPS) for g, w in widths.items()}
        return bounds_of(wide, up(tokens), sent)


def nodes_of(nodes: Nodes | Cluster | str) -> Nodes:
    """Return the nodes of a cluster, or nodes as they are."""
    if isinstance(nodes, Nodes):
        return nodes
    cluster = parse_cluster(nodes) if isinstance(nodes, str) else nodes
    return Nodes(cluster.num_hosts, cluster.gpus_per_host)


def _checked(lengths: ArrayLike) -> np.ndarray:
    given = np.asarray(lengths)
    whole = given.ndim == 1 and given.size and given.dtype.kind in "iu"
    if not whole or given.min() < 1:
        least = f", the least {given.min()}" if whole else ""
        raise ValueError(
            f"lengths of shape {given.shape} and dtype {given.dtype}{least}: expected one dim of "
            "whole numbers, at least one, each 1 or more"
        )
    return given.astype(int)
