"""Attend over rings of several sizes, each sharding its sequences, in one static program.

On each device slots are ordered by ring size, the largest rings first. Those of a ring of g devices
are two halves: rank i has chunk i of 2g of each of its sequences in the first half, and 2g - 1 - i
in the second, so that under a causal mask every rank has the same work in every round. From rank j,

    j = i        early x early, late x late, late x early
    j < i        late x early, early x early
    j > i        late x early, late x late

so a round is two blocks of half by half, the second with operands picked by rank. Groups of one
size run after those of another; each hop is in flight under a block of attention. Masks are by
sequence and position, from the plan: what a step is compiled for does not depend on the batch.

The blocks are cuDNN's kernel where there is one (`fused_rings.py`), else matmuls under a mask
(`matmul_rings.py`). Backward, keys and values go round again, and the sums of their gradients
travel behind them, in float32: in bfloat16 each hop would round them once more.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxoverlap.passes.rings.chunks import tied
from jaxoverlap.train.varlen.device.blocks import in_float32
from jaxoverlap.train.varlen.device.fused_rings import FusedRings
from jaxoverlap.train.varlen.device.matmul_rings import MatmulRings
from jaxoverlap.train.varlen.device.sets import Engine, ExchangedSet, LocalSet, RingSet


def attend(engine: Engine, q: Array, k: Array, v: Array, segment: Array, position: Array) -> Array:
    """Attend, each sequence to itself alone and causally; call it where the axes are manual.

    Differentiable in reverse mode.

    Args:
        engine: what it is compiled for.
        q: f[slots, heads, head] of this device.
        k, v: f[slots, kv heads, head]; kv heads divide heads.
        segment: i32[devices, slots], the sequence of each device's slots; -1 has none.
        position: i32[devices, slots], positions in the sequences; slots without one have their own
            number.

    Returns:
        Like q; slots without a sequence hold numbers without meaning.
    """
    grouped = q.reshape(1, q.shape[0], k.shape[1], -1, q.shape[-1])
    out = _attention(engine, grouped, k[None], v[None], segment, position)
    return out.reshape(*q.shape[:2], v.shape[-1])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(
    engine: Engine, q: Array, k: Array, v: Array, segment: Array, position: Array
) -> Array:
    return _forward(engine, q, k, v, segment, position)[0]


def _forward(
    engine: Engine, q: Array, k: Array, v: Array, segment: Array, position: Array
) -> tuple[Array, Any]:
    sets = _sets(engine, q, segment, position)
    given = {s: s.given(q, k, v) for s in sets}
    outs, kept = dict[_AnySet, Array](), dict[int, Any]()
    for each, before in _in_turn(sets, (RingSet, LocalSet, ExchangedSet)):
        if before:
            given[each], outs[before] = tied((given[each], outs[before]))
        outs[each], log_sums = each.forward(*given[each])
        kept[each.size] = *given[each], outs[each], log_sums
    returned = [s.returned(outs[s])[0] for s in sets]
    return jnp.concatenate(returned, axis=1), (segment, position, kept)


def _backward(engine: Engine, residuals: Any, to_out: Array) -> tuple[Any, ...]:
    segment, position, kept = residuals
    (q, *_), *_ = kept.values()
    sets = _sets(engine, q, segment, position)
    given, grads = {s: s.given(to_out)[0] for s in sets}, dict[_AnySet, tuple[Array, ...]]()
    for each, before in _in_turn(sets, (RingSet, ExchangedSet, LocalSet)):
        parts = kept[each.size]
        if before:
            (parts, given[each]), grads[before] = tied(((parts, given[each]), grads[before]))
        q, k, v, out, kept_of = parts
        delta = jnp.einsum("bskgd,bskgd->bskg", in_float32(given[each]), in_float32(out))
        found = each.backward((q, given[each], kept_of, delta), k, v)
        grads[each] = tuple(g.astype(x.dtype) for g, x in zip(found, (q, k, v), strict=True))
    returned = [s.returned(*grads[s]) for s in sets]
    joined = (jnp.concatenate(g, axis=1) for g in zip(*returned, strict=True))
    return (*joined, None, None)


_attention.defvjp(_forward, _backward)


def _sets(engine: Engine, q: Array, segment: Array, position: Array) -> list[LocalSet | RingSet]:
    """Return the sets of groups, the largest first."""
    ringed = FusedRings if engine.fuses(q, engine.bounds.ringed) else MatmulRings
    kinds = {
        size: ExchangedSet if size in engine.bounds.exchanged else ringed if size > 1 else LocalSet
        for size, _ in engine.bounds.widths
    }
    return [
        kinds[size](engine, size, width, segment, position) for size, width in engine.bounds.widths
    ]


_AnySet = LocalSet | RingSet


def _in_turn(
    sets: list[_AnySet], kinds: tuple[type[_AnySet], ...]
) -> Iterator[tuple[_AnySet, _AnySet | None]]:
    """Yield the sets kind by kind, the largest groups first, each with the one before it.

    Local documents are attended to where an exchange in one part can hide under them: forward
    while queries, keys and values are exchanged, backward while their gradients are.
    """
    own = {ExchangedSet: ExchangedSet, LocalSet: LocalSet}
    order = [s for kind in kinds for s in sets if own.get(type(s), RingSet) is kind]
    yield from zip(order, [None, *order], strict=False)
