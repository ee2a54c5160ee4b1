"""Place the axes of a configuration on a cluster: which stay on NVLink, which cross hosts."""

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
        order: the axes, slowest first: the last one's neighbours are neighbours on a host.
        sizes: their sizes.
        domain: devices that NVLink joins.
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
        place = np.unravel_index(device, self.sizes)
        index = tuple(
            slice(None) if axis in axes else at for axis, at in zip(self.order, place, strict=True)
        )
        return numbers[index].ravel().tolist()

    def __str__(self) -> str:
        shown = [f"{axis}={n}" for axis, n in zip(self.order, self.sizes, strict=True) if n > 1]
        return " > ".join(shown) or "one device"


@functools.cache  # a search asks for the same few groups again and again
def _group(
    order: tuple[str, ...], sizes: tuple[int, ...], domain: int, axes: tuple[str, ...]
) -> Group:
    members, stride = [0], 1
    for axis, size in zip(reversed(order), reversed(sizes), strict=True):
        if axis in axes:
            members = [at + i * stride for at in members for i in range(size)]
        stride *= size
    return Group(len(members), len({at // domain for at in members}))


def place(of: Configuration, cluster: Cluster, order: tuple[str, ...] = AXES) -> Placement:
    """Place a configuration's axes in an order, slowest first.

    Raises:
        ValueError: if the configuration has another number of devices than the cluster.
    """
    if of.devices != cluster.num_devices:
        raise ValueError(
            f"{of}: {of.devices} devices, and {cluster} has {cluster.num_devices}; change a size"
        )
    sizes = tuple(of.axes[axis] for axis in order)
    return Placement(order, sizes, cluster.gpus_per_nvlink_domain)


def placements(of: Configuration, cluster: Cluster) -> Iterator[Placement]:
    """Yield the placements that differ: each order of the axes that are larger than one.

    Tensor parallelism is innermost in all of them: it talks most, by two orders of magnitude
    (ConfigTuner, arXiv 2512.24750: over 99% of the volume), in every layer of every micro-batch.
    """
    ones = tuple(axis for axis in AXES if of.axes[axis] == 1)
    moving = tuple(axis for axis in AXES if of.axes[axis] > 1 and axis != "model")
    last = ("model",) if of.model > 1 else ()
    for order in itertools.permutations(moving):
        yield place(of, cluster, (*ones, *order, *last))
