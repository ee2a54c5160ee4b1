"""Attention and its output projection, then reduce-scatter: a hop under each slice of the queries.

Before, on each device, whose heads' q, k and v have the full sequence (batch left out):

    q: f32[s, h/N, e]   k, v: f32[t, h/N, e]   wo: f32[h/N, e, d]
    p: f32[h/N, s, t] = softmax(q k^T)
    o: f32[s, h/N, e] = dot_general p v
    z: f32[s, d] = dot_general o wo                    # this device's partial sums
    y: f32[s/N, d] = reduce_scatter[axis_name=model, scatter_dimension=0] z

->  after: slice (r - 1) % N of the queries is first, and then, at hop i of 1 .. N - 1, on rank r:

    q, sum = optimization_barrier q sum
    sum = ppermute sum                                 # in flight ...
    p: f32[h/N, s/N, t] = softmax(q[slice] k^T)        # ... under these three matmuls,
    o: f32[s/N, h/N, e] = dot_general p v              #     of slice (r - 1 - i) % N
    z: f32[s/N, d] = dot_general o wo
    sum, z = optimization_barrier sum z
    sum = add sum z

The own slice comes last, so only an add trails. A hop carries what it does when the projection
alone is ringed, and may hide under the scores and values too; and no more than one slice's scores
are alive. How much of a slice a hop gets is XLA's choice: its scheduler starts one as late as it
estimates will do, on NVLink often beside the projection. Backward, one ring gathers y's gradient;
each slice that arrives gives its part of the gradients of q, k, v and wo, from scores that are
computed again.

With t for all that one slice computes and tau for its hop, the ring takes
t + (N - 1) max(t, tau) + t_add, its backward ring the same without the add. It does not apply where
s does not divide by N, or where the loss of a fused attention kernel outweighs the hops: the
scores of a slice, [batch, h/N, s/N, t], are held in float32, and a causal mask saves no work, as
which slice is computed is known only at run time. The rest is in `orders.py`.

CommFuse's query-split attention (arXiv 2604.24013, Algorithm 4), there in the direct order; here
the variants are those of `matmul_reduce_scatter`, whose loop this is. Scores, softmax and sums are
in float32 at least, sums that travel in the result's dtype.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxoverlap.passes.rings import chunks
from jaxoverlap.passes.rings.all_gather_matmul import gather_under
from jaxoverlap.passes.rings.chunks import Chunking
from jaxoverlap.passes.rings.matmul_reduce_scatter import scatter_under
from jaxoverlap.passes.rings.ring_attention import SCORES, TO_KEY, TO_QUERY, Attention, dot

_PROJECT = "bskgd,kgdm->bsm"
_TO_VALUES = "bsm,kgdm->bskgd"
_TO_PROJECTION = "bskgd,bsm->kgdm"
_SEQUENCE = 1  # the dim of q and of the result that is cut


def attend_and_project(how: Attention, q: Array, k: Array, v: Array, wo: Array) -> Array:
    """Attend, project and scatter; call it where the axis is manual.

    Args:
        q: f[batch, s, kv heads, group, head], this device's heads.
        k, v: f[batch, t, kv heads, head].
        wo: f[kv heads, group, head, d], its shard of the projection.

    Returns:
        This device's shard of the sum over devices, f[batch, s/N, d].

    Raises:
        ValueError: if a slice does not divide into the variant's slices.
    """
    dtype = jnp.result_type(q, wo)
    return scatter_under(_Slices(how, q, k, v, wo), how.axis, dtype, how.variant)


def attend_and_project_backward(
    how: Attention, q: Array, k: Array, v: Array, wo: Array, to_result: Array
) -> tuple[Array, Array, Array, Array]:
    """Compute the gradients of q, k, v and wo from that of this device's shard of the result."""
    gradients = _Gradients(_Slices(how, q, k, v, wo))
    gather_under(gradients, to_result, how.axis, how.variant)
    pairs = zip((q, k, v, wo), gradients.accumulated, strict=True)
    to_q, to_k, to_v, to_wo = (gradient.astype(x.dtype) for x, gradient in pairs)
    return to_q, to_k, to_v, to_wo


class _Slices:
    """The slices of the queries, each of which gives partial sums of the result."""

    def __init__(self, how: Attention, q: Array, k: Array, v: Array, wo: Array):
        self.how, self.q, self.k, self.v, self.wo = how, q, k, v, wo
        self.dim, self.cut = _SEQUENCE, Chunking(how.axis_size, how.variant.slices)

    def tie[Tree](self, leaving: Tree) -> Tree:
        """Tie what leaves to the queries that are sliced next: neither starts before the other."""
        self.q, leaving = chunks.tied((self.q, leaving))
        return leaving

    def multiply(self, chunk: Any, piece: int, dtype: Any) -> Array:
        """Compute partial sums of one piece of one slice; of every slice, if None."""
        q = self.queries(chunk, piece)
        values = self.values(self.probabilities(q, chunk, piece))
        return dot(_PROJECT, values.astype(q.dtype), self.wo).astype(dtype)

    def queries(self, chunk: Any, piece: int) -> Array:
        """Take one piece of one slice of the queries."""
        return chunks.take(self.q, _SEQUENCE, self.cut, chunk, piece)

    def probabilities(self, q: Array, chunk: Any, piece: int) -> Array:
        """Compute the softmax of a piece's scores, f32[batch, kv heads, group, queries, keys]."""
        scores = dot(SCORES, q, self.k) * self.how.scale
        if self.how.causal:
            # The mask goes by positions in the whole sequence: a piece of all slices is no one run.
            count = lax.iota(jnp.int32, self.q.shape[_SEQUENCE])
            positions = chunks.take(count, 0, self.cut, chunk, piece)
            keys = lax.iota(jnp.int32, self.k.shape[_SEQUENCE])
            scores = jnp.where(keys[None, :] <= positions[:, None], scores, -jnp.inf)
        return jax.nn.softmax(scores, axis=-1)  # finite: every query sees its own key

    def values(self, p: Array) -> Array:
        """Average the values by a piece's softmax, f32[batch, queries, kv heads, group, head]."""
        return dot(TO_QUERY, p.astype(self.v.dtype), self.v)


class _Gradients:
    """The gradients of q, k, v and wo while slices of the result's gradient arrive."""

    def __init__(self, slices: _Slices):
        self.slices, self.dim, self.cut = slices, slices.dim, slices.cut
        self.accumulated: tuple[Array, ...] = ()  # of q, k, v and wo, once the first piece is read

    def tie(self, held: dict[Any, Array]) -> dict[Any, Array]:
        """Tie the next read, so that it and the scores under it start after the last read."""
        if not self.accumulated:
            return held
        (held, self.accumulated) = self.slices.tie((held, self.accumulated))
        return held

    def read(self, to_result: Array, chunk: Any, piece: int) -> None:
        """Add what one piece of one slice gives; of all slices, if None."""
        to_q, *sums = _backward(self.slices, to_result, chunk, piece)
        if self.accumulated:
            whole, *before = self.accumulated
            sums = [a + b for a, b in zip(before, sums, strict=True)]
        else:
            whole = chunks.room(to_q, _SEQUENCE, self.cut, chunk)
        self.accumulated = (chunks.put(whole, to_q, _SEQUENCE, self.cut, chunk, piece), *sums)


def _backward(
    slices: _Slices, to_result: Array, chunk: Any, piece: int
) -> tuple[Array, Array, Array, Array]:
    """Compute a piece's gradients: q's in its dtype, those of k, v and wo in float32 at least."""
    q, k, v = slices.queries(chunk, piece), slices.k, slices.v
    p = slices.probabilities(q, chunk, piece)
    values = slices.values(p)
    to_values = dot(_TO_VALUES, to_result, slices.wo)
    delta = jnp.einsum("bskgd,bskgd->bkgs", to_values, values)
    to_values = to_values.astype(v.dtype)
    to_scores = p * (dot(SCORES, to_values, v) - delta[..., None]) * slices.how.scale
    to_scores = to_scores.astype(q.dtype)
    return (
        dot(TO_QUERY, to_scores, k).astype(q.dtype),
        dot(TO_KEY, to_scores, q),
        dot(TO_KEY, p.astype(v.dtype), to_values),
        dot(_TO_PROJECTION, values.astype(q.dtype), to_result),
    )
