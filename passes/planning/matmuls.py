"""Decide whether a matmul may become a ring, read its shardings, fit a variant to a chunk size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from jaxoverlap._jax import compat
from jaxoverlap.passes.analysis.einsum import LETTERS, einsum_of
from jaxoverlap.passes.analysis.jaxprs import Dot
from jaxoverlap.passes.analysis.partitioned import Shardings
from jaxoverlap.passes.planning.entries import names_of, num_dims
from jaxoverlap.passes.planning.splits import ShardedMatmul
from jaxoverlap.passes.planning.terms import Requests
from jaxoverlap.plan.collectives import Kind
from jaxoverlap.plan.decisions import Reason, Variant

_DTYPES = (
    *("float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32", "float64"),
    *("int8", "uint8", "int32"),
)


def matmul_of(
    dot: Dot, shardings: Shardings, axis_sizes: Mapping[str, int]
) -> ShardedMatmul | Reason:
    """Return a matmul as the sharding algebra reads it, or why its sharding is not known."""
    avals = [v.aval for v in (*dot.eqn.invars, dot.eqn.outvars[0])]
    lhs, rhs, out = shardings[:3]
    if lhs is None or rhs is None or out is None:
        return Reason("no ring", "its sharding splits a mesh axis, or could not be read")
    return ShardedMatmul(
        einsum=einsum_of(dot.eqn.params["dimension_numbers"], avals[0].shape, avals[1].shape),
        lhs=lhs,
        rhs=rhs,
        out=out,
        itemsize=tuple(np.dtype(a.dtype).itemsize for a in avals),  # type: ignore[arg-type]
        axis_sizes=axis_sizes,
    )


def refusal(dot: Dot, requests: Requests) -> Reason | None:
    """Return why the user's requests, or the matmul alone, rule a ring out; None if they do not."""
    if (requested := requests.refusal(names_of(dot))) is not None:
        return requested
    unfit = why_unfit(dot)
    return Reason("no ring", unfit) if unfit else None


def explicit_axes_mismatch(dot: Dot, explicit: Sequence[str]) -> Reason | None:
    """Return why a matmul whose types state other axes than the mesh is skipped, or None."""
    stated = compat.stated_axes(dot.eqn)
    if stated is None or set(stated) == set(explicit):
        return None
    here, there = (", ".join(axes) or "no axis" for axes in (stated, explicit))
    return Reason(
        "no ring",
        f"its types state shardings over {here}, the step's mesh over {there}: no ring is written "
        "inside explicit_axes or auto_axes",
    )


def why_unfit(dot: Dot) -> str | None:
    """Return why a matmul can have no ring, whatever its sharding; None if it can."""
    if dot.eqn.primitive.name != "dot_general":
        return f"{dot.eqn.primitive.name}: no ring for that"
    if dot.inside:  # a primitive whose body has rules of its own, as pallas_call
        return f"inside {dot.inside}, whose body is not rewritten"
    if num_dims(dot) > len(LETTERS):
        return f"its operands have {num_dims(dot)} dims: more than letters ({len(LETTERS)})"
    if any(v.aval.size == 0 for v in (*dot.eqn.invars, *dot.eqn.outvars)):
        return "it has a dim of size 0"
    dtypes = [np.dtype(v.aval.dtype).name for v in (*dot.eqn.invars, dot.eqn.outvars[0])]
    for dtype in dtypes:
        if dtype not in _DTYPES:
            return f"dtype {dtype} is not supported (supported: {', '.join(_DTYPES)})"
    *operands, result = (np.dtype(name).kind for name in dtypes)
    if result in "iu" and not {*operands} <= {"i", "u"}:
        return f"{dtypes[0]} operands give {dtypes[2]}: the sums of chunks would be rounded"
    return None


def variant_of(kind: Kind, chunk: int, wanted: Variant) -> tuple[Variant, str]:
    """Return the variant that fits a ring's chunk size, and why its slices were dropped, or ""."""
    if chunk % wanted.slices:
        style = "one_way" if wanted.style == "sliced" else wanted.style
        why = f"in one piece: a chunk of {chunk} rows does not divide by {wanted.slices}"
        return variant_of(kind, chunk, Variant(style))[0], why
    if kind == "all_to_all" and wanted.style in ("one_way", "two_way"):
        return Variant("direct", wanted.slices), ""  # each slice has a device of its own to go to
    return wanted, ""
