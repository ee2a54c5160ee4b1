"""Find the collectives next to the matmuls of a manual body, and the equations between them.

    x = all_gather x ;  t = transpose x ;  y = dot_general t w      # one operand moves
    p = dot_general h w ;  c = convert p ;  s = add c b ;  z = psum s   # the result moves, in a sum

A `ManualSite` is a matmul and the equations between it and its collective; `Sites` finds them in a
body.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxoverlap._jax import compat
from jaxoverlap._util.text import human_bytes
from jaxoverlap.passes.analysis.einsum import Einsum, Side, einsum_of
from jaxoverlap.passes.analysis.jaxprs import Body, Dot
from jaxoverlap.plan.collectives import RINGED, Kind
from jaxoverlap.plan.decisions import Reason, Variant


def is_view(eqn: Any) -> bool:
    """Return whether an equation can be done chunk by chunk, and before a sum as well as after."""
    if eqn.primitive.name == "convert_element_type":
        return jnp.issubdtype(eqn.params["new_dtype"], jnp.floating)
    return eqn.primitive.name in ("transpose", "pvary")


def is_sum(eqn: Any) -> bool:
    """Return whether an equation adds two values."""
    return eqn.primitive.name in ("add", "add_any")


@dataclass(frozen=True)
class WrittenCollective:
    """A collective of the user's that a ring can do.

    Attributes:
        position: its index in the body.
        eqn: the equation.
        kind: the kind of collective.
        axis, axis_size: the mesh axis, and its devices.
        dim: the dim that is gathered or scattered; for an exchange the one that is gathered, for
            an all-reduce None.
        wanted: for an exchange the dim that is sharded instead.
        spread: devices of automatic axes among which the value is shared out.
    """

    position: int
    eqn: Any
    kind: Kind
    axis: str
    axis_size: int
    dim: int | None = None
    wanted: int | None = None
    spread: int = 1

    @property
    def bytes_moved(self) -> int:
        """Bytes that each device sends in one run, by a ring."""
        before, n = self.eqn.invars[0].aval, self.axis_size
        whole = before.size * before.dtype.itemsize // self.spread * (n - 1)
        times = {"all_gather": n, "all_reduce": 2}.get(self.kind, 1)
        return times * whole // n

    def __str__(self) -> str:
        return f"{self.axis} {self.kind}, {human_bytes(self.bytes_moved)}"


class ManualSite(NamedTuple):
    """A matmul that reads a collective's result, or whose result a collective reads.

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
        """Its einsum, in which the letters of the moving side stand in the moving value's order."""
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


@dataclass
class ManualRing:
    """A collective and the matmuls that share its ring.

    Attributes:
        collective: the collective.
        sites: the matmuls.
        dim: the dim, of the value that moves, that is split into chunks.
        between: indices of the equations between them, which the ring runs too.
        keep: whether others read the gathered value.
        again: those of `between` that others read.
        variant: how the pieces travel.
        why: the reason if they do not travel as requested.
    """

    collective: WrittenCollective
    sites: list[ManualSite]
    dim: int
    between: set[int]
    keep: bool = False
    again: tuple[int, ...] = ()
    variant: Variant = Variant()  # noqa: RUF009, it is frozen
    why: str = ""

    @property
    def site(self) -> int:
        """The number of the first matmul, which names the ring."""
        return self.sites[0].dot.index

    @property
    def kind(self) -> Kind:
        """The collective that the ring carries out."""
        return self.collective.kind

    @property
    def axis(self) -> str:
        """The mesh axis of the ring."""
        return self.collective.axis

    @property
    def axis_size(self) -> int:
        """The devices along its axis."""
        return self.collective.axis_size

    @property
    def arrives(self) -> bool:
        """Return whether an operand moves, and not results."""
        return self.sites[0].side != "out"

    @property
    def chunk(self) -> int:
        """The size of the chunked dim in one chunk on one device."""
        rows = self.collective.eqn.invars[0].aval.shape[self.dim]
        return rows if self.arrives else rows // self.collective.axis_size


def collective(position: int, eqn: Any, axes: Mapping[str, int]) -> WrittenCollective | Reason:
    """Describe a collective that a ring can do, or say why no ring can.

    Args:
        position: its index in the body.
        eqn: the equation.
        axes: the manual mesh axes, and the devices along each.
    """
    name, params = eqn.primitive.name, eqn.params
    if name not in RINGED:
        return Reason("no ring", f"{name} beside it is not decomposed")
    named = params["axes"] if "axes" in params else params["axis_name"]
    named = named if isinstance(named, tuple) else (named,)
    if params.get("axis_index_groups") is not None:
        return Reason("no ring", f"{name} is over groups of an axis (axis_index_groups)")
    if len(named) != 1 or named[0] not in axes:
        over = " x ".join(map(str, named))
        return Reason("no ring", f"{name} is over {over}: a ring has one manual mesh axis")
    if not params.get("tiled", True):
        return Reason("no ring", f"{name} is not tiled")
    axis, n = named[0], axes[named[0]]
    if n == 1:
        return Reason("no collective", f"axis {axis} has one device")
    dims = [params.get(k) for k in ("all_gather_dimension", "scatter_dimension", "concat_axis")]
    dim = next((d for d in dims if d is not None), None)
    if dim is not None and dim == params.get("split_axis"):
        return Reason("no ring", f"{name} splits the dim that it gathers")
    return WrittenCollective(position, eqn, RINGED[name], axis, n, dim, params.get("split_axis"))


class Sites:
    """The matmuls and collectives of one manual body, and the views and sums between them.

    Attributes:
        collectives: each collective by its index, or the reason why no ring can do it.
        uses: the makers and readers of the body's values.
    """

    def __init__(self, body: Body, axes: Mapping[str, int]):
        self.eqns = body.eqns
        dots = (dot for dot in body.dots if dot.eqn.primitive.name == "dot_general")
        self.dots = {dot.position: dot for dot in dots}
        self.uses = body.uses
        self.collectives = {
            position: collective(position, eqn, axes)
            for position, eqn in enumerate(body.eqns)
            if compat.is_collective(eqn)
        }

    def reading(self, position: int) -> tuple[list[ManualSite], set[int]]:
        """Return the matmuls that read a collective's result, and the indices of all its views."""
        sites: list[ManualSite] = []
        positions: set[int] = set()
        views: list[tuple[Any, tuple[Any, ...]]] = [(self.eqns[position].outvars[0], ())]
        for var, above in views:  # it grows
            for reader in dict.fromkeys(self.uses.readers(var)):
                eqn = None if reader is None else self.eqns[reader]
                if eqn is not None and reader in self.dots:
                    sides = [s for s, v in zip(("lhs", "rhs"), eqn.invars, strict=True) if v is var]
                    sites += [ManualSite(self.dots[reader], side, above) for side in sides]  # type: ignore[arg-type]
                elif eqn is not None and reader is not None and is_view(eqn):
                    positions.add(reader)
                    views.append((eqn.outvars[0], (*above, eqn)))
        return sorted(sites, key=lambda site: site.dot.index), positions

    def summed(self, position: int) -> tuple[list[ManualSite], set[int]] | None:
        """Return the matmuls whose sum a collective reads, and the indices in between, or None."""
        terms = self._terms(self.eqns[position].invars[0])
        return terms and (sorted(terms[0], key=lambda site: site.dot.index), terms[1])

    def _terms(self, var: Any) -> tuple[list[ManualSite], set[int]] | None:
        if self.uses.maker(var) is None or len(self.uses.readers(var)) != 1:
            return None
        position = self.uses.made[var]
        eqn = self.eqns[position]
        if position in self.dots:
            return [ManualSite(self.dots[position], "out")], set()
        if not is_view(eqn) and not is_sum(eqn):
            return None
        parts = [part for v in eqn.invars if (part := self._terms(v))]
        if len(parts) != len(eqn.invars):
            return None
        sites = [site for summands, _ in parts for site in summands]
        if is_view(eqn):
            sites = [site._replace(views=(*site.views, eqn)) for site in sites]
        return sites, {position}.union(*(positions for _, positions in parts))

    def unread(self, views: set[int], ring: set[int]) -> set[int]:
        """Return the views that nobody reads but a ring's matmuls and other such views."""
        dead: set[int] = set()
        for position in sorted(views, reverse=True):
            if not self.read_beyond(position, ring | dead):
                dead.add(position)
        return dead

    def read_beyond(self, position: int, positions: set[int]) -> bool:
        """Return whether any equation not in `positions` reads the result of `position`."""
        return any(r not in positions for r in self.uses.readers(self.eqns[position].outvars[0]))


def possible_rings(sites: Sites) -> Iterator[ManualRing]:
    """Yield each collective with all matmuls that read it, and with those whose sum it reads."""
    for position, this_collective in sites.collectives.items():
        if isinstance(this_collective, Reason):
            continue
        if this_collective.kind in ("all_gather", "all_to_all"):
            reading, views = sites.reading(position)
            met = [site.dot.index for site in reading]
            once = [site for site in reading if met.count(site.dot.index) == 1]  # not x @ x.T
            assert this_collective.dim is not None
            if once:
                yield ManualRing(this_collective, once, this_collective.dim, views)
        if this_collective.kind != "all_gather" and (summed := sites.summed(position)):
            dim = (
                this_collective.dim
                if this_collective.kind == "reduce_scatter"
                else this_collective.wanted
            )
            dim = dim_of_sum(this_collective) if dim is None else dim
            if dim is not None:
                yield ManualRing(this_collective, summed[0], dim, summed[1])


def dim_of_sum(all_reduce: WrittenCollective) -> int | None:
    """Choose the dim of an all-reduce to split into chunks: the largest that divides."""
    shape = all_reduce.eqn.invars[0].aval.shape
    fits = [d for d, size in enumerate(shape) if size % all_reduce.axis_size == 0]
    return max(fits, key=lambda d: shape[d], default=None)
