"""Ring attention whose block is cuDNN's fused kernel; no scores in memory.

Before, on each device (heads and batch left out): as in `ring_attention.py`.

->  after, at hop i of N:

    next = ppermute k, v                               # in flight ...
    block, its log_sums = cuDNN q k v                  # ... under one kernel
    output, log_sums = merge (output, log_sums) (block, its log_sums)
    k, v, output, log_sums = optimization_barrier next output log_sums

where merging is by the log of the softmax's sums, which cuDNN's forward kernel returns:

    log_sums' = log(exp(log_sums) + exp(its log_sums))
    output'   = output exp(log_sums - log_sums') + block exp(its log_sums - log_sums')

cuDNN's backward kernel computes a block's probabilities from its scores and the merged log_sums, so
its results are that block's part of the gradients. It gives all three at once: sums are sent under
the next block, and the last ones, which go home, under nothing.

The kernel has a causal mask for queries and keys that begin together, and none for keys at an
offset: the own block is causal, an earlier rank's is seen in full, and a later rank's is computed
and hidden by a log of -inf. So every rank takes the time of the last one, N blocks. If `balanced`,
rank r has halves r and 2N - 1 - r of the 2N halves instead, by two permutes of each operand before
the ring and of the result after it. Then the own block is still causal in itself, and of another
block two of four pairs of halves are seen, in full: late queries see its early keys; if it is an
earlier rank's, early queries see its early keys, else late queries its late keys. The two are one
call of the kernel; the ring takes N / 2 blocks.

Halves so paired: Brandon et al., arXiv 2311.09431; Llama 3, arXiv 2407.21783.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from jaxoverlap.passes.rings import orders
from jaxoverlap.passes.rings.all_gather_matmul import wide
from jaxoverlap.passes.rings.ring_attention import Attention, Home, Travel

Merged = tuple[Array, Array]
"""Attention to the blocks so far: the output [batch, s, heads, head] and the log of the softmax's
sums [batch, heads, s], in float32; the output too, once it has been merged."""

Gradients = tuple[Array, Array, Array]
"""Parts of the gradients of q, k and v, in 16 bits or float32."""

_SEQUENCE = 1  # the dim of q, k, v and outputs that is sharded
_OF_SUMS = 2  # the same of the log of sums


def attend(how: Attention, q: Array, k: Array, v: Array) -> tuple[Array, Array]:
    """Attend in a ring of cuDNN's kernel; arguments and results as of `ring_attention.attend`.

    If `how.balanced`, all of them have halves in pairs (`paired`).
    """
    heads, travel = _in_heads(q), Travel(how, k, v)
    state: Merged | None = None
    for step, piece in travel.order():
        (k, v), state = travel.turn(step, piece, state)
        if state is None or not how.causal:
            state = _merge(state, _forward(how, heads, k, v, causal=how.causal))
        elif how.balanced:
            state = _merge_halves(how, _is_earlier(how, step), state, heads, k, v)
        else:
            block, log_sums = _forward(how, heads, k, v, causal=False)
            hidden = jnp.full_like(log_sums, -jnp.inf)
            log_sums = jnp.where(_is_earlier(how, step), log_sums, hidden)
            state = _merge(state, (block, log_sums))
    assert state is not None
    output, log_sums = state
    return output.astype(q.dtype).reshape(q.shape), _by_group(log_sums, q)


def attend_backward(
    how: Attention, q: Array, k: Array, v: Array, output: Array, log_sums: Array, to_output: Array
) -> tuple[Array, Array, Array]:
    """Compute the gradients of q, k and v; `output` and `log_sums` are what `attend` gave."""
    heads, output, to_output = map(_in_heads, (q, output, to_output))
    log_sums = log_sums.reshape(heads.shape[0], heads.shape[2], heads.shape[1])
    travel, home = Travel(how, k, v), Home(how)
    to_q = jnp.zeros(heads.shape, wide(q.dtype))
    for step, piece in travel.order():
        (k, v), (to_q, home.sums) = travel.turn(step, piece, (to_q, home.sums))
        parts = _block_backward(how, step, heads, k, v, output, log_sums, to_output)
        more, to_k, to_v = travel.awaited(step, piece, parts)
        to_q = home.send(step, piece, (to_k, to_v), to_q + more, k.dtype)
    to_k, to_v = home.finish()
    return to_q.astype(q.dtype).reshape(q.shape), to_k.astype(k.dtype), to_v.astype(v.dtype)


def _block_backward(how: Attention, step: orders.GatherStep, *operands: Array) -> Gradients:
    """Compute a step's part of the gradients."""
    if not how.causal or step.back == 0:
        return _backward(how, *operands, causal=how.causal)
    if how.balanced:
        return _backward_halves(how, _is_earlier(how, step), *operands)
    # A hidden block's scores may exceed the log of the sums by any number: its parts may be inf.
    to_q, to_k, to_v = (
        jnp.where(_is_earlier(how, step), part, jnp.zeros_like(part))
        for part in _backward(how, *operands, causal=False)
    )
    return to_q, to_k, to_v


# -- one block ------------------------------------------------------------------------------------


# The kernel's results stay in 16 bits until they are added: no float32 copy is written for that.


def _forward(how: Attention, q: Array, k: Array, v: Array, *, causal: bool) -> Merged:
    assert how.kernel is not None
    return how.kernel.forward(q, k, v, causal=causal, scale=how.scale)


def _backward(how: Attention, *operands: Array, causal: bool) -> Gradients:
    """Compute one block's part of the gradients."""
    assert how.kernel is not None
    return how.kernel.backward(*operands, causal=causal, scale=how.scale)


def _merge(state: Merged | None, block: Merged) -> Merged:
    """Merge attention to one more block; a log of -inf hides the block."""
    if state is None:
        return block
    log_sums = jnp.logaddexp(state[1], block[1])
    merged, more = (out * _per_query(jnp.exp(log - log_sums)) for out, log in (state, block))
    return merged + more, log_sums


def _per_query(stat: Array) -> Array:
    """Shape a stat [batch, heads, s] as a factor of the output."""
    return jnp.swapaxes(stat, 1, 2)[..., None]


# -- halves, under a causal mask ------------------------------------------------------------------


def _merge_halves(
    how: Attention, earlier: Array, state: Merged, q: Array, k: Array, v: Array
) -> Merged:
    """Merge attention to another rank's block: one kernel call for two pairs of halves."""
    pairs = (_pair(earlier, x, by) for x, by in ((q, _QUERIES), (k, _KEYS), (v, _KEYS)))
    blocks = _forward(how, *pairs, causal=False)
    late, other = zip(*(jnp.split(x, 2) for x in blocks), strict=True)
    early_queries, late_queries = zip(_halves(state[0]), _halves(state[1], _OF_SUMS), strict=True)
    hidden = jnp.full_like(other[1], -jnp.inf)
    if_early = other[0], jnp.where(earlier, other[1], hidden)
    if_late = other[0], jnp.where(earlier, hidden, other[1])
    halves = _merge(early_queries, if_early), _merge(_merge(late_queries, late), if_late)
    output, log_sums = zip(*halves, strict=True)
    return jnp.concatenate(output, _SEQUENCE), jnp.concatenate(log_sums, _OF_SUMS)


def _backward_halves(
    how: Attention, earlier: Array, q: Array, k: Array, v: Array, output: Array, log_sums: Array,
    to_output: Array,
) -> Gradients:  # fmt: skip
    """Compute the gradients' parts by another rank's block, in float32 at least."""
    q, output, to_output = (_pair(earlier, x, _QUERIES) for x in (q, output, to_output))
    k, v = (_pair(earlier, x, _KEYS) for x in (k, v))
    log_sums = _pair(earlier, log_sums, _QUERIES, _OF_SUMS)
    to_q, to_k, to_v = _backward(how, q, k, v, output, log_sums, to_output, causal=False)
    return (
        _unpaired(earlier, to_q, _QUERIES),
        _unpaired(earlier, to_k, _KEYS),
        _unpaired(earlier, to_v, _KEYS),
    )


_QUERIES, _KEYS = 1, 0  # the half in the first pair: late queries see early keys


def _pair(earlier: Array, x: Array, first: int, dim: int = _SEQUENCE) -> Array:
    """Return the halves in both pairs, along the batch: half `first`, and early ones if earlier."""
    halves = _halves(x, dim)
    return jnp.concatenate([halves[first], jnp.where(earlier, *halves)])


def _unpaired(earlier: Array, sums: Array, first: int) -> Array:
    """Add the gradients of both pairs to their halves: the transpose of `_pair`."""
    always, other = jnp.split(sums.astype(wide(sums.dtype)), 2)
    zero = jnp.zeros_like(other)
    halves = [jnp.where(earlier, other, zero), jnp.where(earlier, zero, other)]
    halves[first] += always
    return jnp.concatenate(halves, _SEQUENCE)


def _halves(x: Array, dim: int = _SEQUENCE) -> list[Array]:
    return jnp.split(x, 2, dim)


def _is_earlier(how: Attention, step: orders.GatherStep) -> Array:
    """Return whether the keys of a step are an earlier rank's."""
    rank = lax.axis_index(how.axis)
    return orders.chunk_at(rank, step.back, how.axis_size) < rank


def paired(how: Attention, x: Array, dim: int = _SEQUENCE) -> Array:
    """Exchange halves 2r and 2r + 1 of a dim for r and 2N - 1 - r, which rank r takes."""
    sent = [_sent(how, half, j, _there) for j, half in enumerate(_halves(x, dim))]
    return jnp.concatenate(_swapped(how, sent), dim)


def in_order(how: Attention, x: Array, dim: int = _SEQUENCE) -> Array:
    """Undo `paired`."""
    halves = _swapped(how, _halves(x, dim))
    return jnp.concatenate([_sent(how, half, j, _back) for j, half in enumerate(halves)], dim)


def _sent(how: Attention, x: Array, odd: int, pairs: Callable[[int, int], Any]) -> Array:
    """Send all even halves, or all odd ones."""
    return lax.ppermute(x, how.axis, pairs(how.axis_size, odd))


def _there(n: int, odd: int) -> list[tuple[int, int]]:
    """Return (source, target) of each even half, or odd one."""
    return [(r, min(2 * r + odd, 2 * n - 1 - 2 * r - odd)) for r in range(n)]


def _back(n: int, odd: int) -> list[tuple[int, int]]:
    return [(target, source) for source, target in _there(n, odd)]


def _swapped(how: Attention, halves: list[Array]) -> list[Array]:
    """Swap two halves on odd ranks, whose early half has an odd number."""
    even = lax.axis_index(how.axis) % 2 == 0
    return [jnp.where(even, *halves), jnp.where(even, *halves[::-1])]


# -- shapes ---------------------------------------------------------------------------------------


def _in_heads(x: Array) -> Array:
    """Join kv heads and groups: [batch, s, kv heads, group, head] -> [batch, s, heads, head]."""
    return x.reshape(*x.shape[:2], -1, x.shape[-1])


def _by_group(log_sums: Array, q: Array) -> Array:
    """Split heads: [batch, heads, s] -> [batch, kv heads, group, s]."""
    return log_sums.reshape(q.shape[0], *q.shape[2:4], q.shape[1])
