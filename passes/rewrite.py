"""Put rings in the place of matmuls.

    y = dot_general[dimension_numbers=...] x w

->  y = shard_map[manual_axes={model} in_specs=... out_specs=...] x w, whose body is the ring

The equation keeps its operands and its result, so the jaxpr around it (scan, remat, ...) stays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax import Array, lax
from jax.sharding import Mesh, PartitionSpec

from jaxoverlap import _compat
from jaxoverlap.passes.all_gather_matmul import Reader, all_gather_matmul
from jaxoverlap.passes.decide import PASSES, source_of
from jaxoverlap.passes.errors import RewriteError
from jaxoverlap.passes.jaxprs import Dot, map_dots
from jaxoverlap.passes.layout import Layout
from jaxoverlap.passes.matmul_all_reduce import matmul_all_reduce
from jaxoverlap.passes.matmul_reduce_scatter import Term, matmul_reduce_scatter
from jaxoverlap.passes.sites import Spec


def rewrite(jaxpr: Any, layouts: Mapping[int, Layout], mesh: Mesh) -> Any:
    """A jaxpr with the laid-out matmuls (by place, see `jaxprs.dots`) replaced by rings.

    Raises:
        RewriteError: if that fails for one, naming the equation and its source line.
    """

    def visit(dot: Dot) -> list[Any] | None:
        layout = layouts.get(dot.index)
        if layout is None:
            return None
        try:
            return _compat.inline(ringed(layout, dot, mesh), dot.eqn)
        except Exception as error:
            source = source_of(dot)
            raise RewriteError(
                f"could not rewrite matmul {dot.index} ({layout.matmul.einsum}, {dot.eqn}) written "
                f"at {source}: {type(error).__name__}: {error}. To leave it alone, pass "
                f"skip=({source!r},) to overlap(); to run the step as it is, on_error='plain'"
            ) from error

    return map_dots(jaxpr, visit)


def scope(dot: Dot, layout: Layout) -> str:
    """The name that a ring's operations carry in profiles and in the scheduled module."""
    assert layout.ring.motion is not None
    return f"{PASSES[layout.ring.motion.kind]}.{dot.index}"


def ringed(layout: Layout, dot: Dot, mesh: Mesh) -> Callable[[Array, Array], Array]:
    """The function that takes a matmul's place."""
    params = dot.eqn.params
    dtype = dot.eqn.outvars[0].aval.dtype

    def chunk_dot(lhs: Array, rhs: Array, dtype: Any) -> Array:
        return lax.dot_general(
            lhs,
            rhs,
            dimension_numbers=params["dimension_numbers"],
            precision=params["precision"],
            preferred_element_type=dtype,
        )

    def body(lhs: Array, rhs: Array) -> Array:
        lhs, rhs = _gather_others(lhs, rhs, layout)
        out = _ring(lhs, rhs, layout, chunk_dot, dtype)
        return _reduce_others(out, layout)

    mapped = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=(_partition_spec(layout.lhs), _partition_spec(layout.rhs)),
        out_specs=_partition_spec(layout.out),
        axis_names=set(layout.manual),
        check_vma=False,  # rings break the replication that it would try to infer
    )
    return jax.named_call(mapped, name=scope(dot, layout))


def _ring(lhs: Array, rhs: Array, layout: Layout, dot: Any, dtype: Any) -> Array:
    """The decomposition that the ring's motion asks for."""
    motion = layout.ring.motion
    assert motion is not None
    einsum, letter = layout.matmul.einsum, layout.letter
    ring = {"axis": layout.ring.axis, "axis_size": layout.ring.axis_size}
    if motion.kind == "all_gather":
        gathered = motion.side == "lhs"
        shard, other = (lhs, rhs) if gathered else (rhs, lhs)
        reader = Reader(other, einsum, "lhs" if gathered else "rhs", dot, dtype)
        dim = einsum.side(motion.side).index(letter)
        (result,), _ = all_gather_matmul(shard, [reader], dim=dim, **ring)
        return result
    scatter = matmul_reduce_scatter if motion.kind == "reduce_scatter" else matmul_all_reduce
    terms = [Term(lhs, rhs, einsum, dot)]
    return scatter(terms, dim=einsum.out.index(letter), dtype=dtype, **ring)


def _gather_others(lhs: Array, rhs: Array, layout: Layout) -> tuple[Array, Array]:
    """The gathers on other axes, whole and before the ring."""
    sides = {"lhs": lhs, "rhs": rhs}
    for split in layout.others:
        motion = split.motion
        if motion is not None and motion.kind == "all_gather":
            dim = layout.matmul.einsum.side(motion.side).index(motion.letter)
            whole = lax.all_gather(sides[motion.side], split.axis, axis=dim, tiled=True)
            sides[motion.side] = whole
    return sides["lhs"], sides["rhs"]


def _reduce_others(out: Array, layout: Layout) -> Array:
    """The sums on other axes, whole and after the ring."""
    for split in layout.others:
        motion = split.motion
        if motion is not None and motion.kind == "reduce_scatter":
            dim = layout.matmul.einsum.out.index(motion.letter)
            out = lax.psum_scatter(out, split.axis, scatter_dimension=dim, tiled=True)
        elif motion is not None and motion.kind == "all_reduce":
            out = lax.psum(out, split.axis)
    return out


def _partition_spec(spec: Spec) -> PartitionSpec:
    return PartitionSpec(*(axes or None for axes in spec))
