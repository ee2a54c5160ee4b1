"""Give scans further operands and results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxoverlap._jax import compat


def widened(
    scan: Any, consts: Mapping[Any, Any], slices: Mapping[Any, Any], stacks: Mapping[Any, Any]
) -> Any:
    """Return a scan with further constants, slices and stacked results.

    Args:
        scan: the scan.
        consts, slices: the values as its body has them, and as the body around it has them.
        stacks: likewise the results: a value of the body, and its stack.
    """
    body, (num_consts, num_carry) = scan.params["jaxpr"], compat.scan_counts(scan)

    binders = [*with_more(scan, body.invars, [*consts]), *slices]
    body = compat.with_binders(body, binders, [*body.outvars, *stacks])
    invars = [*with_more(scan, scan.invars, [*consts.values()]), *slices.values()]
    counts = num_consts + len(consts), num_carry
    return compat.new_scan(scan, body, counts, invars, [*scan.outvars, *stacks.values()])


def with_more(scan: Any, operands: Sequence[Any], more: Sequence[Any]) -> list[Any]:
    """Return a scan's operands with others between its constants and what it carries."""
    num_consts, _ = compat.scan_counts(scan)
    return [*operands[:num_consts], *more, *operands[num_consts:]]


def without_slices(scan: Any, gone: Sequence[Any]) -> Any:
    """Return a scan whose body does not get some slices as operands.

    Args:
        scan: the scan.
        gone: the operands of the body.
    """
    body, counts = scan.params["jaxpr"], compat.scan_counts(scan)
    stays = [binder not in gone for binder in body.invars]
    binders = [binder for binder, stay in zip(body.invars, stays, strict=True) if stay]
    invars = [atom for atom, stay in zip(scan.invars, stays, strict=True) if stay]
    body = compat.with_binders(body, binders, body.outvars)
    return compat.new_scan(scan, body, counts, invars, scan.outvars)
