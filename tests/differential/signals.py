"""Draw programs around other operations than matmuls: convolutions, grouped matmuls, scans, FFTs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.differential import layers
from tests.differential.training import Program, trained
from tests.differential.world import World

LAYOUTS_OF_IMAGES = (("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW"))


def images(w: World) -> Program:
    """Draw a network of images: 2-D convolutions, then matmuls, as a ViT or a small U-Net has."""
    shapes = {"up": "DF", "down": "FD", "out": "DV"}
    params: dict[str, Any] = layers.initial(w, "net", shapes)
    order = w.pick("order of dims", LAYOUTS_OF_IMAGES)
    kind = w.pick(
        "convolutions", ("patches", "patches", "frozen patches", "three by three", "groups")
    )
    hidden, side = w.size("D"), 4 if "patches" in kind else 1
    channels = 4
    params["patch"] = _kernel(
        w, "patch", order[1], (side if side > 1 else 3,) * 2, channels, hidden
    )
    if kind == "groups":
        params["inner"] = _kernel(w, "inner", order[1], (3, 3), hidden // 4, hidden)
    if kind == "three by three":
        params["inner"] = _kernel(w, "inner", order[1], (3, 3), hidden, hidden)
    window = (side, side)

    def convolved(x, kernel, strides, padding, groups=1):
        return jax.lax.conv_general_dilated(
            x, kernel, strides, padding, dimension_numbers=order, feature_group_count=groups
        )

    def loss(params, x, targets):
        p, x = w.cast(params), x.astype(w.compute)
        patch = jax.lax.stop_gradient(p["patch"]) if kind == "frozen patches" else p["patch"]
        x = convolved(x, patch, window, "VALID" if side > 1 else "SAME")
        if "inner" in p:
            inner = jax.nn.silu(
                convolved(x, p["inner"], (1, 1), "SAME", 4 if kind == "groups" else 1)
            )
            x = x + w.pin("inner", inner)
        x = jnp.moveaxis(x, 1, -1) if order[0] == "NCHW" else x
        x = w.pin("tokens", x.reshape(x.shape[0], -1, x.shape[-1]))
        h = w.pin("h", jax.nn.gelu(x @ p["up"]), wide=True)
        x = (x + h @ p["down"]).mean(axis=1)
        return layers.cross_entropy(w, "loss", w.pin("logits", x @ p["out"]), targets)

    shape = (8, 8, channels) if order[0] == "NHWC" else (channels, 8, 8)
    batch = w.size("B")
    return trained(
        w, params, loss,
        lambda n: [w.normal(f"x {n}", (batch, *shape)), w.integers(f"y {n}", (batch,), w.size("V"))],
    )  # fmt: skip


def _kernel(w: World, label: str, order: str, window: Any, inputs: int, outputs: int) -> Any:
    """Draw a kernel whose dims have the given order, "O" and "I" among them."""
    sizes = {"O": outputs, "I": inputs, "H": window[0], "W": window[-1]}
    shape = [sizes[letter] for letter in order]
    leaf = w.normal(label, shape)
    scale = 1 / np.sqrt(np.prod(shape) / outputs)
    return type(leaf)((leaf.value * scale).astype(w.kept), w.wild(label, shape, even=True))


def state_space(w: World) -> Program:
    """Draw blocks as Mamba's: a gate, a causal depthwise convolution, and a scan over time."""
    params: dict[str, Any] = layers.initial(
        w, "net", {"inner": "DF", "gate": "DF", "decay": "DF", "out": "FD"}
    )
    inner, taps = w.size("F"), 4
    params["conv"] = _kernel(w, "conv", "WIO", (taps,), 1, inner)
    over_time = w.pick("over time", ("associative_scan", "scan", "cumsum", "while"))

    def loss(params, x, y):
        p, x = w.cast(params), x.astype(w.compute)
        h = jax.lax.conv_general_dilated(
            x @ p["inner"], p["conv"], (1,), [(taps - 1, 0)],
            dimension_numbers=("NWC", "WIO", "NWC"), feature_group_count=inner,
        )  # fmt: skip
        h = w.pin("h", jax.nn.silu(h), wide=True)
        decay = jax.nn.sigmoid(x @ p["decay"])
        h = _recurrent(over_time, decay, h * (1 - decay))
        out = w.einsum("out", "bsf,fd->bsd", h * jax.nn.silu(x @ p["gate"]), p["out"])
        return jnp.mean(jnp.square(w.pin("out", out + x).astype(jnp.float32) - y))

    return trained(w, params, loss, layers.rows(w, "BSD", "BSD"))


def _recurrent(kind: str, decay: jax.Array, given: jax.Array) -> jax.Array:
    """Compute h[t] = decay[t] h[t - 1] + given[t] along dim 1, or something like it."""
    if kind == "associative_scan":

        def joined(a, b):
            return a[0] * b[0], b[0] * a[1] + b[1]

        return jax.lax.associative_scan(joined, (decay, given), axis=1)[1]
    if kind == "scan":

        def one(h, now):
            h = now[0] * h + now[1]
            return h, h

        first = jnp.zeros_like(given[:, 0])
        over = (jnp.moveaxis(decay, 1, 0), jnp.moveaxis(given, 1, 0))
        return jnp.moveaxis(jax.lax.scan(one, first, over)[1], 0, 1)
    if kind == "cumsum":
        weights = jnp.flip(jax.lax.cummax(jnp.flip(decay, 1), axis=1), 1)
        return jnp.cumsum(given, axis=1) * weights / given.shape[1]
    scale = jax.lax.while_loop(  # as far as the norm is above a bound: no gradient goes through
        lambda s: jnp.abs(s).max() > 0.5, lambda s: s / 2, jax.lax.stop_gradient(decay)
    )
    return given * (1 + scale)


def grouped_experts(w: World) -> Program:
    """Draw a mixture of experts that sorts its tokens, and multiplies them in groups."""
    experts = w.size("E")
    params = layers.initial(
        w, "moe", {"a": "DF", "b": "FD", "router": "DE", "up": "EDF", "down": "EFD"}
    )
    back = w.pick("back", ("scatter", "gather", "scatter-add"))
    dense_first = w.chance("dense layer", 0.7)

    def loss(params, x, y):
        p, x = w.cast(params), x.astype(w.compute)
        if dense_first:
            x = x + w.pin("dense", jax.nn.gelu(x @ p["a"]), wide=True) @ p["b"]
        tokens = w.pin("tokens", x.reshape(-1, x.shape[-1]))
        scores = jax.nn.softmax((tokens @ p["router"]).astype(jnp.float32), axis=-1)
        # The choice is the token's number: a tie of rounding would be another program.
        which = (jnp.arange(tokens.shape[0]) * 7 + 3) % experts
        order = jnp.argsort(which)
        sizes = jnp.bincount(which, length=experts).astype(jnp.int32)
        given = tokens[order]
        h = jax.nn.silu(jax.lax.ragged_dot(given, p["up"], sizes))
        made = jax.lax.ragged_dot(w.pin("grouped", h, wide=True), p["down"], sizes)
        gate = jnp.take_along_axis(scores, which[:, None], axis=1).astype(w.compute)
        if back == "gather":
            made = made[jnp.argsort(order)]
        elif back == "scatter":
            made = jnp.zeros_like(tokens).at[order].set(made)
        else:
            made = jnp.zeros_like(tokens).at[order].add(made)
        out = tokens + gate * made
        error = jnp.mean(jnp.square(out.reshape(x.shape).astype(jnp.float32) - y))
        return error / 16  # steps of 0.1 would diverge, and multiply noise

    return trained(w, params, loss, layers.rows(w, "BSD", "BSD"))


@jax.custom_vjp
def clipped(x: jax.Array) -> jax.Array:
    """Return x; its cotangent is clipped."""
    return x


clipped.defvjp(lambda x: (x, None), lambda _, ct: (jnp.clip(ct, -1.0, 1.0),))


def mixed_tokens(w: World) -> Program:
    """Draw token mixing without attention: FFTs, sorts, rolls, cumulative sums, clipped cotangents."""
    params = layers.initial(w, "net", {"up": "DF", "down": "FD"})
    kinds = ("fft", "fft over batch", "sort", "roll", "cumsum", "cumlogsumexp", "flip", "top_k")
    kind, own = w.pick("mixes by", kinds), w.chance("clips cotangents", 0.4)
    dim = w.pick("along", (1, 1, 2, 0))

    def mixed(x):
        if kind.startswith("fft"):
            axes = (0, 1) if kind == "fft over batch" else (1, 2)
            return jnp.fft.fftn(x.astype(jnp.float32), axes=axes).real.astype(x.dtype) / x.shape[1]
        return {
            "sort": lambda: jnp.sort(x, axis=dim),
            "roll": lambda: jnp.roll(x, 1, axis=dim),
            "cumsum": lambda: jnp.cumsum(x, axis=dim) / x.shape[dim],
            "cumlogsumexp": lambda: jax.lax.cumlogsumexp(x, axis=dim) / 4,
            "flip": lambda: jnp.flip(x, axis=dim),
            "top_k": lambda: x * (x >= jax.lax.top_k(x, 2)[0][..., -1:]),
        }[kind]()

    def loss(params, x, y):
        p, x = w.cast(params), w.pin("x", x.astype(w.compute))
        x = x + mixed(x)
        h = jax.nn.gelu(w.einsum("up", "bsd,df->bsf", clipped(x) if own else x, p["up"]))
        out = w.einsum("down", "bsf,fd->bsd", w.pin("h", h, wide=True), p["down"])
        return jnp.mean(jnp.square(w.pin("out", x + out).astype(jnp.float32) - y))

    return trained(w, params, loss, layers.rows(w, "BSD", "BSD"))


PROGRAMS = (images, state_space, grouped_experts, mixed_tokens)
