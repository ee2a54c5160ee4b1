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
from dataclasses import dataclass, replace
from typing import Any

from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxoverlap._jax import compat, inlining
from jaxoverlap.passes.analysis.jaxprs import Body, Dot, bodies, map_bodies
from jaxoverlap.passes.analysis.mesh import explicit_axes
from jaxoverlap.passes.analysis.partitioned import Shardings
from jaxoverlap.passes.edited import EditedStep, check_named, check_sites, misfit
from jaxoverlap.passes.evaluated import Evaluated, Proposal
from jaxoverlap.passes.rewriting.pin_results import dims_of, is_even
from jaxoverlap.plan.edits import InterleaveColumns

_LHS, _RHS, _OUT = range(3)
_View = Callable[[Array], Array]


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
    specs = shardings[:3]
    sources = (shardings.lhs_sources, shardings.rhs_sources, shardings.out_sinks)
    for dims in _shared_dims(dot.eqn):
        sides = [side for side, dim in enumerate(dims) if dim is not None]
        for side, other in itertools.permutations(sides):
            spec, weight = specs[side], next(iter(sources[other]), None) or specs[other]
            if weight is None:
                continue
            axes = weight[dims[other]] or (spec[dims[side]] if spec is not None else ())
            devices = math.prod(mesh.shape[a] for a in axes)
            if devices == 1:
                continue
            parts = _parts(body, dot, side, dims[side])
            if not parts or not all(part.sharded % devices == 0 for part in parts):
                continue
            others = tuple(
                axes if dim == dims[other] else tuple(a for a in on if a not in axes)
                for dim, on in enumerate(weight)
            )
            var = (*dot.eqn.invars, *dot.eqn.outvars)[other]
            if is_even(var.aval.shape, others, mesh):
                yield InterleaveColumns(
                    site=dot.index,
                    dims=dims,
                    parted=side,
                    sections=_sections(parts),
                    axes=axes,
                    spec=others,
                )
                return


def _shared_dims(eqn: Any) -> Iterator[tuple[int | None, int | None, int | None]]:
    """Yield the dims that two of a matmul's operands and result have, but for batch dims."""
    (lhs, rhs), (lhs_batch, rhs_batch) = eqn.params["dimension_numbers"]
    yield from ((one, other, None) for one, other in zip(lhs, rhs, strict=True))
    out = len(lhs_batch)
    for side, contracted, batch in ((_LHS, lhs, lhs_batch), (_RHS, rhs, rhs_batch)):
        for dim in range(eqn.invars[side].aval.ndim):
            if dim not in contracted and dim not in batch:
                yield (dim, None, out) if side == _LHS else (None, dim, out)
                out += 1


# -- the parts of a value -------------------------------------------------------------------------


@dataclass(frozen=True)
class _Part:
    """A value that has some columns of a fused one.

    Attributes:
        first, size: its columns.
        var: the value.
        sharded: the size of its dim that devices share.
        view: makes the value from its columns, or the columns from the value.
        position: the equation that takes it from the fused value; None if that is made of it.
    """

    first: int
    size: int
    var: Any
    sharded: int
    view: _View
    position: int | None = None


@dataclass(frozen=True)
class _Divided:
    """A view of a fused value.

    Attributes:
        var: the view.
        dim: its dim that is divided into parts.
        unit: the columns that one index of the dim has.
        inner: the dim that has these; None if an index is a column.
        views: the steps between columns and a part, given the part's indices along the dim.
    """

    var: Any
    dim: int
    unit: int = 1
    inner: int | None = None
    views: tuple[Callable[[Array, int], Array], ...] = ()

    def part(self, first: int, count: int, var: Any, position: int | None = None) -> _Part:
        """Return a part with some indices along the dim."""

        def view(x: Array) -> Array:
            for one in self.views:
                x = one(x, count)
            return x

        alone = count == 1 and self.inner is not None
        sharded = self.var.aval.shape[self.inner] if alone else count
        return _Part(first * self.unit, count * self.unit, var, sharded, view, position)


def _parts(body: Body, dot: Dot, side: int, dim: int) -> list[_Part]:
    """Return the parts of an operand or result along one dim, in order; none if it has none."""
    if side == _OUT:
        var = dot.eqn.outvars[0]
        found = _taken(body, _Divided(var, dim))
    else:
        var = dot.eqn.invars[side]
        found = None if compat.is_literal(var) else _joined(body, _Divided(var, dim))
    parts = sorted(found or (), key=lambda part: part.first)
    ends = [0, *(part.first + part.size for part in parts)]
    tiles = ends[-1] == var.aval.shape[dim] if parts else False
    tiles = tiles and all(p.first == end for p, end in zip(parts, ends, strict=False))
    return parts if tiles and len(parts) > 1 else []


def _sections(parts: Sequence[_Part]) -> tuple[int, ...]:
    return tuple(part.size for part in parts)


def _taken(body: Body, fused: _Divided) -> list[_Part] | None:
    """Return the parts that all readers of a value take of it; None if one takes another."""
    parts: list[_Part] = []
    for position in body.uses.readers(fused.var):
        eqn = None if position is None else body.eqns[position]
        found = None if eqn is None else _taken_by(body, eqn, position, fused)
        if found is None:
            return None
        parts += found
    return parts


def _taken_by(body: Body, eqn: Any, position: int | None, fused: _Divided) -> list[_Part] | None:
    name, dim, shape = eqn.primitive.name, fused.dim, fused.var.aval.shape
    if name == "sharding_constraint":
        return _taken(body, replace(fused, var=eqn.outvars[0]))
    if name == "transpose":
        order = eqn.params["permutation"]
        view = lambda x, _: lax.transpose(x, order)  # noqa: E731
        inner = None if fused.inner is None else order.index(fused.inner)
        made = _Divided(eqn.outvars[0], order.index(dim), fused.unit, inner, (*fused.views, view))
        return _taken(body, made)
    if name == "reshape":
        split = _split(shape, eqn.outvars[0].aval.shape, dim) if fused.unit == 1 else None
        if split is None:
            return None
        sizes = eqn.outvars[0].aval.shape
        view = lambda x, count: lax.reshape(x, (*sizes[:dim], count, *sizes[dim + 1 :]))  # noqa: E731
        return _taken(body, _Divided(eqn.outvars[0], dim, split, dim + 1, (*fused.views, view)))
    if name == "split" and eqn.params["axis"] == dim:
        firsts = itertools.accumulate((0, *eqn.params["sizes"]))
        sizes = zip(firsts, eqn.params["sizes"], eqn.outvars, strict=False)
        return [fused.part(int(first), int(n), var, position) for first, n, var in sizes]
    if name == "unstack" and eqn.params["axis"] == dim:
        alone = lambda x, _: lax.squeeze(x, (dim,))  # noqa: E731
        fused = replace(fused, views=(*fused.views, alone))
        return [fused.part(n, 1, var, position) for n, var in enumerate(eqn.outvars)]
    if name == "slice" and eqn.params["strides"] in (None, (1,) * len(shape)):
        out, first = eqn.outvars[0].aval.shape, eqn.params["start_indices"][dim]
        if all(n == size for d, (n, size) in enumerate(zip(out, shape, strict=True)) if d != dim):
            return [fused.part(first, out[dim], eqn.outvars[0], position)]
    return None


def _joined(body: Body, fused: _Divided) -> list[_Part] | None:
    """Return the parts that a value is made of; None if it is not made of parts."""
    eqn, dim = body.uses.maker(fused.var), fused.dim
    if eqn is None:
        return None
    name, operand = eqn.primitive.name, eqn.invars[0]
    if name == "sharding_constraint":
        return _joined(body, replace(fused, var=operand))
    if name in ("add_any", "add"):
        both = [_joined(body, replace(fused, var=v)) for v in compat.variables(eqn.invars)]
        known = [parts for parts in both if parts is not None]
        return [p for parts in known for p in parts] if len(known) == 2 else None
    if name == "transpose":
        order = eqn.params["permutation"]
        view = lambda x, _: lax.transpose(x, order)  # noqa: E731
        inner = None if fused.inner is None else order[fused.inner]
        made = _Divided(operand, order[dim], fused.unit, inner, (view, *fused.views))
        return _joined(body, made)
    if name == "reshape" and fused.unit == 1 and not compat.is_literal(operand):
        whole = fused.var.aval.shape
        unit = _split(whole, operand.aval.shape, dim)
        if unit is None:
            return None
        sizes = lambda count: (*whole[:dim], count * unit, *whole[dim + 1 :])  # noqa: E731
        view = lambda x, count: lax.reshape(x, sizes(count))  # noqa: E731
        return _joined(body, _Divided(operand, dim, unit, dim + 1, (view, *fused.views)))
    if name == "concatenate" and eqn.params["dimension"] == dim:
        counts = [v.aval.shape[dim] for v in eqn.invars]
        firsts = itertools.accumulate((0, *counts))
        every = zip(firsts, counts, eqn.invars, strict=False)
        return [fused.part(first, count, var) for first, count, var in every]
    if name == "stack" and eqn.params["axis"] == dim:
        alone = lambda x, _: lax.expand_dims(x, (dim,))  # noqa: E731
        fused = replace(fused, views=(alone, *fused.views))
        return [fused.part(n, 1, var) for n, var in enumerate(eqn.invars)]
    if name == "pad" and compat.is_literal(eqn.invars[1]) and eqn.invars[1].val == 0:
        config = eqn.params["padding_config"]
        if all(not any(pads) for d, pads in enumerate(config) if d != dim) and not config[dim][2]:
            return [fused.part(int(config[dim][0]), operand.aval.shape[dim], operand)]
    return None


def _split(whole: Sequence[int], parts: Sequence[int], dim: int) -> int | None:
    """Return the columns that an index has where a reshape splits one dim; None for another."""
    behind = len(whole) - dim - 1
    inner = parts[dim + 1 : len(parts) - behind]
    same = (*parts[:dim], *parts[len(parts) - behind :]) == (*whole[:dim], *whole[dim + 1 :])
    if not same or not inner or parts[dim] * math.prod(inner) != whole[dim]:
        return None
    return math.prod(inner)


# -- the rewriting --------------------------------------------------------------------------------


def _rewritten(
    body: Body, edits: Mapping[int, tuple[Dot, InterleaveColumns]], mesh: Mesh
) -> list[Any]:
    """Return the equations of a body, with the columns of some matmuls permuted."""
    made = {position: [eqn] for position, eqn in enumerate(body.eqns)}
    for position, (dot, edit) in edits.items():
        columns, eqn = _Columns(mesh, edit), dot.eqn
        parts = columns.checked(_parts(body, dot, edit.parted, columns.dim(edit.parted)))
        before, after, values = list[Any](), list[Any](), [*eqn.invars, *eqn.outvars]
        if edit.parted == _OUT:
            source = _constrained(body, values[_OUT])
            for place in {part.position for part in parts}:
                like = body.eqns[place]
                made[place] = [
                    new
                    for part in parts
                    if part.position == place
                    for new in inlining.inline(columns.taken(part), [source], [part.var], like)
                ]
        else:
            values[edit.parted] = compat.like_var(values[edit.parted])
            operands = [part.var for part in parts]
            before += inlining.inline(columns.joined(parts), operands, [values[edit.parted]], eqn)
        given = values[columns.weight]
        values[columns.weight] = new = compat.like_var(given)
        if columns.weight == _OUT:
            after += inlining.inline(columns.restored, [new], [given], eqn)
        else:
            before += inlining.inline(columns.permuted, [given], [new], eqn)
        eqn = eqn.replace(invars=values[:_OUT], outvars=values[_OUT:])
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

    def checked(self, parts: Sequence[_Part]) -> Sequence[_Part]:
        """Return the parts of the matmul if they are those of the edit."""
        if _sections(parts) != self._edit.sections:
            raise misfit(self._edit, f"the matmul's parts have {_sections(parts)} columns")
        if any(part.sharded % self._devices for part in parts):
            raise misfit(self._edit, f"{self._devices} devices do not divide its parts")
        return parts

    def taken(self, part: _Part) -> Callable[[Array], list[Array]]:
        """Return the function that takes a part from the fused value."""
        dim, n = self.dim(self._edit.parted), self._devices

        def take(x: Array) -> list[Array]:
            apart = self._apart(x, dim)
            own = lax.slice_in_dim(
                apart, part.first // n, (part.first + part.size) // n, 1, dim + 1
            )
            shape = (*x.shape[:dim], part.size, *x.shape[dim + 1 :])
            return [part.view(lax.reshape(own, shape))]

        return take

    def joined(self, parts: Sequence[_Part]) -> Callable[..., list[Array]]:
        """Return the function that makes the fused value of its parts."""
        dim, n = self.dim(self._edit.parted), self._devices

        def join(*values: Array) -> list[Array]:
            every = []
            for part, value in zip(parts, values, strict=True):
                x = part.view(value)
                every.append(self._at(_divided(x, dim, n), dim))
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

    def _apart(self, x: Array, dim: int) -> Array:
        """Return a fused value with a dim of devices before that of the columns of each."""
        return self._at(_divided(x, dim, self._devices), dim)

    def _at(self, x: Array, dim: int) -> Array:
        """Constrain the dim of the devices."""
        spec = [PartitionSpec.UNCONSTRAINED] * x.ndim
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
