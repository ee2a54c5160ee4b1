"""Send keys and values one device on along a ring, between nodes over several rails.

Of a ring that joins nodes only the last device of each node sends to another node, so one of the
node's network interfaces works and the others stand still. Routed over p rails (Zeppelin's routing
layer, arXiv 2509.21841), a part of 1/p goes from the last device to each proxy (dispatch), from
each proxy to its peer in the next node (transfer), and from there to the first device (combine):

    node 0                        node 1
    last -> proxy 0   ==rail 0==> proxy 0 (first)
    last (proxy 1)    ==rail 1==> proxy 1 -> first
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from jaxoverlap.train.varlen.rings import Nodes

Pairs = list[tuple[int, int]]


class Route(NamedTuple):
    """The senders and receivers of a hop along rings of one size.

    Attributes:
        nodes: the devices.
        axes: the mesh axes, manual, whose product is all devices, node by node.
        size: devices of a ring.
        proxies: rails that a hop between nodes goes over; 1 inside a node.
    """

    nodes: Nodes
    axes: tuple[str, ...]
    size: int
    proxies: int = 1


def hop_pairs(nodes: Nodes, size: int) -> tuple[Pairs, Pairs]:
    """Return who sends to whom in all rings of one size: inside nodes, and between them."""
    pairs = [(d, d - size + 1 if (d + 1) % size == 0 else d + 1) for d in range(nodes.total)]
    inside = [(a, b) for a, b in pairs if a // nodes.devices == b // nodes.devices]
    return inside, [pair for pair in pairs if pair not in set(inside)]


def proxy_ranks(nodes: Nodes, proxies: int) -> tuple[int, ...]:
    """Return the proxies' numbers in a node; the last device is one of them, and the first."""
    return (*range(proxies - 1), nodes.devices - 1)


def send(route: Route, values: tuple[Array, ...]) -> tuple[Array, ...]:
    """Send values to the next device of the ring; all are alike, f[batch, tokens, ...].

    Over several rails they are joined, and split by tokens into parts that differ by one at most.
    """
    inside, between = hop_pairs(route.nodes, route.size)
    if not between or route.proxies == 1:
        return tuple(lax.ppermute(v, route.axes, [*inside, *between]) for v in values)
    first = lax.axis_index(route.axes) % route.nodes.devices == 0
    return tuple(
        jnp.split(_routed(route, jnp.concatenate(values), inside, between, first), len(values))
    )


def _routed(route: Route, value: Array, inside: Pairs, between: Pairs, first: Array) -> Array:
    """Send a value inside nodes directly, and between nodes over the proxies."""
    nodes, ranks = route.nodes, proxy_ranks(route.nodes, route.proxies)
    tokens = value.shape[1]
    size = -(-tokens // route.proxies)
    padded = jnp.pad(
        value, [(0, 0), (0, size * route.proxies - tokens)] + [(0, 0)] * (value.ndim - 2)
    )
    parts = jnp.split(padded, route.proxies, axis=1)
    last = nodes.devices - 1

    def at(device: int, rank: int) -> int:
        return device - device % nodes.devices + rank

    # A permute leaves zeros where nobody sends, and each proxy gets one part: their sum is that.
    mine = jnp.where(lax.axis_index(route.axes) % nodes.devices == last, parts[-1], 0)
    for rank, part in zip(ranks[:-1], parts[:-1], strict=True):
        mine = mine + lax.ppermute(part, route.axes, [(a, at(a, rank)) for a, _ in between])
    over = [(at(a, rank), at(b, rank)) for a, b in between for rank in ranks]
    arrived = lax.ppermute(mine, route.axes, over)
    joined = [arrived] + [
        lax.ppermute(arrived, route.axes, [(at(b, rank), b) for _, b in between])
        for rank in ranks[1:]
    ]
    crossed = jnp.concatenate(joined, axis=1)[:, :tokens]
    if not inside:
        return crossed
    return jnp.where(first, crossed, lax.ppermute(value, route.axes, inside))
