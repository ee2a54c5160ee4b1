"""Propose pins of the results of all matmuls: one layout for all values, and changes of it.

Propagation chooses a layout by priorities; here the estimate does. The layouts that the arguments
suggest come first, and mostly the best of them is one of these; then one axis at a time changes
(`layout.neighbours`), then single source lines take another of the first layouts, and pins that
change nothing are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import Any

from jaxoverlap._jax import compat
from jaxoverlap.passes.analysis.dims import DimNames
from jaxoverlap.passes.analysis.einsum import Spec
from jaxoverlap.passes.analysis.jaxprs import Body, Dot, bodies, equations
from jaxoverlap.passes.edited import EditedStep
from jaxoverlap.passes.evaluated import Evaluated, Proposal
from jaxoverlap.passes.layouts.layout import Layout, by_size, neighbours, spec_of, starts
from jaxoverlap.passes.layouts.lost import NOTHING, Lost, lost_in
from jaxoverlap.passes.layouts.pins import Pins, pinnable
from jaxoverlap.passes.planning.entries import line_of, type_of
from jaxoverlap.plan.edits import Edit, Pin, PinArgument, PinValue
from jaxoverlap.plan.limits import LOOKUP_WAITS

_TABLE_DIMS = 2


class _Pinned:
    """The results of a step's matmuls, and how a layout pins them.

    Attributes:
        dims: the named dims of the step.
        sizes: devices along each mesh axis.
        matmuls: the matmuls whose results may be pinned.
    """

    def __init__(self, step: EditedStep):
        self._step, jaxpr = step, step.unpinned.jaxpr
        self.dims, self.sizes = DimNames(jaxpr), dict(step.mesh.shape)
        self.matmuls = tuple(pinnable(jaxpr))

    def starts(self) -> Iterator[Layout]:
        """Yield the layouts that the shardings of the arguments suggest."""
        if self.matmuls:
            unpinned = self._step.unpinned
            yield from starts(unpinned.jaxpr, unpinned.arguments, self.dims, self.sizes)

    def pins(self, layout: Layout) -> dict[int, Spec]:
        """Return the pin of each result."""
        return {dot.index: self._spec(dot.eqn.outvars[0], layout) for dot in self.matmuls}

    def proposal(self, layout: Layout, lost: Lost = NOTHING) -> Proposal:
        """Propose a layout instead of the one that a step has.

        Args:
            layout: the layout.
            lost: the values that are pinned to it besides the results of matmuls.
        """
        edits = (
            *(self._argument(number, layout) for number in lost.arguments),
            *(self._value(*value, layout) for value in lost.values),
            *edits_of(self.pins(layout)),
        )
        return Proposal(edits, _is_pin, {Pin: layout, PinValue: lost})

    def _spec(self, var: Any, layout: Layout) -> Spec:
        return spec_of(self.dims.of(var), var.aval.shape, layout, self.sizes)

    def _argument(self, number: int, layout: Layout) -> PinArgument:
        jaxpr = self._step.unpinned.jaxpr
        name, var = compat.argument_names(jaxpr)[number], jaxpr.invars[number]
        spec = self._spec(var, layout)
        return PinArgument(argument=number, name=name, value=type_of(var), spec=spec)

    def _value(self, body: Body, position: int, layout: Layout) -> PinValue:
        eqn = body.eqns[position]
        out = eqn.outvars[0]
        return PinValue(
            body=body.index,
            position=position,
            source=line_of(eqn, body.around),
            value=type_of(out),
            spec=self._spec(out, layout),
        )


def _is_pin(edit: Edit) -> bool:
    return isinstance(edit, Pin | PinArgument | PinValue)


def edits_of(pins: Pins) -> tuple[Pin, ...]:
    """Return the edits that pin results."""
    return tuple(Pin(site=site, spec=spec) for site, spec in pins.items())


def pins_of(step: EditedStep) -> dict[int, Spec]:
    """Return the pins of a step whose batch is not split, by the number of the matmul."""
    return {edit.site: edit.spec for edit in step.edits if isinstance(edit, Pin)}


def propose_starts(step: Evaluated) -> Iterator[Proposal]:
    """Propose the layouts that the shardings of a step's arguments suggest."""
    unpinned = step.step.unpinned
    if not aborting_convolutions(unpinned):
        pinned = _Pinned(unpinned)
        layouts = [*pinned.starts()]
        yield from map(pinned.proposal, layouts)
        if lost := lost_in(unpinned, pinned.matmuls, pinned.dims, layouts):
            for layout in lost.layouts:
                yield pinned.proposal(layout, lost)


def propose_lookups(step: Evaluated) -> Iterator[Proposal]:
    """Propose to pin what is looked up in tables to the layout of a step.

    What is looked up begins the residual stream, which no matmul has made: XLA shards it as the
    table and the indices are, and all-reduces it.
    """
    if (layout := step.notes.get(Pin)) is None or not _waits_for_lookups(step):
        return
    pinned, lost = _Pinned(step.step), step.notes[PinValue]
    values = (*lost.values, *_lookups(step.step.unpinned.jaxpr))
    yield pinned.proposal(layout, replace(lost, values=values))


def _lookups(jaxpr: Any) -> Iterator[tuple[Body, int]]:
    """Yield the lookups in tables that are outside of loops: their bodies and positions."""
    for body in bodies(jaxpr):
        if body.around or body.opaque:
            continue
        for position, eqn in enumerate(body.eqns):
            if eqn.primitive.name == "gather" and eqn.outvars[0].aval.ndim > _TABLE_DIMS:
                yield body, position


def _waits_for_lookups(step: Evaluated) -> bool:
    """Return whether kernels wait for collectives of lookups, or of their gradients."""
    if step.estimate is None:
        return False
    waited_s = 0.0
    for (computation, name), seconds in step.estimate.waited_s.items():
        every = step.program.module.computations[computation]
        op_name = next((one.op_name for one in every if one.name == name), "")
        if op_name.rpartition("/")[2] in ("gather", "scatter-add"):
            waited_s += seconds
    return waited_s > LOOKUP_WAITS * step.estimate.step_s


def propose_neighbours(step: Evaluated) -> Iterator[Proposal]:
    """Propose the layouts in which one axis has one dim first, last or not at all."""
    if (layout := step.notes.get(Pin)) is not None:
        pinned = _Pinned(step.step)
        names = by_size([dot.eqn.outvars[0] for dot in pinned.matmuls], pinned.dims)
        lost = step.notes[PinValue]
        yield from (pinned.proposal(other, lost) for other in neighbours(layout, names))


def propose_mixes(step: Evaluated) -> Iterator[Proposal]:
    """Propose the layout of single source lines from another of the first layouts.

    A mixture of experts has its tokens on all devices, except where the experts work.
    """
    if step.notes.get(Pin) is None:
        return
    pinned, now = _Pinned(step.step), pins_of(step.step)
    for other in map(pinned.pins, pinned.starts()):
        for sites in _by_line(pinned.matmuls):
            if any(now.get(site) != other[site] for site in sites):
                pins = {site: other[site] for site in sites}
                yield Proposal(edits_of(pins), _pins_at(sites))


def propose_without_own(step: Evaluated) -> Iterator[Proposal]:
    """Propose to leave out the pins that equal XLA's own choice."""
    chosen = {site: lies.out for site, lies in step.plain.shardings.items()}
    pins = pins_of(step.step)
    own = [site for site, spec in pins.items() if chosen.get(site) == spec]
    if own and len(own) < len(pins):
        yield Proposal((), _pins_at(own))


def propose_fewer(step: Evaluated) -> Iterator[Proposal]:
    """Propose to leave out pins: many at a time, then one by one.

    This is delta debugging (Zeller and Hildebrandt, TSE 2002): what is left is needed, each.
    """
    sites = list(pins_of(step.step))
    together = len(sites)
    while together > 1:
        together = (together + 1) // 2
        for first in range(0, len(sites), together):
            yield Proposal((), _pins_at(sites[first : first + together]))


def aborting_convolutions(step: EditedStep) -> tuple[tuple[Any, Any], ...]:
    """Return the grouped convolutions whose groups the devices do not divide evenly.

    XLA's partitioner aborts: it divides by the groups in one shard of the features, maybe 0.
    """
    return tuple(
        (eqn, around)
        for eqn, around in equations(step.jaxpr)
        if eqn.primitive.name == "conv_general_dilated"
        and (groups := max(eqn.params["feature_group_count"], eqn.params["batch_group_count"])) > 1
        and groups % step.mesh.size
    )


def _pins_at(sites: Collection[int]) -> Callable[[Edit], bool]:
    """Return the predicate of pins of some matmuls."""

    def is_one(edit: Edit) -> bool:
        return isinstance(edit, Pin) and edit.site in sites

    return is_one


def _by_line(matmuls: Collection[Dot]) -> Iterator[list[int]]:
    """Yield the numbers of the matmuls of each source line."""
    lines: dict[Any, list[int]] = {}
    for dot in matmuls:
        file, line, _ = compat.source_line(dot.eqn)
        lines.setdefault((file, line), []).append(dot.index)
    yield from lines.values()
