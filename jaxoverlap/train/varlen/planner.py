"""Plan batches of sequences of any lengths, each for the cheapest of a few programs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import ArrayLike

from jaxoverlap._util.expect import expect
from jaxoverlap.hardware.cluster import Cluster, parse_cluster
from jaxoverlap.train.varlen.arrays import pieces_of, widths_of
from jaxoverlap.train.varlen.costs import AttentionCosts
from jaxoverlap.train.varlen.packing import Packing, packed
from jaxoverlap.train.varlen.plan import BatchPlan
from jaxoverlap.train.varlen.programs import fitted, has_kernels
from jaxoverlap.train.varlen.remap import even_tokens, token_costs, transport
from jaxoverlap.train.varlen.rings import Bounds, Nodes, costs_in
from jaxoverlap.train.varlen.sharing import Infeasible

_TRIED = 3  # programs, the cheapest at first sight, for which sequences are moved while that helps


class Planner:
    """Plans batches, one after the other, for a few compiled programs.

        planner = Planner(attention_costs("h100-sxm:2x8", heads=32, head_size=128), "h100-sxm:2x8",
                          capacity=10240)
        planner.fit(sample)                       # lists of lengths, like those of the run
        plan = planner([9000, 300, 1200, 512])

    `fit` chooses the programs' static sizes, and they never change after that. A batch's time is
    estimated at the static sizes of each program that it fits, and it is planned for the fastest. A
    planner that was not fitted fits itself to its first batch alone.

    Args:
        costs: prices of one layer's attention.
        nodes: the devices, or a cluster.
        capacity: slots that a device has for tokens in attention; every program keeps within it.
        programs: static sizes chosen before, by `fit`.

    Raises:
        ValueError: for a capacity below two, or programs with more slots.
    """

    def __init__(
        self,
        costs: AttentionCosts,
        nodes: Nodes | Cluster | str,
        *,
        capacity: int,
        programs: Sequence[Bounds] = (),
    ):
        expect(capacity >= 2, "capacity", capacity, "2 tokens a device or more")
        self.nodes, self.capacity, self.costs = nodes_of(nodes), capacity + capacity % 2, costs
        self.programs = tuple(programs)
        for bounds in self.programs:
            if max(bounds.slots, bounds.tokens) > self.capacity:
                raise ValueError(
                    f"a program of {bounds.slots} slots and {bounds.tokens} tokens with "
                    f"capacity={capacity}: raise the capacity, or fit again"
                )

    def __repr__(self) -> str:
        """Return the capacity, and the programs that were chosen."""
        chosen = "\n  ".join(map(str, self.programs)) or "no program yet: fit(batches) chooses them"
        return f"Planner for {self.capacity} tokens a device\n  {chosen}"

    def fit(self, batches: Iterable[ArrayLike], *, most: int = 5) -> tuple[Bounds, ...]:
        """Choose the programs over a sample of batches, and return them.

        Up to 24 batches are looked at, evenly spread. The last program runs every batch that the
        devices can hold, at a price.

        Args:
            batches: i[sequences] each, tokens of every sequence.
            most: programs, at least one.

        Raises:
            Infeasible: a batch of the sample does not fit the devices.
            ValueError: for no batches, fewer than one program, or lengths that are no integers of 1
                or more.
        """
        sample = [_checked(lengths) for lengths in batches]
        if not sample or most < 1:
            raise ValueError(
                f"{len(sample)} batches for {most} programs: expected one or more of each"
            )
        for lengths in sample:
            self._check_room(lengths)
        self.programs = fitted(
            sample, self.nodes, self.costs, capacity=self.capacity, most=most
        )  # fmt: skip
        return self.programs

    def __call__(self, lengths: ArrayLike) -> BatchPlan:
        """Plan a batch for the program in which a layer takes least, by its static sizes.

        Args:
            lengths: i[sequences], tokens of each.

        Raises:
            Infeasible: a ValueError; the batch does not fit.
            ValueError: for lengths that are no integers of one or more.
        """
        checked = _checked(lengths)
        if not self.programs:
            self.fit([checked])
        tried = [self._packed(checked, bounds, thorough=False) for bounds in self.programs]
        found = sorted((packing for packing in tried if packing), key=Packing.layer_s)
        again = (self._packed(checked, p.bounds, thorough=True) for p in found[:_TRIED])
        for packing in sorted((*(p for p in again if p), *found), key=Packing.layer_s):
            plan = self._plan_of(packing) if packing.fits() else None
            if plan is not None:
                return plan
        self._check_room(checked)
        raise Infeasible(
            f"{len(checked)} sequences fit none of {len(self.programs)} programs, the last with "
            f"room for {self.programs[-1].sequences} on a group: fit on a sample with such batches"
        )

    def _packed(self, lengths: np.ndarray, bounds: Bounds, *, thorough: bool) -> Packing | None:
        packing = packed(lengths, self.nodes, self.costs, bounds, thorough=thorough)
        return packing if packing and has_kernels(packing) else None

    def _check_room(self, lengths: np.ndarray) -> None:
        """Raise if sequences split evenly over all devices need more slots than there are."""
        size, total = self.nodes.ring_sizes[-1], int(lengths.sum())
        if self.costs.kv_heads % size == 0:  # they exchange heads, so any token can be on any
            needed = -(-total // size)
        else:
            needed = 2 * int((-(-lengths // (2 * size))).sum())
        if needed > self.capacity:
            raise Infeasible.split(lengths, self.nodes, self.capacity, needed)

    def plan_of(self, packing: Packing) -> BatchPlan:
        """Return the plan of sequences that are packed into a program.

        Raises:
            Infeasible: if they do not fit it.
        """
        plan = self._plan_of(packing)
        if plan is None:
            raise Infeasible(
                f"{len(packing.lengths)} sequences of {packing.lengths.sum()} tokens do not fit "
                f"so into {packing.bounds}"
            )
        return plan

    def _plan_of(self, packing: Packing) -> BatchPlan | None:
        """Return a plan; None where the program has no room for it.

        Packing counts fractions of tokens, and rounded up they may need a slot more; more tokens
        may have to move for the linear layers than the program can send; and a group may have more
        sequences than its kernel was compiled for.
        """
        if not has_kernels(packing):
            return None
        bounds, lengths, sizes = packing.bounds, packing.lengths, self.nodes.ring_sizes
        size, total = np.array(sizes)[packing.size], self.nodes.total
        pieces = pieces_of(lengths, size, packing.ring, self.nodes, bounds)
        held = np.zeros(total, int)
        np.add.at(held, pieces.device, pieces.length)
        flow = self._flow(held, bounds) if bounds.sent else np.zeros((total, total), int)
        tokens = held - flow.sum(axis=1) + flow.sum(axis=0)
        wide = all(w <= bounds.width(g) for g, w in widths_of(pieces, self.nodes, bounds).items())
        if not wide or tokens.max() > bounds.tokens or flow.max() > bounds.sent:
            return None
        seconds = {g: np.repeat(packing.ring_seconds(i), g) for i, g in enumerate(sizes)}
        costs = costs_in(bounds, self.costs)
        return BatchPlan(lengths, size, packing.ring, seconds, flow, self.nodes, costs, bounds)

    def _flow(self, held: np.ndarray, bounds: Bounds) -> np.ndarray:
        """Return who sends how many tokens to whom so that all have equally many."""
        over = held - even_tokens(int(held.sum()), self.nodes.total)
        cost = token_costs(
            self.nodes, 1 / self.costs.intra.bytes_per_s, 1 / self.costs.network.bytes_per_s
        )
        give, want = np.maximum(over, 0), np.maximum(-over, 0)
        return transport(give, want, cost, at_once=bounds.sent)


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
