"""Assign a configuration's axes to a cluster: which are on NVLink, which cross its domains."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from jaxoverlap.cost.groups import Group
from jaxoverlap.hardware.cluster import Cluster
from jaxoverlap.parallelism.configuration import AXES, Configuration


@dataclass(frozen=True)
class Placement:
    """The order of the axes over the devices, which are counted host by host.

    Attributes:
        order: the axes, major to minor: devices along the last one are adjacent.
        sizes: their sizes.
        domain: GPUs per NVLink domain (a host, or a rack of NVL72).
    """

    order: tuple[str, ...]
    sizes: tuple[int, ...]
    domain: int

    def group(self, *axes: str) -> Group:
        """Return the devices of a collective over axes, as far as its time depends on them."""
        return _group(self.order, self.sizes, self.domain, axes)

    def members(self, device: int, axes: tuple[str, ...]) -> list[int]:
        """Return the devices of one device's group over axes, in the order of the ring."""
        numbers = np.arange(math.prod(self.sizes)).reshape(self.sizes)
        coordinates = np.unravel_index(device, self.sizes)
        index = tuple(
            slice(None) if axis in axes else coordinate
            for axis, coordinate in zip(self.order, coordinates, strict=True)
        )
        return numbers[index].ravel().tolist()

    def __str__(self) -> str:
        shown = [f"{axis}={n}" for axis, n in zip(self.order, self.sizes, strict=True) if n > 1]
        return " > ".join(shown) or "one device"


@dataclass(frozen=True)
class Densest(Placement):
    """A lower bound of all placements: every group is on as few domains as its size allows.

    Only `group` means anything here: no one order of the axes gives all these groups.
    """

    def group(self, *axes: str) -> Group:
        """Return the devices of a collective over axes, adjacent but for tensor parallelism."""
        return _densest(self.order, self.sizes, self.domain, axes)


@functools.cache
def _densest(
    order: tuple[str, ...], sizes: tuple[int, ...], domain: int, axes: tuple[str, ...]
) -> Group:
    by_axis = dict(zip(order, sizes, strict=True))
    members = math.prod(by_axis[axis] for axis in axes)
    stride = 1 if "model" in axes else by_axis["model"]
    return Group(members, min(-(-members * stride // domain), members))


@functools.cache  # a search asks for the same few groups again and again
def _group(
    order: tuple[str, ...], sizes: tuple[int, ...], domain: int, axes: tuple[str, ...]
) -> Group:
    """Return the group along axes that spreads over most domains: a step waits for the slowest.

    All spread alike if domains begin where slices of the mesh do; with six adjacent devices in
    domains of eight some groups stay inside a domain, and others do not.
    """
    members, starts, stride, aligned = [0], [0], 1, True
    for axis, size in zip(reversed(order), reversed(sizes), strict=True):
        grown = members if axis in axes else starts
        grown[:] = [device + i * stride for device in grown for i in range(size)]
        stride *= size
        aligned = aligned and (domain % stride == 0 or stride % domain == 0)
    several = starts[:1] if aligned else starts
    spread = max(len({(start + device) // domain for device in members}) for start in several)
    return Group(len(members), spread)


def place(config: Configuration, cluster: Cluster, order: tuple[str, ...] = AXES) -> Placement:
    """Assign a configuration's axes in an order, major to minor.

    Raises:
        ValueError: if the configuration has another number of devices than the cluster.
    """
    if config.devices != cluster.num_devices:
        raise ValueError(
            f"{config}: {config.devices} devices, and {cluster} has {cluster.num_devices}; change "
            "a size"
        )
    sizes = tuple(config.axes[axis] for axis in order)
    return Placement(order, sizes, cluster.gpus_per_nvlink_domain)


def placements(config: Configuration, cluster: Cluster) -> Iterator[Placement]:
    """Yield the placements that differ: each order of the axes that are larger than one.

    Tensor parallelism is innermost in all of them: it talks most, by two orders of magnitude
    (ConfigTuner, arXiv 2512.24750: over 99% of the volume), in every layer of every micro-batch.
    """
    ones = tuple(axis for axis in AXES if config.axes[axis] == 1)
    moving = tuple(axis for axis in AXES if config.axes[axis] > 1 and axis != "model")
    last = ("model",) if config.model > 1 else ()
    for order in itertools.permutations(moving):
        yield place(config, cluster, (*ones, *order, *last))


def densest(config: Configuration, cluster: Cluster) -> Densest:
    """Return a bound: no placement with tensor parallelism innermost is faster."""
    return Densest(AXES, tuple(config.axes.values()), cluster.gpus_per_nvlink_domain)
