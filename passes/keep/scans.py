"""Give scans further operands and results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxoverlap._jax import compat


def widened(
    scan: Any, consts: Mapping[Any, Any], slices: Mapping[Any, Any], stacks: Mapping[Any, Any]
) -> Any:
    """Return a scan with further constants, slices and stacked results.

    What it has as an operand already is not given to it again, as XLA would copy that.

    Args:
        scan: the scan.
        consts, slices: the values as its body has them, and as the body around it has them.
        stacks: likewise the results: a value of the body, and its stack.
    """
    body, (num_consts, num_carry) = scan.params["jaxpr"], compat.scan_counts(scan)
    pairs = [*zip(scan.invars, body.invars, strict=True)]
    consts, same = _new(consts, pairs[:num_consts])
    slices, sliced = _new(slices, pairs[num_consts + num_carry :])
    body = _renamed(body, same | sliced)

    binders = [*with_more(scan, body.invars, [*consts]), *slices]
    body = compat.with_binders(body, binders, [*body.outvars, *stacks])
    invars = [*with_more(scan, scan.invars, [*consts.values()]), *slices.values()]
    counts = num_consts + len(consts), num_carry
    return compat.new_scan(scan, body, counts, invars, [*scan.outvars, *stacks.values()])


def _new(
    wanted: Mapping[Any, Any], operands: Sequence[tuple[Any, Any]]
) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """Return which values are no operands yet; and the binders of the others.

    Args:
        wanted: the values as a body has them, and as the body around it has them.
        operands: those that there are: as the body around has them, and as the body has them.
    """
    there = {atom: binder for atom, binder in operands if not compat.is_literal(atom)}
    new, known = dict[Any, Any](), dict[Any, Any]()
    for inside, outside in wanted.items():
        if compat.is_literal(outside) or (binder := there.setdefault(outside, inside)) is inside:
            new[inside] = outside
        else:
            known[inside] = binder
    return new, known


def _renamed(body: Any, names: Mapping[Any, Any]) -> Any:
    if not names:
        return body

    def now(atoms: Sequence[Any]) -> list[Any]:
        return [atom if compat.is_literal(atom) else names.get(atom, atom) for atom in atoms]

    eqns = [eqn.replace(invars=now(eqn.invars)) for eqn in body.eqns]
    return body.replace(eqns=eqns, outvars=now(body.outvars))


def stack_of(scan: Any, value: Any) -> Any:
    """Return the result in which a scan stacks a value of its body; None if it does not."""
    _, num_carry = compat.scan_counts(scan)
    stacked = zip(scan.params["jaxpr"].outvars[num_carry:], scan.outvars[num_carry:], strict=True)
    return next((stack for one, stack in stacked if one is value), None)


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
