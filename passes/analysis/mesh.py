"""The one mesh that a step runs on, read off its arguments, its jit and its constraints."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxoverlap._jax import explicit, jits
from jaxoverlap.passes.analysis.errors import UserError
from jaxoverlap.passes.analysis.jaxprs import equations


class MeshError(UserError):
    """None of the step can be overlapped, as when it does not run on one mesh of several devices.

    Attributes:
        meshes: the meshes that it uses.
    """

    def __init__(self, message: str, meshes: tuple[Mesh, ...] = ()):
        super().__init__(message)
        self.meshes = meshes


class NoMeshError(MeshError):
    """None of the step's shardings names a mesh."""


class MutableError(MeshError):
    """The step takes, or closes over, mutable arrays: no edit may move their reads and writes."""


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
            "axes, axis types and order of devices everywhere",
            tuple(meshes),
        )
    mesh = meshes.pop()
    _check(name, mesh)
    return mesh


def _check(name: str, mesh: Mesh) -> None:
    if mesh.size == 1:
        raise MeshError(
            f"{name} runs on a mesh of one device ({dict(mesh.shape)}): there is nothing to "
            "overlap. Use more devices, or leave overlap() off",
            (mesh,),
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
    return (eqn for eqn, _ in equations(jaxpr) if eqn.primitive.name == primitive)


def explicit_axes(mesh: Mesh) -> tuple[str, ...]:
    """Return the axes whose shardings are part of the arrays' types."""
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(axis for axis, kind in kinds if kind == AxisType.Explicit)


def partition_spec(spec: Sequence[tuple[str, ...]]) -> PartitionSpec:
    """Make a `PartitionSpec` of the mesh axes on each dim."""
    return PartitionSpec(*(axes or None for axes in spec))


def auto_mesh(mesh: Mesh) -> Mesh | AbstractMesh:
    """Return the mesh with all of its axes left to the partitioner.

    Where axes are explicit it is abstract: it stands inside `auto_axes`, where JAX knows the
    devices, and a step with an operation that partitions itself may name but one mesh of devices.
    """
    return explicit.automatic_mesh(mesh.abstract_mesh) if explicit_axes(mesh) else mesh


def is_cpu(mesh: Mesh) -> bool:
    """Return whether a mesh is of CPU devices."""
    return mesh.devices.flat[0].platform == "cpu"
