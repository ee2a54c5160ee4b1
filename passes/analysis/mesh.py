"""The one mesh that a step runs on, read off its arguments, its jit and its constraints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxoverlap._jax import compat, jits
from jaxoverlap.hardware.cluster import Chip, Cluster, chips
from jaxoverlap.hardware.hosts import WITHIN_S, hosts_of
from jaxoverlap.hardware.pods import pod_of
from jaxoverlap.passes.analysis.errors import UserError


class MeshError(UserError):
    """The step does not run on one mesh of several devices, so none of it can be overlapped."""


class NoMeshError(MeshError):
    """None of the step's shardings names a mesh."""


def find_mesh(name: str, arguments: Iterable[Any], parameters: Iterable[Any], jaxpr: Any) -> Mesh:
    """Find the mesh of a step.

    Args:
        name: the step's name, for messages.
        arguments: its flat arguments: arrays, ShapeDtypeStructs or scalars.
        parameters: the jit's shardings and its context mesh.
        jaxpr: the traced step, whose sharding constraints name a mesh too; and its shard_maps,
            which are asked last, as each has its own.

    Raises:
        NoMeshError: if there is none.
        MeshError: if there are two, or if it has one device.
    """
    named = (map(jits.bound_sharding, arguments), parameters, _constraints(jaxpr))
    meshes = {mesh for source in named for mesh in _meshes(source)}
    meshes = meshes or set(_meshes(_shard_maps(jaxpr)))
    if not meshes:
        raise NoMeshError(
            f"{name} has no mesh: none of its arguments, in_shardings, out_shardings and sharding "
            "constraints is a NamedSharding, so no matmul has a collective. Shard its arguments "
            "over a jax.sharding.Mesh, or leave overlap() off"
        )
    if len(meshes) > 1:
        shown = " and ".join(sorted(str(dict(m.shape)) for m in meshes))
        raise MeshError(
            f"{name} uses {len(meshes)} meshes ({shown}); expected one for the step: the same "
            "axes, axis types and order of devices everywhere"
        )
    mesh = meshes.pop()
    _check(name, mesh)
    return mesh


def _check(name: str, mesh: Mesh) -> None:
    if mesh.size == 1:
        raise MeshError(
            f"{name} runs on a mesh of one device ({dict(mesh.shape)}): there is nothing to "
            "overlap. Use more devices, or leave overlap() off"
        )


def unread(mesh: Mesh) -> str | None:
    """Return why the shardings of a mesh's matmuls cannot be read, or None if they can."""
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    if not jax.config.jax_use_shardy_partitioner:
        return "jax_use_shardy_partitioner is off, and shardings are read from Shardy"
    manual = [axis for axis, kind in kinds if kind == AxisType.Manual]
    if not manual:
        return None
    return (
        f"mesh axis {', '.join(manual)} is Manual for the whole step: overlap the function that is "
        "around the shard_map"
    )


def _meshes(sources: Iterable[Any]) -> Iterator[Mesh]:
    for source in sources:
        mesh = source.mesh if isinstance(source, NamedSharding) else source
        if isinstance(mesh, Mesh) and not mesh.empty:
            yield mesh


def _constraints(jaxpr: Any) -> Iterator[Any]:
    """Yield the shardings of every sharding constraint, at any depth."""
    return (eqn.params["sharding"] for eqn in _named(jaxpr, "sharding_constraint"))


def _shard_maps(jaxpr: Any) -> Iterator[Any]:
    """Yield the meshes of every shard_map, at any depth."""
    return (eqn.params["mesh"] for eqn in _named(jaxpr, "shard_map"))


def _named(jaxpr: Any, primitive: str) -> Iterator[Any]:
    """Yield the equations of a primitive, at any depth."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == primitive:
            yield eqn
        for inner in compat.jaxprs_in(eqn):
            yield from _named(inner, primitive)


def explicit_axes(mesh: Mesh) -> tuple[str, ...]:
    """Return the axes whose shardings are part of the arrays' types."""
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(axis for axis, kind in kinds if kind == AxisType.Explicit)


def cluster_of(mesh: Mesh, within_s: float = WITHIN_S) -> Cluster | None:
    """Return the cluster that a mesh's devices say they are in; None if they are not known.

    A host is what its processes say it is (`jaxoverlap.hardware.hosts`). Devices are taken to be
    numbered host by host.

    Args:
        mesh: the mesh.
        within_s: how long to wait for processes that have not said yet where they run.

    Raises:
        DisagreementError: if one of them does not say in time.
    """
    devices = list(mesh.devices.flat)
    pod = pod_of(mesh)
    chip = pod.chip if pod else _chip_of(mesh)
    if chip is None:
        return None
    host = _hosts(mesh, within_s)
    processes = Counter((host(device), device.process_index) for device in devices)
    hosts = Counter(map(host, devices))
    a_host = Counter(at for at, _ in processes)
    if any(len(set(counts.values())) > 1 for counts in (processes, hosts, a_host)):
        return None  # hosts or processes that are not alike
    num_hosts = len(hosts)
    return Cluster(
        chip,
        num_hosts,
        len(devices) // num_hosts,
        chip.nvlink,
        chip.network,
        len(processes) // num_hosts,
    )


def axis_costs(mesh: Mesh, cluster: Cluster | None) -> dict[str, float]:
    """Return the cost of a byte along each axis, relative to one over NVLink.

    An axis whose neighbours are in different NVLink domains takes the network. Where it is not
    known what links the devices have, all axes cost alike.

    Args:
        mesh: the mesh.
        cluster: its GPUs, if named; else what its devices say of themselves counts.

    Raises:
        DisagreementError: as `cluster_of`.
    """
    links = cluster or pod_of(mesh) or _chip_of(mesh)
    if links is None:
        return dict.fromkeys(mesh.axis_names, 1.0)
    network = links.nvlink.bandwidth_bytes_per_s / links.network.bandwidth_bytes_per_s
    spread = axis_domains(mesh, cluster)
    return {axis: network if spread[axis] > 1 else 1.0 for axis in mesh.axis_names}


def axis_domains(mesh: Mesh, cluster: Cluster | None) -> dict[str, int]:
    """Count the NVLink domains over which the devices along each axis spread.

    Args:
        mesh: the mesh.
        cluster: its GPUs, if named; else those of the pod; else each host is a domain.

    Raises:
        DisagreementError: as `cluster_of`.
    """
    if cluster is not None:
        return _spread(mesh, _block(mesh, cluster.gpus_per_nvlink_domain))
    if pod := pod_of(mesh):
        return _spread(mesh, lambda device: device.id // pod.gpus_per_nvlink_domain)
    return _spread(mesh, _hosts(mesh))


def axis_processes(mesh: Mesh, cluster: Cluster | None) -> dict[str, int]:
    """Count the processes of the devices along each axis; the arguments are `axis_domains`'."""
    if cluster is None:
        return _spread(mesh, lambda device: device.process_index)
    return _spread(mesh, _block(mesh, cluster.gpus_per_process))


def processes_of_one(mesh: Mesh, cluster: Cluster) -> int:
    """Count the real processes within one process of the cluster, at most: 1 if it is right."""
    block = _block(mesh, cluster.gpus_per_process)
    found: dict[int, set[int]] = {}
    for device in mesh.devices.flat:
        found.setdefault(block(device), set()).add(device.process_index)
    return max(map(len, found.values()))


def _chip_of(mesh: Mesh) -> Chip | None:
    """Return the GPU model that a mesh's devices call themselves."""
    kind = mesh.devices.flat[0].device_kind
    return next((chip for chip in chips() if chip.device_name == kind), None)


def _hosts(mesh: Mesh, within_s: float = WITHIN_S) -> Callable[[Any], Hashable]:
    """Return a function that maps each device of a mesh to its host."""
    if pod := pod_of(mesh):
        return lambda device: device.id // pod.gpus_per_host
    of = hosts_of({device.process_index for device in mesh.devices.flat}, within_s)
    return lambda device: of[device.process_index]


def _block(mesh: Mesh, size: int) -> Callable[[Any], int]:
    """Return a function that maps each device of a mesh to its group of `size`, by device id."""
    ids = sorted(device.id for device in mesh.devices.flat)
    block = {number: place // size for place, number in enumerate(ids)}
    return lambda device: block[device.id]


def _spread(mesh: Mesh, of: Callable[[Any], Hashable]) -> dict[str, int]:
    """Return the most different values of `of` that any line of devices along each axis has."""
    found = np.empty(mesh.devices.shape, object)
    for place, device in np.ndenumerate(mesh.devices):
        found[place] = of(device)
    return {
        axis: max(len(set(line)) for line in np.moveaxis(found, i, -1).reshape(-1, size).tolist())
        for i, (axis, size) in enumerate(mesh.shape.items())
    }


def partition_spec(spec: Sequence[tuple[str, ...]]) -> PartitionSpec:
    """Make a `PartitionSpec` of the mesh axes on each dim."""
    return PartitionSpec(*(axes or None for axes in spec))


def automatic(mesh: Mesh) -> Mesh:
    """Return the mesh with all of its axes left to the partitioner."""
    types = (AxisType.Auto,) * len(mesh.axis_names)
    return Mesh(mesh.devices, mesh.axis_names, axis_types=types)
