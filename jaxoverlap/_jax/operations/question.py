"""Define what XLA's partitioner passes to an operation, and the device's program it gets back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from jax.sharding import Mesh

from jaxoverlap._jax.operations.specs import Spec, num_blocks


@dataclasses.dataclass(frozen=True)
class Wish:
    """A later operation's wish for an operand, gathered along one dim.

    Attributes:
        operand: the index of the operand among the operation's.
        dim: the dim that is to be unsharded, or less sharded.
        spec: how the later operation wants it.
    """

    operand: int
    dim: int
    spec: Spec


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation while it is partitioned.

    Attributes:
        mesh: the mesh, all of its axes automatic.
        avals: the global types of its operands.
        operands, results: their shardings, as XLA settled them; None if they split a mesh axis.
        wishes: what later operations would read gathered.
        source: the file and line of the code that wrote it.
        number: the number that its name ends with, in the compiled module too.
    """

    mesh: Mesh
    avals: tuple[Any, ...]
    operands: tuple[Spec | None, ...]
    results: tuple[Spec | None, ...]
    wishes: tuple[Wish, ...]
    source: tuple[str, int]
    number: int


@dataclasses.dataclass(frozen=True)
class DeviceProgram:
    """The program by which one device computes its part of an operation.

    Attributes:
        jaxpr: the computation of one device, in which all mesh axes are manual; after the results
            it gives what was wished for and fulfilled.
        operands, results: the shardings of its operands and its results.
        fulfilled: the wishes that it fulfils.
    """

    jaxpr: Any
    operands: tuple[Spec, ...]
    results: tuple[Spec, ...]
    fulfilled: tuple[Wish, ...]


Partition = Callable[[Operation], DeviceProgram]


def even(operation: Operation, position: int) -> Spec:
    """Return an operand's sharding on the axes that divide its dims; replicated if not known."""
    told, shape = operation.operands[position], operation.avals[position].shape
    dims: list[tuple[str, ...]] = []
    for size, axes in zip(shape, told or ((),) * len(shape), strict=True):
        kept: tuple[str, ...] = ()
        for axis in axes:
            if size % num_blocks(operation.mesh, (*kept, axis)) == 0:
                kept = (*kept, axis)
        dims.append(tuple(a for a in kept if operation.mesh.shape[a] > 1))
    return tuple(dims)
