"""Draw programs for XLA's partitioner to split: models with a loss, in several people's styles."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from tests.differential import layers
from tests.differential.training import Program, trained
from tests.differential.world import Leaf, World


def language_model(w: World) -> Program:
    """Draw a language model: embedding, transformer blocks, logits, integer labels."""
    attends, tied = w.chance("attention", 0.6), w.chance("tied embedding", 0.3)
    shapes = {"mlp_norm": "D"} | layers.mlp_shapes(w, "mlp")
    if attends:
        shapes |= {f"att_{k}": v for k, v in layers.attention_shapes(w, "att").items()}
        shapes["att_norm"] = "D"
    params: dict[str, Any] = {
        "embed": w.param("embed", "VD"),
        "blocks": layers.stacked(w, "blocks", shapes),
        "norm": w.ones("norm", "D"),
    }
    if not tied:
        params["head"] = w.param("head", "DV")

    def block(p, x):
        p = w.cast(p)
        if attends:
            own = {k[4:]: v for k, v in p.items() if k.startswith("att_")}
            x = x + layers.attention(w, "att", own, layers.norm(w, "att", x, p["att_norm"]))
            x = w.pin("stream after attention", x)
        x = x + layers.mlp(w, "mlp", p, layers.norm(w, "mlp", x, p["mlp_norm"]))
        return w.pin("stream", x)

    def loss(params, tokens, targets):
        x = layers.look_up(w, "embed", params["embed"], tokens).astype(w.compute)
        x = layers.stack(w, "blocks", block, params["blocks"], w.pin("embedded", x))
        x = layers.norm(w, "final", x, params["norm"].astype(w.compute))
        head = params["embed"].T if tied else params["head"]
        logits = w.pin(
            "logits", w.einsum("head", "bsd,dv->bsv", x, head.astype(w.compute)), wide=True
        )
        return layers.cross_entropy(w, "loss", logits, targets)

    return trained(w, params, loss, layers.tokens(w))


def regression(w: World) -> Program:
    """Draw a regression as in a script of one page: matrices in a dict and a squared error."""
    shapes = layers.mlp_shapes(w, "first") | {"out": "DD"}
    if w.chance("second", 0.5):
        shapes |= {"second_up": "DF", "second_down": "FD"}
    params = layers.initial(w, "net", shapes)

    def loss(params, x, y):
        p, x = w.cast(params), x.astype(w.compute)
        h = layers.mlp(w, "first", p, w.pin("x", x))
        if "second_up" in p:
            wide = jax.nn.gelu(w.einsum("second.up", "bd,df->bf", h, p["second_up"]))
            h = w.pin(
                "h", h + w.einsum("second.down", "bf,fd->bd", w.pin("wide", wide), p["second_down"])
            )
        out = w.einsum("out", "bd,de->be", jnp.tanh(h), p["out"])
        return jnp.mean(jnp.square(out.astype(jnp.float32) - y))

    return trained(w, params, loss, layers.rows(w, "BD", "BD"))


def residual_scan(w: World) -> Program:
    """Draw a scanned residual network, as in a benchmark of a compiler."""
    shapes = layers.mlp_shapes(w, "mlp")
    if w.chance("normed", 0.4):
        shapes["norm"] = "D"
    params = layers.stacked(w, "blocks", shapes)
    dims = w.pick("rows", ("BD", "BSD"))

    def block(p, x):
        p = w.cast(p)
        h = layers.norm(w, "mlp", x, p["norm"]) if "norm" in p else x
        return w.pin("stream", x + layers.mlp(w, "mlp", p, h))

    def loss(params, x):
        out = layers.stack(w, "blocks", block, params, x.astype(w.compute))
        return jnp.sum(jnp.square(out.astype(jnp.float32))) / out.size

    return trained(w, params, loss, layers.rows(w, dims))


def mixer(w: World) -> Program:
    """Draw linear attention and token mixing: several matmuls read their sums over the model."""
    params = [
        layers.initial(w, f"block {i}", {"k": "DD", "w": "DF", "u": "FD", "mix": "SS"})
        for i in range(w.size("L") - 1)
    ]  # fmt: skip
    mixes = w.pick("mixes", ("linear attention", "linear attention", "tokens", "both"))

    def loss(params, x, y):
        x = x.astype(w.compute)
        for i, layer in enumerate(params):
            p = w.cast(layer)
            if mixes != "tokens":
                k = w.pin(f"k {i}", x @ p["k"])
                held = jnp.einsum("bsd,bse->bde", k, x)
                x = x + jnp.einsum("bsd,bde->bse", k, held) / (x.shape[1] * x.shape[2])
            if mixes != "linear attention":
                x = x + jnp.einsum("bsd,st->btd", jnp.tanh(x), p["mix"])
            x = w.pin(f"stream {i}", x)
            x = x + w.einsum(
                "u", "bsf,fd->bsd", jnp.tanh(w.einsum("w", "bsd,df->bsf", x, p["w"])), p["u"]
            )
        return jnp.mean(jnp.square(x.astype(jnp.float32) - y))

    return trained(w, params, loss, layers.rows(w, "BSD", "BSD"))


def experts(w: World) -> Program:
    """Draw a dense mixture: each token to every expert, weighted, or dispatched by its best two."""
    shapes = {"router": "DE", "up": "EDF", "down": "EFD"}
    params = layers.initial(w, "moe", shapes)
    dispatched = w.chance("dispatched", 0.5)

    def loss(params, x, y):
        p, x = w.cast(params), x.astype(w.compute)
        gates = jax.nn.softmax((x @ p["router"]).astype(jnp.float32), axis=-1).astype(w.compute)
        if dispatched:
            best, where = jax.lax.top_k(gates, 2)
            hot = jax.nn.one_hot(where, gates.shape[-1], dtype=w.compute)
            gates = jnp.einsum("bk,bke->be", best, hot)
        h = jax.nn.silu(jnp.einsum("bd,edf->ebf", x, p["up"]))
        h = w.pin("experts", h, wide=True)
        out = jnp.einsum("ebf,efd,be->bd", h, p["down"], gates)
        return jnp.mean(jnp.square(w.pin("out", out).astype(jnp.float32) - y)) + jnp.mean(gates)

    return trained(w, params, loss, layers.rows(w, "BD", "BD"))


def two_towers(w: World) -> Program:
    """Draw a contrastive model: rows of one tower against all rows of the other."""
    params = {
        "a": layers.initial(w, "a", {"up": "DF", "down": "FC"}),
        "b": layers.initial(w, "b", {"up": "DF", "down": "FC"}),
        "scale": w.ones("scale", ""),
    }

    def tower(label, p, x):
        h = w.pin(f"{label}.h", jax.nn.gelu(x @ p["up"]), wide=True) @ p["down"]
        return h * jax.lax.rsqrt(jnp.sum(jnp.square(h), -1, keepdims=True) + 1e-3)

    def loss(params, x, y):
        p = w.cast(params)
        a, b = tower("a", p["a"], x.astype(w.compute)), tower("b", p["b"], y.astype(w.compute))
        logits = w.pin("logits", jnp.einsum("ic,jc->ij", a, b)) * p["scale"]
        own = jnp.arange(logits.shape[0])
        forth = layers.cross_entropy(w, "loss", logits, own)
        return (forth + layers.cross_entropy(w, "loss", logits.T, own)) / 2

    return trained(w, params, loss, layers.rows(w, "BD", "BD"))


def adapters(w: World) -> Program:
    """Draw low-rank adapters beside frozen weights, which the step is given and does not change."""
    frozen = layers.initial(w, "frozen", {"up": "DF", "down": "FD"})
    shapes = {"up_a": "DR", "up_b": "RF", "down_a": "FR", "down_b": "RD"}
    params = layers.initial(w, "adapters", shapes)

    def loss(params, frozen, x, y):
        p, f, x = w.cast(params), w.cast(frozen), x.astype(w.compute)
        h = x @ f["up"] + (x @ p["up_a"]) @ p["up_b"]
        h = w.pin("h", jax.nn.silu(h), wide=True)
        out = h @ f["down"] + h @ p["down_a"] @ p["down_b"]
        return jnp.mean(jnp.square(w.pin("out", out).astype(jnp.float32) - y))

    data = layers.rows(w, "BD", "BD")
    return trained(w, params, loss, lambda call: [frozen, *data(call)])


def accumulated(w: World) -> Program:
    """Draw a step that adds up gradients over microbatches, in a scan or a fori_loop."""
    params = layers.initial(w, "net", layers.mlp_shapes(w, "mlp"))
    loops = w.pick("accumulates in", ("scan", "fori_loop"))
    parts = 2

    def loss(params, x):
        out = layers.mlp(w, "mlp", w.cast(params), x.astype(w.compute))
        return jnp.mean(jnp.square(w.pin("out", out).astype(jnp.float32)))

    def step(params, x):
        pieces = x.reshape(parts, -1, *x.shape[1:])
        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)

        def add(total, piece):
            value, grads = jax.value_and_grad(loss)(params, piece)
            return jax.tree.map(lambda t, g: t + g, total, grads), value

        if loops == "scan":
            grads, values = jax.lax.scan(add, zeros, pieces)
        else:
            grads = jax.lax.fori_loop(0, parts, lambda i, t: add(t, pieces[i])[0], zeros)
            values = jnp.zeros(())
        new = jax.tree.map(lambda p, g: (p - 0.1 * g / parts).astype(p.dtype), params, grads)
        return new, values.mean()

    return Program(step, [params], layers.rows(w, "BD"), (0, None))


def recurrent(w: World) -> Program:
    """Draw a cell scanned over time, with weights that it closes over."""
    params = layers.initial(w, "cell", {"inner": "DD", "hidden": "DD", "z_bias": "D", "out": "DV"})
    remat = w.chance("remat over time", 0.3)

    def loss(params, x, targets):
        p = w.cast(params)

        def cell(h, x):
            z = jax.nn.sigmoid(x @ p["inner"] + p["z_bias"])
            h = w.pin("h", z * h + (1 - z) * jnp.tanh(h @ p["hidden"]))
            return h, h

        first = jnp.zeros(x[:, 0].shape, w.compute)
        xs = jnp.moveaxis(x.astype(w.compute), 1, 0)
        _, hs = jax.lax.scan(jax.checkpoint(cell) if remat else cell, first, xs)
        logits = jnp.einsum("sbd,dv->bsv", hs, p["out"])
        return layers.cross_entropy(w, "loss", w.pin("logits", logits), targets)

    shape = (w.size("B"), w.size("S"))
    return trained(
        w, params, loss,
        lambda n: [w.normal(f"x {n}", (*shape, w.size("D"))), w.integers(f"y {n}", shape, w.size("V"))],
    )  # fmt: skip


def branches(w: World) -> Program:
    """Draw a step that branches on its counter now and then, by cond or switch."""
    shapes = {"a": "DF", "b": "FD", "c": "DD"}
    params = layers.initial(w, "net", shapes)
    kind = w.pick("branches by", ("cond", "switch", "cond in the loss"))

    def loss(params, x, step):
        p, x = w.cast(params), x.astype(w.compute)
        h = w.pin("h", jax.nn.gelu(x @ p["a"]), wide=True) @ p["b"]
        if kind == "cond in the loss":
            h = jax.lax.cond(step % 2 == 0, lambda h: h @ p["c"], lambda h: jnp.tanh(h), h)
        return jnp.mean(jnp.square(w.pin("out", h + x).astype(jnp.float32)))

    def train(params, step, x):
        value, grads = jax.value_and_grad(loss)(params, x, step)

        def move(rate):
            return lambda p, g: jax.tree.map(lambda p, g: (p - rate * g).astype(p.dtype), p, g)

        if kind == "switch":
            params = jax.lax.switch(
                step % 3, [move(0.1), move(0.05), lambda p, g: p], params, grads
            )
        elif kind == "cond":
            decayed = lambda p, g: jax.tree.map(lambda p: p * 0.9, move(0.1)(p, g))  # noqa: E731
            params = jax.lax.cond(step % 2 == 0, decayed, move(0.1), params, grads)
        else:
            params = move(0.1)(params, grads)
        return params, step + 1, value

    return Program(train, [params, Leaf(np.int32(0), P())], layers.rows(w, "BD"), (0, 1, None))


def dropped_out(w: World) -> Program:
    """Draw a network with dropout, whose key is split in the step and fed back."""
    params = layers.initial(w, "net", {"up": "DF", "down": "FD"})

    def loss(params, key, x, y):
        p, x = w.cast(params), x.astype(w.compute)
        h = w.pin("h", jax.nn.relu(w.einsum("up", "bd,df->bf", x, p["up"])), wide=True)
        h = jnp.where(jax.random.bernoulli(key, 0.8, h.shape), h / 0.8, 0)
        out = w.einsum("down", "bf,fd->bd", h, p["down"])
        return jnp.mean(jnp.square(w.pin("out", out).astype(jnp.float32) - y))

    def step(params, key, x, y):
        key, own = jax.random.split(key)
        grads = jax.grad(loss)(params, own, x, y)
        return jax.tree.map(lambda p, g: (p - 0.1 * g).astype(p.dtype), params, grads), key

    key = Leaf(np.zeros(2, np.uint32), P() if w.chance("key on the mesh", 0.7) else None)
    return Program(step, [params, key], layers.rows(w, "BD", "BD"), (0, 1))


def decoding(w: World) -> Program:
    """Draw a step that decodes one more token; its cache is written in place and donated."""
    params = layers.initial(
        w, "net", {"embed": "VD", "q": "DHK", "k": "DHK", "v": "DHK", "o": "HKD"}
    )
    shape = (w.size("B"), 8, w.size("H"), w.size("K"))
    cache = {
        "k": Leaf(np.zeros(shape, w.compute), w.batch_spec("cache", shape)),
        "v": Leaf(np.zeros(shape, w.compute), w.batch_spec("cache", shape)),
        "at": Leaf(np.int32(0), P()),
    }

    def decode(cache, params, ids):
        p, at = w.cast(params), cache["at"]
        x = w.pin("x", layers.look_up(w, "embed", p["embed"], ids))
        q, k, v = (jnp.einsum("bd,dhk->bhk", x, p[n]) for n in "qkv")
        ks = jax.lax.dynamic_update_slice_in_dim(cache["k"], k[:, None], at, axis=1)
        vs = cache["v"].at[:, at].set(v)
        scores = w.pin("scores", jnp.einsum("bhk,bthk->bht", q, ks))
        seen = jnp.arange(ks.shape[1]) <= at
        weights = jax.nn.softmax(jnp.where(seen, scores.astype(jnp.float32), -1e9)).astype(
            w.compute
        )
        out = jnp.einsum("bht,bthk->bhk", weights, vs)
        logits = (x + jnp.einsum("bhk,hkd->bd", out, p["o"])) @ p["embed"].T
        return {"k": ks, "v": vs, "at": at + 1}, w.pin("logits", logits, wide=True)

    ids = (w.size("B"),)
    return Program(
        decode, [cache], lambda n: [params, w.integers(f"ids {n}", ids, w.size("V"))], (0, None)
    )  # fmt: skip
