"""Attend within each sequence over a plan's groups: tokens move to them, and results back."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxoverlap.train.arguments import check_automatic
from jaxoverlap.train.varlen.arrays import PlanArrays
from jaxoverlap.train.varlen.costs import AttentionCosts
from jaxoverlap.train.varlen.device.engine import Engine, attend
from jaxoverlap.train.varlen.device.fused import described, has_kernel
from jaxoverlap.train.varlen.remap import remap
from jaxoverlap.train.varlen.rings import Bounds, Nodes


def engine_of(
    nodes: Nodes,
    axes: tuple[str, ...],
    bounds: Bounds,
    *,
    scale: float,
    costs: AttentionCosts | None = None,
) -> Engine:
    """Return what a step is compiled for; hops go over as many rails as `costs` say, or one."""
    proxies = []
    for size, width in bounds.widths:
        if costs and nodes.crosses(size):
            sent = width * costs.token_bytes
            most = min(costs.rails, nodes.devices)
            rails = costs.proxies(sent), costs.proxies(sent * costs.backward_bytes)
            proxies.append((size, (min(rails[0], most), min(rails[1], most))))
    return Engine(nodes, axes, bounds, scale, tuple(proxies))


def attention(
    q: Array,
    k: Array,
    v: Array,
    arrays: PlanArrays,
    *,
    mesh: Mesh,
    bounds: Bounds,
    costs: AttentionCosts | None = None,
    scale: float | None = None,
    fused: bool | None = None,
) -> Array:
    """Attend within each sequence, causally: tokens move to the plan's rings, and back.

    Queries, keys and values go in one all-to-all, results in another.

    Args:
        q: f[nodes, devices of a node x bounds.tokens, heads, head], sharded over the mesh's axes:
            heads over the third, if there is one.
        k, v: the same with kv heads, which divide heads.
        arrays: the plan's.
        mesh: two axes, nodes and devices of a node; a third is of tensor parallelism.
        bounds: what this program is compiled for: the plan's.
        costs: prices that say over how many rails hops between nodes go; none: over one.
        scale: the factor of scores; none: 1/sqrt(head).
        fused: whether unsharded sequences are attended to by cuDNN's kernel, in float16 or bfloat16
            and with heads of 128 or less; none: where the devices have it (Hopper and later).

    Raises:
        ValueError: for a mesh or shapes that do not fit.
    """
    nodes, axes, shared = nodes_of_mesh(mesh), mesh.axis_names[:2], mesh.axis_names[2:]
    wanted = (nodes.count, nodes.devices * bounds.tokens)
    if q.shape[:2] != wanted or k.shape[:2] != wanted or k.shape != v.shape:
        raise ValueError(
            f"queries of shape {q.shape}, keys and values of {k.shape} and {v.shape}: expected "
            f"{wanted} as their first two dims, {nodes.count} nodes of {nodes.devices} devices "
            f"with {bounds.tokens} tokens each (the plan's bounds)"
        )
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"{q.shape[2]} heads with {k.shape[2]} kv heads: expected a multiple")
    tensor = mesh.size // nodes.total
    if k.shape[2] % tensor:
        raise ValueError(f"{k.shape[2]} kv heads over {shared}, {tensor} devices: give a multiple")
    kv_heads = k.shape[2] // tensor
    unequal = [size for size in bounds.exchanged if kv_heads % size]
    if unequal:
        raise ValueError(
            f"{kv_heads} kv heads a device with groups of {unequal} devices that exchange heads: "
            f"expected a multiple of each; make the costs with kv_heads={k.shape[2]} and "
            f"tensor={tensor}, and plan by them"
        )
    head_scale = q.shape[-1] ** -0.5 if scale is None else scale
    fuses = has_kernel(mesh) if fused is None else fused
    engine = engine_of(nodes, axes, bounds, scale=head_scale, costs=costs)
    engine = engine._replace(fused=fuses, chip=described(mesh))
    stream, each = P(*axes, shared or None, None), P(axes)
    placed = PlanArrays(P(), P(), each, each)  # type: ignore[arg-type]
    body = functools.partial(_on_device, engine, q.shape[2] // tensor, kv_heads)
    mapped = jax.shard_map(
        body, mesh=mesh, in_specs=(stream, stream, stream, placed), out_specs=stream,
        axis_names=set(mesh.axis_names), check_vma=False,
    )  # fmt: skip
    return mapped(q, k, v, arrays)


def _on_device(
    engine: Engine, heads: int, kv_heads: int, q: Array, k: Array, v: Array, arrays: PlanArrays
) -> Array:
    there, back = jax.tree.map(lambda x: x[0], (arrays.to_attention, arrays.to_linear))
    joined = jnp.concatenate([q[0], k[0], v[0]], axis=1)
    slots = remap(engine.axes, joined, there, back)
    own_q, own_k, own_v = jnp.split(slots, [heads, heads + kv_heads], axis=1)
    out = attend(engine, own_q, own_k, own_v, arrays.segment, arrays.position)
    return remap(engine.axes, out, back, there)[None]


def nodes_of_mesh(mesh: Mesh) -> Nodes:
    """Return the nodes that a mesh is of: the first axis counts nodes, the second their devices.

    A device that shares heads with others, along a third axis, counts as one with them.

    Raises:
        ValueError: for another number of axes, or axes that are not automatic.
    """
    if len(mesh.axis_names) not in (2, 3):
        raise ValueError(
            f"a mesh of axes {mesh.axis_names}: expected two, nodes and the devices of a node, or "
            "three, the last of tensor parallelism"
        )
    check_automatic(mesh)
    return Nodes(*tuple(mesh.shape.values())[:2])
