"""Move tokens between two layouts: attention's, by the plan, and one of equal tokens a device.

Linear layers take as long as their device has tokens, so between attentions each device has as many
as any other, less one. Which tokens move is a transport problem (Zeppelin's remapping layer, arXiv
2509.21841): devices with a surplus send to those with a deficit, at the least cost, which is less
inside a node. One all-to-all of static size carries it out, and back.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from scipy.optimize import linprog
from scipy.sparse import coo_array

from jaxoverlap.train.varlen.rings import Nodes


def transport(
    surplus: np.ndarray, deficit: np.ndarray, cost: np.ndarray, *, at_once: int = 1
) -> np.ndarray:
    """Return who sends how many tokens to whom, at the least cost under a bound of each part.

    An all-to-all of static size sends parts as long as the longest, so parts are bounded: by the
    least power of two that can do, or by `at_once` where that is more. A transport problem has
    integers at its corners, so a linear program finds them.

    Args:
        surplus: i[devices], tokens to give away.
        deficit: i[devices], tokens wanted; as many in all.
        cost: f[devices, devices], of a token, above zero.
        at_once: tokens of one part that cost nothing more.

    Returns:
        i[devices, devices], from and to.

    Raises:
        ValueError: if the sums differ.
    """
    if surplus.sum() != deficit.sum():
        raise ValueError(
            f"{surplus.sum()} tokens to give and {deficit.sum()} wanted: expected as many"
        )
    give, want = np.flatnonzero(surplus), np.flatnonzero(deficit)
    moved = np.zeros(cost.shape, int)
    if not give.size:
        return moved
    total = np.concatenate([surplus[give], deficit[want]])
    least = max(-(-surplus.max() // want.size), -(-deficit.max() // give.size))
    most = max(at_once, 1 << int(least - 1).bit_length())
    while (found := _program(cost[np.ix_(give, want)], total, most)) is None:
        most *= 2
    moved[np.ix_(give, want)] = found
    return moved


def _program(cost: np.ndarray, total: np.ndarray, most: int) -> np.ndarray | None:
    """Solve a transport problem whose parts are bounded; None if there is no answer."""
    givers, index = len(cost), np.arange(cost.size)
    rows = np.concatenate([index // cost.shape[1], givers + index % cost.shape[1]])
    flow = coo_array((np.ones(2 * index.size), (rows, np.tile(index, 2)))).tocsr()
    found = linprog(
        cost.ravel() / cost.max(), A_eq=flow, b_eq=total, bounds=(0, most), method="highs-ds"
    )
    if found.status == 2:  # infeasible
        return None
    if not found.success:
        raise AssertionError(f"a transport problem without an answer: {found.message}")
    return np.rint(found.x).astype(int).reshape(cost.shape)


def token_costs(nodes: Nodes, inside: float, between: float) -> np.ndarray:
    """Return the cost of a token from each device to each, inside nodes and between them."""
    node = np.arange(nodes.total) // nodes.devices
    return np.where(node[:, None] == node[None, :], inside, between)


def even_tokens(total: int, devices: int) -> np.ndarray:
    """Return equal tokens of each device, the first ones one more where they do not divide."""
    return total // devices + (np.arange(devices) < total % devices)


class Moves(NamedTuple):
    """The moves of one direction on one device.

    Attributes:
        sent: i32[devices, most], the slots whose tokens go to each device; past the end where there
            are none.
        taken: i32[slots there], for each slot its index in [own slots, arrived]; past the end for a
            slot without a token, which is zero.
    """

    sent: Any
    taken: Any


def moved(x: Array, moves: Moves, axes: tuple[str, ...]) -> Array:
    """Move tokens, f[slots, ...] -> f[slots there, ...]; call it where the axes are manual."""
    if not moves.sent.shape[1]:  # nothing leaves its device
        return jnp.take(x, moves.taken, axis=0, mode="fill", fill_value=0)
    leaving = jnp.take(x, moves.sent, axis=0, mode="fill", fill_value=0)
    arrived = lax.all_to_all(leaving, axes, 0, 0, tiled=True)
    both = jnp.concatenate([x, arrived.reshape(-1, *x.shape[1:])])
    return jnp.take(both, moves.taken, axis=0, mode="fill", fill_value=0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def remap(axes: tuple[str, ...], x: Array, there: Moves, back: Moves) -> Array:
    """Permute tokens across devices by `there`; their gradient is permuted by `back`."""
    return moved(x, there, axes)


def _there(axes: tuple[str, ...], x: Array, there: Moves, back: Moves) -> tuple[Array, Moves]:
    return moved(x, there, axes), back


def _back(axes: tuple[str, ...], back: Moves, gradient: Array) -> tuple[Array, None, None]:
    return moved(gradient, back, axes), None, None


remap.defvjp(_there, _back)
