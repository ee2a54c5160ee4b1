"""Write the Shardy sharding rule of an operation that computes one or several matmuls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxoverlap.passes.analysis.matmul_group import MatmulGroup


def rule(avals: Sequence[Any], *, group: MatmulGroup) -> tuple[str, dict[str, Any]]:
    """Return the rule of a group: for `bsd,df->bsf`, "b s d, d f -> b s f", reducing d.

    Each matmul has factors of its own, as it would have as a `dot_general`, but for those of the
    terms of a sum: what one operand's dims tell of another's is what they would tell there.

    Args:
        avals: the types of the operands, two for each matmul.
        group: the matmuls.
    """
    operands: list[str] = []
    results: list[str] = []
    reduced: list[str] = []
    number = 0
    for output in group.outputs:
        total: list[str] = []
        for product in output:
            einsum = product.einsum(avals[2 * number], avals[2 * number + 1])
            names = {c: f"{c}{number}" for c in einsum.sizes}
            if total:
                names |= dict(zip(einsum.out, total, strict=True))
            total = [names[c] for c in einsum.out]
            operands += [" ".join(names[c] for c in side) for side in (einsum.lhs, einsum.rhs)]
            reduced += [names[c] for c in einsum.sizes if c not in einsum.out]
            number += 1
        results.append(" ".join(total))
    return f"{', '.join(operands)} -> {', '.join(results)}", {"reduction_factors": tuple(reduced)}
