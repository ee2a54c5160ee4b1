"""Read the shardings that XLA's partitioner settles on, from the module that Shardy leaves.

Shardy writes its module down after each of its passes, in a folder that a compiler option names.
After propagation every value there has its final sharding, and an operation is identified by the
frontend attributes that it was lowered with. Nothing is added to the step for it: one
more reader of a value may change how Shardy resolves a conflict.

Written against jax 0.11.2 and 0.12.0; `tests/_jax/test_partitioner.py` pins what is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax._src.interpreters import mlir
from jax._src.lib.mlir import ir  # type: ignore[attr-defined]
from jax._src.lib.mlir.dialects import hlo, sdy  # type: ignore[attr-defined]

Spec = tuple[tuple[str, ...], ...]
"""Mesh axes of every dim, major to minor."""

_FILE = "02.after_propagation.mlir"
_ATTRIBUTES, _SHARDING = "mhlo.frontend_attributes", "sdy.sharding"
_RESHARDS = ("sdy.reshard", "sdy.sharding_constraint")
_DOTS = ("stablehlo.dot_general", "stablehlo.dot")
_SCATTER = "stablehlo.scatter"


def options(folder: Path) -> dict[str, str]:
    """Return the options by which Shardy dumps its modules to a folder, and XLA hardly anything."""
    return {
        "xla_dump_to": str(folder),
        "xla_dump_hlo_pass_re": "shardy.*",
        "xla_dump_hlo_module_re": "none",
    }


def read(folder: Path) -> ir.Module | None:
    """The module that Shardy left in a folder, in a context of its own; None if there is none."""
    found = sorted(folder.glob(f"shardy/*/{_FILE}"))
    if len(found) != 1:
        return None
    context = mlir.make_ir_context()
    context.allow_unregistered_dialects = True
    return ir.Module.parse(found[0].read_text(), context)


# -- operations -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Side:
    """A side of an operation: an operand, or its result.

    Attributes:
        shape: its shape; that of a part in a manual body.
        spec: its sharding; None where it splits a mesh axis.
        beyond: the shardings of the values that it is resharded from, the last reshard first; or,
            of a result, that it is resharded to as long as nobody else reads it, by the dims of
            the result.
    """

    shape: tuple[int, ...]
    spec: Spec | None
    beyond: tuple[Spec | None, ...]

    def transposed(self, dims: tuple[int | None, ...]) -> Side:
        """This side with other dims: of each the old one; None for a new one of size 1."""

        def spec(of: Spec | None) -> Spec | None:
            return of and tuple(() if d is None else of[d] for d in dims)

        shape = tuple(1 if d is None else self.shape[d] for d in dims)
        return Side(shape, spec(self.spec), tuple(map(spec, self.beyond)))


@dataclass(frozen=True)
class Tagged:
    """A matmul or a scatter of a step that was lowered with a tag.

    Attributes:
        lhs, rhs: its operands; of a scatter the array and the updates.
        out: its result.
        contracted, batched: the pairs of dims of the operands of a matmul; none of a scatter.
    """

    lhs: Side
    rhs: Side
    out: Side
    contracted: tuple[tuple[int, int], ...] = ()
    batched: tuple[tuple[int, int], ...] = ()


def tagged(module: ir.Module, name: str) -> Iterator[tuple[str, Tagged]]:
    """Yield the matmuls and scatters of a propagated module that have a frontend attribute.

    Args:
        module: as `read` gives it.
        name: the attribute; its value is yielded with the operation.
    """
    with module.context:
        for op in _operations(module.operation):
            if op.name not in (*_DOTS, _SCATTER) or _ATTRIBUTES not in op.attributes:
                continue
            attributes = ir.DictAttr(op.attributes[_ATTRIBUTES])
            if name in attributes:
                yield ir.StringAttr(attributes[name]).value, _tagged(op)


def _operations(op: Any) -> Iterator[Any]:
    """Yield the operations inside another, at any depth."""
    for region in op.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield inner.operation
                yield from _operations(inner.operation)


def _tagged(op: Any) -> Tagged:
    out = _side(op.results[0], _sinks(op.results[0]))
    if op.name == _SCATTER:
        lhs, _, rhs = (_side(v, _sources(v)) for v in op.operands)
        return Tagged(lhs, rhs, out)
    lhs, rhs = (_side(v, _sources(v)) for v in op.operands)
    if op.name == "stablehlo.dot":
        return Tagged(lhs, rhs, out, ((len(lhs.shape) - 1, 0),))
    dims = hlo.DotDimensionNumbers(op.attributes["dot_dimension_numbers"])
    contracted = zip(dims.lhs_contracting_dimensions, dims.rhs_contracting_dimensions, strict=True)
    batched = zip(dims.lhs_batching_dimensions, dims.rhs_batching_dimensions, strict=True)
    return Tagged(lhs, rhs, out, tuple(contracted), tuple(batched))


def _side(value: Any, beyond: Iterator[Spec | None]) -> Side:
    return Side(tuple(ir.RankedTensorType(value.type).shape), _spec_of(value), tuple(beyond))


def _sources(value: Any) -> Iterator[Spec | None]:
    while (op := _maker(value)) is not None and op.name in _RESHARDS:
        value = op.operands[0]
        yield _spec_where_made(value)


def _spec_where_made(value: Any) -> Spec | None:
    """Return a value's sharding; of what a step of a scan reads, as the slice has it.

    Shardy gives a constraint's sharding to the value that is constrained, so that a slice of
    stacked weights is gathered as soon as it is cut.
    """
    reshape = _maker(value)
    if reshape is not None and reshape.name == "stablehlo.reshape":
        cut, shape = reshape.operands[0], (1, *ir.RankedTensorType(value.type).shape)
        by = _maker(cut)
        is_slice = by is not None and by.name == "stablehlo.dynamic_slice"
        if is_slice and tuple(ir.RankedTensorType(cut.type).shape) == shape:
            spec = _spec_of(cut)
            return spec and spec[1:]
    return _spec_of(value)


def _sinks(value: Any) -> Iterator[Spec | None]:
    order = tuple(range(ir.RankedTensorType(value.type).rank))
    while len(uses := list(value.uses)) == 1:
        op = uses[0].owner.operation
        if op.name == "stablehlo.transpose":
            order = tuple(order[d] for d in ir.DenseI64ArrayAttr(op.attributes["permutation"]))
        elif op.name not in (*_RESHARDS, "stablehlo.convert"):
            return
        value = op.results[0]
        if op.name in _RESHARDS:
            spec = _spec_of(value)
            yield spec and tuple(spec[order.index(d)] for d in range(len(order)))


# -- values ---------------------------------------------------------------------------------------


def _maker(value: Any) -> Any:
    """The operation that makes a value; None for a block's argument."""
    return None if isinstance(value, ir.BlockArgument) else value.owner.operation


def _spec_of(value: Any) -> Spec | None:
    """Return a value's sharding in the module; a value without one is replicated."""
    rank = ir.RankedTensorType(value.type).rank
    op = _maker(value)
    number = value.arg_number if op is None else value.result_number
    if op is None:
        op = value.owner.owner.operation
        sharding = _of_argument(op, number)
        manual = _manual_axes(op)
    else:
        sharding = _of_result(op, number)
        manual = _manual_axes(op.parent)
    return ((),) * rank if sharding is None else _spec(sharding, manual, rank)


def _of_argument(op: Any, number: int) -> Any:
    """The sharding of an argument of a function, a manual computation or a loop's body."""
    if op.name == "func.func":
        if "arg_attrs" not in op.attributes:
            return None
        given = ir.DictAttr(ir.ArrayAttr(op.attributes["arg_attrs"])[number])
        return given[_SHARDING] if _SHARDING in given else None  # noqa: SIM401 (it has no get)
    if op.name == "sdy.manual_computation":
        return _numbered(op, "in_shardings", number)
    return _numbered(op, _SHARDING, number)


def _of_result(op: Any, number: int) -> Any:
    """The sharding of a result of an operation."""
    if op.name in _RESHARDS:
        return op.attributes["sharding"]
    if op.name == "sdy.manual_computation":
        return _numbered(op, "out_shardings", number)
    return _numbered(op, _SHARDING, number)


def _numbered(op: Any, name: str, number: int) -> Any:
    """The sharding of one of the values that an attribute lists; None without the attribute."""
    if name not in op.attributes:
        return None
    return sdy.TensorShardingPerValueAttr(op.attributes[name]).shardings[number]


def _manual_axes(op: Any) -> set[str]:
    """The mesh axes that are manual in an operation's body."""
    axes: set[str] = set()
    while op is not None:
        op = op.operation
        if op.name == "sdy.manual_computation":
            axes |= {*sdy.ManualAxesAttr(op.attributes["manual_axes"])}
        op = op.parent
    return axes


def _spec(attribute: Any, manual: set[str], rank: int) -> Spec | None:
    """Translate a sharding; None where it splits a mesh axis, or is that of a value on one device.

    The result of a callback into Python is on one device: its sharding has no dims.
    """
    dims = []
    for dim in sdy.TensorShardingAttr(attribute).dimension_shardings:
        axes = [sdy.AxisRefAttr(axis) for axis in sdy.DimensionShardingAttr(dim).axes]
        if any(axis.sub_axis_info is not None for axis in axes):
            return None
        dims.append(tuple(axis.name for axis in axes if axis.name not in manual))
    return tuple(dims) if len(dims) == rank else None
