"""Find the iterations of a scan in which a truth value holds that follows from counting alone.

scan over microbatches:  body:  last: bool = eq count 7 ;  count': i32 = rem (add count 1) 8
->  False, False, False, False, False, False, False, True
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxoverlap._jax import compat
from jaxoverlap.passes.analysis.known import KnownValues

_MOST_ITERATIONS = 4096  # of a scan that is followed


def iterations_where(
    last: Any, scan: Any, eqns: Sequence[Any], outvars: Sequence[Any], outer: KnownValues
) -> list[bool] | None:
    """Return whether a value of a scan's body holds, by iteration in the order in which they run.

    A number that the step is given, as an optimizer's count of microbatches, counts as 0, as it is
    between updates.

    Args:
        last: the value.
        scan: the scan.
        eqns, outvars: the equations and results of its body, with inner jits opened.
        outer: the known values of the body that the scan is in.

    Returns:
        None if it is not known: it depends on an array, or on what a loop around the scan changes.
    """
    num_consts, num_carry = compat.scan_counts(scan)
    length, binders = scan.params["length"], scan.params["jaxpr"].invars
    carried = dict(zip(binders[num_consts : num_consts + num_carry], outvars, strict=False))
    if length > _MOST_ITERATIONS or (needed := _numbers(last, eqns, carried)) is None:
        return None
    counting, leaves = needed
    known = dict[Any, np.ndarray]()
    for var, atom in zip(binders, scan.invars, strict=True):
        if var in leaves:
            start = outer.of(atom)
            if start is None and var not in carried:
                return None
            known[var] = np.zeros((), var.aval.dtype) if start is None else start
    sliced, held = {*binders[num_consts + num_carry :]}, list[bool]()
    for n in range(length)[:: -1 if scan.params["reverse"] else 1]:
        now = {v: t.reshape(-1)[n % t.size] if v in sliced else t for v, t in known.items()}
        values = KnownValues(counting, {v: np.asarray(t) for v, t in now.items()})
        if (value := values.of(last)) is None:
            return None
        held.append(bool(value))
        for var in known.keys() & carried.keys():
            if (after := values.of(carried[var])) is None:
                return None
            known[var] = after
    return held


def _numbers(
    last: Any, eqns: Sequence[Any], carried: Mapping[Any, Any]
) -> tuple[list[Any], set[Any]] | None:
    """Return the equations that a value follows from, and the operands of the body that they need.

    None if one of them reads an array.

    Args:
        last: the value.
        eqns: the body's.
        carried: the results of the body that are its operands in the next iteration.
    """
    makers = {v: n for n, eqn in enumerate(eqns) for v in eqn.outvars}
    seen, positions, leaves = set[Any](), set[int](), set[Any]()
    todo = [last]
    while todo:
        var = todo.pop()
        if compat.is_literal(var) or var in seen:
            continue
        seen.add(var)
        if var.aval.ndim:
            return None
        if (position := makers.get(var)) is not None:
            positions.add(position)
            todo += eqns[position].invars
        else:
            leaves.add(var)
            todo += [carried[var]] if var in carried else []
    return [eqns[n] for n in sorted(positions)], leaves
