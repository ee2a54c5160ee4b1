"""Parse the groups of devices in a collective, in every notation of HLO."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping

import numpy as np

_MESH = re.compile(r"mesh\[([^\]]*)\](?:, device_ids=\((.*)\))? \{([^}]*)\}")
_IOTA = re.compile(r"\[([\d,]+)\](?:<=\[([\d,]+)\])?(?:T\(([\d,]+)\))?")

Groups = tuple[tuple[int, ...], ...]


@functools.lru_cache(maxsize=4096)  # a ring writes the same pairs a thousand times
def parties(groups: str, num_devices: int) -> Groups:
    """Return the groups of devices that exchange data in a collective; of a permute, its pairs.

    Args:
        groups: as HLO writes `replica_groups` or `source_target_pairs`; empty: all together.
        num_devices: devices of the module.

    Raises:
        ValueError: if the groups are written in a way that this does not know.
    """
    if not groups or groups == "{}":
        return (tuple(range(num_devices)),)
    if groups.startswith("{{"):
        return tuple(
            tuple(map(int, group.split(","))) for group in re.findall(r"\{([\d,]+)\}", groups)
        )
    if match := _MESH.fullmatch(groups):
        return _mesh_groups(*match.groups())
    if (match := _IOTA.fullmatch(groups)) and match.group(2):
        shape, source, order = map(_numbers, match.groups())
        return _rows(_iota(source, order), shape[-1])
    raise ValueError(f"groups in an unknown form: {groups}")


@functools.lru_cache(maxsize=4096)
def domains(groups: str, num_devices: int, gpus_per_domain: int) -> int:
    """Return the largest number of NVLink domains in one group of a collective.

    Devices are numbered domain after domain, as `Cluster` counts them.
    """
    together = parties(groups, num_devices)
    return max(len({device // gpus_per_domain for device in group}) for group in together)


def axes_of(groups: str, num_devices: int, mesh: Mapping[str, int]) -> tuple[str, ...]:
    """Return the mesh axes along which a collective moves data; the mesh's devices count up."""
    moving = set()
    for group in parties(groups, num_devices):
        positions = np.unravel_index(group, tuple(mesh.values()))
        moving.update(axis for axis, at in zip(mesh, positions, strict=True) if at.min() < at.max())
    return tuple(axis for axis in mesh if axis in moving)


def _mesh_groups(axes: str, ids: str | None, together: str) -> Groups:
    """Return the groups along some axes of a mesh; 'x':(2)4 is a sub-axis: size 4, pre-size 2."""
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", axes)}
    devices = _device_ids(ids, math.prod(sizes.values()))
    parts = {name: (size, 1, 1) for name, size in sizes.items()}  # before it, it, after it
    for name, before, size in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", together):
        before, size = (int(before), int(size)) if size else (1, sizes[name])
        parts[name] = (before, size, sizes[name] // before // size)
    shape = [size for part in parts.values() for size in part]
    order = sorted(range(len(shape)), key=lambda dim: dim % 3 == 1)
    size = math.prod(shape[1::3])
    return _rows(devices[_iota(shape, order)], size)


def _device_ids(text: str | None, num_devices: int) -> np.ndarray:
    """Return the devices of a mesh as a flat list: in order, or as 0,2,1,3 or [2,2]T(1,0) says."""
    if not text:
        return np.arange(num_devices)
    if match := _IOTA.fullmatch(text):
        shape, source, order = map(_numbers, match.groups())
        return _iota(source or shape, order)
    return np.array(_numbers(text))


def _numbers(text: str | None) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", text or "")]


def _iota(shape: list[int], order: list[int]) -> np.ndarray:
    """Return 0, 1, 2, ... reshaped to `shape` and transposed to `order`, as a flat list."""
    return np.arange(math.prod(shape)).reshape(shape).transpose(order or None).ravel()


def _rows(devices: np.ndarray, size: int) -> Groups:
    return tuple(map(tuple, devices.reshape(-1, size).tolist()))
