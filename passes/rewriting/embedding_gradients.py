"""Gradients of embedding lookups, scattered as they are added up.

    dx: [b@data, s@model, d] ;  dw: [v@model, d@data] = scatter-add zeros ids dx

->  local = scatter-add zeros ids dx                    # each device its own tokens: [v, d]
    dw = psum_scatter over model along v, over data along d

The partitioner all-reduces such a full sum over every axis that shards the tokens, and then slices
each device's part out of it. Scattered, it moves half of that, and over the fastest link first,
while it is large: the slow one then sees a part only.

It is no matmul and has no ring; it hides behind the kernels that the scheduler overlaps with it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh

from jaxoverlap._jax import compat, inlining
from jaxoverlap._util.text import human_bytes
from jaxoverlap.passes.analysis.einsum import Spec
from jaxoverlap.passes.analysis.jaxprs import Body, bodies
from jaxoverlap.passes.analysis.mesh import partition_spec
from jaxoverlap.passes.edited import EditedStep, misfit
from jaxoverlap.passes.planning.entries import line_of
from jaxoverlap.passes.rings import chunks
from jaxoverlap.passes.rings.chunks import Chunking
from jaxoverlap.plan.edits import ScatterLookup


class Scattered(NamedTuple):
    """The gradient of an embedding lookup, scattered where XLA would all-reduce it.

    Attributes:
        source: "file:line" of the lookup.
        axes: the mesh axes that it is scattered over, in order.
        bytes_moved: bytes that each device sends in one run.
    """

    source: str
    axes: tuple[str, ...]
    bytes_moved: int

    def __str__(self) -> str:
        over, sent = " and ".join(self.axes), human_bytes(self.bytes_moved)
        return f"The gradient of the lookup at {self.source} is scattered over {over}: {sent}."


@dataclass(frozen=True)
class Lookup:
    """The gradient of one lookup.

    Attributes:
        eqn: its scatter-add.
        number: which of the step's scatter-adds that is.
        source: "file:line" of the lookup.
        updates, out: the shardings of the tokens' gradients and of the result.
        scatters: (dim of the result, mesh axis, the dim's chunking), in order.
        sums: axes over which the sum is all-reduced.
    """

    eqn: Any
    number: int
    source: str
    updates: Spec
    out: Spec
    scatters: tuple[tuple[int, str, Chunking], ...]
    sums: tuple[str, ...]

    @property
    def edit(self) -> ScatterLookup:
        """The edit that scatters it."""
        scatters = tuple((dim, axis, cut.outer) for dim, axis, cut in self.scatters)
        return ScatterLookup(
            number=self.number,
            updates=self.updates,
            out=self.out,
            scatters=scatters,
            sums=self.sums,
        )

    def scattered(self, axis_sizes: Mapping[str, int]) -> Scattered:
        """Return what is sent, and from where."""
        held = math.prod(axis_sizes[a] for axes in self.updates[-1:] for a in axes)
        aval = self.eqn.outvars[0].aval
        local, sent = aval.size * aval.dtype.itemsize // held, 0
        for _, axis, _ in self.scatters:
            local //= axis_sizes[axis]
            sent += local * (axis_sizes[axis] - 1)
        axes = tuple(axis for _, axis, _ in self.scatters)
        return Scattered(source=self.source, axes=axes, bytes_moved=sent)


def run(step: EditedStep, edits: Sequence[ScatterLookup]) -> EditedStep:
    """Scatter the gradients that edits name; `EditedStep.facts` has a tuple of `Scattered`."""
    every, found = list(_scatter_adds(bodies(step.jaxpr))), []
    for edit in edits:
        if (lookup := _lookup_of(edit, every, step.mesh)) is None:
            raise misfit(edit, "no gradient of a lookup is there")
        found.append(lookup)
    facts = tuple(lookup.scattered(step.mesh.shape) for lookup in found)
    return step.to(scatter(step.jaxpr, found, step.mesh), {ScatterLookup: facts})


def lookups(
    every: Sequence[Body],
    shardings: Mapping[Any, Any],
    mesh: Mesh,
    costs: Mapping[str, float],
) -> list[Lookup]:
    """List the lookups of a step whose gradients are sums over devices, to be scattered.

    Args:
        every: the step's bodies.
        shardings: from `partitioned`, by (body, index).
        mesh: its mesh.
        costs: the cost of a byte along each axis.
    """
    known = []
    for number, (body, position, eqn) in enumerate(_scatter_adds(every)):
        read = shardings.get((body.index, position))
        if read is None or None in read[1:3] or not _starts_from_zeros(body, eqn):
            continue
        if compat.stated_axes(eqn):  # inside explicit_axes: its types say how it lies
            continue
        if _adds_rows(eqn) and (moved := _moved(eqn, read.rhs, read.out, mesh, costs)):
            source = line_of(eqn, body.around)
            known.append(Lookup(eqn, number, source, read.rhs, read.out, *moved))
    return known


def _lookup_of(
    edit: ScatterLookup, every: Sequence[tuple[Body, int, Any]], mesh: Mesh
) -> Lookup | None:
    """Find the lookup that an edit names; None if no gradient of one is there."""
    if not 0 <= edit.number < len(every):
        return None
    body, _, eqn = every[edit.number]
    if not _starts_from_zeros(body, eqn) or not _adds_rows(eqn):
        return None
    scatters = tuple(
        (dim, axis, Chunking(mesh.shape[axis], outer=outer)) for dim, axis, outer in edit.scatters
    )
    source = line_of(eqn, body.around)
    return Lookup(eqn, edit.number, source, edit.updates, edit.out, scatters, edit.sums)


def _scatter_adds(every: Sequence[Body]) -> Iterator[tuple[Body, int, Any]]:
    """Yield the scatter-adds of a step, each with its body and its index there."""
    for body in every:
        for position, eqn in enumerate(body.eqns):
            if eqn.primitive.name == "scatter-add":
                yield body, position, eqn


def _starts_from_zeros(body: Body, eqn: Any) -> bool:
    maker = body.uses.maker(eqn.invars[0])
    return maker is not None and _is_zeros(maker)


def _is_zeros(eqn: Any) -> bool:
    if eqn.primitive.name != "broadcast_in_dim" or not compat.is_literal(eqn.invars[0]):
        return False
    # The tangents of integers are float0, a dtype of no numbers, which compares with none. (By jnp:
    # to numpy bfloat16 is no number either.)
    value = np.asarray(eqn.invars[0].val)
    return jnp.issubdtype(value.dtype, np.number) and value == 0


def _adds_rows(eqn: Any) -> bool:
    """Return whether a scatter-add adds one full-width update per token to a table [v, d]."""
    dims = eqn.params["dimension_numbers"]
    updates, out = eqn.invars[2].aval, eqn.outvars[0].aval
    return (
        out.ndim == 2
        and dims.update_window_dims == (updates.ndim - 1,)
        and dims.inserted_window_dims == dims.scatter_dims_to_operand_dims == (0,)
        and not dims.operand_batching_dims
        and updates.shape[-1] == out.shape[-1]
    )


def _moved(
    eqn: Any, updates: Spec, out: Spec, mesh: Mesh, costs: Mapping[str, float]
) -> tuple[tuple[tuple[int, str, Chunking], ...], tuple[str, ...]] | None:
    """Plan the scatters and sums of one gradient; None if its shardings do not allow any."""
    summed = {a for dim in updates[:-1] for a in dim if mesh.shape[a] > 1}
    moved = [(dim, a) for dim, axes in enumerate(out) for a in axes if a in summed]
    if not moved or updates[-1] != tuple(a for a in out[-1] if a not in summed):
        return None
    if any(a not in summed for a in out[0]) or (updates[-1] and len(out[-1]) > len(updates[-1])):
        return None
    shape = eqn.outvars[0].aval.shape
    if any(shape[d] % math.prod(mesh.shape[a] for a in out[d]) for d in range(2)):
        return None
    # The fastest link comes first; axes that are major on a dim but scattered later make `outer`.
    order = sorted(moved, key=lambda move: costs.get(move[1], 1.0))
    scatters = []
    for i, (dim, axis) in enumerate(order):
        later = {a for d, a in order[i + 1 :] if d == dim}
        major = out[dim][: out[dim].index(axis)]
        outer = math.prod(mesh.shape[a] for a in major if a in later)
        scatters.append((dim, axis, Chunking(mesh.shape[axis], outer=outer)))
    sums = tuple(a for a in mesh.axis_names if a in summed and a not in {a for _, a in moved})
    return tuple(scatters), sums


def scatter(jaxpr: Any, known: Sequence[Lookup], mesh: Mesh) -> Any:
    """Scatter the gradients of a jaxpr's lookups."""
    by_result = {lookup.eqn.outvars[0]: lookup for lookup in known}

    def visit(jaxpr: Any) -> Any:
        eqns: list[Any] = []
        for given in jaxpr.eqns:
            eqn = compat.map_jaxprs(visit, given)
            lookup = by_result.get(eqn.outvars[0]) if eqn.outvars else None
            if lookup is None:
                eqns.append(eqn)
            else:
                fn = _scattered(lookup, mesh)
                eqns += inlining.inline(fn, eqn.invars[1:], eqn.outvars, eqn)
        return jaxpr.replace(eqns=eqns)

    return visit(jaxpr) if known else jaxpr


def _scattered(lookup: Lookup, mesh: Mesh) -> Any:
    """Make fn(ids, updates), which sums the updates by their id and scatters the sum as planned."""
    eqn, tokens = lookup.eqn, lookup.updates[:-1]
    rows, out = eqn.outvars[0].aval.shape[0], eqn.outvars[0].aval

    def body(ids: Array, updates: Array) -> list[Array]:
        total = lax.scatter_add(
            chunks.zeros((rows, updates.shape[-1]), out.dtype, updates),
            ids,
            updates,
            eqn.params["dimension_numbers"],
            indices_are_sorted=eqn.params["indices_are_sorted"],
            unique_indices=eqn.params["unique_indices"],
            mode=eqn.params["mode"],
        )
        for dim, axis, cut in lookup.scatters:
            total = chunks.scatter(total, dim, axis, cut)
        return [lax.psum(total, lookup.sums) if lookup.sums else total]

    mapped = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=(partition_spec((*tokens, ())), partition_spec(lookup.updates)),
        out_specs=[partition_spec(lookup.out)],
        check_vma=False,
    )
    return jax.named_call(mapped, name="scattered_lookup")
