"""Replace the user's collectives and matmuls in manual bodies by rings.

    x = all_gather x ;  q = dot_general x wq ;  k = dot_general x wk

->  q, k = <the equations of one ring> x wq wk

The axis is manual there already, so there is no shard_map around a ring. Where types say on which
axes a value may differ (`check_vma`), those of the new equations come out as they were: a permute
gives what differs, as gathers and scatters do; only an all-reduce gives what does not, and so ends
in the gather that says so (`to="invarying"`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxoverlap._jax import compat, inlining
from jaxoverlap.passes.analysis.errors import RewriteError, could_not_rewrite
from jaxoverlap.passes.analysis.jaxprs import Body
from jaxoverlap.passes.manual.decide import ManualSharing
from jaxoverlap.passes.manual.find import ManualRing, ManualSite
from jaxoverlap.passes.planning.entries import source_of
from jaxoverlap.passes.rings.all_gather_matmul import LocalDot, Reader
from jaxoverlap.passes.rings.by_kind import Along, Dim, operand_ring, result_ring
from jaxoverlap.passes.rings.matmul_reduce_scatter import Term
from jaxoverlap.plan.collectives import RING_PASSES

Multiply = Callable[..., Array]
"""`multiply(site, lhs, rhs, dtype)`: one chunk of the matmul `site.dot`, in `dtype`."""


def manual_rings(body: Body, sharing: ManualSharing, multiply: Multiply) -> list[Any]:
    """Return the equations of a manual body, with rings as decided.

    Raises:
        RewriteError: if that fails for one, naming its matmuls and their source lines.
    """
    order = sharing.order
    rings = {order.first(ring.collective.position): ring for ring in sharing.rings}
    new: list[Any] = []
    for position in order.positions():
        ring = rings.get(position)
        if ring is None:
            new.append(body.eqns[position])
            continue
        try:
            with compat.in_shard_maps(sharing.manual.maps):
                new += _equations(ring, multiply, checked=sharing.manual.checked)
        except Exception as error:
            raise _failed(ring, error) from error
        new += [body.eqns[again] for again in ring.again]
    return new


def _failed(ring: ManualRing, error: Exception) -> RewriteError:
    dots = [site.dot for site in ring.sites]
    what = f"beside {ring.collective.eqn}"
    return could_not_rewrite([dot.index for dot in dots], what, map(source_of, dots), error)


def _equations(ring: ManualRing, multiply: Multiply, *, checked: bool) -> list[Any]:
    """Make the equations that replace a collective and the matmuls of its ring."""
    moving, eqn = ring.collective.eqn, ring.sites[0].dot.eqn
    if ring.arrives:
        fn = functools.partial(_arriving, ring, multiply)
        operands = [moving.invars[0], *map(_other, ring.sites)]
        results = [s.dot.eqn.outvars[0] for s in ring.sites] + [moving.outvars[0]] * ring.keep
    else:
        fn = functools.partial(_leaving, ring, multiply, checked)
        operands = [v for site in ring.sites for v in site.dot.eqn.invars]
        results = [moving.outvars[0]]
    fn = jax.named_call(fn, name=f"{RING_PASSES[ring.collective.kind]}.{ring.site}")
    return inlining.inline(fn, operands, results, eqn)


def _other(site: ManualSite) -> Any:
    """Return the operand that does not move."""
    lhs, rhs = site.dot.eqn.invars
    return rhs if site.side == "lhs" else lhs


def _arriving(ring: ManualRing, multiply: Multiply, shard: Array, *others: Array) -> list[Array]:
    """Run the ring of a gathered or exchanged operand; return the operand too if `ring.keep`."""
    moving = ring.collective
    readers = [_reader(s, multiply, other) for s, other in zip(ring.sites, others, strict=True)]
    split = None if moving.wanted is None else Dim(moving.wanted)
    dims: dict[str, Any] = {"gathered": Dim(ring.dim), "split": split}
    return operand_ring(moving.kind, shard, readers, _along(ring), **dims, keep=ring.keep)


def _leaving(ring: ManualRing, multiply: Multiply, checked: bool, *operands: Array) -> list[Array]:
    """Run the ring of results that are summed, then scattered, exchanged or replicated."""
    moving = ring.collective
    pairs = zip(ring.sites, operands[::2], operands[1::2], strict=True)
    terms = [Term(lhs, rhs, s.einsum, _product(s, multiply)) for s, lhs, rhs in pairs]
    total = result_ring(
        moving.kind,
        terms,
        _along(ring),
        dtype=moving.eqn.outvars[0].aval.dtype,
        split=Dim(ring.dim),
        gathered=None if moving.dim is None else Dim(moving.dim),
        invarying=checked,
    )
    return [total]


def _along(ring: ManualRing) -> Along:
    return Along(ring.axis, ring.axis_size, ring.variant)


def _reader(site: ManualSite, multiply: Multiply, other: Array) -> Reader:
    assert site.side != "out"
    dtype = site.dot.eqn.outvars[0].aval.dtype
    return Reader(other, site.einsum, site.side, _product(site, multiply), dtype)


def _product(site: ManualSite, multiply: Multiply) -> LocalDot:
    """Make the function that multiplies one chunk, with the views between it and what moves."""
    own = site.dot.eqn.outvars[0].aval.dtype

    def product(lhs: Array, rhs: Array, dtype: Any) -> Array:
        if site.side == "lhs":
            lhs = _seen(lhs, site.views)
        elif site.side == "rhs":
            rhs = _seen(rhs, site.views)
        wider = dtype if jnp.finfo(dtype).bits > jnp.finfo(own).bits else own
        result = multiply(site, lhs, rhs, wider)
        return _seen(result, site.views if site.side == "out" else ()).astype(dtype)

    return product


def _seen(value: Array, views: Sequence[Any]) -> Array:
    """Apply the views between a chunk and its matmul."""
    for eqn in views:
        if eqn.primitive.name == "transpose":
            value = lax.transpose(value, eqn.params["permutation"])
        elif eqn.primitive.name == "convert_element_type":
            value = lax.convert_element_type(value, eqn.params["new_dtype"])
    return value
