"""Number the values of a step: values with one number are equal, whoever computes them.

    forward scan over w:   body:  h = dot x w ;  y = tanh h      stacked: x
    backward scan over w:  body:  remat x w dy:  h' = dot x w ;  y' = tanh h' ; ...

h and h' have one number, and y and y'. It is what compilers call value numbering: an equation's
results are numbered by its primitive, its parameters and the numbers of its operands. What a scan
slices is numbered by what is sliced, or, where another scan of the same body stacked it, as the
value that was stacked; so a backward scan knows the values of the forward one. What loops carry has
numbers of its own, and so has all that has effects. Random bits are a function of their key.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxoverlap._jax import compat
from jaxoverlap.passes.analysis.jaxprs import REMATS


class Scope(NamedTuple):
    """A body, with the numbers of its values.

    Attributes:
        jaxpr: the body.
        numbers: of its variables.
        scan: the scan that it is the body of; None for another one.
        position: the index of the equation that runs it, in the body around.
        outer: the body around; None for the step.
    """

    jaxpr: Any
    numbers: Mapping[Any, int]
    scan: Any = None
    position: int = 0
    outer: Scope | None = None


class Numbers:
    """The numbers of a step's values."""

    def __init__(self) -> None:
        self._known: dict[Hashable, int] = {}
        self._stacked: dict[tuple[int, int, int], int] = {}
        self._structures: dict[int, tuple[Any, Hashable]] = {}
        self._held: list[Any] = []  # objects whose id is part of a key

    def scopes(self, jaxpr: Any) -> Iterator[Scope]:
        """Yield the bodies of a step, outer ones first, in the order of their equations."""
        return self._inside(jaxpr, [self._new() for _ in jaxpr.invars])

    def _inside(self, jaxpr: Any, operands: Sequence[int], **where: Any) -> Iterator[Scope]:
        level = self._new()
        numbers = dict(zip(jaxpr.invars, operands, strict=True))
        numbers |= {v: self._new() for v in jaxpr.constvars}
        scope = Scope(jaxpr, numbers, **where)
        inner: list[Callable[[], Iterator[Scope]]] = []
        for position, eqn in enumerate(jaxpr.eqns):
            read = [self._atom(atom, numbers) for atom in eqn.invars]
            outermost = scope.outer is None and eqn.primitive.name == "scan"
            if outermost:
                made = [self._new() for _ in eqn.outvars]
            elif eqn.primitive.name == "sharding_constraint" and self._is_stack(read[0]):
                made = read  # a step on an explicit mesh has one between its scans
            else:
                made = self._results(eqn, read)
            if eqn.primitive.name == "scan":
                inner.append(self._scanned(eqn, read, made, level, scope, position))
            else:
                inner += self._called(eqn, read, scope, position)
            numbers.update(zip(eqn.outvars, made, strict=True))
        yield scope
        for walk in inner:
            yield from walk()

    def _scanned(
        self,
        scan: Any,
        read: Sequence[int],
        made: Sequence[int],
        level: int,
        scope: Scope,
        position: int,
    ) -> Callable[[], Iterator[Scope]]:
        """Number the body of a scan, and what it stacks; return the walk through it."""
        body, length = scan.params["jaxpr"], scan.params["length"]
        num_consts, num_carry = compat.scan_counts(scan)
        first = num_consts + num_carry
        sliced = [
            self._stacked.get((level, length, n)) or self._number(("slice", level, length, n))
            for n in read[first:]
        ]
        operands = [*read[:num_consts], *(self._new() for _ in range(num_carry)), *sliced]
        where = dict(scan=scan, position=position, outer=scope)
        scopes = self._inside(body, operands, **where)
        own = next(scopes)
        for stack, var in zip(made[num_carry:], body.outvars[num_carry:], strict=True):
            self._stacked.setdefault((level, length, stack), self._atom(var, own.numbers))

        def walk() -> Iterator[Scope]:
            yield own
            yield from scopes

        return walk

    def _is_stack(self, number: int) -> bool:
        return any(number == stack for _, _, stack in self._stacked)

    def _called(
        self, eqn: Any, read: Sequence[int], scope: Scope, position: int
    ) -> Iterator[Callable[[], Iterator[Scope]]]:
        """Yield the walks through the bodies of an equation; operands keep numbers in few."""
        for body in compat.jaxprs_in(eqn):
            through = eqn.primitive.name in (*REMATS, "jit") and len(body.invars) == len(read)
            operands = list(read) if through else [self._new() for _ in body.invars]
            where = dict(position=position, outer=scope)
            yield lambda b=body, o=operands, w=where: self._inside(b, o, **w)

    # -- one equation -------------------------------------------------------------------------

    def _results(self, eqn: Any, read: Sequence[int]) -> list[int]:
        if compat.ordered_effects(eqn):
            return [self._new() for _ in eqn.outvars]
        if is_remat(eqn):
            body = eqn.params["jaxpr"]
            numbers = self._numbered(body, read)
            return [self._atom(atom, numbers) for atom in body.outvars]
        if is_identity(eqn):
            return list(read)
        if eqn.primitive.name == "scan":
            return [self._of_scan(eqn, read, n) for n in range(len(eqn.outvars))]
        key = self._key(eqn, read)
        return [self._number((key, n, compat.type_text(v))) for n, v in enumerate(eqn.outvars)]

    def _of_scan(self, scan: Any, read: Sequence[int], number: int) -> int:
        """Number a result of a scan by what it needs: one with residuals has further results."""
        used, alone = compat.with_one_result(scan, number)
        key = self._key(alone, [n for n, uses in zip(read, used, strict=True) if uses])
        result = scan.outvars[number]
        return self._number((key, alone.outvars.index(result), compat.type_text(result)))

    def _key(self, eqn: Any, read: Sequence[int]) -> Hashable:
        params = {k: v for k, v in eqn.params.items() if k not in ("ft_in", "ft_out")}
        counts = compat.scan_counts(eqn) if eqn.primitive.name == "scan" else ()
        own = tuple((k, self._value(v)) for k, v in sorted(params.items()))
        return eqn.primitive, own, counts, tuple(read), compat.numeric_context(eqn)

    def _value(self, value: Any) -> Hashable:
        """Return the key of a parameter; unknown objects are compared by identity."""
        if compat.is_jaxpr(value):
            return self._structure(value)
        if isinstance(value, tuple | list):
            return type(value), tuple(map(self._value, value))
        if isinstance(value, dict):
            return "dict", tuple((k, self._value(value[k])) for k in sorted(value, key=repr))
        if isinstance(value, np.ndarray | np.generic):
            return "array", str(value.dtype), value.shape, value.tobytes()
        try:
            hash(value)
        except TypeError:
            self._held.append(value)
            return "object", id(value)
        return type(value), value

    def _structure(self, jaxpr: Any) -> Hashable:
        """Return a key of what a jaxpr computes: two that compute the same have one."""
        if id(jaxpr) not in self._structures:
            types = tuple(map(compat.type_text, jaxpr.invars))
            operands = [self._number(("operand", *of)) for of in enumerate(types)]
            numbers = self._numbered(jaxpr, operands)
            results = tuple(self._atom(atom, numbers) for atom in jaxpr.outvars)
            self._structures[id(jaxpr)] = jaxpr, (types, results)
        return self._structures[id(jaxpr)][1]

    def _numbered(self, jaxpr: Any, operands: Sequence[int]) -> dict[Any, int]:
        """Number the values of a body, but for those of bodies inside it."""
        numbers = dict(zip(jaxpr.invars, operands, strict=True))
        numbers |= {v: self._new() for v in jaxpr.constvars}
        for eqn in jaxpr.eqns:
            made = self._results(eqn, [self._atom(atom, numbers) for atom in eqn.invars])
            numbers.update(zip(eqn.outvars, made, strict=True))
        return numbers

    def _atom(self, atom: Any, numbers: Mapping[Any, int]) -> int:
        if not compat.is_literal(atom):
            return numbers[atom]
        value = np.asarray(atom.val)
        return self._number(("literal", compat.type_text(atom), value.tobytes()))

    def _number(self, key: Hashable) -> int:
        return self._known.setdefault(key, len(self._known) + 1)

    def _new(self) -> int:
        return self._number(("new", len(self._known)))


def is_remat(eqn: Any) -> bool:
    """Return whether an equation is the backward pass of a `jax.checkpoint`."""
    return eqn.primitive.name in REMATS and eqn.params["differentiated"]


def is_identity(eqn: Any) -> bool:
    """Return whether an equation's results are its operands, with a name or as many bits."""
    if eqn.primitive.name in ("name", "optimization_barrier"):
        return True
    return eqn.primitive.name == "reduce_precision" and compat.keeps_precision(eqn)
