"""The cross-entropy of logits whose vocabulary is sharded: each device reads its own part alone.

    logits: f32[b, s, v/N];  labels: i32[b, s]
    greatest = pmax(max(logits));  total = psum(sum(exp(logits - greatest)))
    loss = greatest + log(total) - psum(logits[label], where this device has that label)

XLA partitions the two reductions so too, and gathers all logits to look the labels up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.interpreters import ad
from jax.typing import ArrayLike

from jaxoverlap._jax.operations.question import DeviceProgram, Operation, even
from jaxoverlap._jax.operations.specs import block_index, local_structs, trace_on
from jaxoverlap._util.text import short_source
from jaxoverlap.ops.define import Plain, linear, operation
from jaxoverlap.ops.einsum import stays_plain
from jaxoverlap.plan import operations
from jaxoverlap.plan.decisions import Reason, Skip


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
            vocabulary put in where it has fewer dims. They are those that the softmax is summed
            over: the label's own logit counts where it is masked out, as in optax. Where none
            counts the loss is 0.

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
    flat, shape = _vocabulary_last(logits, axes), logits.shape
    if labels.shape != flat.shape[:-1]:
        raise ValueError(
            f"labels {labels.shape} and logits {flat.shape} with the vocabulary last: expected "
            "labels of the logits' shape without it"
        )
    labels = labels.astype(jnp.promote_types(labels.dtype, jnp.int32))  # it counts the vocabulary
    labels = jnp.where(labels < 0, labels + flat.shape[-1], labels)
    if where is None:
        log_sums, picked = _parts(flat, labels)
        return (log_sums - picked).astype(logits.dtype)
    where = jnp.asarray(where)
    if where.dtype != jnp.bool_:
        raise ValueError(f"where of dtype {where.dtype}: expected bool")
    where = jnp.expand_dims(where, axis) if where.ndim != logits.ndim else where
    where = _vocabulary_last(jnp.broadcast_to(where, shape), axes)
    none = ~where.any(-1)
    # The label's own logit counts even where it is masked out, as in optax.
    _, picked = _parts(flat, labels)
    masked = jnp.where(where, flat, jnp.where(none[..., None], 0, -jnp.inf).astype(flat.dtype))
    log_sums, _ = _parts(masked, labels)
    return jnp.where(none, 0, log_sums - picked).astype(logits.dtype)


def _vocabulary_last(array: Array, axes: Sequence[int]) -> Array:
    """Move the dims of the vocabulary to the end, and join them into one."""
    moved = jnp.moveaxis(array, axes, range(-len(axes), 0))
    lead = moved.ndim - len(axes)
    return moved.reshape(*moved.shape[:lead], math.prod(moved.shape[lead:]))


def _parts(logits: Array, labels: Array) -> Sequence[Array]:
    """Compute the log of the softmax's sums and the label's logit, of the labels' shape."""
    if not logits.size:  # nothing is summed
        wide = jnp.promote_types(logits.dtype, jnp.float32)
        return jnp.full(labels.shape, -jnp.inf, wide), jnp.zeros(labels.shape, wide)
    return (_plain if stays_plain(logits, labels) else _bind)(logits, labels)


def _plain(logits: Array, labels: Array, first: Any = 0, axes: tuple[str, ...] = ()) -> list[Array]:
    """Compute the log of the softmax's sums, and the label's logit, from a part of the vocabulary.

    Args:
        logits, labels: as above.
        first: the first label of this part.
        axes: the mesh axes over which the vocabulary is sharded.

    Returns:
        Both in float32 at least. The logit of a label outside of the vocabulary is nan.
    """
    wide = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    greatest = lax.stop_gradient(wide).max(-1)
    greatest = lax.pmax(greatest, axes) if axes else greatest
    greatest = jnp.where(jnp.isfinite(greatest), greatest, 0)
    total = jnp.exp(wide - greatest[..., None]).sum(-1)
    at = labels - first
    mine = (at >= 0) & (at < logits.shape[-1])
    picked = jnp.take_along_axis(wide, jnp.where(mine, at, 0)[..., None], -1)[..., 0]
    known = (labels >= 0) & (labels < logits.shape[-1] * lax.psum(1, axes))
    picked = jnp.where(mine, picked, jnp.where(known, 0, jnp.nan))
    if axes:
        total, picked = lax.psum((total, picked), axes)
    return [greatest + jnp.log(total), picked]


# -- derivatives ----------------------------------------------------------------------------------


def _jvp(primals: Sequence[Array], tangents: Sequence[Any]) -> tuple[list[Array], list[Array]]:
    """Compute both results and their tangents, which are linear in the logits' tangent."""
    log_sums, picked = _bind(*primals)
    return [log_sums, picked], _bind_tangents(*primals, log_sums, tangents[0])


def _plain_tangents(logits: Array, labels: Array, log_sums: Array, moved: Array) -> list[Array]:
    """Compute the tangents of both results from that of the logits: XLA partitions these sums."""
    moved = moved.astype(log_sums.dtype)
    softmax = jnp.exp(logits.astype(log_sums.dtype) - log_sums[..., None])
    return [(softmax * moved).sum(-1), jnp.where(_is_label(logits, labels), moved, 0).sum(-1)]


def _transposed(
    cts: Sequence[Any], logits: Array, labels: Array, log_sums: Array, _: Any
) -> list[Any]:
    """Compute the gradient of the logits from those of both results."""
    to_sums, to_picked = cts
    if isinstance(to_sums, ad.Zero):  # softmax may be nan here: logits that `where` masks may be
        picked = jnp.where(_is_label(logits, labels), to_picked[..., None], 0)
        return [None, None, None, picked.astype(logits.dtype)]
    to_picked = ad.instantiate_zeros(to_picked)
    return [None, None, None, *_bind_backward(logits, labels, log_sums, to_sums, to_picked)]


def _plain_backward(
    logits: Array, labels: Array, log_sums: Array, to_sums: Array, to_picked: Array, first: Any = 0
) -> list[Array]:
    """Compute the gradient of the logits: softmax times that of the sums, and the label's own."""
    softmax = jnp.exp(logits.astype(log_sums.dtype) - log_sums[..., None])
    picked = jnp.where(_is_label(logits, labels, first), to_picked[..., None], 0)
    return [(softmax * to_sums[..., None] + picked).astype(logits.dtype)]


def _is_label(logits: Array, labels: Array, first: Any = 0) -> Array:
    """Return which entries of this part of the vocabulary are labels; of the logits' shape."""
    vocabulary = first + lax.broadcasted_iota(labels.dtype, logits.shape, logits.ndim - 1)
    return vocabulary == labels[..., None]


# -- the rule, and each device's part -------------------------------------------------------------


def _rule(backward: bool) -> Callable[..., tuple[str, dict[str, Any]]]:
    def rule(avals: Sequence[Any]) -> tuple[str, dict[str, Any]]:
        lead = " ".join(f"b{d}" for d in range(avals[1].ndim))
        logits = f"{lead} v".strip()
        if backward:
            return f"{logits}, {lead}, {lead}, {lead}, {lead} -> {logits}", {}
        return f"{logits}, {lead} -> {lead}, {lead}", {"reduction_factors": ("v",)}

    return rule


def _partition(backward: bool) -> Callable[..., Callable[[Operation], DeviceProgram]]:
    def answer(op: Operation) -> DeviceProgram:
        at = even(op, 0)
        lead, axes = at[:-1], at[-1]
        given = (at, *(lead,) * (len(op.avals) - 1))
        structs = local_structs(op.mesh, op.avals, given)
        size = structs[0].shape[-1]

        def local(*operands: Array) -> list[Array]:
            first = block_index(op.mesh, axes) * size if axes else 0
            if backward:
                return _plain_backward(*operands, first=first)
            return _plain(operands[0], operands[1], first, axes)

        own = Reason("no ring", "each device reads its own part of the vocabulary")
        why = own if axes else Reason("no collective")
        entry = Skip(site=0, source="", einsum="...v,...->...", runs=1, why=why)
        operations.note(op.number, [entry], short_source(*op.source))
        back = (at,) if backward else (lead, lead)
        return DeviceProgram(trace_on(op.mesh, local, structs), given, back, ())

    return lambda: answer


def _batch(bind: Plain, size: int, front: list[Array]) -> list[Array]:
    """Compute a batch: its dim is one more of the labels'."""
    return bind(*front)


_bind = operation(
    "sharded_cross_entropy", 2, lambda: _plain, _rule(False), _partition(False), _batch, _jvp
)
_bind_backward = operation(
    "sharded_cross_entropy_backward",
    5,
    lambda: _plain_backward,
    _rule(True),
    _partition(True),
    _batch,
)
_bind_tangents = linear("cross_entropy_tangents", _plain_tangents, _transposed, _batch)
