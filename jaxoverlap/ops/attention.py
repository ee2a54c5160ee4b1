"""Define an attention that XLA partitions into a ring where the sequence is sharded.

    o = jaxoverlap.attention(q, k, v, is_causal=True)

Where XLA shards queries along the sequence, keys and values travel in a ring, each hop under a
block of attention (`passes/rings/ring_attention.py`), or are gathered, if that is estimated to take
less time. A causal ring of cuDNN's kernels is balanced over the devices where that is estimated to
take less time. Batch and heads may be sharded too, at no cost.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh
from jax.typing import ArrayLike

from jaxoverlap._jax import fused_attention
from jaxoverlap._jax.operations.question import DeviceProgram, Operation, even
from jaxoverlap._jax.operations.specs import Spec, block_index, local_structs, trace_on
from jaxoverlap._util.text import short_source
from jaxoverlap.ops.define import Plain, operation
from jaxoverlap.ops.einsum import stays_plain
from jaxoverlap.ops.partition import terms_now
from jaxoverlap.passes.rings.fused_ring_attention import in_order, paired
from jaxoverlap.passes.rings.gradients import attend, attend_backward
from jaxoverlap.passes.rings.ring_attention import SCORES, TO_KEY, TO_QUERY, Attention, dot
from jaxoverlap.plan import operations
from jaxoverlap.plan.decisions import Decision, Reason, Skip, Variant


def attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    implementation: Any = None,
    **others: Any,
) -> Any:
    """Compute `jax.nn.dot_product_attention`, in a ring where the sequence is sharded.

    | query | key, value | result |
    | --- | --- | --- |
    | [batch, sequence, heads, size] | [batch, keys, kv heads, size] | like query |

    Differentiable in reverse mode, like every `jax.custom_vjp`. All scores of one block are in
    memory, in float32; with `implementation="cudnn"` none. With a bias, a mask, three dims or any
    other argument of `jax.nn.dot_product_attention` it is that function.

    Args:
        query, key, value: kv heads divide heads; a causal mask wants as many keys as queries.
        bias, mask, others: as in `jax.nn.dot_product_attention`.
        scale: what scores are multiplied by; none: 1/sqrt(size).
        is_causal: whether a query sees no keys after its own position.
        implementation: what computes a block: "cudnn", its fused kernel; None or "xla", matmuls.
    """
    q, k, v = (jnp.asarray(x) for x in (query, key, value))
    usual = bias is not None or mask is not None or any(x is not None for x in others.values())
    usual = usual or not isinstance(scale, int | float | None)
    fused = implementation == "cudnn"
    usual = usual or implementation not in (None, "xla", "cudnn")
    if fused:
        usual = usual or q.shape[-1] != v.shape[-1] or fused_attention.refusal(q, k, v) is not None
    if usual or not _fits(q, k, v, is_causal) or stays_plain(q, k, v):
        return jax.nn.dot_product_attention(  # it says what is wrong
            q, k, v, bias, mask, scale=scale, is_causal=is_causal, implementation=implementation,
            **others,
        )  # fmt: skip
    factor = q.shape[-1] ** -0.5 if scale is None else float(scale)
    grouped = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[-1])
    out = _attention(_Kind(is_causal, factor, fused), grouped, k, v)
    return out.reshape(*q.shape[:3], v.shape[-1])


def _fits(q: Array, k: Array, v: Array, causal: bool) -> bool:
    """Return whether the operation takes these; JAX's function says what is wrong with others."""
    alike = q.dtype == k.dtype == v.dtype and jnp.issubdtype(q.dtype, jnp.floating)
    if not alike or not q.ndim == k.ndim == v.ndim == 4 or not q.size or not k.size:
        return False
    pairs = k.shape[:3] == v.shape[:3] and (q.shape[0], q.shape[3]) == (k.shape[0], k.shape[3])
    return pairs and q.shape[2] % k.shape[2] == 0 and (not causal or q.shape[1] == k.shape[1])


class _Kind(NamedTuple):
    """The parameters of the operation: as in `Attention` of `ring_attention.py`."""

    causal: bool
    scale: float
    fused: bool


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(kind: _Kind, q: Array, k: Array, v: Array) -> Array:
    return _bind(q, k, v, **kind._asdict())[0]


def _forward(kind: _Kind, q: Array, k: Array, v: Array) -> tuple[Array, Any]:
    out, log_sums = _bind(q, k, v, **kind._asdict())
    return out, (q, k, v, out, log_sums)


def _backward(kind: _Kind, kept: Any, to_out: Array) -> tuple[Array, ...]:
    return tuple(_bind_backward(*kept, to_out, **kind._asdict()))


_attention.defvjp(_forward, _backward)


# -- without a ring -------------------------------------------------------------------------------


def _scores(q: Array, k: Array, causal: bool, scale: float, first: Any) -> Array:
    """Compute masked scores, f32[batch, kv heads, group, queries, keys].

    Args:
        q, k: queries, and all keys.
        causal, scale: as in `attention`.
        first: the position of the first of the queries.
    """
    scores = dot(SCORES, q, k) * scale
    if not causal:
        return scores
    queries = first + lax.iota(jnp.int32, q.shape[1])
    return jnp.where(lax.iota(jnp.int32, k.shape[1]) <= queries[:, None], scores, -jnp.inf)


def _plain(
    q: Array, k: Array, v: Array, *, causal: bool, scale: float, fused: bool, first: Any = 0
) -> list[Array]:
    """Compute attention of some queries and all keys, and the log of the softmax's sums."""
    if fused:
        return list(attend(_alone(causal, scale), q, k, v))
    scores = _scores(q, k, causal, scale, first)
    log_sums = jax.nn.logsumexp(scores, -1)
    p = jnp.exp(scores - log_sums[..., None]).astype(v.dtype)
    return [dot(TO_QUERY, p, v).astype(q.dtype), log_sums]


def _alone(causal: bool, scale: float) -> Attention:
    """Return the settings of a ring of one device, whose block is the kernel."""
    return Attention("", 1, causal, scale, Variant(), fused_attention.CUDNN_LOCAL)


def _plain_backward(
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    log_sums: Array,
    to_out: Array,
    *,
    causal: bool,
    scale: float,
    fused: bool,
    first: Any = 0,
) -> list[Array]:
    """Compute the gradients of q, k and v; those of k and v by these queries alone."""
    if fused:
        return list(attend_backward(_alone(causal, scale), q, k, v, out, log_sums, to_out))
    wide = log_sums.dtype
    delta = jnp.einsum("bskgd,bskgd->bkgs", to_out.astype(wide), out.astype(wide))
    p = jnp.exp(_scores(q, k, causal, scale, first) - log_sums[..., None])
    to_p = dot(SCORES, to_out, v)
    to_scores = (p * (to_p - delta[..., None]) * scale).astype(q.dtype)
    to_q, to_k = dot(TO_QUERY, to_scores, k), dot(TO_KEY, to_scores, q)
    to_v = dot(TO_KEY, p.astype(q.dtype), to_out)
    return [to_q.astype(q.dtype), to_k.astype(k.dtype), to_v.astype(v.dtype)]


# -- the rule, and each device's part -------------------------------------------------------------

_Q, _K, _V, _OUT, _STATS = "b t m g h", "b s m h", "b s m w", "b t m g w", "b m g t"


def _rule(_: Sequence[Any], **__: Any) -> tuple[str, dict[str, Any]]:
    return f"{_Q}, {_K}, {_V} -> {_OUT}, {_STATS}", {"reduction_factors": ("h", "s")}


def _rule_backward(_: Sequence[Any], **__: Any) -> tuple[str, dict[str, Any]]:
    return f"{_Q}, {_K}, {_V}, {_OUT}, {_STATS}, {_OUT} -> {_Q}, {_K}, {_V}", {}


@dataclass(frozen=True)
class _Lies:
    """The sharding of an attention on a mesh.

    Attributes:
        batch, heads: the mesh axes of the batch and of the kv heads.
        queries: those of the queries' sequence.
        ring: the axis along which keys and values travel; "" where each device has all of them.
        balanced: whether devices exchange halves of the sequence before and after the ring.
    """

    batch: tuple[str, ...]
    heads: tuple[str, ...]
    queries: tuple[str, ...]
    ring: str
    balanced: bool = False

    def spec(self, letters: str) -> Spec:
        """Return the sharding of a value of these dims."""
        keys = (self.ring,) if self.ring else ()
        at = {"b": self.batch, "m": self.heads, "t": self.queries, "s": keys}
        return tuple(at.get(letter, ()) for letter in letters.split(" "))


def _partition(backward: bool, **kind: Any) -> Callable[[Operation], DeviceProgram]:
    operands = (_Q, _K, _V, *((_OUT, _STATS, _OUT) if backward else ()))
    results = (_Q, _K, _V) if backward else (_OUT, _STATS)

    def answer(op: Operation) -> DeviceProgram:
        lies, why = _lies(op, _Kind(**kind), backward)
        given = tuple(map(lies.spec, operands))
        structs = local_structs(op.mesh, op.avals, given)
        how = functools.partial(_local, op.mesh, lies, backward, _Kind(**kind))
        operations.note(op.number, [_entry(op, lies, why, backward)], short_source(*op.source))
        jaxpr = trace_on(op.mesh, how, structs)
        return DeviceProgram(jaxpr, given, tuple(map(lies.spec, results)), ())

    return answer


def _local(mesh: Mesh, lies: _Lies, backward: bool, kind: _Kind, *operands: Array) -> list[Array]:
    """Compute one device's part."""
    if lies.ring:
        kernel = fused_attention.CUDNN_LOCAL if kind.fused else None
        settings = kind.causal, kind.scale, Variant(), kernel, lies.balanced
        how = Attention(lies.ring, mesh.shape[lies.ring], *settings)
        if lies.balanced:
            return _balanced(how, *operands)
        return list((attend_backward if backward else attend)(how, *operands))
    first = 0
    if lies.queries:
        size = operands[0].shape[1]
        first = block_index(mesh, lies.queries) * size
    if not backward:
        return _plain(*operands, **kind._asdict(), first=first)
    to_q, to_k, to_v = _plain_backward(*operands, **kind._asdict(), first=first)
    if lies.queries:
        to_k, to_v = lax.psum((to_k, to_v), lies.queries)
    return [to_q, to_k, to_v]


def _balanced(how: Attention, *operands: Array) -> list[Array]:
    """Compute one device's part of a ring, forward or backward, with halves exchanged for it."""
    sums = _STATS.split(" ").index("t")
    dims = [sums if i == 4 else 1 for i in range(len(operands))]
    given = [paired(how, x, dim) for x, dim in zip(operands, dims, strict=True)]
    if len(operands) > 3:
        return [in_order(how, x) for x in attend_backward(how, *given)]
    out, log_sums = attend(how, *given)
    return [in_order(how, out), in_order(how, log_sums, sums)]


def _lies(op: Operation, kind: _Kind, backward: bool) -> tuple[_Lies, Reason | None]:
    """Choose an attention's sharding; return it, and why keys are gathered, if they are.

    The kernel has no causal mask for a part of the queries and all keys: without a ring, queries
    are gathered too. A ring of kernels never takes longer than a gather and the kernel.
    """
    batch, queries, heads, _, _ = even(op, 0)
    keys = even(op, 1)[1]
    only_ring = kind.fused and kind.causal
    without = _Lies(batch, heads, () if only_ring else queries, "")
    if len(queries) != 1:
        along = f"queries lie along {' and '.join(queries)}: a ring takes one axis"
        return without, Reason("no ring", along) if queries else Reason("no collective")
    (axis,) = queries
    if op.avals[1].shape[1] % op.mesh.shape[axis]:
        return without, Reason("no ring", f"{op.avals[1].shape[1]} keys do not divide")
    if axis not in keys and not only_ring:
        return without, Reason("no collective", "each device has all keys")
    ring = _Lies(batch, heads, queries, axis)
    if only_ring and _balance_pays(op, ring, backward):
        ring = replace(ring, balanced=True)
    why = None if kind.fused else _why_unprofitable(op, axis, ring)
    return (without, why) if why else (ring, None)


def _balance_pays(op: Operation, lies: _Lies, backward: bool) -> bool:
    """Return whether half of a causal ring's work takes longer than the exchange that saves it."""
    prices, n = terms_now(op.mesh).prices, op.mesh.shape[lies.ring]
    q, k = local_structs(op.mesh, op.avals[:2], [lies.spec(s) for s in (_Q, _K)])
    b, t, m, g, h = q.shape
    if prices is None or prices.cost.tables.attention is None or t % 2:
        return False
    block_s = prices.cost.attention_s(t, t, b * m * g, h, backward=backward)
    return prices.hop_s(lies.ring, _exchanged(q, k, backward)) < (n - 1) / 2 * block_s


def _exchanged(q: Any, k: Any, backward: bool) -> int:
    """Count the bytes that a device exchanges: q, k, v, the output and, backward, gradients."""
    return (2 + 2 * backward) * (q.size + k.size) * q.dtype.itemsize


def _why_unprofitable(op: Operation, axis: str, lies: _Lies) -> Reason | None:
    """Return why a ring does not pay: it would take longer than a gather and the full attention.

    With t for a block's two matmuls, tau for a hop: t + (N - 1) max(t, tau) against c + w.
    """
    prices, n = terms_now(op.mesh).prices, op.mesh.shape[axis]
    dtype = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}.get(op.avals[0].dtype.name)
    if prices is None or dtype not in prices.cost.dtypes:
        return None
    specs = [lies.spec(s) for s in (_Q, _K)]
    q, k = local_structs(op.mesh, op.avals[:2], specs)
    b, t, m, g, h = q.shape

    def matmuls_s(keys: int) -> float:
        return sum(
            prices.cost.matmul_s(g * t, columns, inner, batch=b * m, dtype=dtype)
            for columns, inner in ((keys, h), (h, keys))
        )

    sent = 2 * k.size * k.dtype.itemsize
    hop_s = prices.hop_s(axis, sent)
    gather_s = prices.gather_s(axis, sent * (n - 1))
    block_s, whole_s = matmuls_s(k.shape[1]), matmuls_s(k.shape[1] * n)
    ring_s = block_s + (n - 1) * max(block_s, hop_s)
    if ring_s <= whole_s + gather_s:
        return None
    return Reason(
        "not ringed",
        f"its blocks and hops take {ring_s * 1e6:.0f} µs, more than attention and all_gather, "
        f"{(whole_s + gather_s) * 1e6:.0f} µs",
    )


def _entry(op: Operation, lies: _Lies, why: Reason | None, backward: bool) -> Decision | Skip:
    einsum = "btmgh,bsmh,bsmw->btmgw"
    if why is not None:
        return Skip(site=0, source="", einsum=einsum, runs=1, why=why)
    q, k, v = local_structs(op.mesh, op.avals[:3], list(map(lies.spec, (_Q, _K, _V))))
    sent = (k.size * k.dtype.itemsize + v.size * v.dtype.itemsize) * (op.mesh.shape[lies.ring] - 1)
    sent *= 2 if backward else 1
    sent += _exchanged(q, k, backward) if lies.balanced else 0
    return Decision(
        site=0,
        ring=0,
        source="",
        einsum=einsum,
        kind="ring_attention",
        axis=lies.ring,
        letter="s",
        num_chunks=op.mesh.shape[lies.ring],
        bytes_moved=sent,
        runs=1,
        why="keys, values and the sums of their gradients travel" if backward else "",
    )


def _batch(bind: Plain, size: int, front: list[Array]) -> list[Array]:
    """Compute a batch: its dim is joined with the batch of each attention."""
    results = bind(*(o.reshape(-1, *o.shape[2:]) for o in front))
    return [r.reshape(size, -1, *r.shape[1:]) for r in results]


_bind = operation(
    "sharded_attention",
    3,
    lambda **how: functools.partial(_plain, **how),
    _rule,
    functools.partial(_partition, False),
    _batch,
)
_bind_backward = operation(
    "sharded_attention_backward",
    6,
    lambda **how: functools.partial(_plain_backward, **how),
    _rule_backward,
    functools.partial(_partition, True),
    _batch,
)
