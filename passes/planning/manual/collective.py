"""The collectives that a user wrote in a shard_map, as a ring carries them out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxoverlap._util.text import human_bytes
from jaxoverlap.plan.collectives import RINGED, Kind
from jaxoverlap.plan.decisions import Reason


@dataclass(frozen=True)
class WrittenCollective:
    """A collective of the user's that a ring can do.

    Attributes:
        position: its index in the body.
        eqn: the equation.
        kind: the kind of collective.
        axis, axis_size: the mesh axis, and its devices.
        dim: the dim that is gathered or scattered; for an all-to-all the one that is gathered, for
            an all-reduce None.
        wanted: for an all-to-all the dim that is sharded instead; else None.
        spread: devices of automatic axes among which the value is shared out.
    """

    position: int
    eqn: Any
    kind: Kind
    axis: str
    axis_size: int
    dim: int | None = None
    wanted: int | None = None
    spread: int = 1

    @property
    def bytes_moved(self) -> int:
        """Bytes that each device sends in one run, by a ring."""
        before, n = self.eqn.invars[0].aval, self.axis_size
        ring_bytes = before.size * before.dtype.itemsize // self.spread * (n - 1)
        times = {"all_gather": n, "all_reduce": 2}.get(self.kind, 1)
        return times * ring_bytes // n

    @property
    def dim_of_sum(self) -> int | None:
        """The dim of a summed result to split into chunks; of an all-reduce the largest that fits.

        None if no dim of an all-reduce divides by the axis.
        """
        if self.kind == "reduce_scatter":
            return self.dim
        if self.kind == "all_to_all":
            return self.wanted
        shape = self.eqn.invars[0].aval.shape
        fits = [d for d, size in enumerate(shape) if size % self.axis_size == 0]
        return max(fits, key=lambda d: shape[d], default=None)

    def __str__(self) -> str:
        return f"{self.axis} {self.kind}, {human_bytes(self.bytes_moved)}"


def written_collective(
    position: int, eqn: Any, axes: Mapping[str, int]
) -> WrittenCollective | Reason:
    """Describe a collective that a ring can do, or say why no ring can.

    Args:
        position: its index in the body.
        eqn: the equation.
        axes: the manual mesh axes, and the devices along each.
    """
    name, params = eqn.primitive.name, eqn.params
    if name not in RINGED:
        return Reason("no ring", f"{name} next to it is not decomposed")
    named = params["axes"] if "axes" in params else params["axis_name"]
    named = named if isinstance(named, tuple) else (named,)
    if params.get("axis_index_groups") is not None:
        return Reason("no ring", f"{name} is over groups of an axis (axis_index_groups)")
    if len(named) != 1 or named[0] not in axes:
        over = " x ".join(map(str, named))
        return Reason("no ring", f"{name} is over {over}: a ring has one manual mesh axis")
    if not params.get("tiled", True):
        return Reason("no ring", f"{name} is not tiled")
    axis, n = named[0], axes[named[0]]
    if n == 1:
        return Reason("no collective", f"axis {axis} has one device")
    dims = [params.get(k) for k in ("all_gather_dimension", "scatter_dimension", "concat_axis")]
    dim = next((d for d in dims if d is not None), None)
    if dim is not None and dim == params.get("split_axis"):
        return Reason("no ring", f"{name} splits the dim that it gathers")
    return WrittenCollective(position, eqn, RINGED[name], axis, n, dim, params.get("split_axis"))
