"""Lower a primitive to an operation that partitions itself.

Written against jax 0.11.2 and 0.12.0; `tests/ops` pins what is used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import core, dispatch, sharding_impls, source_info_util
from jax._src import mesh as meshes
from jax._src.interpreters import mlir
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import Mesh

from jaxoverlap._jax.operations.partitioning import Before, FirstReader, Partitioning, gathered_of
from jaxoverlap._jax.operations.question import Partition


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

    Operations of one block that read one value gather it once: each has, in addition to its
    results, every operand once more for each dim, with a sharding along that dim that is free of
    the operand's. The others that read the value have these as operands too. When they are
    partitioned, in this order, the first gives what it gathered there, and the others read that.

    Args:
        primitive: the primitive.
        plain: makes of the equation's parameters the plain computation.
        rule: makes of the operands' types and the parameters a Shardy rule, as text and keywords.
        partition: makes of the parameters the function that partitions the operation.
        operands: makes of the parameters the numbers of the operation's operands among the
            equation's: one that is read with several shardings is listed as often.
        shares: whether it reads what others have gathered, and gives them what it gathers.
    """

    def lowering(ctx: Any, *values: Any, **params: Any) -> Any:
        fn, mesh = plain(**params), _mesh(ctx)
        if mesh is None:
            return mlir.lower_fun(fn, multiple_results=True)(ctx, *values)
        at, gathered = list(operands(**params)), gathered_of(ctx)
        found = [(position, gathered.of(values[n])) for position, n in enumerate(at) if shares]
        before = [
            (Before(position, dim, seen.by, seen.number), value)
            for position, seen in found
            if seen
            for dim, value in enumerate(seen.again)
        ]
        for b, _ in before:
            b.by.wanted.add((b.number, b.dim))
        op = Partitioning(
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

        avals = [*ctx.avals_in, *(op.avals[b.position] for b, _ in before)]
        inner = ctx.replace(avals_in=avals, avals_out=None)
        lower = mlir.lower_fun(named, multiple_results=True)
        results = lower(inner, *values, *(value for _, value in before))
        for n, value in enumerate(values):
            if not shares or gathered.of(value):
                continue  # a first one, of a forward pass, tells more of how its operands lie
            again = zip(op.again, results[op.results :], strict=True)
            gathered.put(value, FirstReader(op, n, [r for (m, _), r in again if m == n]))
        return results[: op.results]

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
