"""The cross-entropy of logits whose vocabulary is sharded: each device reads its own part alone.

    logits: f32[b, s, v/N];  labels: i32[b, s]
    greatest = pmax(max(logits));  total = psum(sum(exp(logits - greatest)))
    loss = greatest + log(total) - psum(logits[label], where this device has that label)

XLA partitions the two reductions so too, and gathers all logits to look the labels up.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from jaxoverlap._jax.operations.question import Operation, Partitioned, even
from jaxoverlap._jax.operations.specs import block_index, local_structs, trace_on
from jaxoverlap._util.text import short_source
from jaxoverlap.ops.define import operation
from jaxoverlap.ops.einsum import stays_plain
from jaxoverlap.plan import operations
from jaxoverlap.plan.decisions import Skip


def softmax_cross_entropy_with_integer_labels(
    logits: ArrayLike,
    labels: ArrayLike,
    axis: int | tuple[int, ...] = -1,
    where: ArrayLike | None = None,
) -> Array:
    """Compute the cross-entropy of integer labels, as optax's function of this name does.

    Where the vocabulary is sharded no logits move: each device adds up its own part, and what is
    summed over devices has the shape of the labels.

    Args:
        logits: [..., vocabulary], of a floating-point dtype.
        labels: [...], of an integer dtype. Negative ones count from the end of the vocabulary;
            the loss of one outside of it is nan.
        axis: the dim of the vocabulary, or its dims.
        where: which entries of the vocabulary count; broadcast to the logits, with the dim of the
            vocabulary put in where it has fewer dims. Where none counts the loss is 0.

    Returns:
        -log softmax(logits)[label], of the labels' shape, in the logits' dtype.

    Raises:
        ValueError: for dtypes or shapes that do not fit.
    """
    logits, labels = jnp.asarray(logits), jnp.asarray(labels)
    if not jnp.issubdtype(logits.dtype, jnp.floating):
        raise ValueError(f"logits of dtype {logits.dtype}: expected a floating-point one")
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise ValueError(f"labels of dtype {labels.dtype}: expected integers")
    axes = (axis,) if isinstance(axis, int) else tuple(axis)
    if not all(-logits.ndim <= a < logits.ndim for a in axes):
        raise ValueError(f"axis={axis} of logits {logits.shape}: expected one of their dims")
    none: Any = None
    if where is not None:
        where = jnp.asarray(where)
        where = jnp.expand_dims(where, axis) if where.ndim != logits.ndim else where
        none = ~where.any(axis, keepdims=True)
        logits = jnp.where(where | none, logits, -jnp.inf)
    logits = jnp.moveaxis(logits, axes, range(-len(axes), 0))
    logits = logits.reshape(*logits.shape[: logits.ndim - len(axes)], -1)
    if labels.shape != logits.shape[:-1]:
        raise ValueError(
            f"labels {labels.shape} and logits {logits.shape} with the vocabulary last: expected "
            "labels of the logits' shape without it"
        )
    labels = labels.astype(jnp.promote_types(labels.dtype, jnp.int32))  # it counts the vocabulary
    labels = jnp.where(labels < 0, labels + logits.shape[-1], labels)
    plain = stays_plain(logits, labels)
    loss = _plain(logits, labels, 0, ())[0] if plain else _loss(logits, labels)
    return loss if none is None else jnp.where(none.squeeze(axis), 0, loss)


@jax.custom_vjp
def _loss(logits: Array, labels: Array) -> Array:
    return _bind(logits, labels)[0]


def _forward(logits: Array, labels: Array) -> tuple[Array, tuple[Array, ...]]:
    loss, log_sums = _bind(logits, labels)
    return loss, (logits, labels, log_sums)


def _backward(kept: tuple[Array, ...], to_loss: Array) -> tuple[Array, None]:
    return _bind_backward(*kept, to_loss)[0], None


_loss.defvjp(_forward, _backward)


def _plain(logits: Array, labels: Array, first: Any, axes: tuple[str, ...]) -> list[Array]:
    """Compute the loss, and the log of the softmax's sums, of a part of the vocabulary.

    Args:
        logits, labels: as above.
        first: the first label of this part.
        axes: the mesh axes over which the parts lie.
    """
    wide = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    greatest = lax.stop_gradient(wide).max(-1)
    greatest = lax.pmax(greatest, axes) if axes else greatest
    total = jnp.exp(wide - greatest[..., None]).sum(-1)
    at = labels - first
    mine = (at >= 0) & (at < logits.shape[-1])
    picked = jnp.take_along_axis(wide, jnp.where(mine, at, 0)[..., None], -1)[..., 0]
    known = (labels >= 0) & (labels < logits.shape[-1] * lax.psum(1, axes))
    picked = jnp.where(mine, picked, jnp.where(known, 0, jnp.nan))
    if axes:
        total, picked = lax.psum((total, picked), axes)
    log_sums = greatest + jnp.log(total)
    return [(log_sums - picked).astype(logits.dtype), log_sums]


def _plain_backward(
    logits: Array, labels: Array, log_sums: Array, to_loss: Array, first: Any = 0
) -> list[Array]:
    """Compute the gradient of the logits: softmax less one at the label, times the loss's own."""
    p = jnp.exp(logits.astype(log_sums.dtype) - log_sums[..., None])
    vocabulary = first + lax.broadcasted_iota(labels.dtype, logits.shape, logits.ndim - 1)
    p = p - (vocabulary == labels[..., None])
    return [(p * to_loss[..., None].astype(p.dtype)).astype(logits.dtype)]


# -- the rule, and each device's part -------------------------------------------------------------


def _rule(backward: bool) -> Callable[..., tuple[str, dict[str, Any]]]:
    def rule(avals: Sequence[Any]) -> tuple[str, dict[str, Any]]:
        lead = " ".join(f"b{d}" for d in range(avals[1].ndim))
        logits = f"{lead} v".strip()
        if backward:
            return f"{logits}, {lead}, {lead}, {lead} -> {logits}", {}
        return f"{logits}, {lead} -> {lead}, {lead}", {"reduction_factors": ("v",)}

    return rule


def _partition(backward: bool) -> Callable[..., Callable[[Operation], Partitioned]]:
    def answer(op: Operation) -> Partitioned:
        at = even(op, 0)
        lead, axes = at[:-1], at[-1]
        given = (at, *(lead,) * (len(op.avals) - 1))
        structs = local_structs(op.mesh, op.avals, given)
        size = structs[0].shape[-1]

        def local(*operands: Array) -> list[Array]:
            first = block_index(op.mesh, axes) * size if axes else 0
            if backward:
                logits, labels, log_sums, to_loss = operands
                return _plain_backward(logits, labels, log_sums, to_loss, first)
            return _plain(operands[0], operands[1], first, axes)

        said = "each device reads its own part of the vocabulary" if axes else "no collective"
        entry = Skip(site=0, source="", einsum="...v,...->...", runs=1, reason=said)
        operations.note(op.number, [entry], short_source(*op.source))
        back = (at,) if backward else (lead, lead)
        return Partitioned(trace_on(op.mesh, local, structs), given, back, ())

    return lambda: answer


def _batch(
    bind: Callable[..., list[Array]], operands: Sequence[Any], dims: Sequence[int | None]
) -> tuple[list[Array], list[int]]:
    """Compute a batch: its dim is one more of the labels'."""
    size = next(o.shape[d] for o, d in zip(operands, dims, strict=True) if d is not None)
    front = [
        jnp.broadcast_to(o, (size, *o.shape)) if d is None else jnp.moveaxis(o, d, 0)
        for o, d in zip(operands, dims, strict=True)
    ]
    results = bind(*front)
    return results, [0] * len(results)


_bind = operation(
    "sharded_cross_entropy",
    2,
    lambda: functools.partial(_plain, first=0, axes=()),
    _rule(False),
    _partition(False),
    _batch,
)
_bind_backward = operation(
    "sharded_cross_entropy_backward",
    4,
    lambda: _plain_backward,
    _rule(True),
    _partition(True),
    _batch,
)
