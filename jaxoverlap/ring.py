"""Collectives under matmuls, for those who write `shard_map` by hand.

    def layer(x, w):                       # x: [s/N, d], w: [d, f/N] on each device
        return jaxoverlap.ring.all_gather_matmul(x, w, "model")   # [s, f/N]

    jax.shard_map(layer, mesh=mesh, in_specs=(P("model"), P(None, "model")),
                  out_specs=P(None, "model"), axis_names={"model"}, check_vma=False)

Each function runs where `axis_name` is manual, does what a collective and a matmul would, and has
gradients that are rings too. N is the size of the axis. A matmul is named by an einsum `spec` of
two operands, in which every letter is in two or in all three of `x,w->y`; without a spec it is
`x @ w` of x [..., rows, inner] and w [inner, columns], and what moves is the rows.

| function | x on a device | w on a device | y on a device |
| --- | --- | --- | --- |
| all_gather_matmul | [rows/N, inner] | [inner, columns] | [rows, columns] |
| matmul_reduce_scatter | [rows, inner] | [inner, columns] | [rows/N, columns], summed |
| matmul_all_reduce | [rows, inner] | [inner, columns] | [rows, columns], summed |
| all_to_all_matmul | [rows, inner/N] | [inner, columns] | [rows/N, columns] |
| matmul_all_to_all | [rows/N, inner] | [inner, columns] | [rows, columns/N] |
| ring_attention | q, k, v: [batch, sequence/N, heads, head] | | like q |
| query_split_attention | q, k, v: [b, s, h/N, head] | wo: [h/N, head, d] | [b, s/N, d], summed |

`variant` says how the pieces travel: a `Variant` or its text, as in "two_way x 2". Exchanges have
no "one_way" and no "two_way", ring attention has no "sliced".
"""

from __future__ import annotations

from typing import Any

from jax import Array

from jaxoverlap.passes.rings import arguments, gradients
from jaxoverlap.passes.rings.fused_ring_attention import in_order, paired
from jaxoverlap.passes.rings.ring_attention import Attention
from jaxoverlap.plan.plan import Variant

__all__ = [
    "all_gather_matmul",
    "all_to_all_matmul",
    "matmul_all_reduce",
    "matmul_all_to_all",
    "matmul_reduce_scatter",
    "query_split_attention",
    "ring_attention",
]


def all_gather_matmul(
    x: Array,
    w: Array,
    axis_name: str,
    *,
    spec: str | None = None,
    gather: str | None = None,
    variant: str | Variant = "one_way",
    precision: Any = None,
    preferred_element_type: Any = None,
) -> Array:
    """Compute `einsum(spec, all_gather(x), w)`, each hop under the chunk that has arrived.

    | spec, gather | x | w | y |
    | --- | --- | --- | --- |
    | none | [rows/N, inner] | [inner, columns] | [rows, columns] |
    | "bsd,df->bsf", "s" | [b, s/N, d] | [d, f] | [b, s, f] |
    | "df,bsd->bsf", "d" | [d/N, f] | [b, s, d] | [b, s, f] |

    The second row is a sequence that is gathered, the third an FSDP weight. Backward, x's gradient
    is a reduce-scatter ring, and w's gathers x again rather than keep it.

    Args:
        x: the operand that is gathered.
        w: the other one, not sharded along the gathered dim if it has it.
        axis_name: the manual mesh axis that x is sharded over.
        spec: the matmul; none: `x @ w`.
        gather: the letter of x that is gathered; none: the rows, x's dim before the last.
        variant: how the pieces travel.
        precision, preferred_element_type: as in `jax.numpy.einsum`.

    Raises:
        ValueError: for a spec, letter, shape or variant that does not fit.
    """
    how = arguments.matmul(x, w, axis_name, spec, variant, precision, preferred_element_type)
    how = arguments.moving(how, gather, "gather", how.x, -2)
    arguments.check_sizes(how, x, w, gathered=how.moved)
    return gradients.gathered(how, *arguments.varying(axis_name, x, w))


def matmul_reduce_scatter(
    x: Array,
    w: Array,
    axis_name: str,
    *,
    spec: str | None = None,
    scatter: str | None = None,
    variant: str | Variant = "one_way",
    precision: Any = None,
    preferred_element_type: Any = None,
) -> Array:
    """Compute `psum_scatter(einsum(spec, x, w))`, each hop under the next chunk.

    | spec, scatter | x | w | y |
    | --- | --- | --- | --- |
    | none | [rows, inner] | [inner, columns] | [rows/N, columns] |
    | "bsf,fd->bsd", "s" | [b, s, f] | [f, d] | [b, s/N, d] |

    Backward, y's gradient is gathered once, by one ring that feeds both operands' gradients.

    Args:
        x, w: operands of this device's partial sums.
        axis_name: the manual mesh axis over which they are summed, and y is sharded.
        spec: the matmul; none: `x @ w`.
        scatter: the letter of y that is scattered; none: the rows, y's dim before the last.
        variant, precision, preferred_element_type: as in `all_gather_matmul`.

    Raises:
        ValueError: for a spec, letter, shape or variant that does not fit.
    """
    how = arguments.matmul(x, w, axis_name, spec, variant, precision, preferred_element_type)
    how = arguments.moving(how, scatter, "scatter", how.y, -2)
    arguments.check_sizes(how, x, w, divided=how.moved)
    return gradients.scattered(how, *arguments.varying(axis_name, x, w))


def matmul_all_reduce(
    x: Array,
    w: Array,
    axis_name: str,
    *,
    spec: str | None = None,
    chunk: str | None = None,
    variant: str | Variant = "one_way",
    precision: Any = None,
    preferred_element_type: Any = None,
) -> Array:
    """Compute `psum(einsum(spec, x, w))`: a reduce-scatter ring, then a plain all-gather.

    | spec, chunk | x | w | y |
    | --- | --- | --- | --- |
    | none | [rows, inner] | [inner, columns] | [rows, columns] |
    | "bsf,fd->bsd", "s" | [b, s, f] | [f, d] | [b, s, d] |

    Backward, y's gradient is summed as `psum` does it: scattered plainly, then gathered by one ring
    that feeds both operands' gradients. Use it under `shard_map(check_vma=False)`: JAX cannot see
    that y is the same on all devices.

    Args:
        x, w: operands of this device's partial sums.
        axis_name: the manual mesh axis over which they are summed.
        spec: the matmul; none: `x @ w`.
        chunk: the letter of y to split into chunks; none: the rows, y's dim before the last.
        variant, precision, preferred_element_type: as in `all_gather_matmul`.

    Raises:
        ValueError: for a spec, letter, shape or variant that does not fit.
    """
    how = arguments.matmul(x, w, axis_name, spec, variant, precision, preferred_element_type)
    how = arguments.moving(how, chunk, "chunk", how.y, -2)
    arguments.check_sizes(how, x, w, divided=how.moved)
    return gradients.reduced(how, *arguments.varying(axis_name, x, w))


def all_to_all_matmul(
    x: Array,
    w: Array,
    axis_name: str,
    *,
    spec: str | None = None,
    gather: str | None = None,
    split: str | None = None,
    variant: str | Variant = "direct",
    precision: Any = None,
    preferred_element_type: Any = None,
) -> Array:
    """Compute `einsum(spec, all_to_all(x), w)`, each send under the slice that has arrived.

    | spec, gather, split | x | w | y |
    | --- | --- | --- | --- |
    | none | [rows, inner/N] | [inner, columns] | [rows/N, columns] |
    | "bshd,hde->bse", "h", "s" | [b, s, h/N, d] | [h, d, e] | [b, s/N, e] |

    The second row is Ulysses' exchange from attention's heads back to the sequence. Backward, x's
    gradient is an exchanged result, and w's exchanges x again rather than keep it.

    Args:
        x: the operand that is exchanged: sharded on `gather`, wanted sharded on `split`.
        w: the other one; not sharded along `gather`, 1/N of `split`, where it has them.
        axis_name: the manual mesh axis.
        spec: the matmul; none: `x @ w`.
        gather: the letter of x that is sharded; none: x's last dim.
        split: the letter of x that is sharded instead; none: the rows, x's dim before the last.
        variant: "direct", or as in "sliced x 4".
        precision, preferred_element_type: as in `all_gather_matmul`.

    Raises:
        ValueError: for a spec, letter, shape or variant that does not fit.
    """
    how = arguments.matmul(x, w, axis_name, spec, variant, precision, preferred_element_type)
    how = arguments.moving(how, gather, "gather", how.x, -1, split, -2)
    arguments.check_sizes(how, x, w, gathered=how.moved, divided=how.split)
    return gradients.exchanged(how, *arguments.varying(axis_name, x, w))


def matmul_all_to_all(
    x: Array,
    w: Array,
    axis_name: str,
    *,
    spec: str | None = None,
    gather: str | None = None,
    split: str | None = None,
    variant: str | Variant = "direct",
    precision: Any = None,
    preferred_element_type: Any = None,
) -> Array:
    """Compute `all_to_all(einsum(spec, x, w))`, each send under the next slice.

    | spec, gather, split | x | w | y |
    | --- | --- | --- | --- |
    | none | [rows/N, inner] | [inner, columns] | [rows, columns/N] |
    | "bsd,dhe->bshe", "s", "h" | [b, s/N, d] | [d, h, e] | [b, s, h/N, e] |

    The second row is Ulysses' exchange from the sequence to attention's heads. Backward, y's
    gradient is exchanged once, for both operands' gradients.

    Args:
        x, w: operands, of which at least one has 1/N of `gather`.
        axis_name: the manual mesh axis.
        spec: the matmul; none: `x @ w`.
        gather: the letter of y that is computed in parts; none: the rows, y's dim before the last.
        split: the letter of y that is sharded instead; none: y's last dim.
        variant: "direct", or as in "sliced x 4".
        precision, preferred_element_type: as in `all_gather_matmul`.

    Raises:
        ValueError: for a spec, letter, shape or variant that does not fit.
    """
    how = arguments.matmul(x, w, axis_name, spec, variant, precision, preferred_element_type)
    how = arguments.moving(how, gather, "gather", how.y, -2, split, -1)
    arguments.check_sizes(how, x, w, divided=how.split)
    return gradients.exchanged_result(how, *arguments.varying(axis_name, x, w))


def ring_attention(
    q: Array,
    k: Array,
    v: Array,
    axis_name: str,
    *,
    causal: bool = False,
    scale: float | None = None,
    variant: str | Variant = "one_way",
    implementation: str | None = None,
    balanced: bool = True,
) -> Array:
    """Compute attention over a sharded sequence; keys and values travel under blocks of it.

    | q | k, v | result |
    | --- | --- | --- |
    | [batch, sequence/N, heads, head] | the same | the same |
    | [batch, sequence/N, heads, head] | [batch, keys/N, kv heads, head] | like q |

    Backward, the gradients of k and v travel with k and v. Each device holds the scores of one
    block, [batch, heads, sequence/N, keys/N], in float32; with `implementation="cudnn"` none. That
    one needs what `jax.nn.dot_product_attention(implementation="cudnn")` needs, and all axes of
    the mesh manual.

    Args:
        q, k, v: this device's part of the sequence; kv heads divide heads.
        axis_name: the manual mesh axis that the sequence is sharded over, in order.
        causal: whether a query sees no keys after its own position in the full sequence.
        scale: what scores are multiplied by; none: 1/sqrt(head).
        variant: how keys and values travel; not "sliced".
        implementation: what computes a block: "cudnn", its fused kernel; None or "xla", matmuls.
        balanced: for "cudnn" with a causal mask: exchange halves of the sequence before and after,
            which halves the ring's work. Not worth it over slow links with short sequences.

    Raises:
        ValueError: for a shape, variant or implementation that does not fit.
    """
    how = _attention(q, axis_name, causal, scale, variant)
    how = arguments.with_kernel(how, implementation, balanced)
    arguments.check_attention(how, q, k, v)
    operands = arguments.varying(axis_name, _grouped(q, k), k, v)
    if how.balanced:
        operands = [paired(how, x) for x in operands]
    out = gradients.attended(how, *operands)
    return (in_order(how, out) if how.balanced else out).reshape(q.shape)


def query_split_attention(
    q: Array,
    k: Array,
    v: Array,
    wo: Array,
    axis_name: str,
    *,
    causal: bool = False,
    scale: float | None = None,
    variant: str | Variant = "one_way",
) -> Array:
    """Compute attention of this device's heads, projected and scattered, hops under query slices.

    | q | k, v | wo | result |
    | --- | --- | --- | --- |
    | [batch, sequence, heads/N, head] | the same | [heads/N, head, d] | [batch, sequence/N, d] |
    | [batch, sequence, heads/N, head] | [batch, keys, kv heads/N, head] | the same | the same |

    Tensor parallelism's attention, between column-parallel q, k and v and a sequence that is
    sharded; CommFuse's query-split (arXiv 2604.24013). Before, for one batch and without `scale`:

        p: f32[heads/N, sequence, keys] = softmax(q k^T)
        o: f32[sequence, heads/N, head] = dot_general p v
        z: f32[sequence, d] = dot_general o wo
        y: f32[sequence/N, d] = reduce_scatter[axis_name=model, scatter_dimension=0] z

    After, N times, the device's own slice of the queries last:

        sum = ppermute sum                             # in flight under all that follows
        p: f32[heads/N, sequence/N, keys] = softmax(q[slice] k^T)
        o: f32[sequence/N, heads/N, head] = dot_general p v
        sum = add sum (dot_general o wo)

    With t for one slice's compute and tau for its hop that takes t + (N - 1) max(t, tau) and an
    add. Backward, y's gradient is gathered by one ring, and each slice's scores are computed again
    under its hops: only the operands are residuals. Each device holds the scores of one slice,
    [batch, heads/N, sequence/N, keys], in float32.

    Not for attention that gains more from a fused kernel than from hidden hops, nor where a slice
    is too small to run at the full matmul's rate. A causal mask saves no work: which slice is
    computed is known only at run time, so each has all keys.

    Args:
        q, k, v: this device's heads of the full sequence; kv heads divide heads.
        wo: the rows of the output projection that belong to these heads.
        axis_name: the manual mesh axis that heads are sharded over, and the result's sequence.
        causal: whether a query sees no keys after its own position.
        scale: what scores are multiplied by; none: 1/sqrt(head).
        variant: how the sums travel.

    Raises:
        ValueError: for a shape, dtype or variant that does not fit.
    """
    how = _attention(q, axis_name, causal, scale, variant)
    arguments.check_projected(how, q, k, v, wo)
    operands = _grouped(q, k), k, v, wo.reshape(k.shape[2], -1, *wo.shape[1:])
    return gradients.projected(how, *arguments.varying(axis_name, *operands))


def _attention(
    q: Array, axis_name: str, causal: bool, scale: float | None, variant: str | Variant
) -> Attention:
    """Collect the settings of an attention, which stay the same along its ring."""
    return Attention(
        axis_name,
        arguments.size_of(axis_name),
        causal,
        q.shape[-1] ** -0.5 if scale is None else scale,
        arguments.variant_of(variant),
    )


def _grouped(q: Array, k: Array) -> Array:
    """The heads of q by the kv head that they read: [batch, queries, kv heads, group, head]."""
    batch, queries, heads, head = q.shape
    return q.reshape(batch, queries, k.shape[2], heads // k.shape[2], head)
