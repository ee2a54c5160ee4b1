"""Write layers as people do: parameters by name, and functions of parameters and values."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from tests.differential.world import Leaf, World

ACTIVATIONS = (jax.nn.gelu, jnp.tanh, jax.nn.silu, jax.nn.softplus)


def initial(w: World, label: str, shapes: dict[str, str], *, stacked: bool = False) -> dict:
    """Return parameters by name; names that end in "norm" or "bias" have their own values."""
    front = "L" if stacked else ""
    made = {}
    for name, dims in shapes.items():
        if name.endswith("norm"):
            made[name] = w.ones(f"{label}.{name}", front + dims)
        elif name.endswith("bias"):
            made[name] = w.param(f"{label}.{name}", front + dims, scale=0.1)
        else:
            made[name] = w.param(f"{label}.{name}", front + dims)
    return made


# -- norms, MLPs ----------------------------------------------------------------------------------


def norm(w: World, label: str, x: jax.Array, scale: jax.Array) -> jax.Array:
    kind = w.pick("norm", ("rms", "layer", "none"))
    if kind == "none":
        return x * scale
    wide = x.astype(jnp.float32)
    if kind == "layer":
        wide = wide - wide.mean(-1, keepdims=True)
    variance = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    return (wide * jax.lax.rsqrt(variance + 1e-5)).astype(x.dtype) * scale


def mlp_shapes(w: World, label: str) -> dict[str, str]:
    shapes = {"up": "DF", "down": "FD"}
    if w.chance(f"{label} gated", 0.4):
        shapes["gate"] = "DF"
    if w.chance(f"{label} biased", 0.3):
        shapes |= {"up_bias": "F", "down_bias": "D"}
    return shapes


def mlp(w: World, label: str, p: dict, x: jax.Array) -> jax.Array:
    act = w.pick(f"{label} activation", ACTIVATIONS)
    lead = "abcde"[: x.ndim - 1]
    h = w.einsum(f"{label}.up", f"{lead}y,yz->{lead}z", x, p["up"])
    if "up_bias" in p:
        h = h + p["up_bias"]
    h = w.pin(f"{label}.hidden", h, wide=True)
    if "gate" in p:
        h = act(w.einsum(f"{label}.gate", f"{lead}y,yz->{lead}z", x, p["gate"])) * h
    else:
        h = act(h)
    if w.chance(f"{label} own backward pass", 0.08) and not w.explicit:
        out = sparing(h, p["down"])
    else:
        out = w.einsum(f"{label}.down", f"{lead}y,yz->{lead}z", h, p["down"])
    return out + p["down_bias"] if "down_bias" in p else out


@jax.custom_vjp
def sparing(x: jax.Array, y: jax.Array) -> jax.Array:
    """Multiply, with a backward pass of its own as authors of kernels write it."""
    return x @ y


def _sparing_forward(x: jax.Array, y: jax.Array) -> tuple[jax.Array, Any]:
    return x @ y, (x, y)


def _sparing_backward(kept: Any, ct: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, y = kept
    rows = x.reshape(-1, x.shape[-1])
    return ct @ y.T, rows.T @ ct.reshape(rows.shape[0], -1)


sparing.defvjp(_sparing_forward, _sparing_backward)


# -- attention ------------------------------------------------------------------------------------


def attention_shapes(w: World, label: str) -> dict[str, str]:
    kind = w.pick(f"{label} heads", ("apart", "flat", "linear"))
    if kind == "flat":  # one matrix for queries, keys and values, split after
        return {"q": "DD", "k": "DD", "v": "DD", "o": "DD"}
    if kind == "linear":
        return {"k": "DD", "u": "DD"}
    return {"q": "DHK", "k": "DHK", "v": "DHK", "o": "HKD"}


def attention(w: World, label: str, p: dict, x: jax.Array) -> jax.Array:
    if "q" not in p:
        return linear_attention(w, label, p, x)
    if p["q"].ndim == 2:
        heads = max(h for h in (1, 2, 4) if x.shape[-1] % h == 0)
        joined = jnp.concatenate([p["q"], p["k"], p["v"]], axis=1)
        fused = w.pin(f"{label}.qkv", x @ joined, wide=True)
        q, k, v = (t.reshape(*x.shape[:2], heads, -1) for t in jnp.split(fused, 3, axis=-1))
        return mixed(w, label, q, k, v).reshape(x.shape) @ p["o"]
    q, k, v = (
        w.einsum(f"{label}.{n}", "bsd,dhk->bshk", x, p[n]) for n in ("q", "k", "v")
    )  # fmt: skip
    q = w.pin(f"{label}.q", q)
    return w.einsum(f"{label}.o", "bshk,hkd->bsd", mixed(w, label, q, k, v), p["o"])


def mixed(w: World, label: str, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Apply causal attention over [batch, sequence, head, dim]."""
    if w.chance(f"{label} fused attention", 0.2):
        return jax.nn.dot_product_attention(q, k, v, is_causal=True)
    scores = jnp.einsum("bshk,bthk->bhst", q, k) / math.sqrt(q.shape[-1])
    scores = w.pin(f"{label}.scores", scores)
    mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    scores = jnp.where(mask, scores, jnp.finfo(scores.dtype).min)
    return jnp.einsum("bhst,bthk->bshk", jax.nn.softmax(scores, axis=-1), v)


def linear_attention(w: World, label: str, p: dict, x: jax.Array) -> jax.Array:
    """Apply linear attention: keys against the stream itself, without a softmax."""
    k = w.pin(f"{label}.k", x @ p["k"])
    state = jnp.einsum("bsd,bse->bde", k, x)
    mixed = jnp.einsum("bsd,bde->bse", k, state) / (x.shape[1] * x.shape[2])
    return jnp.tanh(mixed) @ p["u"]


# -- stacks ---------------------------------------------------------------------------------------


def stack(w: World, label: str, block: Callable, params: Any, x: jax.Array) -> jax.Array:
    """Apply blocks in turn: scanned over stacked weights or unrolled, with remat or not."""
    remat = w.pick(f"{label} remat", ("no", "no", "all", "dots", "none saveable"))
    policies = {
        "all": None,
        "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
        "none saveable": jax.checkpoint_policies.nothing_saveable,
    }
    if remat != "no":
        block = jax.checkpoint(block, policy=policies[remat])
    if w.chance(f"{label} block jitted", 0.15):
        block = jax.jit(block)
    if not isinstance(params, list):
        unroll = 2 if w.chance(f"{label} unroll", 0.1) else 1
        aux = w.chance(f"{label} gives norms", 0.2)

        def body(x, p):
            x = block(p, x)
            return x, (jnp.mean(jnp.square(x)) if aux else None)

        return jax.lax.scan(body, x, params, unroll=unroll)[0]
    for p in params:
        x = block(p, x)
    return x


def stacked(w: World, label: str, shapes: dict[str, str]) -> Any:
    """Return a stack's parameters: stacked for a scan, or a list of layers if these are small."""
    if len(shapes) > 6 or w.pick(f"{label} stack", ("scan", "scan", "scan", "unrolled")) == "scan":
        return initial(w, label, shapes, stacked=True)
    return [initial(w, f"{label} {i}", shapes) for i in range(2)]


# -- ends -----------------------------------------------------------------------------------------


def look_up(w: World, label: str, table: jax.Array, ids: jax.Array) -> jax.Array:
    kind = w.pick(f"{label} lookup", ("index", "index", "take", "one hot"))
    if kind == "take":
        return jnp.take(table, ids, axis=0)
    if kind == "one hot":
        return jax.nn.one_hot(ids, table.shape[0], dtype=table.dtype) @ table
    return table[ids]


def cross_entropy(w: World, label: str, logits: jax.Array, labels: jax.Array) -> jax.Array:
    logits = logits.astype(jnp.float32)
    kind = w.pick(f"{label} cross-entropy", ("optax", "optax", "take_along_axis", "one hot"))
    if kind == "optax":
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    logs = jax.nn.log_softmax(logits)
    if kind == "one hot":
        return -(jax.nn.one_hot(labels, logits.shape[-1]) * logs).sum(-1).mean()
    return -jnp.take_along_axis(logs, labels[..., None], axis=-1).mean()


def tokens(w: World, *, below: str = "V") -> Callable[[int], list[Leaf]]:
    """Return a function that draws a call's rows of ids, and the id that follows each."""
    shape = (w.size("B"), w.size("S"))
    return lambda call: [
        w.integers(f"tokens {call}", shape, w.size(below)),
        w.integers(f"targets {call}", shape, w.size(below)),
    ]


def rows(w: World, *dims: str) -> Callable[[int], list[Leaf]]:
    """Return a function that draws a call's given and wanted values, by the letters of each."""
    return lambda call: [
        w.normal(f"rows {i} {call}", [w.size(c) for c in letters])
        for i, letters in enumerate(dims)
    ]  # fmt: skip
