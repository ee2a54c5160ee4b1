"""Pin the results of a step's matmuls where XLA's own shardings have a higher estimated cost."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

import msgspec
from jax.sharding import Mesh

from jaxoverlap._jax import compat
from jaxoverlap._util.text import short_source
from jaxoverlap.cost.model import CostModel
from jaxoverlap.passes.analysis.errors import RewriteError, UserError
from jaxoverlap.passes.analysis.jaxprs import Dot, bodies, dots, equations
from jaxoverlap.passes.analysis.matmul_collectives import permuted_matmuls
from jaxoverlap.passes.analysis.partitioned import SpmdProgram
from jaxoverlap.passes.apply import apply
from jaxoverlap.passes.edited import EditedStep
from jaxoverlap.passes.layouts.dims import DimNames, Name
from jaxoverlap.passes.layouts.layout import starts
from jaxoverlap.passes.layouts.memory import estimated_peak_bytes
from jaxoverlap.passes.layouts.pins import Pins, pinnable
from jaxoverlap.passes.layouts.search import LayoutSearch, PricedLayout
from jaxoverlap.passes.planning.entries import source_of
from jaxoverlap.passes.rewriting.pin_results import pinned_results
from jaxoverlap.plan.edits import ORDER, Edit, Pin, in_order
from jaxoverlap.plan.layouts import KeptEdit, Layouts, PinnedResult
from jaxoverlap.plan.limits import GAIN, LAYOUT_EQUATIONS, LAYOUT_MEMORY, RIVAL_LAYOUTS
from jaxoverlap.step.candidate import StepCandidate, changed, evaluate
from jaxoverlap.step.context import StepContext
from jaxoverlap.step.options import LayoutMode

_WRONG_PERMUTE_AXES = 3  # XLA loses permutes on meshes of so many axes (docs/upstream.md)


def with_layouts(
    step: StepContext,
    mode: LayoutMode | None,
    pins: tuple[Edit, ...] | None,
    overlapped_s: Callable[[StepCandidate], float],
) -> StepCandidate:
    """Return the step with pins on matmuls, if these lower its estimated cost.

    Args:
        step: the step.
        mode: how long to search; None: no search.
        pins: edits of the layout to take instead of a search.
        overlapped_s: estimates the seconds of a step with layouts, once it is overlapped.
    """
    evaluator, cost = _Evaluator(step), step.cost
    layouts: Layouts | None = None
    edits: tuple[Edit, ...] = ()
    if pins is not None and not step.explicit:
        edits = pins
    elif mode and cost and not step.explicit:  # their types state shardings
        layouts, edits = step.once(
            ("layouts", mode), lambda: _searched(evaluator, cost, mode, overlapped_s)
        )
    candidate = evaluator.sharded(edits)
    if edits and (
        changed(step.plain, candidate.spmd) or _wrong_permutes(candidate.spmd, step.mesh)
    ):
        return evaluator.sharded(())
    return replace(candidate, layouts=layouts)


class _Evaluator:
    """Runs XLA's partitioner on one step with edits of its layout."""

    def __init__(self, step: StepContext):
        self.step = step
        self._results = pinned_results(step.params, step.plain.results, step.mesh)

    def edited(self, edits: Sequence[Edit]) -> EditedStep:
        """Return the step with edits; its results keep the shardings of the plain step."""
        return apply(self.step.edited, in_order([*edits, *self._results]))

    def sharded(self, edits: Sequence[Edit]) -> StepCandidate:
        """Edit the step and partition it, which gives the shardings of its matmuls."""

        def partitioned() -> StepCandidate:
            edited = self.edited(edits)
            spmd = self.step.partitioned(edited.jaxpr) if edits else self.step.plain
            return StepCandidate(edited, spmd)

        return self.step.once(("sharded", tuple(edits)), partitioned)

    def answer(self, edits: Sequence[Edit]) -> PricedLayout:
        """Partition the step with edits, and estimate it; XLA may refuse some."""
        try:
            candidate = evaluate(self.step, StepCandidate(self.edited(edits)))
        except RewriteError as error:
            return PricedLayout(math.inf, 0, str(error))
        why_not = candidate.why_not or _wrong_permutes(candidate.spmd, self.step.mesh)
        peak_bytes = estimated_peak_bytes(candidate.spmd.module)
        return PricedLayout(candidate.seconds, peak_bytes, why_not)


def _pins(pins: Pins) -> tuple[Pin, ...]:
    return tuple(Pin(site=site, spec=spec) for site, spec in pins.items())


def _searched(
    evaluator: _Evaluator,
    cost: CostModel,
    mode: LayoutMode,
    overlapped_s: Callable[[StepCandidate], float],
) -> tuple[Layouts, tuple[Edit, ...]]:
    """Search for the layout of a step; return the record of it, and its edits."""
    step, plain = evaluator.step, evaluator.step.plain
    dims, sizes = DimNames(step.jaxpr), dict(step.mesh.shape)
    most = LAYOUT_EQUATIONS[mode] // _num_equations(step.jaxpr)
    search = LayoutSearch(
        matmuls=tuple(pinnable(step.jaxpr)),
        dims=dims,
        sizes=sizes,
        ask=lambda pins: evaluator.answer(_pins(pins)),
        plain=PricedLayout(step.estimate(plain).step_s, estimated_peak_bytes(plain.module)),
        most=most,
        thorough=mode != "repair",
    )
    aborting = tuple(dict.fromkeys(_aborting_convolutions(step)))
    if not aborting:
        search.run(starts(step.jaxpr, step.edited.arguments, dims, sizes))
    if len(rivals := search.rivals(RIVAL_LAYOUTS[mode])) > 1:
        search.best = min(rivals, key=lambda c: overlapped_s(evaluator.sharded(_pins(c.pins))))
    search.leave_out({site: shardings.out for site, shardings in plain.shardings.items()})
    if mode == "advise":
        search.thin_out(most)
    layouts = _record(step.jaxpr, search, cost.cluster.chip.memory_bytes)
    edits: tuple[Edit, ...] = _pins(search.best.pins)
    if aborting:
        return msgspec.structs.replace(layouts, aborting=aborting), edits
    for proposed in _proposed(step):
        layouts, edits = _with_proposed(evaluator, layouts, edits, proposed)
    return layouts, edits


def _aborting_convolutions(step: StepContext) -> Iterator[str]:
    """Name the grouped convolutions whose groups the devices do not divide evenly.

    XLA's partitioner aborts: it divides by the groups in one shard of the features, maybe 0.
    """
    for eqn, around in equations(step.jaxpr):
        if eqn.primitive.name == "conv_general_dilated":
            groups = max(eqn.params["feature_group_count"], eqn.params["batch_group_count"])
            if groups > 1 and groups % step.mesh.size:
                yield described(eqn, around)


def _proposed(step: StepContext) -> Iterator[tuple[Edit, ...]]:
    """Yield the edits that each pass with a `propose` proposes for a step."""
    for name in dict.fromkeys(kind.applied_by for kinds in ORDER for kind in kinds):
        module = importlib.import_module(f"jaxoverlap.passes.{name}")
        if hasattr(module, "propose"):
            yield tuple(e for e in module.propose(step.edited, step.plain) if _fits(step, e))


def _fits(step: StepContext, edit: Edit) -> bool:
    """Return whether the pass of an edit accepts it: a `propose` need not check that."""
    try:
        apply(step.edited, [edit])
    except UserError:
        return False
    return True


def _with_proposed(
    evaluator: _Evaluator, layouts: Layouts, edits: tuple[Edit, ...], proposed: tuple[Edit, ...]
) -> tuple[Layouts, tuple[Edit, ...]]:
    """Keep proposed edits if they lower the estimated cost and need hardly more memory."""
    if not proposed:
        return layouts, edits
    before_s, answer = layouts.step_s, evaluator.answer((*edits, *proposed))
    layouts = msgspec.structs.replace(layouts, questions=layouts.questions + 1)
    if answer.why_not or answer.peak_bytes > LAYOUT_MEMORY * layouts.plain_peak_bytes:
        return layouts, edits
    if answer.step_s > before_s * (1 - GAIN):
        return layouts, edits
    gain_s = (before_s - answer.step_s) / len(proposed)
    kept = (*layouts.kept, *(KeptEdit(edit=str(edit), gain_s=gain_s) for edit in proposed))
    layouts = msgspec.structs.replace(
        layouts, kept=kept, step_s=answer.step_s, peak_bytes=answer.peak_bytes
    )
    return layouts, (*edits, *proposed)


def _record(jaxpr: Any, search: LayoutSearch, memory_bytes: int) -> Layouts:
    """Record what a search has found, for the plan."""
    best, plain, first = search.best, search.plain, dict[str, Dot]()
    for dot in dots(jaxpr):  # the first matmul of each line is the forward pass's
        first.setdefault(source_of(dot), dot)
    pins = [
        PinnedResult(
            site=dot.index,
            source=source_of(dot),
            type=_type(dot),
            part=_part(dot, first[source_of(dot)], best.pins),
            spec=best.pins[dot.index],
            gain_s=search.gain_s(dot.index),
        )
        for dot in search.matmuls
        if dot.index in best.pins
    ]
    return Layouts(
        pins=tuple(pins),
        plain_s=plain.step_s,
        step_s=best.answer.step_s,
        plain_peak_bytes=plain.peak_bytes,
        peak_bytes=best.answer.peak_bytes,
        memory_bytes=memory_bytes,
        questions=search.asked,
        axes={a: examples(jaxpr, search.dims, n) for a, n in (best.layout or {}).items()},
        unnamed=tuple(dict.fromkeys(map(described, search.dims.unnamed))),
    )


def _type(dot: Dot) -> str:
    aval = dot.eqn.outvars[0].aval
    return f"{aval.dtype}[{','.join(map(str, aval.shape))}]"


def _part(dot: Dot, forward: Dot, pins: Pins) -> Literal["result", "operand"]:
    """Return 'result' if a pin is sharded as its line's forward result, else 'operand'."""
    other = pins.get(forward.index, pins[dot.index]) != pins[dot.index]
    return "operand" if other or _type(dot) != _type(forward) else "result"


def examples(jaxpr: Any, dims: DimNames, names: Sequence[Name]) -> tuple[str, ...]:
    """Name dims by the largest argument that has each; those of no argument are left out."""
    largest: dict[Name, tuple[int, str]] = {}
    for var, argument in zip(jaxpr.invars, compat.argument_names(jaxpr), strict=True):
        for d, name in enumerate(dims.of(var)):
            example = math.prod(var.aval.shape), f"dim {d} of {argument}"
            largest[name] = max(example, largest.get(name, (0, "")))
    return tuple(largest[name][1] for name in names if name in largest)


def described(eqn: Any, around: Sequence[Any] = ()) -> str:
    """Name an equation by its primitive and its source line, or that of an equation around it."""
    file, line, _ = compat.source_line(compat.lined_as(eqn, around))
    return f"{eqn.primitive.name} ({short_source(file, line)})"


def _num_equations(jaxpr: Any) -> int:
    return sum(len(body.eqns) for body in bodies(jaxpr)) or 1


def _wrong_permutes(spmd: SpmdProgram, mesh: Mesh) -> str:
    """Return why XLA would give wrong results on three or more axes (lost permutes); "" if not."""
    if sum(size > 1 for size in mesh.shape.values()) < _WRONG_PERMUTE_AXES:
        return ""
    permuted = list(permuted_matmuls(spmd.module))
    return f"XLA would permute values next to {len(permuted)} matmuls" if permuted else ""
