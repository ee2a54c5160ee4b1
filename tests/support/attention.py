"""Attention without a ring, and stand-ins for cuDNN's kernels."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np


def plain(q, k, v, causal: bool, scale: float):
    """Apply attention to whole sequences [batch, sequence, heads, head]."""
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    scores = jnp.einsum("bshd,bthd->bhst", q, k) * scale
    if causal:
        scores = jnp.where(np.tri(*scores.shape[-2:], dtype=bool), scores, -jnp.inf)
    return jnp.einsum("bhst,bthd->bshd", jax.nn.softmax(scores, axis=-1), v)


def stand_in(q, k, v, *, causal: bool, scale: float):
    """Compute what cuDNN's forward kernel does: the output and the log of the softmax's sums."""
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    scores = jnp.einsum("bshd,bthd->bhst", q, k) * scale
    if causal:
        scores = jnp.where(_seen(scores), scores, -jnp.inf)
    log_sums = jax.nn.logsumexp(scores, -1)
    return jnp.einsum("bhst,bthd->bshd", jnp.exp(scores - log_sums[..., None]), v), log_sums


def stand_in_backward(q, k, v, out, log_sums, to_out, *, causal: bool, scale: float):
    """Compute what cuDNN's backward kernel does, from the sums that it is given."""
    shared = q.shape[2] // k.shape[2]
    keys, values = (jnp.repeat(x, shared, axis=2) for x in (k, v))
    scores = jnp.einsum("bshd,bthd->bhst", q, keys) * scale
    if causal:
        scores = jnp.where(_seen(scores), scores, -jnp.inf)
    p = jnp.exp(scores - log_sums[..., None])
    return _gradients(p, q, keys, values, out, to_out, shared, scale)


def _gradients(p, q, keys, values, out, to_out, shared: int, scale: float):
    """Return the gradients by the probabilities; so many heads share a key and a value."""
    delta = jnp.einsum("bshd,bshd->bhs", to_out, out)
    to_scores = p * (jnp.einsum("bshd,bthd->bhst", to_out, values) - delta[..., None]) * scale
    to_q = jnp.einsum("bhst,bthd->bshd", to_scores, keys)
    to_k = jnp.einsum("bhst,bshd->bthd", to_scores, q)
    to_v = jnp.einsum("bhst,bshd->bthd", p, to_out)
    apart = (x.reshape(*x.shape[:2], -1, shared, x.shape[-1]) for x in (to_k, to_v))
    to_k, to_v = (x.sum(3) for x in apart)
    return to_q, to_k, to_v


def packed_stand_in(q, k, v, runs, *, causal: bool, scale: float):
    """Compute what cuDNN's forward kernel does of runs; what it does not write is not a number."""
    shared = q.shape[2] // k.shape[2]
    keys, values = (jnp.repeat(x, shared, axis=2) for x in (k, v))
    seen, query, _ = _packed(runs, q.shape[1], k.shape[1], causal)
    scores = jnp.einsum("bshd,bthd->bhst", q, keys) * scale
    log_sums = jax.nn.logsumexp(jnp.where(seen, scores, -jnp.inf), -1)
    p = jnp.where(seen, jnp.exp(scores - log_sums[..., None]), 0)
    out = jnp.einsum("bhst,bthd->bshd", p, values)
    out = jnp.where(seen.any(-1)[:, None, None], out, jnp.nan)
    by_run = jnp.einsum("rsi,bhs->rhi", query.astype(q.dtype), jnp.nan_to_num(log_sums))
    return out, jnp.where(query.any(1)[:, None], by_run, jnp.nan)


def packed_stand_in_backward(q, k, v, out, log_sums, to_out, runs, *, causal: bool, scale: float):
    """Compute what cuDNN's backward kernel does of runs."""
    shared = q.shape[2] // k.shape[2]
    keys, values = (jnp.repeat(x, shared, axis=2) for x in (k, v))
    seen, query, key = _packed(runs, q.shape[1], k.shape[1], causal)
    read = jnp.where(query.any(1)[:, None], log_sums, 0)
    of_query = jnp.einsum("rsi,rhi->hs", query.astype(q.dtype), read)
    scores = jnp.einsum("bshd,bthd->bhst", q, keys) * scale
    p = jnp.where(seen, jnp.exp(scores - of_query[..., None]), 0)
    grads = _gradients(p, q, keys, values, out, to_out, shared, scale)
    of_runs = [x.any((0, 2))[:, None, None] for x in (query, key, key)]
    return tuple(jnp.where(at, x, jnp.nan) for at, x in zip(of_runs, grads, strict=True))


def _packed(runs, queries: int, keys: int, causal: bool):
    """Return who sees whom, [queries, keys], and which slots are at which index of which run."""

    def where(lengths, starts, slots):
        index = jnp.arange(slots)
        at = starts[:, None, None] + index == index[:, None]
        return at & (index < lengths[:, None, None])  # [most, slots, index in the run]

    query = where(runs.query_lengths, runs.query_starts, queries)
    key = where(runs.key_lengths, runs.key_starts, keys)
    seen = jnp.einsum("rsi,rtj->st", *(x.astype("float32") for x in (query, key))) > 0
    if causal:
        at = [(x * jnp.arange(x.shape[-1])).sum((0, 2)) for x in (query, key)]
        seen &= at[1] <= at[0][:, None]
    return seen, query, key


def _seen(scores):
    """Return which keys a query sees; not as a constant, which no partitioned operation may hold."""
    queries, keys = (jax.lax.broadcasted_iota(jnp.int32, scores.shape[-2:], d) for d in (0, 1))
    return keys <= queries
