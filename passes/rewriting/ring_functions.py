"""Make the function of a ring: what each device does, and the shard_map that replaces matmuls."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import AbstractMesh, Mesh

from jaxoverlap.passes.analysis.einsum import Side, Spec
from jaxoverlap.passes.analysis.mesh import is_cpu, partition_spec
from jaxoverlap.passes.analysis.reshards import End
from jaxoverlap.passes.planning.layout import Layout
from jaxoverlap.passes.planning.ring_plan import Member, Ring, Value
from jaxoverlap.passes.planning.splits import Split
from jaxoverlap.passes.rings import chunks
from jaxoverlap.passes.rings.all_gather_matmul import LocalDot, Reader, wide
from jaxoverlap.passes.rings.by_kind import Along, Dim, operand_ring, result_ring
from jaxoverlap.passes.rings.chunks import Chunking
from jaxoverlap.passes.rings.matmul_reduce_scatter import Term
from jaxoverlap.plan.collectives import RING_PASSES


def scope(ring: Ring) -> str:
    """Return the name that a ring's operations carry in profiles and in the scheduled module."""
    return f"{RING_PASSES[ring.kind]}.{ring.site}"


def ringed(ring: Ring, mesh: Mesh | AbstractMesh, dot: _Dot) -> Callable[..., Any]:
    """Make the function that replaces a ring's matmuls.

    Args:
        ring: the ring.
        mesh: the mesh of its shard_map.
        dot: multiplies chunks, from `dot_on`.
    """
    layouts = [m.ring_layout for m in ring.members]
    out_specs = [layout.out for layout in layouts] if ring.arrives else [ring.first.out]
    if ring.keep:
        shard = Value(None, ring.first.spec(ring.side))
        out_specs.append(shard.moved(ring.first.ring.axis, ring.dim, ring.other_dim).spec)
    mapped = jax.shard_map(
        ring_body(ring, dot),
        mesh=mesh,
        in_specs=tuple(partition_spec(spec) for _, spec in operands_of(ring)),
        out_specs=[partition_spec(spec) for spec in out_specs],
        check_vma=False,  # rings break the replication that it would try to infer
    )

    def fn(*operands: Array) -> list[Array]:
        results = mapped(*operands)
        ends = [m.end for m in ring.members] if ring.total is None else []
        return [end.seen(r) for end, r in zip(ends, results, strict=False)] + results[len(ends) :]

    return fn


def ring_body(ring: Ring, dot: _Dot, *, invarying: bool = False) -> Callable[..., list[Array]]:
    """Make what one device does of a ring, on its parts of what `operands_of` lists.

    Args:
        ring: the ring.
        dot: multiplies chunks, from `dot_on`.
        invarying: whether the type of an all-reduce says that it is alike on all devices.
    """
    if ring.arrives:
        return functools.partial(_arriving, ring, dot)
    return functools.partial(_leaving, ring, dot, invarying)


def likeness(ring: Ring) -> Hashable:
    """Make a key of all that a ring's function depends on but the mesh; equal for equal layers."""

    def written(eqn: Any) -> Hashable:
        return eqn.primitive.name, *sorted(eqn.params.items())

    members = tuple(
        (
            member.layout,
            written(member.dot.eqn),
            member.dot.eqn.outvars[0].aval.dtype,
            tuple(map(written, member.end.views)),
        )
        for member in ring.members
    )
    return ring.keep, ring.variant, ring.total is None, members


def operands_of(ring: Ring) -> list[tuple[Value, Spec]]:
    """List a ring's operands and specs: the gathered value once, then each matmul's others."""
    return [(member.value(side), member.ring_layout.spec(side)) for member, side in ring.reads]


def _arriving(ring: Ring, dot: _Dot, shard: Array, *others: Array) -> list[Array]:
    """Run the body of a ring that moves an operand."""
    layouts = [m.ring_layout for m in ring.members]
    layout, axis = ring.first, ring.first.ring.axis
    shard = _gather_others(shard, ring.side, layout)
    gathered, split = Dim(ring.dim, layout.outer(ring.side, layout.letter, axis)), None
    if ring.kind == "all_to_all":
        assert layout.collective.to is not None and ring.other_dim is not None
        split = Dim(ring.other_dim, layout.outer(ring.side, layout.collective.to, axis))
    readers = [_reader(m, dot, other) for m, other in zip(ring.members, others, strict=True)]
    results = operand_ring(
        ring.kind, shard, readers, _along(ring), gathered=gathered, split=split, keep=ring.keep
    )
    reduced = [_reduce_others(r, layout) for r, layout in zip(results, layouts, strict=False)]
    return reduced + results[len(layouts) :]


def _along(ring: Ring) -> Along:
    return Along(ring.axis, ring.axis_size, ring.variant)


def _reader(member: Member, dot: _Dot, other: Array) -> Reader:
    layout = member.ring_layout
    side, axis = layout.other, layout.ring.axis
    return Reader(
        _gather_others(other, side, layout),
        layout.matmul.einsum,
        "lhs" if side == "rhs" else "rhs",
        _product(member, dot),
        member.dot.eqn.outvars[0].aval.dtype,
        other_outer=layout.outer(side, layout.letter, axis),
        out_outer=layout.outer("out", layout.letter, axis),
    )


def _leaving(ring: Ring, dot: _Dot, invarying: bool, *operands: Array) -> list[Array]:
    """Run the body of a ring that moves a result, or the sum of several."""
    layout, axis = ring.first, ring.first.ring.axis
    pairs = zip(operands[::2], operands[1::2], strict=True)
    terms = [_term(m, dot, lhs, rhs) for m, (lhs, rhs) in zip(ring.members, pairs, strict=True)]
    if ring.written is None:
        terms = _side_by_side(terms, ring.members)
    gathered = None
    if ring.kind == "all_to_all":
        assert ring.other_dim is not None
        gathered = Dim(ring.other_dim, layout.outer("out", layout.collective.letter, axis))
    end = ring.members[0].dot.eqn.outvars[0] if ring.total is None else ring.total
    total = result_ring(
        ring.kind,
        terms,
        _along(ring),
        dtype=end.aval.dtype,
        split=Dim(ring.dim, layout.outer("out", layout.letter, axis)),
        gathered=gathered,
        invarying=invarying,
    )
    return [_reduce_others(total, layout)]


def _term(member: Member, dot: _Dot, lhs: Array, rhs: Array) -> Term:
    layout = member.ring_layout
    return Term(
        _gather_others(lhs, "lhs", layout),
        _gather_others(rhs, "rhs", layout),
        layout.matmul.einsum,
        _product(member, dot),
        lhs_outer=layout.outer("lhs", layout.letter, layout.ring.axis),
        rhs_outer=layout.outer("rhs", layout.letter, layout.ring.axis),
    )


def _shape(term: Term, member: Member) -> tuple[Any, ...]:
    """List the properties that must be alike in matmuls that are multiplied as one."""
    letters = (str(term.einsum), member.dot.eqn.params["precision"])
    uncontracted = [
        (operand.dtype, *(n for c, n in zip(side, operand.shape, strict=True) if c in out))
        for operand, side, out in (
            (term.lhs, term.einsum.lhs, term.einsum.out),
            (term.rhs, term.einsum.rhs, term.einsum.out),
        )
    ]
    others = [term.lhs.shape[term.einsum.lhs.index(c)] for c in _contracted(term)[1:]]
    return (*letters, *map(tuple, uncontracted), *others, term.lhs_outer, term.rhs_outer)


def _contracted(term: Term) -> list[str]:
    return [c for c in term.einsum.lhs if c not in term.einsum.out]


def _side_by_side(terms: list[Term], members: Sequence[Member]) -> list[Term]:
    """Join matmuls whose results are added into one, over all that they contract, if that fits.

    XLA would put all but the last of several matmuls before their hop: one cannot be split so.
    """
    alike = len({_shape(term, m) for term, m in zip(terms, members, strict=True)}) == 1
    if len(terms) == 1 or not alike or not _contracted(terms[0]):  # no dim to join them along
        return terms
    first, letter = terms[0], _contracted(terms[0])[0]
    lhs, rhs = (
        lax.concatenate([getattr(t, side) for t in terms], first.einsum.side(side).index(letter))
        for side in ("lhs", "rhs")
    )
    return [dataclasses.replace(first, lhs=lhs, rhs=rhs)]


def _product(member: Member, dot: _Dot) -> LocalDot:
    """Make the function that multiplies one chunk, with the views between it and what moves."""
    if not member.views:
        return functools.partial(dot, member)
    side, own = member.ring_layout.collective.side, member.dot.eqn.outvars[0].aval.dtype
    seen = End(None, views=member.views).seen

    def product(lhs: Array, rhs: Array, dtype: Any) -> Array:
        lhs, rhs = seen(lhs) if side == "lhs" else lhs, seen(rhs) if side == "rhs" else rhs
        wider = dtype if jnp.finfo(dtype).bits > jnp.finfo(own).bits else own
        result = dot(member, lhs, rhs, wider)
        return (seen(result) if side == "out" else result).astype(dtype)

    return product


_Dot = Callable[..., Array]
"""`dot(member, lhs, rhs, dtype)`: one chunk of a matmul."""


def dot_on(mesh: Mesh) -> _Dot:
    """Make the function that multiplies chunks of matmuls on a mesh's devices."""
    # XLA:CPU lacks some matmuls of narrow operands with a wide result, widens them in others, and
    # in some of chunks' sizes adds up in 16 bits.
    widens = is_cpu(mesh)

    def dot(member: Member, lhs: Array, rhs: Array, dtype: Any) -> Array:
        params = member.dot.eqn.params
        if widens:
            inside = wide(dtype)
            lhs, rhs = (x.astype(inside) if _is_wider(inside, x.dtype) else x for x in (lhs, rhs))
        return lax.dot_general(
            lhs,
            rhs,
            dimension_numbers=params["dimension_numbers"],
            precision=params["precision"],
            preferred_element_type=dtype,
        )

    return dot


def _is_wider(dtype: Any, other: Any) -> bool:
    """Return whether a dtype has more bytes than another, and its values: integers no fractions."""
    keeps = not jnp.issubdtype(dtype, jnp.integer) or jnp.issubdtype(other, jnp.integer)
    return keeps and jnp.dtype(dtype).itemsize > jnp.dtype(other).itemsize


def _gather_others(operand: Array, side: Side, layout: Layout) -> Array:
    """Gather one operand over the other mesh axes before the ring, without chunks."""
    for split in layout.others:
        collective = split.collective
        if collective is not None and collective.kind == "all_gather" and collective.side == side:
            dim = layout.matmul.einsum.side(side).index(collective.letter)
            cut = Chunking(split.axis_size, outer=layout.outer(side, collective.letter, split.axis))
            operand = chunks.gather(operand, dim, split.axis, cut)
    return operand


def _reduce_others(out: Array, layout: Layout) -> Array:
    """Run the result's collectives over the other mesh axes after the ring, without chunks."""
    for split in layout.others:
        collective = split.collective
        if collective is None or collective.side != "out":
            continue
        if collective.kind == "all_reduce":
            out = lax.psum(out, split.axis)
            continue
        dim, cut = _cut(layout, split, collective.letter)
        if collective.kind == "reduce_scatter":
            out = chunks.scatter(out, dim, split.axis, cut)
        else:
            assert collective.to is not None
            wanted, wanted_cut = _cut(layout, split, collective.to)
            out = chunks.exchange(out, dim, cut, wanted, wanted_cut, split.axis)
    return out


def _cut(layout: Layout, split: Split, letter: str) -> tuple[int, Chunking]:
    """Return a dim of the result, and its chunking when it moves along a mesh axis."""
    cut = Chunking(split.axis_size, outer=layout.outer("out", letter, split.axis))
    return layout.matmul.einsum.out.index(letter), cut


def only(spec: Spec, axes: Collection[str]) -> Spec:
    """Keep only some mesh axes of a spec."""
    return tuple(tuple(a for a in dim if a in axes) for dim in spec)
