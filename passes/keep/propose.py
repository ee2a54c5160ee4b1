"""Propose what a step keeps, within the memory that it may use."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxoverlap.cost.model import CostModel
from jaxoverlap.passes.analysis.partitioned import SpmdProgram
from jaxoverlap.passes.estimation.estimate import Estimate
from jaxoverlap.passes.keep.choose import SavedValues, chosen
from jaxoverlap.passes.keep.layers import is_backward
from jaxoverlap.passes.keep.opened import opened
from jaxoverlap.passes.keep.price import Place, Priced, priced, with_barriers
from jaxoverlap.passes.keep.remats import Remat, remats_of
from jaxoverlap.passes.keep.values import Recomputed, named, recomputed
from jaxoverlap.plan.edits import Keep

# A collective that hides costs the kernels less than its seconds, and where one goes, another may
# hide: what to keep is chosen with none and with all of them, and the estimate decides.
_HIDDEN = (0.0, 1.0)
# Shares of the memory that is left, as keeping more may not pay; and whether values are offloaded.
_ROOMS = ((1.0, False), (1.0, True), (0.5, False))


@dataclass(frozen=True)
class Selection:
    """Values to keep.

    Attributes:
        edits: the edits that keep them.
        bytes: what a device keeps.
        offloaded: the bytes of each edit whose value is to be offloaded, by its index.
    """

    edits: tuple[Keep, ...]
    bytes: int
    offloaded: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Remats:
    """What a step computes again, and what the user has decided about it.

    Attributes:
        jaxpr: the step, opened.
        remats: its remats.
        values: what they compute again.
        always, never: the indices of values that are to be kept, and not to be.
    """

    jaxpr: Any
    remats: Sequence[Remat]
    values: Sequence[Recomputed]
    always: Sequence[int] = ()
    never: Sequence[int] = ()

    @classmethod
    def of(cls, jaxpr: Any, keep: Sequence[str] = (), recompute: Sequence[str] = ()) -> Remats:
        """Find what a step computes again; `keep` and `recompute` name values, as in `overlap`.

        Raises:
            UserError: if a name names nothing.
        """
        jaxpr = opened(jaxpr)
        remats = remats_of(jaxpr)
        values = recomputed(remats)
        always, never = named("keep", keep, values), named("recompute", recompute, values)
        return cls(jaxpr, remats, values, always, [n for n in never if n not in always])

    @property
    def forced(self) -> tuple[Keep, ...]:
        """The edits for the values that the user wants to save."""
        return tuple(self.values[n].edit() for n in self.always)

    def prices(
        self,
        partition: Callable[[Any], SpmdProgram],
        estimated: Callable[[SpmdProgram], Estimate],
        cost: CostModel,
    ) -> list[list[Priced]]:
        """Price what it computes again, by each share of hidden collectives; partitions it once."""
        program = partition(with_barriers(self.jaxpr, self.remats))
        estimate = estimated(program)
        return [
            priced(program.module, cost, estimate, self.remats, share, self._layers)
            for share in _HIDDEN
        ]

    @functools.cached_property
    def _layers(self) -> Mapping[Place, int]:
        """How many equal layers of one body compute each value; 1 where a scan runs them."""
        found = dict[Place, int]()
        for value in self.values:
            scopes = {number: self.remats[number].scope for number, *_ in value.alike}
            for place in value.alike:
                own = scopes[place[0]]
                alike = sum(scope is own for scope in scopes.values())
                found[place] = alike if own.scan is None else 1
        return found

    def selections(
        self, prices: Sequence[Sequence[Priced]], room: float, *, offload: bool = False
    ) -> Iterator[Selection]:
        """Yield a few selections that keep at most so many bytes.

        Args:
            prices: of what is computed again, by each share of hidden collectives.
            room: the bytes.
            offload: whether values may be offloaded to the host's memory.
        """
        groups = {place: n for n, one in enumerate(self.values) for place in one.alike}
        seen = set[SavedValues]()
        for share, may in _ROOMS:
            for computations in prices:
                some = self._offloadable if may and offload else ()
                found = chosen(computations, groups, room * share, self.always, self.never, some)
                if found not in seen:
                    seen.add(found)
                    yield self._selection(found, prices[0], groups)

    @functools.cached_property
    def _offloadable(self) -> frozenset[int]:
        """The values that can wait in the host's memory, wherever they are computed again."""
        return frozenset(
            n
            for n, value in enumerate(self.values)
            if all(_can_wait(self.remats[place[0]], place) for place in value.alike)
        )

    def _selection(
        self, found: SavedValues, prices: Sequence[Priced], groups: Mapping[Place, int]
    ) -> Selection:
        kept, ahead = ([0] * len(self.values) for _ in range(2))
        for one in prices:
            for place, size in one.bytes.items():
                kept[groups[place]] += size
                ahead[groups[place]] += one.ahead_bytes[place]
        decided = sorted(found.kept | found.offloaded)
        edits = tuple(
            self.values[n].edit(ahead[n] if n in found.offloaded else kept[n]) for n in decided
        )
        moved = {at: kept[n] for at, n in enumerate(decided) if n in found.offloaded}
        return Selection(edits, sum(edit.bytes_kept for edit in edits), moved)


def _can_wait(remat: Remat, place: Place) -> bool:
    """Return whether a value is of the remat's body, or of a scan that stacks it for that."""
    _, position, output = place
    source = remat.sources[remat.body.eqns[position].outvars[output]]
    here = remat.scope.scan
    if source.scan is None:
        return not source.around and is_backward(remat.eqn)
    return (
        here is not None
        and source.scan.params["reverse"] != here.params["reverse"]
        and source.scan.params["length"] > 1
    )
