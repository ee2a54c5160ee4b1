"""Check the numbers of cuDNN's attention kernels, as rings and packed sequences use them.

python -m benchmarks.cudnn_numbers      # needs a GPU; a minute

Rings run on one GPU: their devices are a mapped dim (`jax.vmap`). Errors are norms relative to
attention in float32: of the output and of the gradients of q, k and v.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from benchmarks import frame
from benchmarks.frame import Only, Written, chosen, provenance, rows_in, write_rows
from jaxoverlap._jax import fused_attention
from jaxoverlap.passes.rings.fused_ring_attention import in_order, paired
from jaxoverlap.passes.rings.gradients import attended
from jaxoverlap.passes.rings.ring_attention import Attention
from jaxoverlap.plan.plan import Variant

AXIS = "sequence"
COLUMNS = ("what", "output", "q", "k", "v")
console = Console(width=200)
app = frame.app()


RINGS = [  # devices, causal, balanced, kv heads, variant
    (4, True, True, 2, "two_way"),
    (2, True, False, 2, "one_way"),
    (4, True, False, 8, "direct"),
    (8, True, True, 2, "one_way"),
    (4, False, True, 8, "two_way"),
    (8, True, False, 8, "one_way"),
    (4, True, True, 8, "direct"),
    (2, False, True, 2, "one_way"),
]


def numbers(batch: int = 2, length: int = 2048, heads: int = 8) -> dict[str, Any]:
    """Return the greatest relative errors of ring attention, and of cuDNN's alone, in bfloat16."""
    worst = {"ring": [0.0] * 4, "cuDNN": [0.0] * 4}
    for n, causal, balanced, kv_heads, variant in RINGS:
        keys = jax.random.split(jax.random.key(n), 4)
        sizes = (heads, kv_heads, kv_heads, heads)
        q, k, v, g = (
            jax.random.normal(key, (batch, length, h, 128), jnp.bfloat16)
            for key, h in zip(keys, sizes, strict=True)
        )
        want = jax.jit(_with_gradients, static_argnums=0)(_EXACT[causal], q, k, v, g)
        alone = functools.partial(
            jax.nn.dot_product_attention, is_causal=causal, implementation="cudnn"
        )
        how = Attention(
            AXIS, n, causal, 128**-0.5, Variant.parse(variant), fused_attention.CUDNN, balanced
        )
        attend = functools.partial(_ring, how)
        mapped = jax.vmap(functools.partial(_with_gradients, attend), axis_name=AXIS)
        split = [jnp.stack(jnp.split(x, n, 1)) for x in (q, k, v, g)]
        got = [jnp.concatenate(list(x), 1) for x in jax.jit(mapped)(*split)]
        for kind, values in (
            ("ring", got),
            ("cuDNN", jax.jit(_with_gradients, static_argnums=0)(alone, q, k, v, g)),
        ):
            errors = [_error(a, b) for a, b in zip(values, want, strict=True)]
            worst[kind] = [max(pair) for pair in zip(worst[kind], errors, strict=True)]
            if kind == "ring":
                of = f"causal {causal}, balanced {balanced}, {kv_heads} kv heads, {variant}"
                console.print(f"ring of {n}, {of}: {' '.join(f'{e:.1e}' for e in errors)}")
    return {"errors": worst, "rings": len(RINGS)}


def packed(length: int = 2048, heads: int = 8) -> dict[str, Any]:
    """Return the errors of attention to sequences that stand one after the other."""
    sizes = [700, 3, 1024, 65, 200]  # 56 slots are of no sequence
    starts = np.cumsum([0, *sizes])
    q, k, v, g = (
        jax.random.normal(key, (1, length, h, 128), jnp.bfloat16)
        for key, h in zip(jax.random.split(jax.random.key(0), 4), (heads, 2, 2, heads), strict=True)
    )
    g = jnp.where(jnp.arange(length)[None, :, None, None] < starts[-1], g, 0)
    rows = jnp.asarray([sizes], jnp.int32), jnp.asarray([[*starts]], jnp.int32)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return fused_attention.packed_causal(q, k, v, *rows, scale=128**-0.5)

    def exact(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        cut = [slice(a, b) for a, b in itertools.pairwise(starts)]
        parts = [_exact(q[:, c], k[:, c], v[:, c], causal=True) for c in cut]
        return jnp.concatenate([*parts, jnp.zeros_like(q[:, starts[-1] :], jnp.float32)], 1)

    got = jax.jit(functools.partial(_with_gradients, attend))(q, k, v, g)
    want = _with_gradients(exact, q, k, v, g)
    errors = [
        _error(a[:, : starts[-1]], b[:, : starts[-1]]) for a, b in zip(got, want, strict=True)
    ]
    beyond = [float(jnp.abs(a[:, starts[-1] :]).max()) for a in got]
    return {"errors": errors, "greatest beyond": beyond}


def local() -> dict[str, Any]:
    """Return the errors of the kernels as XLA's partitioner is given them, against JAX's own."""
    q, k, v, g = (
        jax.random.normal(key, (2, 1024, h, 128), jnp.bfloat16)
        for key, h in zip(jax.random.split(jax.random.key(0), 4), (8, 2, 2, 8), strict=True)
    )

    @functools.partial(jax.jit, static_argnums=(0, 1))
    def both(kernel: fused_attention.BlockKernel, causal: bool) -> Any:
        out, sums = kernel.forward(q, k, v, causal=causal, scale=0.1)
        return out, sums, *kernel.backward(q, k, v, out, sums, g, causal=causal, scale=0.1)

    errors = []
    for causal in (False, True):
        kernels = fused_attention.CUDNN_LOCAL, fused_attention.CUDNN
        got, want = (both(kernel, causal) for kernel in kernels)
        errors += [_error(a, b.astype(jnp.float32)) for a, b in zip(got, want, strict=True)]
    return {"errors": errors}


def _ring(how: Attention, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Attend as `ring.ring_attention` does, which a mapped axis does not pass for a manual one."""
    grouped = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[-1])
    operands = [paired(how, x) if how.balanced else x for x in (grouped, k, v)]
    out = attended(how, *operands)
    return (in_order(how, out) if how.balanced else out).reshape(q.shape)


def _with_gradients(attend: Callable[..., jax.Array], q: Any, k: Any, v: Any, g: Any) -> Any:
    y, transpose = jax.vjp(attend, q, k, v)
    return (y, *transpose(g.astype(y.dtype)))


def _exact(q: jax.Array, k: jax.Array, v: jax.Array, causal: bool) -> jax.Array:
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    with jax.default_matmul_precision("highest"):
        return jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation="xla")


_EXACT = {causal: functools.partial(_exact, causal=causal) for causal in (False, True)}


def _error(got: jax.Array, want: jax.Array) -> float:
    """Return the norm of the difference over the norm of what is wanted."""
    ours, exact = (np.asarray(x, np.float64) for x in (got.astype(jnp.float32), want))
    return float(np.linalg.norm(ours - exact) / np.linalg.norm(exact))


CHECKED: dict[str, Callable[[], dict[str, Any]]] = {
    "ring": numbers,
    "packed": packed,
    "local": local,
}


@app.command()
def main(only: Only = None, out: Written = Path("out/cudnn_numbers.jsonl")) -> None:
    """Compute on the first GPU; print the errors."""
    rows = rows_in(out)
    for name in chosen("only", only, CHECKED):
        made = {"device": jax.devices()[0].device_kind, **provenance(), **CHECKED[name]()}
        rows[name, "numbers"] = {"step": name, "row": "numbers", **made}
        write_rows(out, rows.values())
    made = table(list(rows.values()))
    console.print(frame.filled("relative errors", COLUMNS, made, words=("what",)))


def table(rows: list[frame.Row]) -> list[tuple[str, ...]]:
    """Return the cells of rings, of cuDNN's attention alone, and of packed sequences."""
    errors = {row["step"]: row["errors"] for row in rows}
    lines = {
        "rings of 2, 4 and 8, the greatest": errors["ring"]["ring"],
        "cuDNN's attention without a ring": errors["ring"]["cuDNN"],
        "packed sequences": errors["packed"],
    }
    return [(what, *(f"{error:.1e}" for error in of)) for what, of in lines.items()]


if __name__ == "__main__":
    app()
