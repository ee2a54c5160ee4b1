"""Give each device its share of every part of a fused matmul: permute the columns of the weight.

    y: [b, s, n@tp] = dot_general x w: [d, n@tp]
    gate, up = split y                            # half of the devices have gate: y moves

->  v: [d, n@tp] = <columns of w: the first device's of gate, its of up, the second device's ...>
    y: [b, s, n@tp] = dot_general x v             # each device has its share of gate and of up
    gate = reshape (slice (reshape y: [b, s, tp, n / tp]))                # in place

Queries, keys and values in one weight, or gate and up, are slices of columns that are sharded, so
that XLA moves activations where the weight, which is smaller, could move. Experts write the weight
so that each device's columns are adjacent (Megatron-LM's `--swiglu` and fused attention weights);
that permutation of a weight as it is, and its inverse for the gradient, is ours. The numbers are
the same: each column is computed as it was.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxoverlap._jax import compat, inlining
from jaxoverlap.passes.analysis.jaxprs import Body, Dot, bodies, map_bodies
from jaxoverlap.passes.analysis.mesh import explicit_axes
from jaxoverlap.passes.analysis.partitioned import Shardings
from jaxoverlap.passes.edited import EditedStep, check_named, check_sites, misfit
from jaxoverlap.passes.evaluated import Evaluated, Proposal
from jaxoverlap.passes.layouts.fused import LHS, OUT, RHS, Part, parts_of, sections_of
from jaxoverlap.passes.planning.entries import source_of
from jaxoverlap.passes.rewriting.pin_results import dims_of, is_even
from jaxoverlap.plan.edits import InterleaveColumns


def run(step: EditedStep, edits: Sequence[InterleaveColumns]) -> EditedStep:
    """Permute the columns of the matmuls that edits name."""
    by_site = {edit.site: edit for edit in edits}
    for edit in edits:
        check_named(step.mesh, edit, edit.axes)
    every = bodies(step.jaxpr)
    check_sites({d.index for body in every for d in body.dots}, ((e.site, e) for e in edits))

    def visit(body: Body) -> list[Any] | None:
        here = {
            dot.position: (dot, by_site[dot.index]) for dot in body.dots if dot.index in by_site
        }
        return _rewritten(body, here, step.mesh) if here else None

    return step.to(map_bodies(step.jaxpr, visit))


def propose(step: Evaluated) -> Iterator[Proposal]:
    """Propose to permute the columns of every fused matmul of a step."""
    if explicit_axes(step.step.mesh):
        return
    edits = tuple(
        edit
        for body in bodies(step.step.jaxpr)
        if not body.opaque
        for dot in body.dots
        if dot.index in step.shardings
        for edit in _interleaved(body, dot, step.shardings[dot.index], step.step.mesh)
    )
    if edits:
        yield Proposal(edits)


def _interleaved(
    body: Body, dot: Dot, shardings: Shardings, mesh: Mesh
) -> Iterator[InterleaveColumns]:
    """Yield the edit of a matmul whose columns are in parts; none if they are not."""
    if dot.eqn.primitive.name != "dot_general" or dot.inside is not None or dot.manual is not None:
        return
    values, specs = (*dot.eqn.invars, *dot.eqn.outvars), shardings[:3]
    sources = (shardings.lhs_sources, shardings.rhs_sources, shardings.out_sinks)
    for dims in _shared_dims(dot.eqn):
        for side, other in itertools.permutations(dims):
            spec, stored = specs[side], next(iter(sources[other]), None) or specs[other]
            if stored is None:
                continue
            axes = stored[dims[other]] or (spec[dims[side]] if spec is not None else ())
            devices = math.prod(mesh.shape[a] for a in axes)
            parts = parts_of(body, dot, side, dims[side]) if devices > 1 else []
            if not parts or any(part.sharded % devices for part in parts):
                continue
            weight = [tuple(a for a in on if a not in axes) for on in stored]
            weight[dims[other]] = axes
            if is_even(values[other].aval.shape, tuple(weight), mesh):
                yield InterleaveColumns(
                    site=dot.index,
                    source=source_of(dot),
                    dims=(dims.get(LHS), dims.get(RHS), dims.get(OUT)),
                    parted=side,
                    sections=sections_of(parts),
                    axes=axes,
                    spec=tuple(weight),
                )
                return


def _shared_dims(eqn: Any) -> Iterator[dict[int, int]]:
    """Yield the dims that two of a matmul's operands and result have, but for batch dims."""
    (lhs, rhs), (lhs_batch, rhs_batch) = eqn.params["dimension_numbers"]
    yield from ({LHS: one, RHS: other} for one, other in zip(lhs, rhs, strict=True))
    out = len(lhs_batch)
    for side, contracted, batch in ((LHS, lhs, lhs_batch), (RHS, rhs, rhs_batch)):
        for dim in range(eqn.invars[side].aval.ndim):
            if dim not in contracted and dim not in batch:
                yield {side: dim, OUT: out}
                out += 1


def _rewritten(
    body: Body, edits: Mapping[int, tuple[Dot, InterleaveColumns]], mesh: Mesh
) -> list[Any]:
    """Return the equations of a body, with the columns of some matmuls permuted."""
    made = {position: [eqn] for position, eqn in enumerate(body.eqns)}
    for position, (dot, edit) in edits.items():
        columns, eqn = _Columns(mesh, edit), dot.eqn
        parts = columns.checked(parts_of(body, dot, edit.parted, columns.dim(edit.parted)))
        before, after, values = list[Any](), list[Any](), [*eqn.invars, *eqn.outvars]
        if edit.parted == OUT:
            source = _constrained(body, values[OUT])
            for part in parts:
                assert part.position is not None
                made[part.position] = []
            for part in parts:
                assert part.position is not None
                like = body.eqns[part.position]
                fn = columns.taken(part)
                made[part.position] += inlining.inline(fn, [source], [part.var], like)
        else:
            values[edit.parted] = compat.like_var(values[edit.parted])
            operands = [part.var for part in parts]
            before += inlining.inline(columns.joined(parts), operands, [values[edit.parted]], eqn)
        given = values[columns.weight]
        values[columns.weight] = new = compat.like_var(given)
        if columns.weight == OUT:
            after += inlining.inline(columns.restored, [new], [given], eqn)
        else:
            before += inlining.inline(columns.permuted, [given], [new], eqn)
        eqn = eqn.replace(invars=values[:OUT], outvars=values[OUT:])
        made[position] = [*before, eqn, *after]
    return [new for position in range(len(body.eqns)) for new in made[position]]


def _constrained(body: Body, var: Any) -> Any:
    """Return a value, or what a constraint makes of it if nothing else reads it."""
    while (place := body.uses.only_reader(var)) is not None:
        eqn = body.eqns[place]
        if eqn.primitive.name != "sharding_constraint":
            break
        (var,) = eqn.outvars
    return var


class _Columns:
    """The columns of one matmul, as they are and as they are permuted.

    Attributes:
        weight: which value of the matmul is permuted: 0, 1: an operand, 2: the result.
    """

    def __init__(self, mesh: Mesh, edit: InterleaveColumns):
        self._mesh, self._edit = mesh, edit
        self._devices = math.prod(mesh.shape[a] for a in edit.axes)
        sides = [side for side, dim in enumerate(edit.dims) if dim is not None]
        if len(sides) != 2 or edit.parted not in sides:
            raise misfit(edit, "it names no dim that two values of the matmul have")
        (self.weight,) = (side for side in sides if side != edit.parted)

    def dim(self, side: int) -> int:
        """Return the dim of a value that has the columns."""
        dim = self._edit.dims[side]
        assert dim is not None
        return dim

    def checked(self, parts: Sequence[Part]) -> Sequence[Part]:
        """Return the parts of the matmul if they are those of the edit."""
        if sections_of(parts) != self._edit.sections:
            raise misfit(self._edit, f"the matmul's parts have {sections_of(parts)} columns")
        if any(part.sharded % self._devices for part in parts):
            raise misfit(self._edit, f"{self._devices} devices do not divide its parts")
        return parts

    def taken(self, part: Part) -> Callable[[Array], list[Array]]:
        """Return the function that takes a part from the fused value."""
        dim, n = self.dim(self._edit.parted), self._devices

        def take(x: Array) -> list[Array]:
            apart = self._at(_divided(x, dim, n), dim)
            own = lax.slice_in_dim(
                apart, part.first // n, (part.first + part.size) // n, 1, dim + 1
            )
            shape = (*x.shape[:dim], part.size, *x.shape[dim + 1 :])
            return [part.view(lax.reshape(own, shape))]

        return take

    def joined(self, parts: Sequence[Part]) -> Callable[..., list[Array]]:
        """Return the function that makes the fused value of its parts."""
        dim, n = self.dim(self._edit.parted), self._devices

        def join(*values: Array) -> list[Array]:
            every = []
            for part, value in zip(parts, values, strict=True):
                every.append(self._at(_divided(part.view(value), dim, n), dim))
            x = lax.concatenate(every, dim + 1)
            return [self._at(_merged(x, dim), dim)]

        return join

    def permuted(self, weight: Array) -> list[Array]:
        """Return a weight whose columns are those of each device, one device after the other."""
        dim, n, sections = self.dim(self.weight), self._devices, self._edit.sections
        weight = self._moved(weight)
        if len({*sections}) == 1:  # nothing but moves: such a weight can be gathered ahead
            apart = _divided(_divided(weight, dim, len(sections)), dim + 1, n)
            return [self._stored(_merged(_merged(_swapped(apart, dim), dim), dim))]
        ends = itertools.accumulate(sections)
        every = [
            _divided(lax.slice_in_dim(weight, end - size, end, 1, dim), dim, n)
            for end, size in zip(ends, sections, strict=True)
        ]
        return [self._stored(_merged(lax.concatenate(every, dim + 1), dim))]

    def restored(self, gradient: Array) -> list[Array]:
        """Return the gradient of a weight from that of the permuted one."""
        dim, n, sections = self.dim(self.weight), self._devices, self._edit.sections
        apart = _divided(self._moved(self._stored(gradient)), dim, n)
        if len({*sections}) == 1:
            apart = _divided(apart, dim + 1, len(sections))
            return [self._stored(_merged(_merged(_swapped(apart, dim), dim), dim))]
        ends = itertools.accumulate(size // n for size in sections)
        every = [
            _merged(lax.slice_in_dim(apart, end - size // n, end, 1, dim + 1), dim)
            for end, size in zip(ends, sections, strict=True)
        ]
        return [self._stored(lax.concatenate(every, dim))]

    def _at(self, x: Array, dim: int) -> Array:
        """Constrain the dim of the devices."""
        spec: list[Any] = [PartitionSpec.UNCONSTRAINED] * x.ndim
        spec[dim] = self._edit.axes
        return self._constrained(x, spec)

    def _stored(self, weight: Array) -> Array:
        """Constrain a weight as it is stored."""
        return self._constrained(weight, dims_of(self._edit.spec))

    def _moved(self, weight: Array) -> Array:
        """Move the axes of the columns to another dim, so that a device has all of them."""
        dim, spec = self.dim(self.weight), list(self._edit.spec)
        axes, spec[dim] = spec[dim], ()
        for other in sorted(range(weight.ndim), key=lambda d: -weight.shape[d]):
            moved = [*spec[:other], (*spec[other], *axes), *spec[other + 1 :]]
            if other != dim and is_even(weight.shape, tuple(moved), self._mesh):
                return self._constrained(weight, dims_of(tuple(moved)))
        return weight

    def _constrained(self, x: Array, spec: Sequence[Any]) -> Array:
        return lax.with_sharding_constraint(x, NamedSharding(self._mesh, PartitionSpec(*spec)))


def _divided(x: Array, dim: int, parts: int) -> Array:
    """Divide one dim into a dim of this size and the rest."""
    shape = (*x.shape[:dim], parts, x.shape[dim] // parts, *x.shape[dim + 1 :])
    return lax.reshape(x, shape)


def _merged(x: Array, dim: int) -> Array:
    """Make one dim of a dim and the next."""
    size = x.shape[dim] * x.shape[dim + 1]
    return lax.reshape(x, (*x.shape[:dim], size, *x.shape[dim + 2 :]))


def _swapped(x: Array, dim: int) -> Array:
    """Exchange one dim and the next."""
    order = [*range(x.ndim)]
    order[dim : dim + 2] = dim + 1, dim
    return lax.transpose(x, order)
