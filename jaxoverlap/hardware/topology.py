"""A mesh on its hardware: which hosts, NVLink domains and processes each axis spreads over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

import numpy as np
from jax.sharding import Mesh

from jaxoverlap.hardware.cluster import Chip, Cluster, chips
from jaxoverlap.hardware.hosts import WITHIN_S, hosts_of
from jaxoverlap.hardware.pods import pod_of


def cluster_of(mesh: Mesh, within_s: float = WITHIN_S) -> Cluster | None:
    """Return the cluster of a mesh's devices; None for unknown chips, or hosts that differ.

    A host is what its processes say it is (`jaxoverlap.hardware.hosts`). Devices are taken to be
    numbered host by host.

    Args:
        mesh: the mesh.
        within_s: how long to wait for processes that have not recorded yet where they run.

    Raises:
        DisagreementError: if one of them does not say in time.
    """
    devices = list(mesh.devices.flat)
    pod = pod_of(mesh)
    chip = pod.chip if pod else chip_of(mesh)
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
        pod.network if pod else chip.network,
        len(processes) // num_hosts,
    )


def check_is_pods(mesh: Mesh | None, cluster: Cluster) -> None:
    """Refuse another chip, or other numbers of hosts and GPUs, than those of a mesh of a pod.

    Links may differ, and so may processes.

    Args:
        mesh: the mesh; None, or one of devices that are here, is not compared.
        cluster: what the user says that it is.

    Raises:
        ValueError: if it is another one.
    """
    if mesh is None or (pod := pod_of(mesh)) is None:
        return
    own = cluster_of(mesh) or replace(cluster, chip=pod.chip)  # None: a part of unequal hosts
    sizes = ((one.num_hosts, one.gpus_per_host) for one in (own, cluster))
    if own.chip.device_name != cluster.chip.device_name or len({*sizes}) > 1:
        raise ValueError(
            f"cluster {cluster} for a mesh of {own}: XLA compiles for the GPUs of the mesh. Name "
            f"{own}, which may have another network after an @; or make the mesh by "
            f"pod_mesh('{cluster}', ...)"
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
    links = cluster or pod_of(mesh) or chip_of(mesh)
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
    processes_by_block: dict[int, set[int]] = {}
    for device in mesh.devices.flat:
        processes_by_block.setdefault(block(device), set()).add(device.process_index)
    return max(map(len, processes_by_block.values()))


def chip_of(mesh: Mesh) -> Chip | None:
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
    block = {number: index // size for index, number in enumerate(ids)}
    return lambda device: block[device.id]


def _spread(mesh: Mesh, of: Callable[[Any], Hashable]) -> dict[str, int]:
    """Return the most different values of `of` that any line of devices along each axis has."""
    per_device = np.empty(mesh.devices.shape, object)
    for index, device in np.ndenumerate(mesh.devices):
        per_device[index] = of(device)
    return {
        axis: max(
            len(set(line)) for line in np.moveaxis(per_device, i, -1).reshape(-1, size).tolist()
        )
        for i, (axis, size) in enumerate(mesh.shape.items())
    }
