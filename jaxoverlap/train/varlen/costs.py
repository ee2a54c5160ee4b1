"""Price attention of a batch: seconds of blocks on a device, and of keys and values on links.

A planner needs few numbers: how long a block of scores takes, by its size; how long a hop takes,
inside a node and between nodes; and what routing over all rails makes of the latter.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from jaxoverlap._util.limits import AtLeast1, checked, whole
from jaxoverlap.cost.find import cost_model
from jaxoverlap.cost.groups import Group
from jaxoverlap.cost.model import CostModel
from jaxoverlap.hardware.cluster import Cluster
from jaxoverlap.plan.collectives import PERMUTE

Floats = NDArray[np.float64]

# FlashAttention-2 (arXiv 2307.08691, section 4.1): five matmuls backward for two forward.
BACKWARD_COMPUTE = 2.5
_LARGE = 16384  # tokens of a kernel that fills any chip
_MERGED_BYTES = 10  # of an output's number: in float32 read and written, and a block's in 16 bits
_TRIP_S = 10e-6  # seconds of one trip of a loop that the host decides on; an assumption
HOPPER = (9, 0)  # compute capability from which cuDNN packs sequences
WHOLE_TILE = 512  # queries and keys of a tile of matmuls (`blocks.py`), which is skipped if empty
_TILE = (128, 64)  # queries and keys of FlashAttention-2's tile, for heads of 128
_TRAINING = 3.0  # matmuls of a linear layer forward and backward, over those forward
_SMALL_BYTES, _LARGE_BYTES = 2**20, 2**26


@dataclass(frozen=True)
class Hop:
    """A link that keys and values travel over: a hop of n bytes takes latency + n / rate."""

    latency_s: float
    bytes_per_s: float

    def seconds(self, num_bytes: ArrayLike) -> Floats:
        """Return the seconds of hops of so many bytes; those of none take no time."""
        size = np.asarray(num_bytes, float)
        return np.where(size > 0, self.latency_s + size / self.bytes_per_s, 0.0)


@dataclass(frozen=True, kw_only=True)
@checked
class AttentionCosts:
    """The estimated seconds of one layer's attention. Make one by `attention_costs`.

    Attributes:
        blocks: tokens of square blocks, ascending.
        pair_s: seconds of one query and key, all heads, forward, in blocks of each of these sizes.
        launch_s: seconds of a kernel however small.
        token_bytes: bytes of a token's keys and values.
        remap_bytes: bytes of a token's queries, keys and values, and of its result.
        linear_s: seconds of a token in the layer's other matmuls, forward and backward.
        intra: a hop inside a node.
        network: a hop between nodes, over one rail.
        rails: network interfaces of a node.
        backward_bytes: bytes that a hop backward sends for each that one forward does: keys and
            values, and the sums of their gradients in float32.
        tile: queries and keys of a kernel's tile, which is computed in full; (1, 1) has no tiles.
        kv_heads: of the attention. Groups of so many devices as divide them can exchange heads.
        ring_times: how many times as long a pair takes in a ring whose blocks are matmuls under a
            mask, as in the kernel for unsharded sequences.
        fused_rings: whether a ring's blocks are that kernel.
        merge_s: seconds in which one such block of a token is merged with those before, forward.
        trip_s: seconds that a loop or a branch takes whose next step the host decides on.
        exchanged: sizes of groups that exchange heads by all-to-alls, where others pass keys round
            a ring. A `Planner` says which.
    """

    blocks: tuple[int, ...]
    pair_s: tuple[float, ...]
    launch_s: float
    token_bytes: float
    remap_bytes: float
    linear_s: float
    intra: Hop
    network: Hop
    rails: AtLeast1
    backward_bytes: float = 3.0
    tile: tuple[int, int] = (1, 1)
    kv_heads: int = 1
    ring_times: float = 1.0
    fused_rings: bool = False
    merge_s: float = 0.0
    trip_s: float = 0.0
    exchanged: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if len(self.blocks) != len(self.pair_s) or not self.blocks or min(self.pair_s) <= 0:
            raise ValueError(
                f"{len(self.blocks)} blocks with {len(self.pair_s)} prices: expected as many of "
                "each, at least one, and prices above zero"
            )

    def pairs_s(self, pairs: ArrayLike, block: ArrayLike) -> Floats:
        """Return the seconds of so many pairs of query and key, in blocks of so many tokens."""
        size = np.log2(np.maximum(np.asarray(block, float), 1.0))
        rates = np.interp(size, np.log2(self.blocks), np.log(self.pair_s))
        return np.asarray(pairs, float) * np.exp(rates)

    def block_pairs(self, queries: ArrayLike, keys: ArrayLike) -> Floats:
        """Return the query-key pairs of a block without a mask, rounded up to full tiles."""
        rows, columns = self.tile
        q, k = np.asarray(queries, float), np.asarray(keys, float)
        return np.ceil(q / rows) * rows * np.ceil(k / columns) * columns

    def triangle_pairs(self, tokens: ArrayLike) -> Floats:
        """Return the query-key pairs under a causal mask, counting full tiles on the diagonal."""
        rows, columns = self.tile
        s = np.asarray(tokens, float)
        above = np.maximum(np.ceil(s / rows) - 1, 0.0)  # rows of tiles that are full of queries
        step = -(-rows // columns) * columns
        return rows * step * above * (above + 1) / 2 + np.where(
            s > 0, rows * np.ceil(s / columns) * columns, 0.0
        )

    def causal_s(self, lengths: ArrayLike, devices: int = 1) -> Floats:
        """Return the seconds of causal attention of sequences on each of so many devices, forward.

        On one device a sequence is one block, and on g that exchange heads it is one of a g-th of
        the heads. Round a ring of g it is split into 2g chunks: a rank has its own two first,
        and then g - 1 rounds of both by one or of one by both, whichever has more tiles: one rank
        has the one in all rounds, another the other.
        """
        s = np.asarray(lengths, float)
        if devices == 1 or devices in self.exchanged:
            return self.pairs_s(self.triangle_pairs(s), s) / devices
        own, chunk = s / devices, s / (2 * devices)
        tall, wide = self.block_pairs(own, chunk), self.block_pairs(chunk, own)
        rounds = (devices - 1) * np.maximum(tall, wide)
        times = 1.0 if self.fused_rings else self.ring_times
        return times * self.pairs_s(self.triangle_pairs(own) + rounds, chunk)

    def dense_ring_s(self, width: int, devices: int) -> float:
        """Return the forward seconds of a ring's blocks on a device with so many static slots.

        Three blocks of half the slots by half at first, and two in each of the other rounds.
        """
        blocks = 3 + 2 * (devices - 1)
        return self.ring_times * blocks * float(self.pairs_s((width / 2) ** 2, width / 2))

    def routed_s(self, num_bytes: ArrayLike, proxies: ArrayLike) -> Floats:
        """Return the seconds of a hop between nodes over so many rails (a reconstruction).

        Dispatch to the other proxies, transfer, combine: n / (p b) + 2 n (p - 1) / (p b_intra).
        The sends of a dispatch start together, so each of the three has one latency.
        """
        size, rails = np.asarray(num_bytes, float), np.asarray(proxies)
        aside_s = self.intra.seconds(size * (rails - 1) / rails)
        return self.network.seconds(size / rails) + 2 * aside_s

    def proxies(self, num_bytes: float) -> int:
        """Return over how many rails a hop between nodes of so many bytes is fastest."""
        return min(range(1, self.rails + 1), key=lambda p: float(self.routed_s(num_bytes, p)))

    def crossing_s(self, num_bytes: ArrayLike) -> Floats:
        """Return the seconds of a hop between nodes over as many rails as are fastest."""
        proxies = np.arange(1, self.rails + 1).reshape(-1, *(1,) * np.ndim(num_bytes))
        return self.routed_s(num_bytes, proxies).min(axis=0)

    def exchange_s(self, num_bytes: ArrayLike, nodes: int, devices: int) -> Floats:
        """Return the seconds of an all-to-all over nodes of so many devices each.

        Args:
            num_bytes: bytes that each device has, with those that stay; the devices of a node share
                its rails.
            nodes, devices: of the full all-to-all.
        """
        total, size = nodes * devices, np.asarray(num_bytes, float)
        inside_s = size * (devices - 1) / total / self.intra.bytes_per_s
        if nodes == 1:
            return self.intra.latency_s + inside_s
        rate = self.network.bytes_per_s * min(1.0, self.rails / devices)
        return self.network.latency_s + np.maximum(inside_s, size * (nodes - 1) / nodes / rate)


def attention_costs(
    cluster: str | Cluster | CostModel,
    *,
    heads: int,
    head_size: int,
    kv_heads: int | None = None,
    hidden: int | None = None,
    mlp: int = 0,
    matrices: int = 2,
    rails: int | None = None,
    tensor: int = 1,
    dtype: str = "bf16",
    fused: bool | None = None,
) -> AttentionCosts:
    """Price one layer's attention on a cluster, by this project's cost model.

    Args:
        cluster: what `cost_model` takes, or a cost model, as of `calibrate --here`'s tables.
        heads, head_size, kv_heads: of the attention; no kv_heads: as many as heads.
        hidden: width of the residual stream; none: heads times head_size.
        mlp: inner width of the layer's MLP; 0: no MLP is counted.
        matrices: weights of the MLP: 2, or 3 if it is gated.
        rails: network interfaces of a node; none: one a GPU.
        tensor: neighbours of a node that share the heads of each layer, and its weights (Megatron's
            tensor parallelism); plan for nodes of so many times fewer devices.
        dtype: of activations, as HLO writes it.
        fused: whether a fused kernel attends to unsharded sequences; none: where the engine has
            one (`fused.py`: Hopper and later, 16 bits).

    Raises:
        ValueError: as `cost_model`, for a dtype that was not measured, a size that is no integer of
            1 or more, or a `tensor` that does not divide the kv heads and the GPUs of a host.
    """
    model = cluster if isinstance(cluster, CostModel) else cost_model(cluster)
    kv_heads = heads if kv_heads is None else kv_heads
    hidden = heads * head_size if hidden is None else hidden
    rails = model.cluster.gpus_per_host if rails is None else rails
    sizes = {"heads": heads, "head_size": head_size, "kv_heads": kv_heads, "hidden": hidden}
    for name, size in {**sizes, "rails": rails, "matrices": matrices, "tensor": tensor}.items():
        whole(name, size, 1)
    gpus = model.cluster.gpus_per_host
    if kv_heads % tensor or gpus % tensor:
        raise ValueError(f"tensor={tensor}: expected a divisor of {kv_heads} kv heads, {gpus} GPUs")
    heads, kv_heads, mlp = heads // tensor, kv_heads // tensor, mlp // tensor
    itemsize = 4 if dtype == "f32" else 2
    matmuls = _matmul_kernel(model, heads, head_size, dtype)
    takes = model.cluster.chip.compute_capability >= HOPPER and dtype in ("bf16", "f16")
    fuses = takes and model.tables.attention is not None if fused is None else fused
    kernel = _fused_kernel(model, heads, head_size, dtype) if fuses else matmuls
    blocks, pair_s, launch_s, tile = kernel
    tokens = 8192
    columns = (heads + 2 * kv_heads) * head_size
    linear_s = model.matmul_s(tokens, columns, hidden, dtype=dtype)
    linear_s += model.matmul_s(tokens, hidden, heads * head_size, dtype=dtype)
    if mlp:
        linear_s += matrices * model.matmul_s(tokens, mlp, hidden, dtype=dtype)
    linear_s *= _TRAINING
    if tensor > 1:  # two all-reduces forward and two backward (Megatron, arXiv 1909.08053)
        linear_s += 4 * model.collective_s("all-reduce", tokens * hidden * itemsize, Group(tensor))
    several = model.cluster.num_hosts > 1
    # Inside a process a permute is a copy between GPUs (flags/required.py).
    intra = _hop(model, Group(2, by_copy=model.cluster.gpus_per_process > 1))
    return AttentionCosts(
        blocks=blocks,
        pair_s=pair_s,
        launch_s=launch_s,
        token_bytes=2.0 * kv_heads * head_size * itemsize,
        remap_bytes=(2.0 * heads + 2 * kv_heads) * head_size * itemsize,
        linear_s=linear_s / tokens,
        intra=intra,
        network=_shared(_hop(model, Group(2, 2)), rails, tensor) if several else intra,
        rails=max(1, rails // tensor),
        backward_bytes=1 + 4 / itemsize,
        tile=tile,
        kv_heads=kv_heads,
        ring_times=matmuls[1][-1] / pair_s[-1],
        fused_rings=fuses,
        merge_s=model.memory_s(tokens * _MERGED_BYTES * heads * head_size) / tokens,
        trip_s=_trip_s(model),
    )


Kernel = tuple[tuple[int, ...], tuple[float, ...], float, tuple[int, int]]
"""Block sizes, seconds of a pair in blocks of each size, seconds of a launch, and the tile."""


def _fused_kernel(model: CostModel, heads: int, head_size: int, dtype: str) -> Kernel:
    """Price a fused kernel for packed sequences, such as cuDNN's.

    The kernel fills the chip whatever the lengths are and computes full tiles, so the rate is that
    of a large kernel.
    """
    if model.tables.attention is None:
        raise ValueError(
            f"fused=True on {model.cluster}: no fused attention was measured there; leave it out"
        )
    launch_s = model.tables.attention.launch_s
    large_s = model.attention_s(_LARGE, _LARGE, heads, head_size, dtype=dtype) - launch_s
    return (_LARGE,), (large_s / _LARGE**2,), launch_s, _TILE


def _matmul_kernel(model: CostModel, heads: int, head_size: int, dtype: str) -> Kernel:
    """Price attention as XLA's matmuls under a mask, in tiles that `blocks.py` skips if empty.

    The scores travel through memory: in float32 written once and read twice, for the maximum and
    for the exponential; the probabilities written and read in the activations' dtype.
    """
    score_bytes = 12 + 2 * (4 if dtype == "f32" else 2)

    def pair_s(block: int) -> float:
        dots_s = model.matmul_s(block, block, head_size, batch=heads, dtype=dtype)
        dots_s += model.matmul_s(block, head_size, block, batch=heads, dtype=dtype)
        return (dots_s + model.memory_s(score_bytes * heads * block**2)) / block**2

    each_s = pair_s(WHOLE_TILE) + _trip_s(model) / WHOLE_TILE**2
    return (WHOLE_TILE,), (each_s,), 0.0, (WHOLE_TILE, WHOLE_TILE)


def _trip_s(model: CostModel) -> float:
    """Return the seconds in which a GPU's host learns whether a loop goes on."""
    return 0.0 if model.on_cpus else _TRIP_S


def _shared(network: Hop, rails: int, tensor: int) -> Hop:
    """Return a hop over the rail that each of `tensor` devices has, of a node's rails."""
    return replace(network, bytes_per_s=network.bytes_per_s * min(1.0, rails / tensor))


def _hop(model: CostModel, group: Group) -> Hop:
    """Fit a line to two permutes."""
    small, large = (model.collective_s(PERMUTE, n, group) for n in (_SMALL_BYTES, _LARGE_BYTES))
    rate = (_LARGE_BYTES - _SMALL_BYTES) / max(large - small, 1e-12)
    return Hop(max(small - _SMALL_BYTES / rate, 0.0), rate)
