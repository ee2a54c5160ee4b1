"""Propose to split the batch of a step in parts, whose collectives hide behind each other."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from jaxoverlap._jax import compat
from jaxoverlap.passes.analysis.dims import DimNames, Name
from jaxoverlap.passes.analysis.errors import UserError
from jaxoverlap.passes.analysis.jaxprs import dots, equations
from jaxoverlap.passes.analysis.mesh import explicit_axes
from jaxoverlap.passes.analysis.partitioned import Shardings
from jaxoverlap.passes.edited import EditedStep
from jaxoverlap.passes.evaluated import Evaluated, Proposal
from jaxoverlap.passes.halves import halve
from jaxoverlap.passes.halves.body import HostMemoryError
from jaxoverlap.passes.halves.shardings import shardings_of_parts
from jaxoverlap.passes.halves.start import BatchDim, batch_dims
from jaxoverlap.passes.layouts.moved_first import first_dims
from jaxoverlap.passes.layouts.pins import pinnable
from jaxoverlap.passes.rewriting.pin_results import is_even
from jaxoverlap.plan.edits import Pin, SplitBatch


def propose_parts(parts: int, step: Evaluated) -> Iterator[Proposal]:
    """Propose to split the batch dim that most matmuls have, if each device holds enough of it.

    The proposal's note is the batch, as a dim of an argument.
    """
    edited = step.step
    if not step.outermost:  # who differentiates it would miss derivatives of the user's own
        yield Proposal(why_not="it is called under grad, vmap or jit")
        return
    if explicit := explicit_axes(edited.mesh):  # there each type says how its value is sharded
        yield Proposal(why_not=f"mesh axes {', '.join(explicit)} are explicit")
        return
    dims, sizes = DimNames(edited.jaxpr), dict(edited.mesh.shape)
    moved = first_dims(edited, dims)
    candidates = list(batch_dims(edited.jaxpr, dims, step.shardings, sizes, moved))
    batch = next((r for r in candidates if r.divides(parts)), None)
    arguments = edited.unpinned.jaxpr
    if batch is None:
        yield Proposal(why_not=_none_divides(arguments, dims, candidates))
        return
    site, operand, dim = batch.found_at(edited.jaxpr, dims)
    edit = SplitBatch(site=site, operand=operand, dim=dim, parts=parts, shards=batch.shards)
    notes = {SplitBatch: _named(arguments, dims, batch)}
    pins = [] if _states_shardings(edited) else _pins_of_parts(step, edit)
    yield Proposal((edit, *pins), notes=notes)


def propose_unrolled(unroll: int, step: Evaluated) -> Iterator[Proposal]:
    """Propose to unroll the scans of a step whose batch is split.

    The results of matmuls are pinned to the shardings that they have where scans are not unrolled:
    XLA puts the slices that the steps of an unrolled body leave behind together, and then chooses
    other layouts: it gathered gradients of MaxText's weights over all devices.
    """
    edited = step.step
    split = next((edit for edit in edited.edits if isinstance(edit, SplitBatch)), None)
    if split is None or split.unroll == unroll or all(dot.runs == 1 for dot in dots(edited.jaxpr)):
        return
    pins = _pins(edited, step.shardings)
    unrolled = msgspec.structs.replace(split, unroll=unroll)
    place = edited.edits.index(split)
    if any(isinstance(edit, Pin) for edit in edited.edits[:place]):  # a layout's, which stay
        yield Proposal((unrolled, *pins), lambda edit: isinstance(edit, SplitBatch))
        return
    own = [edit for edit in edited.edits[place:] if isinstance(edit, Pin)]
    yield Proposal((unrolled, *own, *pins), lambda edit: isinstance(edit, SplitBatch | Pin))


def _states_shardings(step: EditedStep) -> bool:
    """Return whether a step has sharding constraints, the user's or pinned ones, on its values."""
    every = equations(step.unpinned.jaxpr)
    return step.has(Pin) or any(eqn.primitive.name == "sharding_constraint" for eqn, _ in every)


def _pins_of_parts(step: Evaluated, edit: SplitBatch) -> list[Pin]:
    """Return pins that keep the shardings of a step's matmuls for the parts of its batch.

    XLA may choose others where nothing states them: between a batch and weights that are sharded
    over one axis it goes by the sizes of the parts.
    """
    try:
        cut = halve.run(step.step, [edit])
    except (UserError, HostMemoryError):
        return []  # it is refused for that again, where the edit is applied
    whole = step.step.jaxpr
    return _pins(cut, shardings_of_parts(whole, cut.jaxpr, step.shardings, edit.parts))


def _pins(step: EditedStep, shardings: Mapping[Any, Shardings]) -> list[Pin]:
    """Return pins of the results of matmuls to their shardings."""
    return [
        Pin(site=dot.index, spec=spec)
        for dot in pinnable(step.jaxpr)
        if dot.index in shardings
        and (spec := shardings[dot.index].out) is not None
        and is_even(dot.eqn.outvars[0].aval.shape, spec, step.mesh)
    ]


def _none_divides(jaxpr: Any, dims: DimNames, candidates: list[BatchDim]) -> str:
    """Say why none of the batch dims is split."""
    if not candidates:
        return "no dim of the batch is one that most matmuls have"
    sizes = (f"{_named(jaxpr, dims, batch)} has {batch.held}" for batch in candidates)
    return f"a device's rows do not divide: {', '.join(sizes)}"


def _named(jaxpr: Any, dims: DimNames, batch: BatchDim) -> str:
    return next(iter(examples(jaxpr, dims, [batch.name])), "a dim of no argument")


def examples(jaxpr: Any, dims: DimNames, names: Sequence[Name]) -> tuple[str, ...]:
    """Name dims by the largest argument that has each; those of no argument are left out."""
    largest: dict[Name, tuple[int, str]] = {}
    for var, argument in zip(jaxpr.invars, compat.argument_names(jaxpr), strict=True):
        for d, name in enumerate(dims.of(var)):
            example = math.prod(var.aval.shape), f"dim {d} of {argument}"
            largest[name] = max(example, largest.get(name, (0, "")))
    return tuple(largest[name][1] for name in names if name in largest)
