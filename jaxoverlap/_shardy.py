"""What Shardy says of a lowered step: shardings, and the collectives that they imply.

With `_compat`, the only file that names jax's or jaxlib's internals. Written against jax 0.11.2 and
0.12.0; `tests/test_shardy.py` pins each behaviour that is used.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import sdy
from jaxlib.mlir.passmanager import PassManager

_PROPAGATION = "builtin.module(sdy-propagation-pipeline)"
# Shardy's own passes: they put in, as operations, the collectives that a partitioner has to.
_COLLECTIVES = (
    "builtin.module(sdy-propagation-pipeline,"
    "func.func(sdy-insert-explicit-reshards{enable-full-version=true}),"
    "func.func(sdy-reshard-to-collectives))"
)

_UNKNOWN = object()


Spec = tuple[tuple[str, ...], ...]


class Read(NamedTuple):
    """The shardings of one matmul: a tuple of mesh axes a dim, major to minor.

    None where Shardy's answer cannot be said so: part of an axis shards a dim, or the value enters
    by an operation whose arguments this reader does not know.

    Attributes:
        lhs, rhs, out: of the operands and the result.
        lhs_sources, rhs_sources: of what the operand is made from by nothing but resharding: before
            the last reshard, before the last two, ...
        out_sinks: of what the result becomes by resharding (and transposes), as long as nobody else
            reads it: after the first reshard, after the first two, ...; by the dims of the result.
    """

    lhs: Spec | None
    rhs: Spec | None
    out: Spec | None
    lhs_sources: tuple[Spec | None, ...] = ()
    rhs_sources: tuple[Spec | None, ...] = ()
    out_sinks: tuple[Spec | None, ...] = ()


def propagate(lowered: jax.stages.Lowered, tag: str) -> dict[str, Read]:
    """Run Shardy's propagation on a lowered step and read the shardings of the tagged dots.

    Returns them by the value of frontend attribute `tag` on each `stablehlo.dot_general`.
    """
    with _propagated(lowered) as root:
        return {name: _read(op) for name, op in _tagged_dots(root, tag)}


def results(lowered: jax.stages.Lowered) -> list[Spec | None]:
    """The shardings that Shardy's propagation finds for the results of a lowered step, in order.

    None where that cannot be said, as in `Read`. Tokens of ordered effects are not among them.
    """
    with _propagated(lowered) as root:
        functions = [op for op in _operations(root) if op.name == "func.func"]
        main = next(op for op in functions if str(op.attributes["sym_name"]) == '"main"')
        (block,) = main.regions[0].blocks
        values = list(block.operations[len(block.operations) - 1].operands)
        said: list[Any] = [None] * len(values)
        if "res_attrs" in main.attributes:
            attributes = map(ir.DictAttr, ir.ArrayAttr(main.attributes["res_attrs"]))
            said = [a["sdy.sharding"] if "sdy.sharding" in a else None for a in attributes]  # noqa: SIM401
        pairs = zip(values, said, strict=True)
        return [_spec(v, sharding) for v, sharding in pairs if str(v.type).startswith("tensor")]


@contextlib.contextmanager
def _propagated(lowered: jax.stages.Lowered) -> Iterator[Any]:
    """A copy of a lowered step with the shardings that Shardy's propagation finds."""
    with _copy(lowered) as root:
        _replace_chlo(root)
        passes = PassManager.parse(_PROPAGATION)
        passes.enable_verifier(
            False
        )  # jax has verified what it lowered; that takes 3/4 of the time
        passes.run(root)
        yield root


@contextlib.contextmanager
def _copy(lowered: jax.stages.Lowered) -> Iterator[Any]:
    """A copy of a lowered step to run passes on: jax keeps the original, and compiles it."""
    module = lowered.compiler_ir("stablehlo")
    assert module is not None
    with module.context:
        yield module.operation.clone()


def _read(op: Any) -> Read:
    lhs, rhs = op.operands[0], op.operands[len(op.operands) - 1]  # of a scatter: the updates
    out = op.results[0]
    specs = (_value_spec(lhs), _value_spec(rhs), _value_spec(out))
    return Read(*specs, _sources(lhs), _sources(rhs), _sinks(out))


_RESHARDS = ("sdy.reshard", "sdy.sharding_constraint")


def _sources(value: Any) -> tuple[Spec | None, ...]:
    """How a value lay before each of the reshards that made it, the last one first."""
    specs = []
    while not isinstance(value, ir.BlockArgument) and value.owner.name in _RESHARDS:
        value = value.owner.operands[0]
        specs.append(_value_spec(value))
    return tuple(specs)


def _sinks(value: Any) -> tuple[Spec | None, ...]:
    """How a value lies after each of the reshards that it meets, by the dims that it has itself."""
    dims = list(range(len(ir.RankedTensorType(value.type).shape)))
    specs = []
    while len(users := [use.owner for use in value.uses]) == 1:
        if users[0].name == "stablehlo.transpose":
            permutation = ir.DenseI64ArrayAttr(users[0].attributes["permutation"])
            dims = [dims[d] for d in permutation]
        elif users[0].name not in (*_RESHARDS, "stablehlo.convert"):
            break
        value = users[0].results[0]
        if users[0].name in _RESHARDS:
            spec = _value_spec(value)
            specs.append(spec and tuple(spec[dims.index(d)] for d in range(len(dims))))
    return tuple(specs)


def _operations(root: Any) -> Iterator[Any]:
    """Every operation below one, at any depth."""
    for region in root.regions:
        for block in region:
            for op in block.operations:
                yield op.operation
                yield from _operations(op.operation)


def _replace_chlo(root: Any) -> None:
    """Put stand-ins of the same shapes for CHLO operations (erf, square, top_k, ...).

    Shardy does not propagate through CHLO, which XLA legalizes first; that pass is not reachable
    from Python. What the stand-ins compute does not matter: the module is read, not run.
    """
    for op in [op for op in _operations(root) if op.name.startswith("chlo.")]:
        values, result = [*op.operands, *op.results], op.results[0]
        shapes = {tuple(ir.RankedTensorType(v.type).shape) for v in values}
        attributes: dict[str, Any] = {}
        if len(values) == 2 and len(shapes) == 1:
            name = "stablehlo.convert"
        elif len(op.results) == 1 and all(v.type == result.type for v in values):
            name = "stablehlo.add"
        elif op.name == "chlo.top_k":
            name = "stablehlo.custom_call"
            attributes = {"call_target_name": ir.StringAttr.get("mhlo.topk")}  # Shardy knows it
        else:
            continue  # its result is read as not known
        stand_in = ir.Operation.create(
            name,
            results=[v.type for v in op.results],
            operands=list(op.operands)[:2],
            attributes=attributes,
            loc=op.location,
            ip=ir.InsertionPoint(op),
        )
        for old, new in zip(op.results, stand_in.results, strict=True):
            old.replace_all_uses_with(new)
        op.erase()


_READ = ("stablehlo.dot_general", "stablehlo.scatter")


def _tagged_dots(root: Any, tag: str) -> Iterator[tuple[str, Any]]:
    for op in _operations(root):
        if op.name in _READ and "mhlo.frontend_attributes" in op.attributes:
            attributes = ir.DictAttr(op.attributes["mhlo.frontend_attributes"])
            if tag in attributes:
                yield ir.StringAttr(attributes[tag]).value, op


def _value_spec(value: Any) -> tuple[tuple[str, ...], ...] | None:
    """The sharding of an MLIR value, wherever Shardy keeps it."""
    return _spec(value, _value_sharding(value))


def _spec(value: Any, sharding: Any) -> tuple[tuple[str, ...], ...] | None:
    """An MLIR value's sharding, as mesh axes a dim."""
    if sharding is _UNKNOWN:
        return None
    rank = len(ir.RankedTensorType(value.type).shape)
    if sharding is None:
        return ((),) * rank  # Shardy found nothing to shard it by: whole on every device
    dims = [
        sdy.DimensionShardingAttr(d) for d in sdy.TensorShardingAttr(sharding).dimension_shardings
    ]
    axes = [[sdy.AxisRefAttr(a) for a in d.axes] for d in dims]
    if any(a.sub_axis_info is not None for dim in axes for a in dim):
        return None
    return tuple(tuple(a.name for a in dim) for dim in axes)


def _value_sharding(value: Any) -> Any:
    if isinstance(value, ir.BlockArgument):
        argument = ir.BlockArgument(value)
        return _argument_sharding(argument.owner.owner, argument.arg_number)
    op = value.owner
    if "sharding" in op.attributes and op.name in ("sdy.reshard", "sdy.sharding_constraint"):
        return op.attributes["sharding"]
    if "out_sharding" in op.attributes:  # Shardy's collectives
        return op.attributes["out_sharding"]
    return _result_sharding(op, ir.OpResult(value).result_number)


def _argument_sharding(op: Any, number: int) -> Any:
    """Sharding of a block argument: a function keeps it itself, a while with its own results."""
    op = op.operation
    if op.name == "func.func":
        attributes = ir.DictAttr(ir.ArrayAttr(op.attributes["arg_attrs"])[number])
        return attributes["sdy.sharding"] if "sdy.sharding" in attributes else None  # noqa: SIM401
    if op.name == "stablehlo.while":
        return _result_sharding(op, number)
    if op.name == "sdy.manual_computation":
        return sdy.TensorShardingPerValueAttr(op.attributes["in_shardings"]).shardings[number]
    return _UNKNOWN


def _result_sharding(op: Any, number: int) -> Any:
    # A manual computation (the body of a shard_map) says itself where its results lie.
    key = "out_shardings" if op.name == "sdy.manual_computation" else "sdy.sharding"
    if key not in op.attributes:
        return _UNKNOWN if op.name.startswith("chlo.") else None
    return sdy.TensorShardingPerValueAttr(op.attributes[key]).shardings[number]


# -- collectives ----------------------------------------------------------------------------------


class Implied(NamedTuple):
    """A collective that the shardings of a step imply.

    Attributes:
        kind: all_gather, all_reduce, reduce_scatter, all_to_all or collective_permute.
        axes: the mesh axes whose devices take part.
        file, line: the user's code that wrote the value.
        runs: how often a step runs it.
        local_bytes: bytes of its result on one device.
    """

    kind: str
    axes: tuple[str, ...]
    file: str
    line: int
    runs: int
    local_bytes: int


def implied_collectives(lowered: jax.stages.Lowered) -> list[Implied]:
    """The collectives that a partitioner has to add to a lowered step, as Shardy works them out.

    Those that stand in it already (in the bodies of shard_maps) are not among them. The same motion
    of the same value counts once.
    """
    with _copy(lowered) as root:
        _replace_chlo(root)
        PassManager.parse(_COLLECTIVES).run(root)
        axis_sizes = _axis_sizes(root)
        found: dict[Any, Implied] = {}
        for op, runs in _running(root, 1):
            if op.name in _KINDS and list(op.results[0].uses):
                key = (op.name, op.operands[0], str(op.attributes["out_sharding"]))
                found.setdefault(key, _implied(op, runs, axis_sizes))
        return list(found.values())


_KINDS = {
    "sdy.all_gather": "gathering_axes",
    "sdy.all_reduce": "reduction_axes",
    "sdy.reduce_scatter": "reduce_scatter_axes",
    "sdy.all_to_all": "params",
    "sdy.collective_permute": "out_sharding",
}


def _axis_sizes(root: Any) -> dict[str, int]:
    meshes = [op for op in _operations(root) if op.name == "sdy.mesh"]
    return {
        name: int(size)
        for op in meshes
        for name, size in re.findall(r'"([^"]+)"=(\d+)', str(op.attributes["mesh"]))
    }


def _running(root: Any, runs: int) -> Iterator[tuple[Any, int]]:
    """Every operation, with how often a step runs it."""
    for region in root.regions:
        for block in region:
            for op in block.operations:
                inner = runs * _trip_count(op) if op.operation.name == "stablehlo.while" else runs
                yield op.operation, runs
                yield from _running(op.operation, inner)


def _trip_count(loop: Any) -> int:
    """How often a scan's loop runs: its condition is `i < length`; 1 for any other loop."""
    for op in loop.regions[0].blocks[0].operations:
        if op.operation.name != "stablehlo.compare":
            continue
        bound = op.operands[1].owner
        number = re.search(r"dense<(\d+)> : tensor<i(?:32|64)>", str(bound))
        if number and "LT" in str(op.attributes["comparison_direction"]):
            return int(number.group(1))
    return 1


def _implied(op: Any, runs: int, axis_sizes: dict[str, int]) -> Implied:
    named = re.findall(r'"([^"]+)"', str(op.attributes[_KINDS[op.name]]))
    kind, result = op.name.removeprefix("sdy."), op.results[0]
    users = [use.owner for use in result.uses]
    if kind == "all_reduce" and all(user.name == "sdy.all_slice" for user in users):
        kind, result = "reduce_scatter", users[0].results[0]  # as every partitioner does it
    axes = tuple(a for a in axis_sizes if a in named)
    spec = _value_spec(result) or ()
    held = math.prod(axis_sizes[a] for dim in spec for a in dim)
    file, line = _source(op)
    return Implied(kind, axes, file, line, runs, _bytes(result.type) // held)


def _bytes(value_type: Any) -> int:
    """Bytes of a tensor."""
    tensor = ir.RankedTensorType(value_type)
    element = str(tensor.element_type)
    bits = re.search(r"\d+", element)
    assert bits is not None, element
    width = max(8, int(bits.group())) * (2 if element.startswith("complex") else 1)
    return math.prod(tensor.shape) * width // 8


def _source(op: Any) -> tuple[str, int]:
    """The user's line that an operation stands for: the innermost frame that jax has kept."""
    found = re.search(r'"([^"]+)":(\d+):', str(op.location))
    return (found.group(1), int(found.group(2))) if found else ("<unknown>", 0)
