"""Parts of jax that may change: primitives whose operations partition themselves.

Written against jax 0.11.2 and 0.12.0; `tests/_jax/test_partitioned_call.py` pins what is used.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import core, dispatch, sharding_impls, source_info_util
from jax._src import mesh as meshes
from jax._src.interpreters import mlir
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxlib.mlir import ir

from jaxoverlap._jax import compat

Spec = tuple[tuple[str, ...], ...]
_numbers = itertools.count()  # of operations, in the order in which they are lowered


@dataclasses.dataclass(frozen=True)
class Wish:
    """A later operation's wish for an operand, gathered along one dim.

    Attributes:
        operand: the place of the operand among the operation's.
        dim: the dim that is to be whole, or less sharded.
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
        operands, results: how these lie, as XLA settled it; None where mesh axes do not say it.
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
class Partitioned:
    """What one device does of an operation.

    Attributes:
        jaxpr: the computation of one device, in which all mesh axes are manual; after the results
            it gives what was wished for and fulfilled.
        operands, results: how its operands and its results lie.
        fulfilled: the wishes that it fulfils.
    """

    jaxpr: Any
    operands: tuple[Spec, ...]
    results: tuple[Spec, ...]
    fulfilled: tuple[Wish, ...]


Partition = Callable[[Operation], Partitioned]


def primitive(name: str) -> Any:
    """Make a primitive with several results."""
    made = core.Primitive(name)
    made.multiple_results = True
    return made


def lower_as(
    primitive: Any,
    plain: Callable[..., Callable[..., list[Any]]],
    rule: Callable[..., tuple[str, dict[str, Any]]],
    partition: Callable[..., Partition],
    operands: Callable[..., Sequence[int]],
    *,
    shares: bool = True,
) -> None:
    """Lower a primitive to an operation that partitions itself, where there is a mesh to do it on.

    It stays plain on one device, where no mesh is known, in manual code and where it is exported.

    Operations that stand in one block and read one value gather it once: each has, beside its
    results, every operand once more for each dim, with a sharding along that dim that is free of
    the operand's. The others that read the value have these as operands too. When they are
    partitioned, in this order, the first gives what it gathered there, and the others read that.

    Args:
        primitive: the primitive.
        plain: makes of the equation's parameters the plain computation.
        rule: makes of the operands' types and the parameters a Shardy rule, as text and keywords.
        partition: makes of the parameters the function that partitions the operation.
        operands: makes of the parameters the numbers of the operation's operands among the
            equation's: one that is read in several ways stands there as often.
        shares: whether it reads what others have gathered, and gives them what it gathers.
    """

    def lowering(ctx: Any, *values: Any, **params: Any) -> Any:
        fn, mesh = plain(**params), _mesh(ctx)
        if mesh is None:
            return mlir.lower_fun(fn, multiple_results=True)(ctx, *values)
        at, gathered = list(operands(**params)), _gathered(ctx)
        found = [(place, gathered.of(values[n])) for place, n in enumerate(at) if shares]
        before = [
            (_Before(place, dim, seen.by, seen.number), value)
            for place, seen in found
            if seen
            for dim, value in enumerate(seen.again)
        ]
        for b, _ in before:
            b.by.wanted.add((b.number, b.dim))
        op = _Partitioning(
            mesh,
            at,
            tuple(ctx.avals_in[n] for n in at),
            len(ctx.avals_out),
            [b for b, _ in before],
            partition(**params),
            _source(ctx.traceback),
            gathered,
            shares,
        )

        # One argument, a list: custom_partitioning counts arguments by a signature.
        def whole(given: Sequence[Any]) -> list[Any]:
            again = [given[at.index(n)] for n, _ in op.again]
            return [*fn(*(given[at.index(n)] for n in range(len(values)))), *again]

        call = custom_partitioning(whole)
        text, kinds = rule(op.avals, **params)
        text = op.with_gathered(text, kinds.get("reduction_factors", ()))
        call.def_partition(partition=op, sharding_rule=text, decode_shardings=False, **kinds)

        def named(*given: Any) -> list[Any]:
            # XLA gives all that an operation becomes the operation's own name.
            with jax.named_scope(f"{primitive.name}.{op.number}"):
                return call([*(given[n] for n in at), *given[len(values) :]])

        avals = [*ctx.avals_in, *(op.avals[b.place] for b, _ in before)]
        inner = ctx.replace(avals_in=avals, avals_out=None)
        lower = mlir.lower_fun(named, multiple_results=True)
        results = lower(inner, *values, *(value for _, value in before))
        for n, value in enumerate(values):
            if not shares or gathered.of(value):
                continue  # a first one, of a forward pass, tells more of how its operands lie
            again = zip(op.again, results[op.results :], strict=True)
            gathered.put(value, _Seen(op, n, [r for (m, _), r in again if m == n]))
        return results[: op.results]

    mlir.register_lowering(primitive, lowering, cacheable=False)
    dispatch.prim_requires_devices_during_lowering.add(primitive)  # else the mesh is not told


@dataclasses.dataclass(frozen=True)
class _Before:
    """An operand that an operation before may have gathered along one dim.

    Attributes:
        place: its place among this operation's operands.
        dim: the dim.
        by: the operation before.
        number: the number that the operand has there.
    """

    place: int
    dim: int
    by: _Partitioning
    number: int


class _Partitioning:
    """An operation, from its lowering to its partitioning; XLA calls it back."""

    def __init__(
        self,
        mesh: Mesh,
        at: list[int],
        avals: tuple[Any, ...],
        results: int,
        before: list[_Before],
        answer: Partition,
        source: tuple[str, int],
        gathered: _Gathered,
        shares: bool,
    ):
        self.mesh, self.at, self.avals, self.results = mesh, at, avals, results
        self.before, self.answer, self.source, self.gathered = before, answer, source, gathered
        self.number = next(_numbers)
        again = sorted({*at}) if shares else []
        self.again = [(n, d) for n in again for d in range(avals[at.index(n)].ndim)]
        self.wanted: set[tuple[int, int]] = set()  # of `again`, what a later operation may read
        self.given: dict[tuple[int, int], Spec] = {}  # of `again`, how it is given, as told

    def with_gathered(self, text: str, reduced: Collection[str]) -> str:
        """Return a rule with the operands that were gathered before, and those that may be here.

        Args:
            text: the rule of the operation alone.
            reduced: its reduced factors, which Shardy allows in no result.
        """
        operands, results = (side.split(", ") for side in text.split(" -> "))
        own = list(operands)

        def free(place: int, dim: int, name: str) -> str:
            factors = own[place].split(" ")
            return " ".join([*factors[:dim], name, *factors[dim + 1 :]])

        operands += [free(b.place, b.dim, f"before{i}") for i, b in enumerate(self.before)]
        for i, (n, dim) in enumerate(self.again):
            factors = free(self.at.index(n), dim, f"again{i}").split(" ")
            results.append(" ".join(f"of{i}{f}" if f in reduced else f for f in factors))
        return f"{', '.join(operands)} -> {', '.join(results)}"

    def __call__(self, _: Any, given: Any, result: Any) -> tuple[Any, ...]:
        """Answer XLA's partitioner."""
        self.gathered.clear()  # the lowering is over
        told = [spec_of(o.sharding, self.mesh, len(o.shape)) for o in given[0]]
        ends = [spec_of(r.sharding, self.mesh, len(r.shape)) for r in result]
        results, places = self.results, list(range(len(self.at)))  # of operands among those given
        for i, b in enumerate(self.before, len(self.at)):
            if told[i] is not None and b.by.given.get((b.number, b.dim)) == told[i]:
                places[b.place] = i
        wishes = [
            Wish(self.at.index(n), dim, spec)
            for (n, dim), spec in zip(self.again, ends[results:], strict=True)
            if (n, dim) in self.wanted and spec not in (None, told[self.at.index(n)])
        ]
        done = self.answer(
            Operation(
                self.mesh,
                self.avals,
                tuple(told[p] for p in places),
                tuple(ends[:results]),
                tuple(wishes),
                self.source,
                self.number,
            )
        )
        whole = [((),) * len(o.shape) for o in given[0]]
        at = [all_of if t is None else t for t, all_of in zip(told, whole, strict=True)]
        for p, spec in zip(places, done.operands, strict=True):
            at[p] = spec
        number = {(self.at[w.operand], w.dim): i for i, w in enumerate(done.fulfilled)}
        self.given = {key: done.fulfilled[i].spec for key, i in number.items()}

        def local(operands: Sequence[Any]) -> list[Any]:
            mine = [operands[p] for p in places]
            out = core.eval_jaxpr(done.jaxpr, done.jaxpr.consts, *mine)
            # Nobody reads what is not in `given`.
            again = [
                out[results + number[key]] if key in number else jnp.zeros(shape, r.dtype)
                for key, shape, r in zip(self.again, shapes, result[results:], strict=True)
            ]
            return [*out[:results], *again]

        free = [
            ((),) * len(r.shape) if spec is None else spec
            for spec, r in zip(ends[results:], result[results:], strict=True)
        ]
        shapes = [
            _sharding(self.mesh, spec).shard_shape(r.shape)
            for spec, r in zip(free, result[results:], strict=True)
        ]
        back = [_sharding(self.mesh, spec) for spec in (*done.results, *free)]
        return self.mesh, local, back, ([_sharding(self.mesh, spec) for spec in at],)


class _Seen(NamedTuple):
    """The first operation of a block that read a value.

    Attributes:
        by: the operation.
        number: the number of the value among its equation's operands.
        again: the value, as the operation gives it again, by dim.
    """

    by: _Partitioning
    number: int
    again: list[Any]


class _Gathered:
    """The values that operations of a module have read, and may have gathered."""

    def __init__(self) -> None:
        self._first: dict[Any, _Seen] = {}

    def of(self, value: Any) -> _Seen | None:
        """Return the first operation of this block that read a value."""
        seen, here = self._first.get(value), ir.InsertionPoint.current.block
        return seen if seen and all(v.owner.operation.block == here for v in seen.again) else None

    def put(self, value: Any, seen: _Seen) -> None:
        """Note the operation that reads a value first."""
        self._first[value] = seen

    def clear(self) -> None:
        """Forget all, and let the module go."""
        self._first.clear()


def _gathered(ctx: Any) -> _Gathered:
    """Return a module's own; it lives as long as the module's lowering."""
    kept = ctx.module_context.keepalives
    found = next((k for k in kept if isinstance(k, _Gathered)), None)
    if found is None:
        found = _Gathered()
        ctx.module_context.add_keepalive(found)
    return found


def _source(traceback: Any) -> tuple[str, int]:
    """Return the file and line of the user's code; ("<unknown>", 0) if it is lost."""
    frame = None if traceback is None else source_info_util.user_frame(traceback)
    return (frame.file_name, frame.start_line) if frame else ("<unknown>", 0)


def not_the_users(folder: str) -> None:
    """Leave a folder's files out of what counts as the user's code."""
    source_info_util.register_exclusion(folder)


def _mesh(ctx: Any) -> Mesh | None:
    """Return the automatic twin of the mesh that a module is lowered for; None to stay plain."""
    module = ctx.module_context
    context = module.axis_context
    if module.lowering_parameters.for_export or not jax.config.jax_use_shardy_partitioner:
        return None
    if not isinstance(context, sharding_impls.ShardingContext):
        return None  # manual code
    devices, abstract = context.device_assignment, context.abstract_mesh
    physical = meshes.thread_resources.env.physical_mesh
    if devices is None or len(devices) == 1:
        return None
    if abstract is not None and not abstract.empty:
        return Mesh(np.array(devices).reshape(abstract.axis_sizes), abstract.axis_names)
    return Mesh(physical.devices, physical.axis_names) if not physical.empty else None


def spec_of(sharding: Any, mesh: Mesh, ndim: int) -> Spec | None:
    """Return the mesh axes on each dim of a value; None where they do not say how it lies."""
    if not isinstance(sharding, NamedSharding):
        try:
            spec = sharding_impls.parse_flatten_op_sharding(
                sharding._to_xla_hlo_sharding(ndim), mesh
            )[0]
        except (ValueError, NotImplementedError, StopIteration, AssertionError):
            return None  # it splits a mesh axis
    else:
        spec = sharding.spec
    return compat.axes_by_dim(spec, ndim)


def _sharding(mesh: Mesh, spec: Spec) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(*(axes or None for axes in spec)))


def trace_on(mesh: Mesh, fn: Callable[..., Any], structs: Sequence[Any]) -> Any:
    """Trace a function where all axes of a mesh are manual."""
    with jax.disable_jit(False):
        return jax.make_jaxpr(fn, axis_env=list(mesh.shape.items()))(*structs)


# -- what answers are made of ---------------------------------------------------------------------


def even(operation: Operation, place: int) -> Spec:
    """Return how an operand lies, less the axes that do not divide its dims; whole if not known."""
    told, shape = operation.operands[place], operation.avals[place].shape
    dims: list[tuple[str, ...]] = []
    for size, axes in zip(shape, told or ((),) * len(shape), strict=True):
        kept: tuple[str, ...] = ()
        for axis in axes:
            if size % num_blocks(operation.mesh, (*kept, axis)) == 0:
                kept = (*kept, axis)
        dims.append(tuple(a for a in kept if operation.mesh.shape[a] > 1))
    return tuple(dims)


def num_blocks(mesh: Mesh, axes: Sequence[str]) -> int:
    """Count the blocks into which mesh axes cut a dim."""
    return math.prod(mesh.shape[a] for a in axes)


def block_index(mesh: Mesh, axes: Sequence[str]) -> Any:
    """Return which block of a dim this device has, where its axes are manual."""
    index: Any = 0
    for axis in axes:
        index = index * mesh.shape[axis] + jax.lax.axis_index(axis)
    return index


def local_structs(
    mesh: Mesh, avals: Sequence[Any], specs: Sequence[Spec]
) -> list[jax.ShapeDtypeStruct]:
    """Return the types of values on one device."""
    return [
        jax.ShapeDtypeStruct(_sharding(mesh, spec).shard_shape(a.shape), a.dtype)
        for a, spec in zip(avals, specs, strict=True)
    ]
