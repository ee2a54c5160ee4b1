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
    delta = jnp.einsum("bshd,bshd->bhs", to_out, out)
    to_scores = p * (jnp.einsum("bshd,bthd->bhst", to_out, values) - delta[..., None]) * scale
    to_q = jnp.einsum("bhst,bthd->bshd", to_scores, keys)
    to_k = jnp.einsum("bhst,bshd->bthd", to_scores, q)
    to_v = jnp.einsum("bhst,bshd->bthd", p, to_out)
    to_k, to_v = (x.reshape(*k.shape[:3], shared, -1).sum(3) for x in (to_k, to_v))
    return to_q, to_k, to_v


def _seen(scores):
    """Return which keys a query sees; not as a constant, which no partitioned operation may hold."""
    queries, keys = (jax.lax.broadcasted_iota(jnp.int32, scores.shape[-2:], d) for d in (0, 1))
    return keys <= queries
