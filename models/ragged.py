"""Experts with ragged exchanges: every token reaches its experts, however many choose one.

Inside a `shard_map` over all mesh axes, for the tokens of one device, as MaxText, marin and tunix
write it:

    tokens, once for each of their experts   [token x choice, hidden]   sorted by expert
    ragged all-to-all                        [room, hidden]             on the experts' devices
    sorted by expert, grouped matmuls        [room, mlp]                `jax.lax.ragged_dot`
    and back, by the same ways               [token x choice, hidden]

Nothing is dropped: by default a device has room for all tokens that can come. A token's result does
not depend on other tokens, which `jaxoverlap.per_sequence` tells `overlap`.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jaxoverlap


def experts(
    mesh: Mesh, *, axis: str, activation: Callable[[Array], Array], room: float | None = None
) -> Callable[..., Array]:
    """Make the function that sends tokens to their experts, multiplies, and mixes the answers.

    Args:
        mesh: all of its axes shard the batch.
        axis: the one that shards the experts.
        activation: applied to what `up` gives, or `gate` where there is one.
        room: slots of a device for tokens that come, as a multiple of the pairs of token and choice
            that it sends; None for the size of `axis`, as many as can come. Where more come than
            there are slots, results are wrong without an error.

    Returns:
        A function of tokens [batch, sequence, hidden], the weights of their choices [batch,
        sequence, choice], the experts chosen [batch, sequence, choice], and the experts' own up
        [expert, hidden, mlp], down [expert, mlp, hidden] and, if given, gate [expert, hidden, mlp].
    """
    batch, own = P(tuple(mesh.axis_names)), P(axis)
    on_gpus = mesh.devices.flat[0].platform == "gpu"
    exchange = lax.ragged_all_to_all if on_gpus else exchange_by_gathers
    body = functools.partial(
        on_device, axis=axis, activation=activation, room=room, exchange=exchange
    )

    def mixed(tokens: Array, weights: Array, chosen: Array, *matmuls: Array) -> Array:
        specs = (batch, batch, batch, *(own,) * len(matmuls))
        mapped = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=batch, check_vma=False)
        return mapped(tokens, weights, chosen, *matmuls)

    return jaxoverlap.per_sequence(mixed, argnums=(0, 1, 2))


def on_device(
    tokens: Array,
    weights: Array,
    chosen: Array,
    up: Array,
    down: Array,
    gate: Array | None = None,
    *,
    axis: str,
    activation: Callable[[Array], Array],
    room: float | None,
    exchange: Callable[..., Array],
) -> Array:
    """Do one device's part, inside a `shard_map`: arguments and result are as of `experts`.

    Args:
        tokens, weights, chosen, up, down, gate: the device's own.
        axis, activation, room: as in `experts`.
        exchange: `lax.ragged_all_to_all`, or what stands in for it.
    """
    devices, me, own = lax.axis_size(axis), lax.axis_index(axis), up.shape[0]
    shape, choices = tokens.shape, chosen.shape[-1]
    tokens, expert_of = tokens.reshape(-1, shape[-1]), chosen.reshape(-1)
    order = jnp.argsort(expert_of)
    sizes = lax.all_gather(jnp.bincount(expert_of, length=own * devices), axis)
    between = sizes.reshape(devices, devices, own).sum(-1)  # [from, to]
    at_home, there = (jnp.cumsum(between, dim) - between for dim in (1, 0))  # where slices begin
    slots = round(order.size * (devices if room is None else room))

    def empty(count: int) -> Array:
        return jnp.zeros((count, shape[-1]), tokens.dtype)

    came = exchange(
        tokens[order // choices], empty(slots),
        at_home[me], between[me], there[me], between[:, me], axis_name=axis,
    )  # fmt: skip
    of_mine = lax.dynamic_slice_in_dim(sizes, me * own, own, 1)  # [from, expert]
    expert_in = jnp.repeat(
        jnp.tile(jnp.arange(own), devices), of_mine.reshape(-1), total_repeat_length=slots
    )
    expert_in = jnp.where(jnp.arange(slots) < of_mine.sum(), expert_in, own)
    by_expert, groups = jnp.argsort(expert_in), of_mine.sum(0)
    slots_in = came[by_expert]
    inner = lax.ragged_dot(slots_in, up, groups)
    if gate is None:
        inner = activation(inner)
    else:
        inner = activation(lax.ragged_dot(slots_in, gate, groups)) * inner
    answers = lax.ragged_dot(inner, down, groups)[jnp.argsort(by_expert)]
    back = exchange(
        answers, empty(order.size),
        there[:, me], between[:, me], at_home[:, me], between[me], axis_name=axis,
    )  # fmt: skip
    answered = back[jnp.argsort(order)].reshape(*shape[:-1], choices, shape[-1])
    return jnp.sum(answered * weights[..., None].astype(answered.dtype), axis=-2)


def exchange_by_gathers(
    operand: Array, output: Array, offsets: Array, sent: Array, there: Array, _: Array, *, axis_name
) -> Array:
    """Do what `lax.ragged_all_to_all` does, for devices without that operation: all but GPUs."""
    me = lax.axis_index(axis_name)
    every = lax.all_gather(operand, axis_name)
    offsets, sent, there = (lax.all_gather(v, axis_name)[:, me] for v in (offsets, sent, there))
    slot = jnp.arange(output.shape[0])[:, None]
    mine = (there <= slot) & (slot < there + sent)  # [slot, device]
    sender = jnp.argmax(mine, 1)
    found = every[sender, (offsets - there)[sender] + slot[:, 0]]
    return jnp.where(mine.any(1).reshape(-1, *(1,) * (output.ndim - 1)), found, output)
