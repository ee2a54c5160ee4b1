"""Walk a jaxpr to its matmuls, and replace them by other equations.

Every pass sees the `dot_general`s of a step in one order, and knows each by its index in it.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from jax.sharding import AxisType

from jaxoverlap._jax import compat
from jaxoverlap.passes.analysis.def_use import DefUse
from jaxoverlap.passes.analysis.matmul_group import MATMUL_GROUP
from jaxoverlap.passes.analysis.sequence_call import SEQUENCE_CALL

REMATS = ("remat2", "checkpoint")  # one primitive, by the names that it has had

# Higher-order primitives whose bodies run as they stand, on the values the step itself holds.
# The body of any other (pallas_call, ...) has rules of its own: look, do not touch. That of a
# shard_map is manual (`Manual`), and only `passes/planning/manual` touches it.
TRANSPARENT = frozenset(
    {
        *REMATS,
        "jit",
        "scan",
        "while",
        "cond",
        "closed_call",
        "core_call",
        "custom_jvp_call",
        "custom_vjp_call",
        "eval_jaxpr",
        SEQUENCE_CALL,
    }
)


# In a shard_map devices may take different branches of these, but a permute needs all devices.
_DIVERGING = frozenset({"while", "cond"})


@dataclass(frozen=True)
class Manual:
    """The shard_maps around a body, and the mesh axes that they make manual.

    Attributes:
        maps: the equations of the shard_maps around it, outer ones first.
    """

    maps: tuple[Any, ...]

    @property
    def axes(self) -> dict[str, int]:
        """The manual mesh axes, and the devices along each."""
        manual = {a for eqn in self.maps for a in eqn.params["newly_manual_axes"]}
        return {a: n for a, n in self._mesh.shape.items() if a in manual}

    @property
    def automatic(self) -> dict[str, int]:
        """The axes that the partitioner shards by, and the devices along each."""
        types = dict(zip(self._mesh.axis_names, self._mesh.axis_types, strict=True))
        left = {a: n for a, n in self._mesh.shape.items() if a not in self.axes and n > 1}
        return {a: n for a, n in left.items() if types[a] != AxisType.Explicit}

    @property
    def explicit(self) -> tuple[str, ...]:
        """The axes whose shardings are part of the arrays' types."""
        rest = {*self.axes, *self.automatic}
        return tuple(a for a, n in self._mesh.shape.items() if a not in rest and n > 1)

    @property
    def checked(self) -> bool:
        """Return whether types state the axes along which a value may differ (`check_vma`)."""
        return self.maps[-1].params["check_vma"]

    @property
    def _mesh(self) -> Any:
        return self.maps[-1].params["mesh"]


# Each equation of these primitives is a site; only the first primitive is ever rewritten.
MATMULS = ("dot_general", "ragged_dot_general", "conv_general_dilated")


@dataclass(frozen=True)
class Dot:
    """One `dot_general` of a step, or a similar primitive, which is reported but not rewritten.

    Attributes:
        index: its index among the step's matmuls, in the order they are written.
        eqn: the equation.
        runs: how often a step runs it: the product of the lengths of the scans around it (a while
            loop, whose trips are not known, counts once).
        inside: the primitive whose body has rules of its own, or None.
        position: the equation's index in its body.
        manual: the shard_maps around it, if there are any and all devices run it.
        around: the equations whose bodies it is in, outer ones first.
    """

    index: int
    eqn: Any
    runs: int
    inside: str | None
    position: int
    manual: Manual | None = None
    around: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Body:
    """One jaxpr of a step: the step itself, or what a scan, a remat, a branch of it runs.

    Attributes:
        index: its number, outer bodies before those inside them.
        eqns: its equations.
        outvars: its results.
        dots: its matmuls; not those of the bodies inside it.
        ahead: values that are known one step of a scan ahead: slices of what the step is given, as
            the weights of a scan over layers are.
        opaque: whether it must stay as it is.
        around: the equations whose bodies it is in, outer ones first.
    """

    index: int
    eqns: tuple[Any, ...]
    outvars: tuple[Any, ...]
    dots: tuple[Dot, ...]
    ahead: frozenset[Any] = frozenset()
    opaque: bool = False
    around: tuple[Any, ...] = ()

    @property
    def is_global(self) -> bool:
        """Whether it may be changed, and computes with arrays of all devices: in no shard_map."""
        return not self.opaque and all(eqn.primitive.name != "shard_map" for eqn in self.around)

    @functools.cached_property
    def uses(self) -> DefUse:
        """The makers and readers of its values."""
        return DefUse(self.eqns, self.outvars)


Visit = Callable[[Body], list[Any] | None]


def map_bodies(jaxpr: Any, visit: Visit) -> Any:
    """Give each body of a jaxpr the equations that `visit` returns; None leaves one as it is.

    A body keeps its operands and results, so every jaxpr around it keeps its signature, and scans,
    remats and conditionals need no rebuilding. Inner bodies are visited first. A body that two
    equations share becomes two: the same matmul in another place may be sharded in another way.
    """
    return _Walk(visit).jaxpr(jaxpr, _Known(set(jaxpr.invars), set()), runs=1, inside=None)


def bodies(jaxpr: Any) -> tuple[Body, ...]:
    """Return every body of a jaxpr, outer ones first."""
    visited: list[Body] = []
    map_bodies(jaxpr, visited.append)
    return tuple(sorted(visited, key=lambda body: body.index))


def equations(jaxpr: Any, around: tuple[Any, ...] = ()) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Yield every equation of a jaxpr, at any depth, with those whose bodies it is in.

    Args:
        jaxpr: the jaxpr.
        around: the equations whose bodies it is in itself, outer ones first.
    """
    for eqn in jaxpr.eqns:
        yield eqn, around
        for body in compat.jaxprs_in(eqn):
            yield from equations(body, (*around, eqn))


def has_matmul(eqn: Any) -> bool:
    """Return whether an equation is a matmul or a group of some, or has one in its bodies."""
    if eqn.primitive.name in ("dot_general", MATMUL_GROUP):
        return True
    return any(has_matmul(inner) for body in compat.jaxprs_in(eqn) for inner in body.eqns)


def dots(jaxpr: Any) -> tuple[Dot, ...]:
    """Return every `dot_general` of a jaxpr, at any depth, in the order they are written."""
    every_dot = (dot for body in bodies(jaxpr) for dot in body.dots)
    return tuple(sorted(every_dot, key=lambda dot: dot.index))


def has_nested_loops(jaxpr: Any, around: bool = False) -> bool:
    """Return whether a jaxpr has a loop with a matmul in a loop.

    Args:
        jaxpr: the jaxpr.
        around: whether it is itself in a loop.
    """
    for eqn in jaxpr.eqns:
        loop = eqn.primitive.name in ("scan", "while")
        if loop and around and has_matmul(eqn):
            return True
        if any(has_nested_loops(body, around or loop) for body in compat.jaxprs_in(eqn)):
            return True
    return False


_MOVES = frozenset(
    {
        "convert_element_type",
        "copy",
        "reshape",
        "reshard",
        "sharding_constraint",
        "squeeze",
        "transpose",
    }
)


class _Known(NamedTuple):
    """Values of a body that nothing has been computed for: they are what the step was given.

    Attributes:
        given: operands of the step, as they are in every step of a scan.
        ahead: slices of such operands: each step of a scan has one of its own.
    """

    given: set[Any]
    ahead: set[Any]

    def follow(self, eqn: Any) -> None:
        """Add the results of an equation that only moves a known value."""
        if eqn.primitive.name in _MOVES and not compat.is_literal(eqn.invars[0]):
            for known in self:
                if eqn.invars[0] in known:
                    known.update(eqn.outvars)

    def inside(self, eqn: Any, jaxpr: Any) -> _Known:
        """Return the known values inside one of an equation's bodies."""
        if len(jaxpr.invars) != len(eqn.invars) or eqn.primitive.name == "while":
            return _Known(set(), set())
        operands = [None if compat.is_literal(a) else a for a in eqn.invars]
        pairs = list(zip(jaxpr.invars, operands, strict=True))
        given = {v for v, atom in pairs if atom in self.given}
        ahead = {v for v, atom in pairs if atom in self.ahead}
        if eqn.primitive.name == "scan":
            num_consts, num_carry = compat.scan_counts(eqn)
            sliced = {*jaxpr.invars[num_consts + num_carry :]}
            carry = {*jaxpr.invars[num_consts:]} - sliced
            given, ahead = given - sliced - carry, (ahead | given & sliced) - carry
        return _Known(given, ahead)


class _Walk:
    """One traversal: it counts as it goes, so that every pass numbers the matmuls alike."""

    def __init__(self, visit: Visit):
        self.visit = visit
        self.num_dots = 0
        self.num_bodies = 0

    def jaxpr(
        self,
        jaxpr: Any,
        known: _Known,
        *,
        runs: int,
        inside: str | None,
        manual: Manual | None = None,
        around: tuple[Any, ...] = (),
    ) -> Any:
        index = self.num_bodies
        self.num_bodies += 1
        eqns: list[Any] = []
        own_dots: list[Dot] = []
        for position, eqn in enumerate(jaxpr.eqns):
            known.follow(eqn)
            if eqn.primitive.name in MATMULS:
                own_dots.append(Dot(self.num_dots, eqn, runs, inside, position, manual, around))
                self.num_dots += 1
                eqns.append(eqn)
            else:
                eqns.append(self.eqn(eqn, known, runs, inside, manual, around))
        ahead = frozenset(known.ahead)
        ours = inside is None or manual is not None
        outvars, own = tuple(jaxpr.outvars), tuple(own_dots)
        body = Body(index, tuple(eqns), outvars, own, ahead, not ours, around)
        new = self.visit(body)
        assert new is None or ours, "the body of an opaque primitive is not ours"
        if not ours or (new is None and all(map(operator.is_, eqns, jaxpr.eqns))):
            return jaxpr
        return jaxpr.replace(eqns=eqns if new is None else new)

    def eqn(
        self,
        eqn: Any,
        known: _Known,
        runs: int,
        inside: str | None,
        manual: Manual | None,
        around: tuple[Any, ...],
    ) -> Any:
        name = eqn.primitive.name
        if not compat.has_jaxprs(eqn):
            return eqn
        inner_runs = runs * eqn.params["length"] if name == "scan" else runs
        opaque = inside or (None if name in TRANSPARENT else name)
        if name == "shard_map" and (manual or inside is None):
            manual = Manual((*(manual.maps if manual else ()), eqn))
        elif manual and (name in _DIVERGING or name not in TRANSPARENT):
            manual, opaque = None, f"{name} in {opaque}"
        return compat.map_jaxprs(
            lambda jaxpr: self.jaxpr(
                jaxpr,
                known.inside(eqn, jaxpr),
                runs=inner_runs,
                inside=opaque,
                manual=manual,
                around=(*around, eqn),
            ),
            eqn,
        )
