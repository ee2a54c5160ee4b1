"""Propose what a step keeps, within the memory that it may use."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jaxoverlap.cost.model import CostModel
from jaxoverlap.passes.analysis.partitioned import SpmdProgram
from jaxoverlap.passes.estimation.estimate import Estimate
from jaxoverlap.passes.keep.choose import chosen
from jaxoverlap.passes.keep.opened import opened
from jaxoverlap.passes.keep.price import Priced, priced, with_barriers
from jaxoverlap.passes.keep.remats import Remat, remats_of
from jaxoverlap.passes.keep.values import Recomputed, named, recomputed
from jaxoverlap.plan.edits import Keep

# A collective that hides costs the kernels less than its seconds, and where one goes, another may
# hide: what to keep is chosen with none and with all of them, and the estimate decides.
_HIDDEN = (0.0, 1.0)
_ROOMS = (1.0, 0.5)  # shares of the memory that is left; keeping more may not pay


@dataclass(frozen=True)
class Selection:
    """Values to keep.

    Attributes:
        edits: the edits that keep them.
        bytes: what a device keeps.
    """

    edits: tuple[Keep, ...]
    bytes: int


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
        return [priced(program.module, cost, estimate, self.remats, share) for share in _HIDDEN]

    def selections(self, prices: Sequence[Sequence[Priced]], room: float) -> Iterator[Selection]:
        """Yield a few selections that keep at most so many bytes."""
        groups = {place: n for n, one in enumerate(self.values) for place in one.alike}
        sizes = [0] * len(self.values)
        for one in prices[0]:
            for place, size in one.bytes.items():
                sizes[groups[place]] += size
        seen = set[frozenset[int]]()
        for share in _ROOMS:
            for computations in prices:
                kept = chosen(computations, groups, room * share, self.always, self.never)
                if kept not in seen:
                    seen.add(kept)
                    edits = tuple(self.values[n].edit(sizes[n]) for n in sorted(kept))
                    yield Selection(edits, sum(edit.bytes_kept for edit in edits))
