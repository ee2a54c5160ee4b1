"""More steps as people first write them: mixtures, norms, caches, trunks, optimizers, losses."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from benchmarks.written.steps import (
    HEADS,
    HIDDEN,
    SEQUENCE,
    WIDTH,
    Built,
    at,
    descent,
    mlp_layers,
    mlp_weights,
    norm,
    shape,
    written,
)


@written("queries, keys and values are one weight, reshaped to 3 x heads", fsdp=8, tp=8)
def fused_attention_weights(mesh: Mesh, expert: bool) -> Built:
    """The columns of all three are sharded together; an expert has the heads outermost."""
    dim = WIDTH // HEADS

    def loss(weights: Any, x: Any) -> Any:
        qkv, out = weights
        y = norm(x) @ qkv
        if expert:
            q, k, v = jnp.unstack(y.reshape(*y.shape[:2], HEADS, 3, dim), axis=3)
        else:
            q, k, v = jnp.unstack(y.reshape(*y.shape[:2], 3, HEADS, dim), axis=2)
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        y = x + mixed.reshape(x.shape) @ out
        return jnp.mean(at(mesh, y, "fsdp", "tp").astype(jnp.float32) ** 2)

    weights = (
        shape(mesh, WIDTH, 3 * WIDTH, spec=("fsdp", "tp")),
        shape(mesh, WIDTH, WIDTH, spec=("tp", "fsdp")),
    )
    return descent(loss), (weights, shape(mesh, 16, SEQUENCE, WIDTH, spec=("fsdp", "tp")))


@written("experts are chosen by one-hot masks, tokens have no constraint", data=8, expert=8)
def one_hot_experts(mesh: Mesh, expert: bool) -> Built:
    """Tokens are dispatched and combined by einsums with a mask (GShard's form)."""
    experts, capacity = 8, 512

    def loss(weights: Any, x: Any) -> Any:
        router, up, down = weights
        scores = jax.nn.softmax((x @ router).astype(jnp.float32))
        chosen = jax.nn.one_hot(jnp.argmax(scores, -1), experts, dtype=jnp.float32)
        place = jnp.cumsum(chosen, 1) * chosen - 1
        mask = jax.nn.one_hot(place.astype(jnp.int32), capacity, dtype=x.dtype)
        sent = jnp.einsum("bsec,bsd->ebcd", mask, x)
        sent = at(mesh, sent, "expert", "data", expert=expert)
        done = jax.nn.gelu(jnp.einsum("ebcd,edf->ebcf", sent, up))
        done = jnp.einsum("ebcf,efd->ebcd", done, down)
        done = at(mesh, done, "expert", "data", expert=expert)
        y = jnp.einsum("bsec,ebcd->bsd", mask * scores[..., None].astype(x.dtype), done)
        y = at(mesh, x + y, ("data", "expert"), expert=expert)
        return jnp.mean(y.astype(jnp.float32) ** 2)

    weights = (
        shape(mesh, WIDTH, experts),
        shape(mesh, experts, WIDTH, HIDDEN, spec=("expert", "data")),
        shape(mesh, experts, HIDDEN, WIDTH, spec=("expert", None, "data")),
    )
    return descent(loss), (weights, shape(mesh, 64, SEQUENCE, WIDTH, spec=(("data", "expert"),)))


@written("tokens are sorted by expert over all devices", data=64)
def sorted_experts(mesh: Mesh, expert: bool) -> Built:
    """A sort and a gather over the global batch; an expert sorts on each device by itself."""
    experts = 8

    def chosen(weights: Any, tokens: Any) -> Any:
        router, up, down = weights
        number = jnp.argmax(tokens @ router, -1)
        order = jnp.argsort(number)
        sizes = jnp.bincount(number, length=experts)
        ordered = lax.ragged_dot(tokens[order], up, sizes)
        done = lax.ragged_dot(jax.nn.gelu(ordered), down, sizes)
        return jnp.zeros_like(tokens).at[order].set(done)

    def batch_of(weights: Any, x: Any) -> Any:
        return chosen(weights, x.reshape(-1, WIDTH)).reshape(x.shape)

    def loss(weights: Any, x: Any) -> Any:
        one = batch_of
        if expert:
            specs = {"in_specs": (P(), P("data")), "out_specs": P("data"), "check_vma": False}
            one = jax.shard_map(batch_of, mesh=mesh, **specs)
        y = one(weights, x)
        return jnp.mean((x + y).astype(jnp.float32) ** 2)

    weights = (
        shape(mesh, WIDTH, experts),
        shape(mesh, experts, WIDTH, WIDTH, spec=(None, "data")),
        shape(mesh, experts, WIDTH, WIDTH, spec=(None, None, "data")),
    )
    return descent(loss), (weights, shape(mesh, 64, SEQUENCE, WIDTH, spec=("data",)))


@written("norms run on activations that are replicated over the tensor axis", fsdp=8, tp=8)
def norms(mesh: Mesh, expert: bool) -> Built:
    """Megatron's MLP without sequence parallelism in the residual stream."""

    def loss(weights: Any, x: Any) -> Any:
        def layer(x: Any, w: Any) -> tuple[Any, None]:
            up, down = w
            x = at(mesh, x, "fsdp", "tp", expert=expert)
            hidden = at(mesh, jax.nn.gelu(norm(x) @ up), "fsdp", None, "tp", expert=expert)
            return at(mesh, x + hidden @ down, "fsdp", "tp", expert=expert), None

        x, _ = lax.scan(jax.checkpoint(layer), x, weights)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    batch = shape(mesh, 64, SEQUENCE, WIDTH, spec=("fsdp",))
    return descent(loss), (mlp_weights(mesh, 4, "fsdp", "tp"), batch)


@written("a Fourier transform along a sharded sequence", fsdp=8, sp=8)
def fourier_mixing(mesh: Mesh, expert: bool) -> Built:
    """FNet's mixing; an expert moves the sharding to the width for the transform."""

    def loss(weights: Any, x: Any) -> Any:
        wide = at(mesh, x.astype(jnp.float32), "fsdp", None, "sp", expert=expert)
        mixed = jnp.real(jnp.fft.fft(wide, axis=1)).astype(x.dtype)
        mixed = at(mesh, mixed, "fsdp", "sp", expert=expert)
        return jnp.mean(mlp_layers(weights, x + mixed).astype(jnp.float32) ** 2)

    batch = shape(mesh, 32, SEQUENCE, WIDTH, spec=("fsdp", "sp"))
    return descent(loss), (mlp_weights(mesh, 2, "fsdp", None), batch)


@written("images are replicated over one axis of the mesh", data=8, model=8)
def convolutions(mesh: Mesh, expert: bool) -> Built:
    """A convolution trunk whose batch is on one axis only; an expert uses both."""

    def loss(weights: Any, images: Any) -> Any:
        x = at(mesh, images, ("data", "model"), expert=expert)
        for w in weights:
            x = x + jax.nn.gelu(
                lax.conv_general_dilated(
                    x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
                )
            )
        return jnp.mean(x.astype(jnp.float32) ** 2)

    weights = [shape(mesh, 3, 3, 512, 512, spec=(None, None, "data")) for _ in range(8)]
    return descent(loss), (weights, shape(mesh, 512, 64, 64, 512, spec=("data",)))


@written("preconditioners of sharded matrices are multiplied where they are", fsdp=64)
def shampoo(mesh: Mesh, expert: bool) -> Built:
    """Shampoo's statistics and preconditioned gradients of the stacked matrices of 64 layers."""
    layers, width = 64, 2048

    def loss(weights: Any, x: Any) -> Any:
        x, _ = lax.scan(
            jax.checkpoint(lambda x, w: (x + jax.nn.gelu(norm(x) @ w), None)), x, weights
        )
        return jnp.mean(x.astype(jnp.float32) ** 2)

    def step(weights: Any, left: Any, right: Any, x: Any) -> Any:
        grads = jax.grad(loss)(weights, x)
        whole = at(mesh, grads, "fsdp", expert=expert)
        left = 0.9 * left + jnp.einsum("lij,lkj->lik", whole, whole)
        right = 0.9 * right + jnp.einsum("lij,lik->ljk", whole, whole)
        update = jnp.einsum("lij,ljk,lkm->lim", left, whole, right)
        update = at(mesh, update, None, "fsdp", expert=expert)
        return weights - 1e-3 * update, left, right

    matrices = shape(mesh, layers, width, width, spec=(None, "fsdp"))
    statistics = shape(mesh, layers, width, width, spec=("fsdp",) if expert else (None, "fsdp"))
    args = matrices, statistics, statistics, shape(mesh, 256, 1024, width, spec=("fsdp",))
    return jax.jit(step, donate_argnums=(0, 1, 2)), args


@written("targets are the tokens shifted by one along a sharded sequence", fsdp=8, tp=8)
def shifted_targets(mesh: Mesh, expert: bool) -> Built:
    """Logits are cut by one position; an expert rolls the tokens and masks the last."""

    def loss(weights: Any, x: Any, tokens: Any) -> Any:
        if expert:
            logits = (norm(x) @ weights).astype(jnp.float32)
            logits = at(mesh, logits, "fsdp", None, "tp")
            targets = jnp.roll(tokens, -1, 1)
            weight = (jnp.arange(tokens.shape[1]) < tokens.shape[1] - 1).astype(jnp.float32)
        else:
            logits = (norm(x) @ weights).astype(jnp.float32)[:, :-1]
            targets, weight = tokens[:, 1:], 1.0
        mask = targets[..., None] == jnp.arange(logits.shape[-1])
        picked = jnp.sum(jnp.where(mask, logits, 0), -1)
        return jnp.mean(weight * (jax.nn.logsumexp(logits, -1) - picked))

    args = (
        shape(mesh, WIDTH, 131072, spec=("fsdp", "tp")),
        shape(mesh, 32, SEQUENCE, WIDTH, spec=("fsdp", "tp")),
        shape(mesh, 32, SEQUENCE, spec=("fsdp", "tp"), dtype=jnp.int32),
    )
    return descent(loss), args


@written("rows are looked up in a table that is sharded over the vocabulary", fsdp=8, tp=8)
def lookup(mesh: Mesh, expert: bool) -> Built:
    """Tokens are sharded over all devices, what is looked up has no constraint."""

    def loss(weights: Any, tokens: Any) -> Any:
        table, layers = weights
        x = at(mesh, table[tokens], "fsdp", "tp", expert=expert)
        return jnp.mean(mlp_layers(layers, x).astype(jnp.float32) ** 2)

    weights = shape(mesh, 131072, WIDTH, spec=("tp", "fsdp")), mlp_weights(mesh, 2, "fsdp", "tp")
    return descent(loss), (weights, shape(mesh, 64, SEQUENCE, spec=("fsdp",), dtype=jnp.int32))


@written("two towers' batches are compared over all devices", data=64)
def contrastive_loss(mesh: Mesh, expert: bool) -> Built:
    """Similarities of all pairs; an expert shards them by the rows of one tower."""

    def loss(weights: Any, images: Any, texts: Any) -> Any:
        first, second = (norm(mlp_layers(weights, x)) for x in (images, texts))
        scores = at(mesh, first @ second.T, "data", expert=expert).astype(jnp.float32)
        own = jnp.sum(first * second, -1).astype(jnp.float32)
        return jnp.mean(jax.nn.logsumexp(scores, 1) + jax.nn.logsumexp(scores, 0) - 2 * own)

    batch = shape(mesh, 32768, WIDTH, spec=("data",))
    return descent(loss), (mlp_weights(mesh, 2, "data", None), batch, batch)
