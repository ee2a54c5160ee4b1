"""Propose to split the batch of a step in parts, whose collectives hide behind each other."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from jaxoverlap._jax import compat
from jaxoverlap.passes.analysis.dims import DimNames, Name
from jaxoverlap.passes.analysis.jaxprs import dots
from jaxoverlap.passes.analysis.mesh import explicit_axes
from jaxoverlap.passes.evaluated import Evaluated, Proposal
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
    yield Proposal((edit,), notes={SplitBatch: _named(arguments, dims, batch)})


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
    pins = [
        Pin(site=dot.index, spec=spec)
        for dot in pinnable(edited.jaxpr)
        if dot.index in step.shardings
        and (spec := step.shardings[dot.index].out) is not None
        and is_even(dot.eqn.outvars[0].aval.shape, spec, edited.mesh)
    ]
    unrolled = msgspec.structs.replace(split, unroll=unroll)
    yield Proposal((unrolled, *pins), lambda edit: isinstance(edit, SplitBatch))


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
