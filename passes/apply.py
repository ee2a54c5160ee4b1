"""Apply edits to a step, one kind after the other: `overlap(plan=)` is this and nothing else.

    jaxpr --[GatherTable, Pin, PinResults]--> laid out --[SplitBatch, Pin]--> in parts
          --[ScatterLookup]--> --[MakeRing, ReadGathered]--> --[GatherAhead]--> --[ShareViews]-->

Edits that follow each other and are of one pass are applied together. Matmuls count as the edits
before have left them. Nothing is asked of XLA: an edit carries the shardings that it needs. An edit
that does not fit the step is refused with a reason, here and nowhere else.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jax.sharding import Mesh

from jaxoverlap._jax import explicit
from jaxoverlap._jax.partitioner import many_processes_of_cpus
from jaxoverlap.passes.analysis.einsum import Spec
from jaxoverlap.passes.analysis.jaxprs import Body, Dot, bodies, dots
from jaxoverlap.passes.halves.batch import BatchSplit
from jaxoverlap.passes.halves.halve import Halved
from jaxoverlap.passes.halves.start import BatchDim
from jaxoverlap.passes.halves.windows import ShardedWindows
from jaxoverlap.passes.layouts.dims import DimNames
from jaxoverlap.passes.layouts.pins import pinned
from jaxoverlap.passes.layouts.tied import Tied, with_tables_gathered
from jaxoverlap.passes.manual.decide import ManualSharing, manual_decisions, placed_manual
from jaxoverlap.passes.planning.decide import decisions
from jaxoverlap.passes.planning.ring_edits import RingEdit, misfit, placed
from jaxoverlap.passes.planning.ring_plan import Ring, Sharing
from jaxoverlap.passes.rewriting.embedding_gradients import Lookup, lookup_of, scatter
from jaxoverlap.passes.rewriting.one_view import with_one_view
from jaxoverlap.passes.rewriting.pin_results import pin_results
from jaxoverlap.passes.rewriting.prefetch import Prefetched, prefetch
from jaxoverlap.passes.rewriting.rewrite import rewrite
from jaxoverlap.passes.rings.chunks import without_ties
from jaxoverlap.plan.decisions import Decision, Scattered
from jaxoverlap.plan.edits import (
    DropTypes,
    Edit,
    GatherAhead,
    GatherTable,
    MakeRing,
    Pin,
    PinResults,
    ReadGathered,
    ScatterLookup,
    ShareViews,
    SplitBatch,
)


@dataclass(frozen=True)
class EditedStep:
    """A step after some edits.

    Attributes:
        jaxpr: the step, flattened.
        mesh: its mesh.
        arguments: how each of its arguments lies; None where that is not known.
        edits: the edits, in order.
        before: the step before the last kind of edits; None for one that was not edited.
        untyped: the step as types were dropped from it; None where they were not.
        sharings: the rings of each body, by its number.
        gathered: the variables of what was gathered before rings, each with a device's bytes of it.
        ahead: the gathers that run a step of their scan ahead.
        lookups: those whose gradients are scattered.
        halved: the batch split; None where the batch is not split.
    """

    jaxpr: Any
    mesh: Mesh
    arguments: tuple[Spec | None, ...]
    edits: tuple[Edit, ...] = ()
    before: EditedStep | None = None
    untyped: EditedStep | None = None
    sharings: Mapping[int, Sharing | ManualSharing] = field(default_factory=dict)
    gathered: Mapping[Any, int] = field(default_factory=dict)
    ahead: Prefetched = Prefetched()  # noqa: RUF009, it is a tuple
    lookups: tuple[Lookup, ...] = ()
    halved: Halved | None = None

    @property
    def rewrites(self) -> bool:
        """Whether the edits change anything but the sharding of values."""
        return any(isinstance(e, MakeRing | ReadGathered | ScatterLookup) for e in self.edits)

    @property
    def joined_bytes(self) -> int:
        """The bytes of a layer's weights that are gathered ahead as one; 0 if none are."""
        whole = any(isinstance(edit, GatherAhead) and edit.whole_layers for edit in self.edits)
        return self.ahead.most_bytes if whole else 0

    @property
    def rings(self) -> tuple[Ring, ...]:
        """The rings, but for those beside collectives that the user wrote."""
        every = (s.rings for s in self.sharings.values() if isinstance(s, Sharing))
        return tuple(ring for rings in every for ring in rings)

    @property
    def decisions(self) -> dict[int, Decision]:
        """The entries of the matmuls that are rewritten, by their number."""
        found: dict[int, Decision] = {}
        for sharing in self.sharings.values():
            manual = isinstance(sharing, ManualSharing)
            found |= manual_decisions(sharing) if manual else decisions(sharing)
        return found

    @property
    def scattered(self) -> tuple[Scattered, ...]:
        """The gradients of lookups that are scattered."""
        return tuple(lookup.entry(self.mesh.shape) for lookup in self.lookups)

    @property
    def result(self) -> Any:
        """The jaxpr that is compiled: types that were dropped are put back."""
        if self.untyped is None:
            return self.jaxpr
        return explicit.typed_as(self.jaxpr, self.untyped.jaxpr)

    @property
    def matmuls(self) -> tuple[Dot, ...]:
        """The matmuls as edits of rings number them, and as `explain()` does."""
        step = self
        while step.before is not None and isinstance(step.edits[-1], _AFTER_NUMBERING):
            step = step.before
        return dots(step.jaxpr)

    @property
    def stages(self) -> list[EditedStep]:
        """The step after each kind of edits, the original one first."""
        return [*(self.before.stages if self.before else ()), self]


def apply(step: EditedStep, edits: Iterable[Edit]) -> EditedStep:
    """Apply edits to a step.

    Args:
        step: the step, as earlier edits left it.
        edits: the edits, in order.

    Raises:
        UserError: if an edit does not fit the step.
        HostMemoryError: if a batch is to be split that is partly in the host's memory.
        RewriteError: if a pass fails on it.
    """
    edits = list(edits)
    _check_order([*step.edits, *edits])
    for run, group in itertools.groupby(edits, key=lambda edit: _PASSES[type(edit)]):
        some = tuple(group)
        step = replace(run(step, some), edits=(*step.edits, *some), before=step)
    return step


def _check_order(edits: Sequence[Edit]) -> None:
    """Refuse an edit that comes after one that needs it to be done."""
    place = 0
    for before, edit in itertools.pairwise([None, *edits]):
        places = (p for p in range(place, len(_ORDER)) if isinstance(edit, _ORDER[p]))
        if (now := next(places, None)) is None:
            assert edit is not None
            raise misfit(edit, f"it has to come before '{before}'")
        place = now


def _drop_types(step: EditedStep, edits: Sequence[DropTypes]) -> EditedStep:
    (edit,) = edits
    if step.edits or not explicit.automatic_mesh(step.mesh) != step.mesh:
        raise misfit(edit, "it is the first edit of a step on an explicit mesh, or none")
    jaxpr = explicit.automatic(step.jaxpr, step.mesh, inferred=not edit.inferred)
    return replace(step, jaxpr=jaxpr, mesh=explicit.automatic_mesh(step.mesh), untyped=step)


def _gather_tables(step: EditedStep, edits: Sequence[GatherTable]) -> EditedStep:
    for edit in edits:
        if not 0 <= edit.argument < len(step.jaxpr.invars):
            raise misfit(edit, f"the step has {len(step.jaxpr.invars)} arguments")
    tables = [Tied(edit.argument, edit.dtype, edit.spec) for edit in edits]
    return replace(step, jaxpr=with_tables_gathered(step.jaxpr, tables, step.mesh))


def _pin(step: EditedStep, edits: Sequence[Pin]) -> EditedStep:
    _check_sites(step.jaxpr, {edit.site: edit for edit in edits})
    pins = {edit.site: edit.spec for edit in edits}
    return replace(step, jaxpr=pinned(step.jaxpr, pins, step.mesh))


def _check_sites(jaxpr: Any, edits: Mapping[int, Edit]) -> None:
    known = {dot.index for dot in dots(jaxpr)}
    for site in edits.keys() - known:
        raise misfit(edits[site], f"the step has {len(known)} matmuls, counted from 0")


def _pin_results(step: EditedStep, edits: Sequence[PinResults]) -> EditedStep:
    jaxpr = step.jaxpr
    for edit in edits:
        wanted = dict(edit.specs)
        if strange := wanted.keys() - set(range(len(jaxpr.outvars))):
            raise misfit(edit, f"the step has no result {min(strange)}")
        specs = [wanted.get(number) for number in range(len(jaxpr.outvars))]
        jaxpr = pin_results(jaxpr, specs, step.mesh)
    return replace(step, jaxpr=jaxpr)


def _split_batch(step: EditedStep, edits: Sequence[SplitBatch]) -> EditedStep:
    (edit,) = edits
    _check_sites(step.jaxpr, {edit.site: edit})
    operands = dots(step.jaxpr)[edit.site].eqn.invars
    if not (0 <= edit.operand < len(operands) and 0 <= edit.dim < operands[edit.operand].aval.ndim):
        raise misfit(edit, f"matmul {edit.site} has no such dim")
    dims, sizes = DimNames(step.jaxpr), dict(step.mesh.shape)
    rows = BatchDim(dims.of(operands[edit.operand])[edit.dim], edit.shards, 0)
    unpinned = next(stage for stage in step.stages if stage.mesh == step.mesh)
    done = Halved(
        step.jaxpr,
        lambda var: rows.dim(dims, var),
        BatchSplit(edit.shards, edit.parts),
        edit.unroll,
        whole=ShardedWindows(unpinned.jaxpr, step.arguments, dims, sizes),
    )
    return replace(step, jaxpr=done.jaxpr, halved=done)


def _scatter_lookups(step: EditedStep, edits: Sequence[ScatterLookup]) -> EditedStep:
    every, found = bodies(step.jaxpr), []
    for edit in edits:
        lookup = lookup_of(edit, every, step.mesh)
        if lookup is None:
            raise misfit(edit, "no gradient of a lookup is there")
        found.append(lookup)
    jaxpr = scatter(step.jaxpr, found, step.mesh)
    return replace(step, jaxpr=jaxpr, lookups=tuple(found))


def _make_rings(step: EditedStep, edits: Sequence[RingEdit]) -> EditedStep:
    named: dict[int, RingEdit] = {}
    for edit in edits:
        for matmul in edit.matmuls if isinstance(edit, MakeRing) else (edit.matmul,):
            if named.setdefault(matmul.site, edit) is not edit:
                raise misfit(edit, f"matmul {matmul.site} is in another ring too")
    _check_sites(step.jaxpr, named)
    sizes = dict(step.mesh.shape)
    sharings: dict[int, Sharing | ManualSharing] = {}
    for body in bodies(step.jaxpr):
        here = list({id(e): e for dot in body.dots if (e := named.get(dot.index))}.values())
        if here:
            sharings[body.index] = _placed(body, here, sizes)
    with without_ties(many_processes_of_cpus(step.mesh.devices.flat)):
        jaxpr, gathered = rewrite(step.jaxpr, sharings, step.mesh)
    return replace(step, jaxpr=jaxpr, sharings=sharings, gathered=gathered)


def _placed(
    body: Body, edits: Sequence[RingEdit], sizes: Mapping[str, int]
) -> Sharing | ManualSharing:
    written = [e for e in edits if isinstance(e, MakeRing) and e.written is not None]
    if not written:
        return placed(body, edits, sizes)
    if len(written) < len(edits) or body.dots[0].manual is None:
        raise misfit(written[0], "rings beside collectives of the user's are in a shard_map")
    return placed_manual(body, written)


def _gather_ahead(step: EditedStep, edits: Sequence[GatherAhead]) -> EditedStep:
    (edit,) = edits
    jaxpr, ahead = prefetch(step.jaxpr, step.gathered, whole_layers=edit.whole_layers)
    return replace(step, jaxpr=jaxpr, ahead=ahead)


def _share_views(step: EditedStep, edits: Sequence[ShareViews]) -> EditedStep:
    return replace(step, jaxpr=with_one_view(step.jaxpr))


# The order of edits. Pins stand before a batch split, and after it for the matmuls of its parts.
_ORDER: Sequence[tuple[type, ...]] = (
    (DropTypes,),
    (GatherTable, Pin, PinResults),
    (SplitBatch,),
    (Pin,),
    (ScatterLookup,),
    (MakeRing, ReadGathered),
    (GatherAhead,),
    (ShareViews,),
)
_AFTER_NUMBERING = (ScatterLookup, MakeRing, ReadGathered, GatherAhead, ShareViews)
_PASSES: Mapping[type, Callable[[EditedStep, Any], EditedStep]] = {
    DropTypes: _drop_types,
    GatherTable: _gather_tables,
    Pin: _pin,
    PinResults: _pin_results,
    SplitBatch: _split_batch,
    ScatterLookup: _scatter_lookups,
    MakeRing: _make_rings,
    ReadGathered: _make_rings,
    GatherAhead: _gather_ahead,
    ShareViews: _share_views,
}
