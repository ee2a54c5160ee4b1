"""What a user wrote beside the matmuls of a manual body, and what stands between.

    x = all_gather x ;  t = transpose x ;  y = dot_general t w      # one operand moves
    p = dot_general h w ;  c = convert p ;  s = add c b ;  z = psum s   # the result moves, in a sum

A `Site` is a matmul and what stands between it and its collective; `Sites` finds them in a body.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxoverlap import _compat
from jaxoverlap._text import human_bytes
from jaxoverlap.passes.jaxprs import Body, Dot
from jaxoverlap.passes.sites import Einsum, Kind, Side, einsum_of

_KINDS: dict[str, Kind] = {
    "all_gather": "all_gather",
    "all_to_all": "all_to_all",
    "reduce_scatter": "reduce_scatter",
    "psum": "all_reduce",
    "psum_invariant": "all_reduce",
}
_VIEWS = ("transpose", "convert_element_type", "pvary")
_SUMS = ("add", "add_any")


@dataclass(frozen=True)
class Collective:
    """A collective of the user's that a ring can do.

    Attributes:
        place: its place in the body.
        eqn: the equation.
        kind: what it does.
        axis, axis_size: the mesh axis, and its devices.
        dim: the dim that is gathered or scattered; for an exchange the one that is gathered, for
            an all-reduce None.
        wanted: for an exchange the dim that is sharded instead.
    """

    place: int
    eqn: Any
    kind: Kind
    axis: str
    axis_size: int
    dim: int | None = None
    wanted: int | None = None

    @property
    def bytes_moved(self) -> int:
        """Bytes that each device sends in one run, by a ring."""
        before, n = self.eqn.invars[0].aval, self.axis_size
        whole = before.size * before.dtype.itemsize * (n - 1)
        return (
            whole if self.kind == "all_gather" else whole * (1 + (self.kind == "all_reduce")) // n
        )

    def __str__(self) -> str:
        return f"{self.axis} {self.kind}, {human_bytes(self.bytes_moved)}"


class Site(NamedTuple):
    """A matmul beside a collective.

    Attributes:
        dot: the matmul.
        side: the operand that moves, or "out".
        views: the equations between the two, in their order, that work element by element.
    """

    dot: Dot
    side: Side
    views: tuple[Any, ...] = ()

    @property
    def einsum(self) -> Einsum:
        """Its letters, with those of what moves in the order in which that moves."""
        shapes = [v.aval.shape for v in self.dot.eqn.invars]
        einsum = einsum_of(self.dot.eqn.params["dimension_numbers"], *shapes)
        letters = list(einsum.side(self.side))
        turns = [e.params["permutation"] for e in self.views if e.primitive.name == "transpose"]
        for turn in turns if self.side == "out" else reversed(turns):
            if self.side == "out":
                letters = [letters[d] for d in turn]
            else:
                letters = [letters[turn.index(d)] for d in range(len(turn))]
        return dataclasses.replace(einsum, **{self.side: "".join(letters)})


def collective(place: int, eqn: Any, axes: Mapping[str, int]) -> Collective | str:
    """What a collective does, by a ring; or why no ring does it.

    Args:
        place: its place in the body.
        eqn: the equation.
        axes: the manual mesh axes, and the devices along each.
    """
    name, params = eqn.primitive.name, eqn.params
    if name not in _KINDS:
        return f"{name} beside it is not decomposed"
    named = params["axes"] if "axes" in params else params["axis_name"]
    named = named if isinstance(named, tuple) else (named,)
    if params.get("axis_index_groups") is not None:
        return f"{name} is over groups of an axis (axis_index_groups)"
    if len(named) != 1 or named[0] not in axes:
        return f"{name} is over {' x '.join(map(str, named))}: a ring has one manual mesh axis"
    if not params.get("tiled", True):
        return f"{name} is not tiled"
    axis, n = named[0], axes[named[0]]
    if n == 1:
        return f"no collective: axis {axis} has one device"
    dims = [params.get(k) for k in ("all_gather_dimension", "scatter_dimension", "concat_axis")]
    dim = next((d for d in dims if d is not None), None)
    if dim is not None and dim == params.get("split_axis"):
        return f"{name} splits the dim that it gathers"
    return Collective(place, eqn, _KINDS[name], axis, n, dim, params.get("split_axis"))


class Sites:
    """What stands around the matmuls of one manual body.

    Attributes:
        collectives: by its place each collective, or why it is not one that a ring can do.
    """

    def __init__(self, body: Body, axes: Mapping[str, int]):
        self._eqns = body.eqns
        self._dots = {dot.place: dot for dot in body.dots}
        self._made = {v: place for place, eqn in enumerate(body.eqns) for v in eqn.outvars}
        self._readers: defaultdict[Any, list[int | None]] = defaultdict(list)
        operands = [(v, place) for place, eqn in enumerate(body.eqns) for v in eqn.invars]
        for v, place in [*operands, *((v, None) for v in body.outvars)]:
            if not _compat.is_literal(v):
                self._readers[v].append(place)
        self.collectives = {
            place: collective(place, eqn, axes)
            for place, eqn in enumerate(body.eqns)
            if _compat.is_collective(eqn)
        }

    def reading(self, place: int) -> tuple[list[Site], set[int]]:
        """The matmuls that read what a collective gives, and the places of all views of that."""
        sites: list[Site] = []
        places: set[int] = set()
        views: list[tuple[Any, tuple[Any, ...]]] = [(self._eqns[place].outvars[0], ())]
        for var, above in views:  # it grows
            for reader in dict.fromkeys(self._readers[var]):
                eqn = None if reader is None else self._eqns[reader]
                if eqn is not None and reader in self._dots:
                    sides = [s for s, v in zip(("lhs", "rhs"), eqn.invars, strict=True) if v is var]
                    sites += [Site(self._dots[reader], side, above) for side in sides]  # type: ignore[arg-type]
                elif eqn is not None and reader is not None and eqn.primitive.name in _VIEWS:
                    places.add(reader)
                    views.append((eqn.outvars[0], (*above, eqn)))
        return sorted(sites, key=lambda site: site.dot.index), places

    def summed(self, place: int) -> tuple[list[Site], set[int]] | None:
        """The matmuls whose sum a collective reads, and the places in between; None if not such."""
        found = self._terms(self._eqns[place].invars[0])
        return found and (sorted(found[0], key=lambda site: site.dot.index), found[1])

    def _terms(self, var: Any) -> tuple[list[Site], set[int]] | None:
        if _compat.is_literal(var) or len(self._readers[var]) != 1 or var not in self._made:
            return None
        place = self._made[var]
        eqn = self._eqns[place]
        if place in self._dots:
            return [Site(self._dots[place], "out")], set()
        if eqn.primitive.name not in (*_VIEWS, *_SUMS):
            return None
        parts = [part for v in eqn.invars if (part := self._terms(v))]
        if len(parts) != len(eqn.invars):
            return None
        sites = [site for found, _ in parts for site in found]
        if eqn.primitive.name in _VIEWS:
            sites = [site._replace(views=(*site.views, eqn)) for site in sites]
        return sites, {place}.union(*(places for _, places in parts))

    def unread(self, views: set[int], ring: set[int]) -> set[int]:
        """Those of some views that nobody reads but a ring's matmuls and other such views."""
        dead: set[int] = set()
        for place in sorted(views, reverse=True):
            if not self.read_beyond(place, ring | dead):
                dead.add(place)
        return dead

    def read_beyond(self, place: int, places: set[int]) -> bool:
        """Whether anybody but the equations at some places reads what one gives."""
        return any(r not in places for r in self._readers[self._eqns[place].outvars[0]])

    def why_not(self, dot: Dot) -> str:
        """Why a matmul that no ring takes is left alone."""
        whys = [*map(self._above, dot.eqn.invars), self._below(dot.eqn.outvars[0])]
        return "; ".join(dict.fromkeys(filter(None, whys))) or "no collective beside it"

    def _above(self, var: Any) -> str | None:
        """Why there is no ring for the collective that an operand comes from, if it does."""
        through = ""
        while not _compat.is_literal(var) and (place := self._made.get(var)) is not None:
            eqn = self._eqns[place]
            found = self.collectives.get(place)
            if isinstance(found, Collective):
                return _left(f"reads the result of {eqn.primitive.name}", through, found, _BEFORE)
            if found is not None:
                return found
            if eqn.primitive.name not in _VIEWS:
                if through or len(eqn.invars) != 1:
                    return None
                through = eqn.primitive.name
            var = eqn.invars[0]
        return None

    def _below(self, var: Any) -> str | None:
        """Why there is no ring for the collective that a result reaches, if it does."""
        through = ""
        while readers := [place for place in self._readers[var] if place is not None]:
            name = self._eqns[readers[0]].primitive.name
            for place in readers:
                found = self.collectives.get(place)
                if isinstance(found, Collective):
                    if len(self._readers[var]) > 1:
                        through = through or "and by others"
                    name = self._eqns[place].primitive.name
                    return _left(f"its result is read by {name}", through, found, _AFTER)
                if found is not None:
                    return found
            if len(readers) != 1 or (through and name not in (*_VIEWS, *_SUMS)):
                return None
            through = through if name in _VIEWS else name
            var = self._eqns[readers[0]].outvars[0]
        return None


_BEFORE, _AFTER = ("all_gather", "all_to_all"), ("reduce_scatter", "all_reduce", "all_to_all")


def _left(what: str, through: str, found: Collective, kinds: Sequence[Kind]) -> str | None:
    """Why a matmul is left alone beside a collective that rings can do elsewhere."""
    if found.kind not in kinds:
        return None if kinds is _BEFORE else f"{what}, and no ring does that"
    if through in _SUMS:
        return f"{what} in a sum with something else"
    if through == "and by others":
        return f"{what} {through}"
    return f"{what} through {through}" if through else f"{what}, in a way that no ring does"
