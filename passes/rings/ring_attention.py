"""Attention over a sequence that is sharded: keys and values travel, each hop under a block.

Before, on each device (heads and batch left out):

    q, k, v: f32[s/N, d]
    k, v: f32[s, d] = all_gather[axis_name=sequence, axis=0] k, v
    y: f32[s/N, d] = softmax(q k^T) v

->  after, at hop i of N, on rank r, with o and the softmax's stats (greatest score, sum) so far:

    next = ppermute k, v                               # in flight ...
    p: f32[s/N, s/N] = exp(q k^T - greatest)           # ... under this block's two matmuls,
    o, stats = o, stats rescaled, + p v                #     of keys (r - i) % N
    k, v, o, stats = optimization_barrier next o stats

The backward ring sends k and v the same way. The sums of their gradients start beside them, travel
with them, and from where they end go home in one permute; each is sent under the matmul of the
query's gradient. A causal mask goes by global positions: device r holds the r-th part of the
sequence.

With t for one block and tau for one hop of k and v, the forward ring takes t + (N - 1) max(t, tau).
It does not apply where a mask makes work uneven: with a causal one rank 0 has one block to do and
the last rank all N, and every device waits for it. The scores of one block are held whole, in
float32: [batch, heads, s/N, s/N].

Blockwise attention: Liu et al., arXiv 2310.01889; sequence parallel rings: Li et al., arXiv
2105.13120. Stats and sums are in float32 at least; gradients of k and v travel in k's dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxoverlap._jax.fused_attention import BlockKernel
from jaxoverlap.passes.rings import chunks, orders
from jaxoverlap.passes.rings.all_gather_matmul import wide
from jaxoverlap.passes.rings.chunks import Chunking
from jaxoverlap.plan.plan import Variant

Pair = tuple[Array, Array]
"""Gradients of k and of v."""

SCORES = "bskgd,btkd->bkgst"
TO_QUERY = "bkgst,btkd->bskgd"
TO_KEY = "bkgst,bskgd->btkd"
_SEQUENCE = 1  # the dim of q, k and v that is sharded


class Attention(NamedTuple):
    """The settings of an attention, which do not change along the ring.

    Attributes:
        axis, axis_size: the mesh axis of the ring, and its devices.
        causal: whether a query sees no keys after its own position.
        scale: the factor by which the scores are multiplied.
        variant: how keys and values travel; not "sliced".
        kernel: the fused kernel that a block is (`fused_ring_attention.py`); none: matmuls.
        balanced: whether devices have halves of the sequence in pairs there, under a causal mask.
    """

    axis: str
    axis_size: int
    causal: bool
    scale: float
    variant: Variant
    kernel: BlockKernel | None = None
    balanced: bool = False


class SoftmaxState(NamedTuple):
    """The softmax so far: its output, greatest scores and sums; in float32 at least."""

    output: Array  # [batch, s/N, kv heads, group, head]
    greatest: Array  # [batch, kv heads, group, s/N]
    total: Array  # the same


def attend(how: Attention, q: Array, k: Array, v: Array) -> tuple[Array, Array]:
    """Attend in a ring; call it where the axis is manual.

    Args:
        q: f[batch, s/N, kv heads, group, head].
        k, v: f[batch, t/N, kv heads, head].

    Returns:
        The output, like q, and the log of the softmax's sums, f32[batch, kv heads, group, s/N].

    Raises:
        ValueError: if a chunk does not divide into the variant's slices.
    """
    travel = Travel(how, k, v)
    state: SoftmaxState | None = None
    for step, piece in travel.order():
        (k, v), state = travel.turn(step, piece, state)
        state = fold(state, _scores(how, q, k, travel.start(step, piece)), v)
    assert state is not None
    output = state.output / per_query(state.total)
    return output.astype(q.dtype), state.greatest + jnp.log(state.total)


def attend_backward(
    how: Attention, q: Array, k: Array, v: Array, output: Array, log_sums: Array, to_output: Array
) -> tuple[Array, Array, Array]:
    """Compute the gradients of q, k and v; `output` and `log_sums` are what `attend` gave."""
    delta = jnp.einsum("bskgd,bskgd->bkgs", *map(_wide, (to_output, output)))
    travel, home = Travel(how, k, v), Home(how)
    to_q = jnp.zeros(q.shape, wide(q.dtype))
    for step, piece in travel.order():
        (k, v), (to_q, home.sums) = travel.turn(step, piece, (to_q, home.sums))
        p = jnp.exp(_scores(how, q, k, travel.start(step, piece)) - log_sums[..., None])
        to_p = dot(SCORES, to_output, v)
        to_scores = (p * (to_p - delta[..., None]) * how.scale).astype(q.dtype)
        sums = dot(TO_KEY, to_scores, q), dot(TO_KEY, p.astype(q.dtype), to_output)
        to_scores = home.send(step, piece, sums, to_scores, k.dtype)
        to_q = to_q + dot(TO_QUERY, to_scores, k)
    to_k, to_v = home.finish()
    return to_q.astype(q.dtype), to_k.astype(k.dtype), to_v.astype(v.dtype)


class Travel:
    """Keys and values on their way: each piece is sent on under the matmuls that read it."""

    def __init__(self, how: Attention, k: Array, v: Array):
        self.how, self.cut = how, Chunking(1, how.variant.slices)
        self.size = k.shape[_SEQUENCE]
        self.held: dict[tuple[int, int], Pair] = {}  # by chunk and piece
        for j in range(how.variant.slices):
            mine = [chunks.take(x, _SEQUENCE, self.cut, piece=j) for x in (k, v)]
            self.held[0, j] = mine[0], mine[1]

    def order(self) -> Iterator[tuple[orders.GatherStep, int]]:
        """Yield the steps and pieces in the order in which they are read."""
        for step in orders.gather_steps(self.how.variant.style, self.how.axis_size):
            for piece in range(self.how.variant.slices):
                yield step, piece

    def turn[State](
        self, step: orders.GatherStep, piece: int, state: State
    ) -> tuple[tuple[Array, Array], State]:
        """Return the keys and values to read now, tied to `state`, and send on under that read."""
        used = {(step.back, piece), *((send.back, piece) for send in step.sends)}
        tied = {key: self.held[key] for key in sorted(used)}
        if jax.tree.leaves(state):
            tied, state = chunks.tied((tied, state))
        self.held |= tied
        for send in step.sends:
            pairs = orders.permutation(self.how.axis_size, send.shift)
            arriving = lax.ppermute(self.held[send.back, piece], self.how.axis, pairs)
            self.held[send.arrives_as, piece] = arriving
        return self.held[step.back, piece], state

    def awaited[Results](self, step: orders.GatherStep, piece: int, results: Results) -> Results:
        """Return a read's results, tied to what arrives under it: XLA then ends no hop later."""
        keys = [(send.arrives_as, piece) for send in step.sends]
        arrived, results = chunks.tied(({key: self.held[key] for key in keys}, results))
        self.held |= arrived
        return results

    def start(self, step: orders.GatherStep, piece: int) -> Any:
        """Return the global position of the first key of a piece."""
        rank = lax.axis_index(self.how.axis)
        chunk = orders.chunk_at(rank, step.back, self.how.axis_size)
        return chunk * self.size + piece * self.cut.size(self.size)


class Home:
    """The sums of k's and v's gradients, on their way to the device that k and v came from."""

    def __init__(self, how: Attention):
        self.how = how
        self.sums: dict[int, Pair] = {}  # by piece: the own chunk's, in float32
        self.arriving: dict[tuple[int, int], Pair] = {}  # by chunk and piece: to be added to
        self.landed: dict[int, Pair] = {}  # by piece: for the own chunk

    def send(
        self, step: orders.GatherStep, piece: int, sums: Pair, next_read: Array, dtype: Any
    ) -> Array:
        """Send sums on with their chunk, or home; under the matmul that reads `next_read`."""
        joined = self.arriving.pop((step.back, piece), None)
        landed = self.landed.pop(piece, None)
        joined, landed, sums = chunks.tied((joined, landed, sums))
        self.sums |= {piece: _add(self.sums.get(piece), landed)} if landed else {}
        sums = _add(sums, joined)
        if step.back == 0:
            self.sums[piece] = sums
            return next_read
        sums = sums[0].astype(dtype), sums[1].astype(dtype)
        sums, next_read = chunks.tied((sums, next_read))
        shift = next((s.shift for s in step.sends if s.back == step.back), -step.back)
        pairs = orders.permutation(self.how.axis_size, shift)
        coming = lax.ppermute(sums, self.how.axis, pairs)
        if step.back + shift:
            self.arriving[step.back + shift, piece] = coming
        else:
            self.landed[piece] = coming
        return next_read

    def finish(self) -> Pair:
        """Return the gradients of this device's own key and value chunk, its slices joined."""
        cut = Chunking(1, self.how.variant.slices)
        pairs = [_add(self.sums[j], self.landed.get(j)) for j in sorted(self.sums)]
        to_k, to_v = (
            chunks.join(list(parts), _SEQUENCE, cut) for parts in zip(*pairs, strict=True)
        )
        return to_k, to_v


def _add(sums: Pair | None, more: Pair | None) -> Pair:
    """Add two pairs, in float32 at least."""
    assert sums is not None
    return sums if more is None else (sums[0] + _wide(more[0]), sums[1] + _wide(more[1]))


def fold(state: SoftmaxState | None, scores: Array, v: Array) -> SoftmaxState:
    """Fold one more block of scores and values into the softmax."""
    greatest = scores.max(-1)
    if state is not None:
        greatest = jnp.maximum(state.greatest, greatest)
    # The own block is first, and no mask hides a query's own key: `greatest` is finite.
    p = jnp.exp(scores - greatest[..., None])
    output, total = dot(TO_QUERY, p.astype(v.dtype), v), p.sum(-1)
    if state is not None:
        kept = jnp.exp(state.greatest - greatest)
        output, total = output + state.output * per_query(kept), total + state.total * kept
    return SoftmaxState(output, greatest, total)


def _scores(how: Attention, q: Array, k: Array, start: Any) -> Array:
    """Compute one block's masked scores, f32[batch, kv heads, group, queries, keys]."""
    scores = dot(SCORES, q, k) * how.scale
    if not how.causal:
        return scores
    num_queries, num_keys = scores.shape[-2:]
    queries = lax.axis_index(how.axis) * num_queries + lax.iota(jnp.int32, num_queries)
    keys = start + lax.iota(jnp.int32, num_keys)
    return jnp.where(keys[None, :] <= queries[:, None], scores, -jnp.inf)


def per_query(stat: Array) -> Array:
    """Shape a stat [batch, kv heads, group, queries] as a factor of the output."""
    return jnp.moveaxis(stat, -1, 1)[..., None]


def dot(spec: str, lhs: Array, rhs: Array) -> Array:
    """Compute an einsum, in float32 at least."""
    return jnp.einsum(spec, lhs, rhs, preferred_element_type=wide(lhs.dtype))


def _wide(x: Array) -> Array:
    return x.astype(wide(x.dtype))
