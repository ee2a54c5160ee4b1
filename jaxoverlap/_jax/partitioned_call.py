"""Parts of jax that may change: primitives whose operations partition themselves.

Written against jax 0.11.2 and 0.12.0; `tests/_jax/test_partitioned_call.py` pins what is used.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import core, dispatch, sharding_impls, source_info_util
from jax._src import mesh as meshes
from jax._src.interpreters import mlir
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxoverlap._jax import compat

Spec = tuple[tuple[str, ...], ...]
_numbers = itertools.count()  # of operations, in the order in which they are lowered


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation while it is partitioned.

    Attributes:
        mesh: the mesh, all of its axes automatic.
        avals: the global types of its operands.
        operands, results: how these lie, as XLA settled it; None where mesh axes do not say it.
        source: the file and line of the code that wrote it.
        number: the number that its name ends with, in the compiled module too.
    """

    mesh: Mesh
    avals: tuple[Any, ...]
    operands: tuple[Spec | None, ...]
    results: tuple[Spec | None, ...]
    source: tuple[str, int]
    number: int


@dataclasses.dataclass(frozen=True)
class Partitioned:
    """What one device does of an operation.

    Attributes:
        jaxpr: the computation of one device, in which all mesh axes are manual.
        operands, results: how its operands and results lie.
    """

    jaxpr: Any
    operands: tuple[Spec, ...]
    results: tuple[Spec, ...]


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
) -> None:
    """Lower a primitive to an operation that partitions itself, where there is a mesh to do it on.

    It stays plain on one device, where no mesh is known, in manual code and where it is exported.

    Args:
        primitive: the primitive.
        plain: makes of the equation's parameters the plain computation.
        rule: makes of the operands' types and the parameters a Shardy rule, as text and keywords.
        partition: makes of the parameters the function that partitions the operation.
        operands: makes of the parameters the numbers of the operation's operands among the
            equation's: one that is read in several ways stands there as often.
    """

    def lowering(ctx: Any, *values: Any, **params: Any) -> Any:
        fn, mesh = plain(**params), _mesh(ctx)
        if mesh is None:
            return mlir.lower_fun(fn, multiple_results=True)(ctx, *values)
        at, answer = list(operands(**params)), partition(**params)
        number, source = next(_numbers), _source(ctx.traceback)
        avals = tuple(ctx.avals_in[n] for n in at)
        results = [a.ndim for a in ctx.avals_out]

        # One argument, a list: custom_partitioning counts arguments by a signature.
        def whole(spread: Sequence[Any]) -> list[Any]:
            return fn(*(spread[at.index(n)] for n in range(len(values))))

        def split(_: Any, given: Any, result: Any) -> Any:
            told = Operation(
                mesh,
                avals,
                tuple(spec_of(o.sharding, mesh, len(o.shape)) for o in given[0]),
                tuple(spec_of(r.sharding, mesh, n) for r, n in zip(result, results, strict=True)),
                source,
                number,
            )
            done = answer(told)

            def local(operands: Sequence[Any]) -> list[Any]:
                return core.eval_jaxpr(done.jaxpr, done.jaxpr.consts, *operands)

            ends = [_sharding(mesh, spec) for spec in done.results]
            return mesh, local, ends, ([_sharding(mesh, spec) for spec in done.operands],)

        call = custom_partitioning(whole)
        text, kinds = rule(avals, **params)
        call.def_partition(partition=split, sharding_rule=text, decode_shardings=False, **kinds)

        def named(*operands: Any) -> list[Any]:
            # XLA gives all that an operation becomes the operation's own name.
            with jax.named_scope(f"{primitive.name}.{number}"):
                return call([operands[n] for n in at])

        return mlir.lower_fun(named, multiple_results=True)(ctx, *values)

    mlir.register_lowering(primitive, lowering, cacheable=False)
    dispatch.prim_requires_devices_during_lowering.add(primitive)  # else the mesh is not told


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
