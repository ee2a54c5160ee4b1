"""The rings by the collective that they carry out: one choice for automatic and manual code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from jax import Array

from jaxoverlap._jax.row_layout import in_rows
from jaxoverlap.passes.rings.all_gather_matmul import Reader, all_gather_matmul
from jaxoverlap.passes.rings.all_to_all_matmul import all_to_all_matmul, matmul_all_to_all
from jaxoverlap.passes.rings.matmul_all_reduce import matmul_all_reduce
from jaxoverlap.passes.rings.matmul_reduce_scatter import Term, matmul_reduce_scatter
from jaxoverlap.plan.collectives import Kind
from jaxoverlap.plan.plan import Variant


class Dim(NamedTuple):
    """One dim of the value that moves.

    Attributes:
        at: its number.
        outer: `Chunking.outer` of it.
    """

    at: int
    outer: int = 1


class Along(NamedTuple):
    """The mesh axis of a ring, and how the pieces travel along it.

    Attributes:
        axis, axis_size: the mesh axis, and its devices.
        variant: how the pieces travel.
    """

    axis: str
    axis_size: int
    variant: Variant


def operand_ring(
    kind: Kind,
    shard: Array,
    readers: Sequence[Reader],
    along: Along,
    *,
    gathered: Dim,
    split: Dim | None = None,
    keep: bool = False,
) -> list[Array]:
    """Multiply an operand that is gathered or exchanged.

    Args:
        kind: all_gather or all_to_all.
        shard: this device's part of the operand.
        readers: the matmuls that read it.
        along: the ring's axis.
        gathered: the dim that becomes unsharded.
        split: for an exchange, the dim that becomes sharded.
        keep: return the moved operand too.

    Returns:
        Each reader's result, and with `keep` the moved operand.
    """
    given: dict[str, Any] = {
        **along._asdict(), "dim": gathered.at, "outer": gathered.outer, "keep": keep
    }  # fmt: skip
    shard = _in_rows(shard, along)
    if kind == "all_gather":
        results, whole = all_gather_matmul(shard, readers, **given)
    else:
        assert split is not None, f"{kind} of an operand without the dim that it splits"
        given |= {"wanted": split.at, "wanted_outer": split.outer}
        results, whole = all_to_all_matmul(shard, readers, **given)
    return results if whole is None else [*results, whole]


def result_ring(
    kind: Kind,
    terms: Sequence[Term],
    along: Along,
    *,
    dtype: Any,
    split: Dim,
    gathered: Dim | None = None,
    invarying: bool = False,
) -> Array:
    """Add up matmuls whose sum is scattered, all-reduced or exchanged.

    Args:
        kind: reduce_scatter, all_reduce or all_to_all.
        terms: the matmuls.
        along: the ring's axis.
        dtype: the dtype of the sum.
        split: the dim that becomes sharded; for all_reduce the one that is split into chunks.
        gathered: for an exchange, the dim that becomes unsharded.
        invarying: for all_reduce, give a result whose type says that it is alike on all devices.
    """
    given: dict[str, Any] = {**along._asdict(), "dtype": dtype}
    if kind == "all_to_all":
        assert gathered is not None, "an exchange of a result without the dim that it gathers"
        given |= {"dim": gathered.at, "outer": gathered.outer}
        total = matmul_all_to_all(terms, wanted=split.at, wanted_outer=split.outer, **given)
        return _in_rows(total, along)
    given |= {"dim": split.at, "outer": split.outer}
    if kind == "reduce_scatter":
        return _in_rows(matmul_reduce_scatter(terms, **given), along)
    return matmul_all_reduce(terms, invarying=invarying, **given)


def _in_rows(value: Array, along: Along) -> Array:
    """Lay a value out in memory row by row, as its matmuls read and write the chunks.

    A collective elsewhere in the step wants the dim that it moves to come first, and XLA gives that
    layout to all that the collective's value is added to. Then it would turn every chunk that comes
    or goes, where one turn of the shard does. A sliced ring has whole collectives, which want the
    other layout themselves.
    """
    if along.variant.style == "sliced":
        return value
    return in_rows(value)
