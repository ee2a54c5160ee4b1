"""Fourier transforms of each device's own shard: XLA's partitioner gathers all of the operand.

    y: [b@data, s, d] = fft x: [b@data, s, d]          # all-gather of x; each device computes all

->  y = shard_map (fft) x: [b@data, s, d]              # each device transforms its own

The mesh axes of a dim that is transformed shard another one, so that no device is idle: one
all-to-all. GSPMD replicates what it has no rule for (arXiv:2105.04663); it has none for batches of
Fourier transforms.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from jax import Array
from jax.sharding import Mesh, PartitionSpec

from jaxoverlap._jax import compat, inlining
from jaxoverlap.passes.analysis.dims import DimNames, Name
from jaxoverlap.passes.analysis.jaxprs import Body, bodies, map_bodies
from jaxoverlap.passes.analysis.mesh import explicit_axes
from jaxoverlap.passes.edited import EditedStep, misfit
from jaxoverlap.passes.evaluated import Evaluated, Proposal
from jaxoverlap.passes.planning.entries import line_of
from jaxoverlap.passes.rewriting.late_sums import axes_by_name
from jaxoverlap.passes.rewriting.pin_results import dims_of, is_even
from jaxoverlap.plan.edits import Spec, TransformPerShard


def run(step: EditedStep, edits: Sequence[TransformPerShard]) -> EditedStep:
    """Compute the Fourier transforms that edits name on each device's own shard."""
    left = {_key(edit): edit for edit in edits}
    if len(left) < len(edits):
        raise misfit(edits[0], "two edits are of the same transforms")
    found = set[TransformPerShard]()

    def visit(body: Body) -> list[Any] | None:
        if not body.is_global:
            return None
        made: list[Any] = []
        for eqn in body.eqns:
            edit = left.get(_name(eqn, body)) if _is_transform(eqn) else None
            if edit is not None:
                _check(eqn, edit, step.mesh)
                found.add(edit)
            made += [eqn] if edit is None else _per_shard(eqn, edit, step.mesh)
        return made

    jaxpr = map_bodies(step.jaxpr, visit)
    for edit in edits:
        if edit not in found:
            raise misfit(edit, "no such Fourier transform is there")
    return step.to(jaxpr)


_Name = tuple[str, tuple[int, ...], int]  # of transforms: line, lengths, dims


def _key(edit: TransformPerShard) -> _Name:
    return edit.source, edit.lengths, len(edit.spec)


def _name(eqn: Any, body: Body) -> _Name:
    lengths = tuple(map(int, eqn.params["fft_lengths"]))
    return line_of(eqn, body.around), lengths, eqn.invars[0].aval.ndim


def _check(eqn: Any, edit: TransformPerShard, mesh: Mesh) -> None:
    if any(edit.spec[dim] for dim in _transformed(eqn)):
        raise misfit(edit, "a dim that is transformed cannot be sharded")
    for var in (*eqn.invars, *eqn.outvars):
        if not is_even(var.aval.shape, edit.spec, mesh):
            raise misfit(edit, f"the devices do not divide {var.aval.shape}")


def propose(step: Evaluated) -> Iterator[Proposal]:
    """Propose to compute all Fourier transforms of a step on each device's own shard.

    XLA's gathers of them take so long that they hide what layouts and batch splits differ by, so
    this comes before these, and again behind them, as they change what shards a transform.
    """
    if explicit_axes(step.step.mesh):
        return
    before = next(one for one in reversed(step.step.stages) if not one.has(TransformPerShard))
    every = [
        (eqn, body)
        for body in bodies(before.jaxpr)
        if body.is_global
        for eqn in body.eqns
        if _is_transform(eqn)
    ]
    if not every:
        return
    names = DimNames(before.numbered.jaxpr)
    axes = axes_by_name(before, names, step.shardings) | _of_arguments(before, names)
    specs: dict[_Name, Spec] = {}
    for eqn, body in every:
        spec = _spec(eqn, names, axes, before.mesh)
        if any(spec) and _name(eqn, body) not in specs:
            specs[_name(eqn, body)] = spec
    edits = tuple(
        TransformPerShard(source=source, lengths=lengths, spec=spec)
        for (source, lengths, _), spec in specs.items()
    )
    if edits and not {*edits} <= {*step.step.edits}:
        yield Proposal(edits, lambda edit: isinstance(edit, TransformPerShard))


def _of_arguments(step: EditedStep, names: DimNames) -> dict[Name, tuple[str, ...]]:
    """Return the mesh axes that shard each named dim of the arguments."""
    pairs = zip(step.jaxpr.invars, step.arguments, strict=True)
    dims = (zip(names.of(var), spec or (), strict=False) for var, spec in pairs)
    return {name: on for of_var in dims for name, on in of_var if on}


def _spec(eqn: Any, names: DimNames, axes: Mapping[Name, tuple[str, ...]], mesh: Mesh) -> Spec:
    """Return a sharding of a transform's operand that leaves the transformed dims unsharded."""
    (operand,) = eqn.invars
    shape, transformed = operand.aval.shape, _transformed(eqn)
    spec: list[tuple[str, ...]] = [()] * len(shape)
    left: list[str] = []
    for dim, name in enumerate(names.of(operand)):
        on = tuple(a for a in axes.get(name, ()) if mesh.shape[a] > 1)
        if dim in transformed:
            left += on
        else:
            spec[dim] = on
    used, others = set[str](), [d for d in range(len(shape)) if d not in transformed]
    for dim in others:  # one axis may be that of two names
        spec[dim] = tuple(a for a in spec[dim] if a not in used)
        used.update(spec[dim])
    for axis in (a for a in dict.fromkeys(left) if a not in used):
        for dim in sorted(others, key=lambda d: -shape[d] // _devices(spec[d], mesh)):
            if shape[dim] % _devices((*spec[dim], axis), mesh) == 0:
                spec[dim] = (*spec[dim], axis)
                break
    return tuple(spec) if is_even(shape, tuple(spec), mesh) else ()


def _devices(axes: Sequence[str], mesh: Mesh) -> int:
    return math.prod(mesh.shape[a] for a in axes)


def _is_transform(eqn: Any) -> bool:
    return eqn.primitive.name == "fft" and not compat.is_literal(eqn.invars[0])


def _transformed(eqn: Any) -> range:
    """Return the dims that are transformed: the last ones."""
    ndim = eqn.invars[0].aval.ndim
    return range(ndim - len(eqn.params["fft_lengths"]), ndim)


def _per_shard(eqn: Any, edit: TransformPerShard, mesh: Mesh) -> list[Any]:
    spec = PartitionSpec(*dims_of(edit.spec))

    def transform(x: Array) -> list[Array]:
        return compat.evaluate_eqn(eqn, [x])

    fn = jax.shard_map(transform, mesh=mesh, in_specs=spec, out_specs=[spec], check_vma=False)
    return inlining.inline(fn, eqn.invars, eqn.outvars, eqn)
