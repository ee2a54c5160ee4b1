"""Check what all train steps here take: a mesh of automatic axes, and how to overlap."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jax.sharding import AxisType, Mesh


def check_automatic(mesh: Mesh) -> None:
    """Raise a ValueError for a mesh with explicit or manual axes."""
    if any(kind != AxisType.Auto for kind in mesh.axis_types):
        raise ValueError(
            f"a mesh of axis types {mesh.axis_types}: expected automatic axes; make it with "
            "jax.make_mesh(..., axis_types=(AxisType.Auto,) * number of axes)"
        )


def check_workers(mesh: Mesh, axis: str) -> None:
    """Raise a ValueError for a mesh without the workers' axis, or with axes not automatic."""
    if not isinstance(mesh, Mesh):
        raise ValueError(f"mesh={mesh!r}: expected a jax.sharding.Mesh; make it with jax.make_mesh")
    if axis not in mesh.shape:
        raise ValueError(
            f"axis={axis!r}: the mesh has the axes {', '.join(mesh.axis_names)}; name the one "
            "along which the workers lie"
        )
    check_automatic(mesh)


def overlap_options(overlap: bool | Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the options of `jaxoverlap.overlap` that are asked for; None for no overlap."""
    if overlap is False:
        return None
    return {} if overlap is True else dict(overlap)
