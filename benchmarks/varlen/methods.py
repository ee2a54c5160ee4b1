"""Seconds of one layer, forward and backward, by each published method to distribute a batch.

Each method is rebuilt here from its published formula or released scheduler, and named so; none is
the authors' code. All are estimated by the same `AttentionCosts`: blocks of attention, hops, the
linear layers of the device that has most tokens. Sums of gradients travel in the keys' dtype with
the others, and in float32 with ours.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.varlen.partition import RaggedSharing, partition, ragged_seconds
from jaxoverlap.train.varlen import AttentionCosts, Nodes, Planner
from jaxoverlap.train.varlen.costs import BACKWARD_COMPUTE
from jaxoverlap.train.varlen.rings import ring_s
from jaxoverlap.train.varlen.sharing import prices_of

_SEARCHED = 12  # choices of degrees in which FlexSP's sequences are moved
PHASES = ((1.0, 1.0), (BACKWARD_COMPUTE, 2.0))  # compute and bytes, forward and backward


@dataclass(frozen=True)
class Setup:
    """Where a batch runs.

    Attributes:
        nodes: the devices.
        costs: prices of a layer.
        capacity: tokens that a device holds.
        flash: the same with a fused kernel for whole sequences and for rings on any chip: the
            others'.
        planner: ours, its programs chosen on other batches; None: on the batch alone.
    """

    nodes: Nodes
    costs: AttentionCosts
    capacity: int
    flash: AttentionCosts
    planner: Planner | None = None

    @property
    def others(self) -> AttentionCosts:
        """Return the prices for the others: one rail a hop, gradients in the keys' dtype."""
        return replace(self.flash, rails=1, backward_bytes=2.0)

    @property
    def nic_share(self) -> float:
        """Return a device's share of its node's network, bytes/s."""
        return self.costs.network.bytes_per_s * min(1.0, self.costs.rails / self.nodes.devices)

    def linear_s(self, tokens: float) -> float:
        """Return the seconds of the linear layers of a device with so many tokens."""
        return tokens * self.costs.linear_s

    def even_linear_s(self, lengths: np.ndarray) -> float:
        """Return those of equal tokens on each device."""
        return self.linear_s(-(-int(lengths.sum()) // self.nodes.total))

    def gather_s(self, num_bytes: float, devices: int) -> float:
        """Return the seconds in which each of `devices` neighbours gets all of so many bytes.

        Rings over all rails of a node at once: what a node lacks comes over all of them.
        """
        intra, network = self.costs.intra, self.costs.network
        inside = num_bytes * (devices - 1) / devices / intra.bytes_per_s
        count = -(-devices // self.nodes.devices)
        between = num_bytes * (count - 1) / count / (self.nic_share * self.nodes.devices)
        hops = (devices - 1) * (intra.latency_s if count == 1 else network.latency_s)
        return hops + max(inside, between)

    def exchange_s(self, num_bytes: float, devices: int) -> float:
        """Return the seconds of an all-to-all in which each device has so many bytes."""
        count = -(-devices // self.nodes.devices)
        return float(self.costs.exchange_s(num_bytes, count, devices // count))


def te_ring(setup: Setup, lengths: np.ndarray) -> float:
    """Transformer Engine's ring, `cp_comm_type="p2p"` (context_parallel.py at d0067d0d).

    Every sequence has 2 D chunks, padded to equal ones. Forward a round's keys and values travel
    under its attention; backward they and the sums of their gradients do, in their own dtype. Each
    send is between one pair of GPUs, so it has one network interface.
    """
    total = setup.nodes.total
    compute = setup.others.causal_s(lengths, total).sum()
    tokens = np.ceil(lengths / (2 * total)).sum() * 2
    return float(ring_s(compute, tokens, total, setup.nodes, setup.others)) + setup.linear_s(tokens)


def routed_ring(setup: Setup, lengths: np.ndarray) -> float:
    """The same with each hop between nodes over all rails: our routing alone."""
    total, costs = setup.nodes.total, replace(setup.flash, backward_bytes=2.0)
    compute = costs.causal_s(lengths, total).sum()
    tokens = np.ceil(lengths / (2 * total)).sum() * 2
    return float(ring_s(compute, tokens, total, setup.nodes, costs)) + setup.linear_s(tokens)


def llama_gather(setup: Setup, lengths: np.ndarray) -> float:
    """Llama 3's context parallelism (arXiv 2407.21783, section 3.3.2): keys are gathered first.

    Forward one gather, backward one reduce-scatter of the same bytes: keys are kept.
    """
    return _gathered(setup, lengths, setup.nodes.total)


def _gathered(setup: Setup, lengths: np.ndarray, size: int) -> float:
    """Return the seconds of all-gather context parallelism of some sequences on one group."""
    compute = float(_gathered_s(setup.flash, lengths, size).sum())
    tokens = float(np.ceil(lengths / (2 * size)).sum() * 2)
    moved_s = 2 * setup.gather_s(tokens * size * setup.costs.token_bytes, size)
    launches = 2 * setup.flash.launch_s
    return (1 + BACKWARD_COMPUTE) * compute + launches + moved_s + setup.linear_s(tokens)


def _gathered_s(costs: AttentionCosts, lengths: np.ndarray, devices: int) -> np.ndarray:
    """Return the seconds of each sequence where each device has all keys: two chunks a device."""
    if devices == 1:
        return costs.causal_s(lengths)
    chunk = lengths / (2 * devices)
    before = costs.block_pairs(chunk, (2 * devices - 1) * chunk)
    return costs.pairs_s(before + 2 * costs.triangle_pairs(chunk), chunk)


def usp(setup: Setup, lengths: np.ndarray) -> float:
    """USP (arXiv 2405.07719), which Transformer Engine calls "a2a+p2p".

    Heads are split inside a node by all-to-alls, and a ring joins the nodes, on which each GPU
    sends over its own network interface. Every sequence is split over all.
    """
    nodes, costs = setup.nodes, setup.others
    tokens = float(np.ceil(lengths / (2 * nodes.total)).sum() * 2)
    compute = costs.causal_s(lengths, nodes.count).sum() / nodes.devices
    moved_s = 2 * setup.exchange_s(tokens * costs.remap_bytes, nodes.devices)
    lanes = Nodes(nodes.count, 1)  # as many rings as a node has devices, at once
    link = replace(costs.network, bytes_per_s=setup.nic_share)
    ring = ring_s(compute, tokens, nodes.count, lanes, replace(costs, network=link))
    return float(ring) + moved_s + setup.linear_s(tokens)


def hybrid_data(setup: Setup, lengths: np.ndarray) -> float:
    """Megatron's hybrid context parallelism (hybrid_cp_schedule.py): data parallel where short.

    A sequence has 2^ceil(log2(length / most of a rank)) ranks, and goes to the group of that size
    with the least work, s^2 / ranks. Then groups grow while devices would idle: sequences of the
    slowest group double their ranks as long as that is faster. Tokens are not evened out.
    """
    nodes, costs = setup.nodes, setup.others
    sizes = np.array(nodes.ring_sizes)
    wanted = np.searchsorted(sizes, np.minimum(lengths / setup.capacity, sizes[-1]))
    best = _hybrid(setup, lengths, wanted, costs)
    for _ in range(len(sizes) * 4):
        longest = np.argmax(np.where(wanted < len(sizes) - 1, lengths / sizes[wanted], -1.0))
        if wanted[longest] == len(sizes) - 1:
            break
        wanted = wanted.copy()
        wanted[longest] += 1
        best = min(best, _hybrid(setup, lengths, wanted, costs))
    return best


def _hybrid(setup: Setup, lengths: np.ndarray, wanted: np.ndarray, costs: AttentionCosts) -> float:
    nodes = setup.nodes
    prices = prices_of(lengths, nodes, costs)
    shared = RaggedSharing(lengths, nodes, costs, prices, capacity=setup.capacity)
    work = np.zeros(nodes.total)
    for index in np.lexsort((-lengths, -wanted)):
        size = nodes.ring_sizes[wanted[index]]
        ring = int(work.reshape(-1, size).max(axis=1).argmin())
        work.reshape(-1, size)[ring] += float(lengths[index]) ** 2 / size
        shared.put(index, int(wanted[index]), ring)
    linear = setup.costs.linear_s * shared.device_tokens()
    return float((shared.device_seconds() + linear).max())


def flexsp(setup: Setup, lengths: np.ndarray) -> float:
    """FlexSP (galvatron/flexsp_solver/solver.py): Ulysses groups of mixed degrees.

    A group of d devices takes its sequences' (quadratic + linear) / d and its all-to-alls; the
    groups share out all devices; tokens / d within capacity. Its MILP is solved within a time
    limit; here its space is searched without one, so that the result does not depend on the
    machine: every choice of degrees, sequences longest first to the group that is then done first
    (LPT), and in the best choices single sequences are moved off the slowest group while that
    helps. Groups of one GPU are there, which its code leaves out.
    """
    quick = [(_lpt(setup, lengths, d), d) for d in _degrees(setup.nodes.total, setup.nodes)]
    quick = sorted((seconds, d) for seconds, d in quick if np.isfinite(seconds))[:_SEARCHED]
    return min((_lpt(setup, lengths, d, moves=40) for _, d in quick), default=float("inf"))


def _degrees(total: int, nodes: Nodes) -> list[tuple[int, ...]]:
    """Return every choice of group sizes that share out all devices, the largest first."""

    def below(left: int, most: int) -> list[tuple[int, ...]]:
        if not left:
            return [()]
        fits = [d for d in nodes.ring_sizes if d <= min(left, most)]
        return [(d, *smaller) for d in fits for smaller in below(left - d, d)]

    return below(total, total)


def _lpt(setup: Setup, lengths: np.ndarray, degrees: tuple[int, ...], moves: int = 0) -> float:
    """Return the seconds of the slowest group; inf where the sequences do not fit."""
    costs, d = setup.flash, np.array(degrees, float)
    work = (1 + BACKWARD_COMPUTE) * costs.causal_s(lengths) + costs.linear_s * lengths
    rate = {g: _exchanged_s(setup, g) for g in set(degrees)}
    each = np.array([rate[g][0] for g in degrees])
    start = np.array([rate[g][1] for g in degrees]) + 2 * costs.launch_s
    seconds, held = start.copy(), np.zeros(len(degrees))
    on = np.zeros(len(lengths), int)
    for index in np.argsort(-work, kind="stable"):
        done = seconds + work[index] / d + each * lengths[index]
        done[held + lengths[index] / d > setup.capacity] = np.inf
        on[index] = done.argmin()
        if not np.isfinite(done[on[index]]):
            return float("inf")
        seconds[on[index]] = done[on[index]]
        held[on[index]] += lengths[index] / d[on[index]]
    for _ in range(moves):
        worst = int(seconds.argmax())
        for index in np.flatnonzero(on == worst):
            done = seconds + work[index] / d + each * lengths[index]
            done[held + lengths[index] / d > setup.capacity] = np.inf
            done[worst] = np.inf
            to = int(done.argmin())
            if done[to] < seconds[worst] * (1 - 1e-9):
                seconds[worst] -= work[index] / d[worst] + each[worst] * lengths[index]
                held[worst] -= lengths[index] / d[worst]
                seconds[to], on[index] = done[to], to
                held[to] += lengths[index] / d[to]
                break
        else:
            break
    return float(seconds.max())


def _exchanged_s(setup: Setup, d: int) -> tuple[float, float]:
    """Return the seconds of a token's all-to-alls in a group of d, and those of none."""
    if d == 1:
        return 0.0, 0.0
    floor_s = setup.exchange_s(0.0, d)
    many = 4096
    link_s = setup.exchange_s(many * setup.flash.remap_bytes, d) - floor_s
    return 2 * link_s / many / d, 4 * floor_s


def wlb_llm(setup: Setup, lengths: np.ndarray) -> float:
    """WLB-LLM's greedy packing (arXiv 2503.17924; as in distca/planner/wlb_planner.py).

    Workload (s / b)^2 + s / b, b = 128K; longest first, to the bin of least workload if it fits
    there, else to the shortest one, leftovers to that of least workload. A bin is a group of
    all-gather context parallelism with chunks per document, of the size that is best.
    """
    longest = int(lengths.max())
    sizes = [s for s in setup.nodes.ring_sizes if s * setup.capacity >= longest]
    return min(_wlb_llm(setup, lengths, size) for size in sizes)


def _wlb_llm(setup: Setup, lengths: np.ndarray, size: int) -> float:
    nodes = setup.nodes
    bins = nodes.total // size
    most = size * setup.capacity
    load, tokens = np.zeros(bins), np.zeros(bins)
    held: list[list[int]] = [[] for _ in range(bins)]
    leftovers = []

    def put(at: int, length: int) -> None:
        load[at] += (length / 131072) ** 2 + length / 131072
        tokens[at] += length
        held[at].append(length)

    for length in sorted(lengths.tolist(), reverse=True):
        least, shortest = int(load.argmin()), int(tokens.argmin())
        if tokens[least] + length <= most:
            put(least, length)
        elif tokens[shortest] + length <= most:
            put(shortest, length)
        else:
            leftovers.append(length)
    for length in leftovers:
        put(int(load.argmin()), length)
    return max(_gathered(setup, np.array(h), size) for h in held if h)


def magi(setup: Setup, lengths: np.ndarray) -> float:
    """MagiAttention's dispatch: equal chunks, as many a rank, areas evened by a min-heap.

    The best of 2 to 16 chunks a rank: fewer even out less, and more fetch more.

    Keys are fetched only where a mask needs them, in 1 to 4 stages under attention (the best is
    taken), over all rails; the sums of their gradients return the same way.
    """
    return min(_magi(setup, lengths, chunks) for chunks in (2, 4, 8, 16))


def _magi(setup: Setup, lengths: np.ndarray, chunks_a_rank: int) -> float:
    nodes, costs, total = setup.nodes, setup.costs, setup.nodes.total
    tokens = int(lengths.sum())
    size = max(1, -(-tokens // (total * chunks_a_rank)))
    number = total * chunks_a_rank
    starts = np.cumsum(lengths) - lengths
    seconds_of, first = _chunk_work(costs, lengths, starts, size, number)
    rank = _min_heap(seconds_of, total, chunks_a_rank)
    edges = np.arange(number) * size
    needed = np.zeros((total, number))
    for q in range(number):
        low = int(first[q]) // size
        if edges[q] < tokens:
            needed[rank[q], low : q + 1] = np.maximum(needed[rank[q], low : q + 1], size)
            if low < q:  # only the tail of the first chunk, unless another query wants all of it
                wanted = (low + 1) * size - first[q]
                others = [
                    p
                    for p in np.flatnonzero(rank == rank[q])
                    if p != q and first[p] // size <= low <= p
                ]
                if not others:
                    needed[rank[q], low] = wanted
    owner = rank[None, :]
    here = np.arange(total)[:, None]
    node = here // nodes.devices == owner // nodes.devices
    remote = needed * (owner != here) * costs.token_bytes
    inside, between = (remote * node).sum(1), (remote * ~node).sum(1)
    sent_inside, sent_between = (
        np.bincount(rank, weights=(remote * m).sum(0), minlength=total) for m in (node, ~node)
    )
    comm = np.maximum(
        np.maximum(inside, sent_inside) / costs.intra.bytes_per_s,
        np.maximum(between, sent_between) / setup.nic_share,
    )
    compute = np.bincount(rank, weights=seconds_of, minlength=total)
    latency = costs.network.latency_s if nodes.count > 1 else costs.intra.latency_s
    worst = []
    for stages in (1, 2, 3, 4):
        local = compute / (stages + 1)
        seconds = np.zeros(total)
        for work, moved in PHASES:
            fetch, block = comm * moved / stages + latency, work * local
            seconds += block + stages * np.maximum(block, fetch) + costs.launch_s * (stages + 1)
        worst.append(seconds.max())
    return float(min(worst)) + setup.linear_s(size * chunks_a_rank)


def _chunk_work(
    costs: AttentionCosts, lengths: np.ndarray, starts: np.ndarray, size: int, number: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return each chunk's seconds of attention forward, and the first key that it needs."""
    seconds, first = np.zeros(number), np.zeros(number)
    edges = np.arange(number + 1) * size
    owner = np.searchsorted(starts, edges[:-1], side="right") - 1
    first[:] = starts[np.maximum(owner, 0)]
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        for q in range(start // size, -(-(start + length) // size)):
            low, high = max(edges[q], start) - start, min(edges[q + 1], start + length) - start
            pairs = costs.block_pairs(high - low, low) + costs.triangle_pairs(high - low)
            seconds[q] += float(costs.pairs_s(pairs, min(length, size)))
    return seconds, first


def _min_heap(work: np.ndarray, ranks: int, each: int) -> np.ndarray:
    """Give each rank as many chunks, the heaviest first, to the rank with the least so far."""
    heap: list[tuple[float, int]] = [(0.0, r) for r in range(ranks)]
    left, found = [each] * ranks, np.zeros(len(work), int)
    for q in np.argsort(-work, kind="stable"):
        load, r = heapq.heappop(heap)
        found[q] = r
        left[r] -= 1
        if left[r]:
            heapq.heappush(heap, (load + float(work[q]), r))
    return found


# -- ours -----------------------------------------------------------------------------------------


def planned(setup: Setup, lengths: np.ndarray) -> float:
    """Ours, at the static sizes of the program that runs the batch."""
    planner = setup.planner or Planner(setup.costs, setup.nodes, capacity=setup.capacity)
    return planner(lengths).layer_seconds


def ragged(setup: Setup, lengths: np.ndarray) -> float:
    """Ours with sizes as the batch is: no program."""
    planner = Planner(setup.costs, setup.nodes, capacity=setup.capacity)
    return ragged_seconds(lengths, planner.nodes, planner.costs, capacity=planner.capacity)


def by_attention(setup: Setup, lengths: np.ndarray, *, routing: bool) -> float:
    """Groups balanced by attention alone, tokens left where attention has them; ragged."""
    costs = setup.costs if routing else replace(setup.costs, rails=1)
    shared = partition(lengths, setup.nodes, costs, capacity=setup.capacity)
    linear_s = setup.costs.linear_s * shared.device_tokens()
    return float((shared.device_seconds() + linear_s).max())


METHODS: dict[str, Callable[[Setup, np.ndarray], float]] = {
    "TE ring": te_ring,
    "USP": usp,
    "Llama all-gather": llama_gather,
    "hybrid DP": hybrid_data,
    "FlexSP": flexsp,
    "WLB-LLM": wlb_llm,
    "MagiAttention": magi,
    "this": planned,
}
