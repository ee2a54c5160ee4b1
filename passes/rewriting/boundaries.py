"""Updates that a scan computes in each iteration and uses in few: computed in these alone.

    scan over microbatches:  body:                                  # optax.MultiSteps
        mean: [i, o] = add acc (div (sub grad acc) n)
        new: [i, o] = ... mean moments                              # an optimizer's update
        w': [i, o] = add w (mul (convert last) new)                 # 0 * new but for every kth
        acc': [i, o] = mul (sub 1 (convert last)) mean

->  scan over microbatches:  body:
        mean: [i, o] = add acc (div (sub grad acc) n)
        w', acc' = cond last: (add w (... mean moments), 0) else: (w, mean)

`last` is a boundary: a number of the iteration decides on it, no array does. What is multiplied by
it, or selected by it, is computed only where it is used; so the sums over the batch that `mean` is
made of are needed there alone, and `carried_sums` adds them up there. Conditionals of the user's
own are boundaries too. Results are equal, whichever iteration the boundaries are in; only where the
user's step multiplies an infinite update by 0, its result is not a number, and this one's is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxoverlap._jax import compat, inlining
from jaxoverlap.passes.analysis.def_use import DefUse
from jaxoverlap.passes.analysis.jaxprs import bodies
from jaxoverlap.passes.analysis.known import known_values
from jaxoverlap.passes.edited import EditedStep, misfit
from jaxoverlap.passes.planning.entries import line_of
from jaxoverlap.passes.rewriting.counted import iterations_where
from jaxoverlap.passes.rewriting.partial_sums import ADDS
from jaxoverlap.passes.rewriting.scans import ReplacedScan, scans_of
from jaxoverlap.plan.edits import UpdateAtBoundary
from jaxoverlap.simulation.branch_shares import runs_scope


def run(step: EditedStep, edits: Sequence[UpdateAtBoundary]) -> EditedStep:
    """Compute what scans use at their boundaries alone there."""
    jaxpr = step.jaxpr
    # A scan that is replaced may change the numbers of later ones.
    for edit in sorted(edits, key=lambda one: -one.scan):
        if not 0 < edit.runs < edit.iterations:
            raise misfit(edit, f"{edit.runs} of {edit.iterations} iterations are no part of them")

        def replaced(scan: Any, edit: UpdateAtBoundary = edit) -> list[Any]:
            found = _boundary(scan)
            if found is None:
                raise misfit(edit, "the scan uses nothing at a boundary alone")
            scope = runs_scope(edit.runs, edit.iterations, at_end=edit.at_end)
            body = compat.with_binders(scan.params["jaxpr"], found.invars, found.outvars)
            try:
                body = body.replace(eqns=found.rewritten(scope))
            except _TangledError as error:
                raise misfit(edit, str(error)) from error
            return [scan.replace(params={**scan.params, "jaxpr": body})]

        walk = ReplacedScan(edit.scan, replaced)
        jaxpr = walk.jaxpr(jaxpr)
        if walk.count <= edit.scan:
            raise misfit(edit, f"the step has {walk.count} scans, counted from 0")
    return step.to(jaxpr)


def boundaries_of(step: EditedStep) -> Iterator[UpdateAtBoundary | str]:
    """Yield an edit for each scan with boundaries in at most half of its iterations.

    Or why there is none, for a scan that makes a carry 0 at boundaries which nobody can count.
    """
    scans = list(scans_of(step.jaxpr))
    found = [(number, scan, _boundary(scan)) for number, scan in enumerate(scans)]
    if not any(boundary for *_, boundary in found):
        return
    # In a shard_map each device would decide by itself, and collectives need all of them.
    every = [body for body in bodies(step.jaxpr) if body.is_global]
    known = known_values(every)
    around = {id(eqn): known[body.index] for body in every for eqn in body.eqns}
    for number, scan, boundary in found:
        if boundary is None or id(scan) not in around:
            continue
        runs = iterations_where(
            boundary.last, scan, boundary.eqns, boundary.outvars, around[id(scan)]
        )
        source = line_of(scan, ())
        if runs is None and boundary.resets:
            yield (
                f"The loop at {source} adds up what it uses in some iterations; in which ones "
                "depends on more than numbers that it counts, so sums stay in all of them."
            )
        elif runs is not None and 0 < 2 * sum(runs) <= len(runs):
            yield UpdateAtBoundary(
                scan=number,
                source=source,
                runs=sum(runs),
                iterations=len(runs),
                at_end=runs[-1],
            )


# -- what is used at a boundary alone -------------------------------------------------------------


@dataclass(frozen=True)
class _Masked:
    """A value that a boundary decides on.

    Attributes:
        var: the value.
        eqns: the equations that make it at a boundary; none if it is 0 there.
        rare: what only these read.
        usual: what it is elsewhere; None if it is 0 there.
    """

    var: Any
    eqns: tuple[Any, ...]
    rare: Any
    usual: Any


def _boundary(scan: Any) -> _Boundary | None:
    """Return the boundary of a scan that decides on most bytes; None if it has none."""
    body = scan.params["jaxpr"]
    eqns, outvars = _opened(body)
    uses, signs = DefUse(eqns, outvars), _signs(eqns)
    found: dict[Any, _Boundary] = {}
    for eqn in eqns:
        sign = signs.get(_mask(eqn, signs))
        if sign is None:
            continue
        one = found.setdefault(sign[0], _Boundary(body.invars, eqns, outvars, uses, signs, sign[0]))
        if eqn.primitive.name == "cond":
            one.own.append(eqn)
        elif (masked := _masked(eqn, sign[1], signs, uses)) is not None:
            one.masked.append(masked)
    return max((b for b in found.values() if b.bytes), key=lambda b: b.bytes, default=None)


def _opened(body: Any) -> tuple[list[Any], list[Any]]:
    """Return a body's equations and results; jits and conditionals of a known branch are opened."""
    renamed: dict[Any, Any] = {}

    def now(atom: Any) -> Any:
        return atom if compat.is_literal(atom) else renamed.get(atom, atom)

    def opened(eqns: Sequence[Any]) -> Iterator[Any]:
        for given in eqns:
            invars = [now(v) for v in given.invars]
            eqn = given if invars == given.invars else given.replace(invars=invars)
            if compat.is_plain_jit(eqn):
                made, results = inlining.opened_jit(eqn)
            elif eqn.primitive.name == "cond" and compat.is_literal(eqn.invars[0]):
                branches = eqn.params["branches"]
                branch = branches[min(max(int(eqn.invars[0].val), 0), len(branches) - 1)]
                made, results = inlining.opened(eqn.replace(invars=eqn.invars[1:]), branch)
            else:
                yield eqn
                continue
            yield from opened(made)
            renamed.update(zip(eqn.outvars, map(now, results), strict=True))

    eqns = list(opened(body.eqns))
    return eqns, [now(v) for v in body.outvars]


def _signs(eqns: Sequence[Any]) -> dict[Any, tuple[Any, bool]]:
    """Return the truth value that each mask is made of, and whether the mask is 1 if it holds."""
    signs: dict[Any, tuple[Any, bool]] = {}
    for eqn in eqns:
        if len(eqn.outvars) != 1:
            continue
        name, atoms, (out,) = eqn.primitive.name, eqn.invars, eqn.outvars
        sign = None if not atoms or compat.is_literal(atoms[-1]) else signs.get(atoms[-1])
        if sign is not None and name in ("convert_element_type", "broadcast_in_dim"):
            signs[out] = sign
        elif sign is not None and (name == "not" or (name == "sub" and _is_one(atoms[0]))):
            signs[out] = sign[0], not sign[1]
        elif not out.aval.ndim and out.aval.dtype == np.bool_:
            signs[out] = out, True
    return signs


def _is_one(atom: Any) -> bool:
    return compat.is_literal(atom) and np.ndim(atom.val) == 0 and atom.val == 1


def _mask(eqn: Any, signs: Mapping[Any, Any]) -> Any:
    """Return the mask of an equation that selects or multiplies by one; None if it has none."""
    name, atoms = eqn.primitive.name, eqn.invars
    if name == "cond" and len(eqn.params["branches"]) != 2:
        return None
    if name == "select_n" and (len(atoms) != 3 or not eqn.outvars[0].aval.ndim):
        return None
    if name == "mul" and not eqn.outvars[0].aval.ndim:
        return None
    masks = atoms if name == "mul" else atoms[:1] if name in ("cond", "select_n") else ()
    return next((v for v in masks if not compat.is_literal(v) and v in signs), None)


def _masked(eqn: Any, is_one: bool, signs: Mapping[Any, Any], uses: DefUse) -> _Masked | None:
    """Return what an equation masks.

    Args:
        eqn: the equation.
        is_one: whether its mask is 1 at a boundary.
        signs: the masks.
        uses: the body's.
    """
    (out,) = eqn.outvars
    if eqn.primitive.name == "select_n":
        rare, usual = eqn.invars[:0:-1] if is_one else eqn.invars[1:]
        return _Masked(out, (eqn,), rare, usual)
    values = [v for v in eqn.invars if compat.is_literal(v) or v not in signs]
    if len(values) != 1 or compat.is_literal(values[0]):
        return None
    if not is_one:
        return _Masked(out, (), None, values[0])
    reader = uses.only_reader(out)
    if reader is not None and (add := uses.eqns[reader]).primitive.name in ADDS:
        other = add.invars[1] if add.invars[0] is out else add.invars[0]
        return _Masked(add.outvars[0], (eqn, add), values[0], other)
    return _Masked(out, (eqn,), values[0], None)


class _Boundary:
    """Holds what a scan's body uses at boundaries alone.

    Attributes:
        invars, eqns, outvars: the body with inner jits opened.
        last: the truth value of a boundary.
        masked: what it decides on.
        own: the conditionals of the user's that it decides on.
    """

    def __init__(
        self,
        invars: Sequence[Any],
        eqns: Sequence[Any],
        outvars: Sequence[Any],
        uses: DefUse,
        signs: Mapping[Any, tuple[Any, bool]],
        last: Any,
    ):
        self.invars, self.eqns, self.outvars = invars, eqns, outvars
        self._uses, self._signs = uses, signs
        self.last, self.masked, self.own = last, list[_Masked](), list[Any]()

    @property
    def bytes(self) -> int:
        """The size of what a boundary decides on."""
        values = [one.var for one in self.masked] + [v for eqn in self.own for v in eqn.outvars]
        return sum(v.aval.size * v.aval.dtype.itemsize for v in values if v.aval.ndim)

    @property
    def resets(self) -> bool:
        """Whether a carry becomes 0 at a boundary."""
        return any(one.rare is None and one.var in self.outvars for one in self.masked)

    def rewritten(self, scope: str) -> list[Any]:
        """Return the body's equations, with a conditional of what is used at boundaries alone.

        Args:
            scope: the name of its conditionals, which says how often they run.
        """
        own = {id(eqn) for eqn in self.own}
        eqns = [compat.in_scope(eqn, scope) if id(eqn) in own else eqn for eqn in self.eqns]
        if not self.masked:
            return eqns
        rare, masks = self._rare(), {id(eqn) for one in self.masked for eqn in one.eqns}
        gone = rare | {self._uses.made[one.var] for one in self.masked}
        gone |= {n for n, eqn in enumerate(eqns) if id(eqn) in masks}
        outside = {
            v for n, e in enumerate(eqns) if n not in gone for v in compat.variables(e.invars)
        }
        outside |= {*compat.variables(self.outvars)}
        results = [one for one in self.masked if one.var in outside]
        inside = [
            eqn for n, eqn in enumerate(eqns) if n in rare or id(eqn) in masks or self._is_sign(eqn)
        ]
        made = {v for eqn in inside for v in eqn.outvars}
        read = [v for eqn in inside for v in compat.variables(eqn.invars)]
        read += compat.variables(one.usual for one in results if one.usual is not None)
        operands = [self.last, *(v for v in dict.fromkeys(read) if v not in {*made, self.last})]
        fn = _conditional(operands, inside, results)
        outvars = [one.var for one in results]
        cond = inlining.inline(fn, operands, outvars, self.masked[0].eqns[0], scope=scope)
        return self._placed(eqns, gone, cond, operands)

    def _is_sign(self, eqn: Any) -> bool:
        """Return whether an equation makes a mask of the boundary's truth value."""
        out = eqn.outvars[0] if eqn.outvars else None
        return out is not self.last and self._signs.get(out, (None,))[0] is self.last

    def _rare(self) -> set[int]:
        """Return the positions of the equations that only boundaries need."""
        rare = set[int]()
        usual = {one.usual for one in self.masked if not compat.is_literal(one.usual)}
        masks = {
            self._uses.made[eqn.outvars[0]]: one.rare for one in self.masked for eqn in one.eqns
        }

        def is_rare(var: Any) -> bool:
            readers = self._uses.readers(var)
            in_masks = (n is not None and masks.get(n) is var for n in readers)
            return var not in usual and all(
                n in rare or masked for n, masked in zip(readers, in_masks, strict=True)
            )

        for n in reversed(range(len(self.eqns))):
            eqn = self.eqns[n]
            if n in masks or eqn.effects or self._is_sign(eqn) or self.last in eqn.outvars:
                continue
            if any(map(self._uses.readers, eqn.outvars)) and all(map(is_rare, eqn.outvars)):
                rare.add(n)
        return rare

    def _placed(
        self, eqns: Sequence[Any], gone: set[int], cond: list[Any], operands: Sequence[Any]
    ) -> list[Any]:
        """Return equations with the conditional behind what makes its operands.

        What needs the conditional comes behind it.
        """
        made = self._uses.made
        last = max((made[v] for v in operands if v in made), default=-1)
        later, needs = list[Any](), {v for eqn in cond for v in eqn.outvars}
        before = list[Any]()
        for n, eqn in enumerate(eqns):
            if n in gone:
                continue
            if n <= last and needs.isdisjoint(compat.variables(eqn.invars)):
                before.append(eqn)
            else:
                later.append(eqn)
                needs |= {*eqn.outvars} if n <= last else set()
        if not needs.isdisjoint(operands):
            raise _TangledError(
                "what is used at a boundary alone needs what the boundary decides on"
            )
        return [*before, *cond, *later]


class _TangledError(Exception):
    """A conditional would need its own results."""


def _conditional(
    operands: Sequence[Any], inside: Sequence[Any], results: Sequence[_Masked]
) -> Callable[..., list[Array]]:
    """Return a function of `operands`, the truth value first, that computes masked values."""
    made = [one.var for one in results if one.eqns]
    rare = compat.jaxpr_of(operands, made, inside)

    def zeros(one: _Masked) -> Array:
        return jnp.zeros(one.var.aval.shape, one.var.aval.dtype)

    def at_boundary(*values: Array) -> list[Array]:
        computed = iter(compat.evaluate(rare, [jnp.asarray(True), *values]))
        return [next(computed) if one.eqns else zeros(one) for one in results]

    def elsewhere(*values: Array) -> list[Array]:
        known = dict(zip(operands[1:], values, strict=True))
        usual = [one.usual for one in results]
        return [
            zeros(one) if v is None else jnp.asarray(v.val) if compat.is_literal(v) else known[v]
            for one, v in zip(results, usual, strict=True)
        ]

    return lambda last, *values: lax.cond(last, at_boundary, elsewhere, *values)
