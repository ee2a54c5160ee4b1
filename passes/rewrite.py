"""Put rings in the place of matmuls.

    q = dot_general x wq ;  k = dot_general x wk

->  q, k = shard_map[manual_axes={model} in_specs=... out_specs=...] x wq wk
                                                            # whose body is one ring for both

A body keeps its operands and results, so the jaxprs around it (scan, remat, ...) stay. Inside it
equations may change places, as far as what they read allows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxoverlap import _compat
from jaxoverlap.passes import chunks
from jaxoverlap.passes.all_gather_matmul import Reader, all_gather_matmul
from jaxoverlap.passes.chunks import Cut
from jaxoverlap.passes.decide import PASSES, source_of
from jaxoverlap.passes.errors import RewriteError
from jaxoverlap.passes.jaxprs import Body, map_bodies
from jaxoverlap.passes.layout import Layout
from jaxoverlap.passes.matmul_all_reduce import matmul_all_reduce
from jaxoverlap.passes.matmul_reduce_scatter import Term, matmul_reduce_scatter
from jaxoverlap.passes.rings import Hoist, Member, Ring, Sharing, Value
from jaxoverlap.passes.sites import OPERANDS, Side, Spec


def rewrite(jaxpr: Any, sharings: Mapping[int, Sharing], mesh: Mesh) -> Any:
    """A jaxpr with rings in the place of matmuls, as decided for each body (by its number).

    Raises:
        RewriteError: if that fails for one, naming the equation and its source line.
    """

    def visit(body: Body) -> list[Any] | None:
        sharing = sharings.get(body.index)
        if sharing is None or not (sharing.rings or sharing.readers):
            return None
        return _Rewritten(body, sharing, mesh).eqns()

    return map_bodies(jaxpr, visit)


class _Rewritten:
    """One body, written anew: it emits each gather when the first that reads it comes."""

    def __init__(self, body: Body, sharing: Sharing, mesh: Mesh):
        self.body, self.sharing, self.mesh = body, sharing, mesh
        self.made: dict[Value, Any] = {}  # the variables of gathered values
        self.new: list[Any] = []

    def eqns(self) -> list[Any]:
        order = self.sharing.order
        rings = {order.first(ring.place): ring for ring in self.sharing.rings}
        readers = {member.dot.place: member for member in self.sharing.readers}
        for place in order.places():
            if place in rings:
                self.ring(rings[place])
            elif place in readers:
                self.reader(readers[place])
            else:
                self.new.append(self.body.eqns[place])
        return self.new

    def atom(self, value: Value, like: Any) -> Any:
        """The variable that holds a value; its gather is emitted if it is the first to ask."""
        if value in self.made:
            return self.made[value]
        hoist = self.sharing.hoisted.get(value)
        if hoist is None:
            return value.var
        before = self.atom(hoist.before, like)
        self.made[value] = _compat.new_var(value.var.aval)
        self.new += _compat.inline(_gather(hoist, self.mesh), [before], [self.made[value]], like)
        return self.made[value]

    def reader(self, member: Member) -> None:
        eqn = member.dot.eqn
        atoms = [self.atom(value, eqn) for value in (member.lhs, member.rhs)]
        self.new.append(eqn.replace(invars=atoms))

    def ring(self, ring: Ring) -> None:
        eqn = ring.members[0].dot.eqn
        try:
            operands = [self.atom(value, eqn) for value, _ in _operands(ring)]
            if ring.total is not None:
                results = [ring.total]
            else:
                results = [m.dot.eqn.outvars[0] for m in ring.members]
            if ring.keep:
                self.made[ring.whole] = _compat.new_var(ring.shard.var.aval)
                results.append(self.made[ring.whole])
            self.new += _compat.inline(ringed(ring, self.mesh), operands, results, eqn)
        except Exception as error:
            raise _failed(ring, error) from error


def _failed(ring: Ring, error: Exception) -> RewriteError:
    lines = tuple(dict.fromkeys(source_of(m.dot) for m in ring.members))
    numbers = ", ".join(str(m.dot.index) for m in ring.members)
    return RewriteError(
        f"could not rewrite matmul {numbers} ({ring.first.matmul.einsum}, "
        f"{ring.members[0].dot.eqn}) written at {', '.join(lines)}: {type(error).__name__}: "
        f"{error}. To leave it alone, pass skip={lines!r} to overlap(); to run the step as it is, "
        "on_error='plain'"
    )


def _gather(hoist: Hoist, mesh: Mesh) -> Callable[[Array], Array]:
    """A gather on an axis of its own: XLA does it whole, and once for all that read it."""
    sharding = NamedSharding(mesh, _partition_spec(hoist.after.spec))
    gather = functools.partial(lax.with_sharding_constraint, shardings=sharding)
    return jax.named_call(gather, name=f"gather_over_{hoist.axis}")


def scope(ring: Ring) -> str:
    """The name that a ring's operations carry in profiles and in the scheduled module."""
    return f"{PASSES[ring.kind]}.{ring.site}"


def ringed(ring: Ring, mesh: Mesh) -> Callable[..., Any]:
    """The function that takes the place of a ring's matmuls."""
    gathers = ring.kind == "all_gather"
    layouts = [_layout(m) for m in ring.members]
    out_specs = [layout.out for layout in layouts] if gathers else [ring.first.out]
    if ring.keep:
        dim, axis, spec = ring.dim, ring.first.ring.axis, ring.first.spec(ring.side)
        whole = tuple(a for a in spec[dim] if a != axis)
        out_specs.append((*spec[:dim], whole, *spec[dim + 1 :]))
    mapped = jax.shard_map(
        functools.partial(_gathering if gathers else _summing, ring),
        mesh=mesh,
        in_specs=tuple(_partition_spec(spec) for _, spec in _operands(ring)),
        out_specs=[_partition_spec(spec) for spec in out_specs],
        axis_names=set(ring.first.manual),
        check_vma=False,  # rings break the replication that it would try to infer
    )
    return jax.named_call(mapped, name=scope(ring))


def _layout(member: Member) -> Layout:
    assert member.layout is not None
    return member.layout


def _operands(ring: Ring) -> list[tuple[Value, Spec]]:
    """What a ring reads, with the specs: the gathered value once, then each matmul's others."""
    if ring.kind != "all_gather":
        pairs: list[tuple[Member, Side]] = [(m, s) for m in ring.members for s in OPERANDS]
        return [(m.value(side), _layout(m).spec(side)) for m, side in pairs]
    others: list[tuple[Member, Side]] = [(m, _other(_layout(m))) for m in ring.members]
    shard = (ring.shard, ring.first.spec(ring.side))
    return [shard, *((m.value(side), _layout(m).spec(side)) for m, side in others)]


def _other(layout: Layout) -> Side:
    """The operand that is not gathered."""
    assert layout.ring.motion is not None
    return "rhs" if layout.ring.motion.side == "lhs" else "lhs"


def _gathering(ring: Ring, shard: Array, *others: Array) -> list[Array]:
    """The body of a ring that gathers."""
    layouts = [_layout(m) for m in ring.members]
    axis = ring.first.ring.axis
    shard = _gather_others(shard, ring.side, ring.first)
    readers = []
    for member, layout, other in zip(ring.members, layouts, others, strict=True):
        side = _other(layout)
        readers.append(
            Reader(
                _gather_others(other, side, layout),
                layout.matmul.einsum,
                "lhs" if side == "rhs" else "rhs",
                _local_dot(member),
                member.dot.eqn.outvars[0].aval.dtype,
                other_outer=layout.outer(side, layout.letter, axis),
                out_outer=layout.outer("out", layout.letter, axis),
            )
        )
    results, whole = all_gather_matmul(
        shard,
        readers,
        dim=ring.dim,
        axis=axis,
        axis_size=ring.first.ring.axis_size,
        outer=ring.first.outer(ring.side, ring.first.letter, axis),
        keep=ring.keep,
    )
    reduced = [_reduce_others(r, layout) for r, layout in zip(results, layouts, strict=True)]
    return reduced if whole is None else [*reduced, whole]


def _summing(ring: Ring, *operands: Array) -> list[Array]:
    """The body of a ring whose partial sums travel."""
    axis, pairs = ring.first.ring.axis, zip(operands[::2], operands[1::2], strict=True)
    terms = []
    for member, (lhs, rhs) in zip(ring.members, pairs, strict=True):
        layout = _layout(member)
        terms.append(
            Term(
                _gather_others(lhs, "lhs", layout),
                _gather_others(rhs, "rhs", layout),
                layout.matmul.einsum,
                _local_dot(member),
                lhs_outer=layout.outer("lhs", layout.letter, axis),
                rhs_outer=layout.outer("rhs", layout.letter, axis),
            )
        )
    scatter = matmul_reduce_scatter if ring.kind == "reduce_scatter" else matmul_all_reduce
    total = scatter(
        terms,
        dim=ring.dim,
        axis=axis,
        axis_size=ring.first.ring.axis_size,
        dtype=ring.members[0].dot.eqn.outvars[0].aval.dtype,
        outer=ring.first.outer("out", ring.first.letter, axis),
    )
    return [_reduce_others(total, ring.first)]


def _local_dot(member: Member) -> Callable[..., Array]:
    params = member.dot.eqn.params

    def dot(lhs: Array, rhs: Array, dtype: Any) -> Array:
        return lax.dot_general(
            lhs,
            rhs,
            dimension_numbers=params["dimension_numbers"],
            precision=params["precision"],
            preferred_element_type=dtype,
        )

    return dot


def _gather_others(operand: Array, side: Side, layout: Layout) -> Array:
    """The gathers of one operand on other axes, whole and before the ring."""
    for split in layout.others:
        motion = split.motion
        if motion is not None and motion.kind == "all_gather" and motion.side == side:
            dim = layout.matmul.einsum.side(side).index(motion.letter)
            cut = Cut(split.axis_size, outer=layout.outer(side, motion.letter, split.axis))
            operand = chunks.gather(operand, dim, split.axis, cut)
    return operand


def _reduce_others(out: Array, layout: Layout) -> Array:
    """The sums on other axes, whole and after the ring."""
    for split in layout.others:
        motion = split.motion
        if motion is not None and motion.kind == "reduce_scatter":
            dim = layout.matmul.einsum.out.index(motion.letter)
            cut = Cut(split.axis_size, outer=layout.outer("out", motion.letter, split.axis))
            out = chunks.scatter(out, dim, split.axis, cut)
        elif motion is not None and motion.kind == "all_reduce":
            out = lax.psum(out, split.axis)
    return out


def _partition_spec(spec: Sequence[tuple[str, ...]]) -> PartitionSpec:
    return PartitionSpec(*(axes or None for axes in spec))
