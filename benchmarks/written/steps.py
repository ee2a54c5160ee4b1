"""Steps as people first write them, and as an expert does: what a user forgets costs many times.

Each builder returns a step and the shapes of its arguments. With `expert` the step has the
constraints, or the form, that an expert would give it; the function that it computes is the same.
Sizes are those of one or a few layers of a large model on 64 H100s.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

POD = "h100-sxm:8x8"
WIDTH, HIDDEN, HEADS, SEQUENCE = 4096, 16384, 32, 2048

Built = tuple[Any, tuple[Any, ...]]


@dataclass(frozen=True)
class Written:
    """A step in two versions.

    Attributes:
        name: of the step.
        about: what is forgotten.
        axes: the mesh.
        build: returns the step and its arguments, as written or as an expert writes it.
    """

    name: str
    about: str
    axes: dict[str, int]
    build: Callable[[Mesh, bool], Built]


STEPS: dict[str, Written] = {}


def written(about: str, **axes: int) -> Callable[[Callable[[Mesh, bool], Built]], Any]:
    """Register a step under the name of its builder."""

    def add(build: Callable[[Mesh, bool], Built]) -> Callable[[Mesh, bool], Built]:
        name = build.__name__.replace("_", " ")
        STEPS[name] = Written(name, about, axes, build)
        return build

    return add


def shape(mesh: Mesh, *dims: int, spec: tuple[Any, ...] = (), dtype: Any = jnp.bfloat16) -> Any:
    """Return the shape of an argument with its sharding."""
    return jax.ShapeDtypeStruct(dims, dtype, sharding=NamedSharding(mesh, P(*spec)))


def at(mesh: Mesh, x: Any, *spec: Any, expert: bool = True) -> Any:
    """Constrain a value, where an expert would."""
    return lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec))) if expert else x


def norm(x: Any) -> Any:
    """Normalise the last dim, in float32."""
    wide = x.astype(jnp.float32)
    return (wide * lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-6)).astype(x.dtype)


def descent(loss: Callable[..., Any]) -> Any:
    """Return a step of gradient descent with float32 loss."""

    def step(weights: Any, *batch: Any) -> tuple[Any, Any]:
        value, grads = jax.value_and_grad(loss)(weights, *batch)
        return jax.tree.map(lambda w, g: w - 1e-3 * g.astype(w.dtype), weights, grads), value

    return jax.jit(step, donate_argnums=0)


def mlp_layers(weights: Any, x: Any) -> Any:
    """Run scanned residual layers of a norm and an MLP."""

    def layer(x: Any, w: Any) -> tuple[Any, None]:
        up, down = w
        return x + jax.nn.gelu(norm(x) @ up) @ down, None

    return lax.scan(jax.checkpoint(layer), x, weights)[0]


def mlp_weights(mesh: Mesh, layers: int, fsdp: Any, tensor: Any) -> tuple[Any, Any]:
    """Return the shapes of the weights of `mlp_layers`."""
    return (
        shape(mesh, layers, WIDTH, HIDDEN, spec=(None, fsdp, tensor)),
        shape(mesh, layers, HIDDEN, WIDTH, spec=(None, tensor, fsdp)),
    )


@written("the batch's sharding is on the microbatch dim that the loop indexes", fsdp=64)
def gradient_accumulation(mesh: Mesh, expert: bool) -> Built:
    """The global batch is reshaped to (microbatches, rest) and scanned."""
    microbatches, layers = 8, 4

    def loss(weights: Any, x: Any) -> Any:
        return jnp.mean(mlp_layers(weights, x).astype(jnp.float32) ** 2)

    def step(weights: Any, batch: Any) -> tuple[Any, Any]:
        parts = batch.reshape(microbatches, -1, *batch.shape[1:])
        parts = at(mesh, parts, None, "fsdp", expert=expert)

        def accumulate(total: Any, part: Any) -> tuple[Any, Any]:
            value, grads = jax.value_and_grad(loss)(weights, part)
            return jax.tree.map(jnp.add, total, grads), value

        zeros = jax.tree.map(jnp.zeros_like, weights)
        grads, values = lax.scan(accumulate, zeros, parts)
        return jax.tree.map(lambda w, g: w - 1e-3 * g, weights, grads), values.mean()

    args = (
        mlp_weights(mesh, layers, "fsdp", None),
        shape(mesh, 512, SEQUENCE, WIDTH, spec=("fsdp",)),
    )
    return jax.jit(step, donate_argnums=0), args


@written("microbatches are slices of the batch at a loop's index", fsdp=64)
def sliced_accumulation(mesh: Mesh, expert: bool) -> Built:
    """Microbatches are cut from the batch by dynamic_slice in a fori_loop."""
    microbatches, layers = 8, 4

    def loss(weights: Any, x: Any) -> Any:
        return jnp.mean(mlp_layers(weights, x).astype(jnp.float32) ** 2)

    def step(weights: Any, batch: Any) -> Any:
        rows = batch.shape[0] // microbatches
        parts = batch
        if expert:
            parts = at(mesh, batch.reshape(microbatches, rows, *batch.shape[1:]), None, "fsdp")

        def accumulate(number: Any, total: Any) -> Any:
            if expert:
                part = lax.dynamic_index_in_dim(parts, number, keepdims=False)
            else:
                part = lax.dynamic_slice_in_dim(parts, number * rows, rows)
            return jax.tree.map(jnp.add, total, jax.grad(loss)(weights, part))

        zeros = jax.tree.map(jnp.zeros_like, weights)
        grads = lax.fori_loop(0, microbatches, accumulate, zeros)
        return jax.tree.map(lambda w, g: w - 1e-3 * g, weights, grads)

    args = (
        mlp_weights(mesh, layers, "fsdp", None),
        shape(mesh, 512, SEQUENCE, WIDTH, spec=("fsdp",)),
    )
    return jax.jit(step, donate_argnums=0), args


@written("the batch is a numpy array, so it is replicated", fsdp=64)
def replicated_batch(mesh: Mesh, expert: bool) -> Built:
    """Weights are sharded, the batch is not."""

    def loss(weights: Any, x: Any) -> Any:
        x = at(mesh, x, "fsdp", expert=expert)
        return jnp.mean(mlp_layers(weights, x).astype(jnp.float32) ** 2)

    args = mlp_weights(mesh, 4, "fsdp", None), shape(mesh, 64, SEQUENCE, WIDTH)
    return descent(loss), args


@written("microbatches are indexed along the dim that the batch is sharded by", pp=4, data=2, tp=8)
def pipeline(mesh: Mesh, expert: bool) -> Built:
    """Stages are vmapped over a sharded axis; a scan indexes the microbatches."""
    stages, microbatches, rows = 4, 8, 4

    def stage(weights: Any, x: Any) -> Any:
        up, down = weights
        for n in range(2):
            x = x + jax.nn.gelu(norm(x) @ up[n]) @ down[n]
        return x

    def loss(weights: Any, batch: Any) -> Any:
        parts = batch.reshape(microbatches, rows, *batch.shape[1:])
        parts = at(mesh, parts, None, "data", expert=expert)
        state = jnp.zeros((stages, *parts.shape[1:]), parts.dtype)
        state = at(mesh, state, "pp", "data", expert=expert)

        def tick(carry: Any, time: Any) -> tuple[Any, Any]:
            state, outputs = carry
            fresh = lax.dynamic_index_in_dim(parts, jnp.minimum(time, microbatches - 1), 0)
            state = jnp.concatenate([fresh, state[:-1]])
            state = at(mesh, state, "pp", "data", expert=expert)
            state = jax.vmap(jax.checkpoint(stage))(weights, state)
            state = at(mesh, state, "pp", "data", expert=expert)
            done = jnp.maximum(time - stages + 1, 0)
            outputs = lax.dynamic_update_index_in_dim(outputs, state[-1], done, 0)
            outputs = at(mesh, outputs, None, "data", expert=expert)
            return (state, outputs), None

        times = jnp.arange(microbatches + stages - 1)
        (_, outputs), _ = lax.scan(tick, (state, jnp.zeros_like(parts)), times)
        return jnp.mean(outputs.astype(jnp.float32) ** 2)

    args = (
        (
            shape(mesh, stages, 2, WIDTH, HIDDEN, spec=("pp", None, None, "tp")),
            shape(mesh, stages, 2, HIDDEN, WIDTH, spec=("pp", None, "tp", None)),
        ),
        shape(mesh, microbatches * rows, SEQUENCE, WIDTH, spec=("data",)),
    )
    return descent(loss), args


def newton_schulz(x: Any) -> Any:
    """Orthogonalise matrices by five iterations of Muon's polynomial (Jordan et al., 2024)."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = x / (jnp.linalg.norm(x, axis=(-2, -1), keepdims=True) + 1e-7)
    for _ in range(5):
        gram = jnp.einsum("lij,lkj->lik", x, x)
        x = a * x + jnp.einsum("lij,ljk->lik", b * gram + c * gram @ gram, x)
    return x


@written("Newton-Schulz iterations run on sharded momenta", fsdp=64)
def muon(mesh: Mesh, expert: bool) -> Built:
    """Muon on the stacked matrices of 64 layers."""
    layers = 64

    def loss(weights: Any, x: Any) -> Any:
        def layer(x: Any, w: Any) -> tuple[Any, None]:
            return x + jax.nn.gelu(norm(x) @ w), None

        x, _ = lax.scan(jax.checkpoint(layer), x, weights)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    def step(weights: Any, momentum: Any, x: Any) -> tuple[Any, Any, Any]:
        value, grads = jax.value_and_grad(loss)(weights, x)
        momentum = 0.95 * momentum + grads
        update = newton_schulz(at(mesh, momentum, "fsdp", expert=expert))
        update = at(mesh, update, None, "fsdp", expert=expert)
        return weights - 0.02 * update, momentum, value

    matrices = shape(mesh, layers, 2048, 2048, spec=(None, "fsdp"))
    args = matrices, matrices, shape(mesh, 256, SEQUENCE, 2048, spec=("fsdp",))
    return jax.jit(step, donate_argnums=(0, 1)), args


@written("gate and up are one weight, split after the matmul", fsdp=8, tp=8)
def gate_and_up(mesh: Mesh, expert: bool) -> Built:
    """The columns of both are sharded together; an expert interleaves them by shard."""

    def loss(weights: Any, x: Any) -> Any:
        def layer(x: Any, w: Any) -> tuple[Any, None]:
            both, down = w
            y = norm(x) @ both
            if expert:
                shards = y.reshape(*y.shape[:2], 8, 2, -1)
                gate, up = shards[..., 0, :], shards[..., 1, :]
                gate, up = (v.reshape(*y.shape[:2], -1) for v in (gate, up))
            else:
                gate, up = jnp.split(y, 2, axis=-1)
            x = x + (jax.nn.silu(gate) * up) @ down
            return at(mesh, x, "fsdp", "tp"), None

        x, _ = lax.scan(jax.checkpoint(layer), x, weights)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    weights = (
        shape(mesh, 2, WIDTH, 2 * HIDDEN, spec=(None, "fsdp", "tp")),
        shape(mesh, 2, HIDDEN, WIDTH, spec=(None, "tp", "fsdp")),
    )
    return descent(loss), (weights, shape(mesh, 32, SEQUENCE, WIDTH, spec=("fsdp", "tp")))


@written("labels are picked from logits that are sharded over the vocabulary", fsdp=8, tp=8)
def labels(mesh: Mesh, expert: bool) -> Built:
    """take_along_axis on sharded logits; an expert masks and sums."""

    def loss(weights: Any, x: Any, targets: Any) -> Any:
        logits = (norm(x) @ weights).astype(jnp.float32)
        logits = at(mesh, logits, "fsdp", None, "tp")
        if expert:
            mask = targets[..., None] == jnp.arange(logits.shape[-1])
            picked = jnp.sum(jnp.where(mask, logits, 0), -1)
        else:
            picked = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits, -1) - picked)

    args = (
        shape(mesh, WIDTH, 131072, spec=("fsdp", "tp")),
        shape(mesh, 32, SEQUENCE, WIDTH, spec=("fsdp",)),
        shape(mesh, 32, SEQUENCE, spec=("fsdp",), dtype=jnp.int32),
    )
    return descent(loss), args


@written("image tokens are put before text along a sharded sequence", fsdp=8, tp=8)
def image_tokens(mesh: Mesh, expert: bool) -> Built:
    """Two parts of a sequence are concatenated, each of which is sharded."""

    def loss(weights: Any, image: Any, text: Any) -> Any:
        x = jnp.concatenate([image, text], 1)
        x = at(mesh, x, "fsdp", "tp", expert=expert)
        return jnp.mean(mlp_layers(weights, x).astype(jnp.float32) ** 2)

    args = (
        mlp_weights(mesh, 2, "fsdp", "tp"),
        shape(mesh, 32, 512, WIDTH, spec=("fsdp", "tp")),
        shape(mesh, 32, 1536, WIDTH, spec=("fsdp", "tp")),
    )
    return descent(loss), args


@written("a recurrence is scanned along a sequence that is sharded", fsdp=8, tp=8)
def recurrence(mesh: Mesh, expert: bool) -> Built:
    """A gated linear recurrence between two matmuls, in a scan over the sequence."""

    def loss(weights: Any, x: Any) -> Any:
        into, out = weights
        gates = jax.nn.sigmoid(norm(x) @ into)
        gates = at(mesh, gates, "fsdp", None, "tp", expert=expert)

        def tick(state: Any, gate: Any) -> tuple[Any, Any]:
            state = gate * state + (1 - gate)
            return state, state

        start = jnp.zeros((x.shape[0], into.shape[1]), x.dtype)
        start = at(mesh, start, "fsdp", "tp", expert=expert)
        _, states = lax.scan(tick, start, gates.swapaxes(0, 1))
        y = at(mesh, x + states.swapaxes(0, 1) @ out, "fsdp", "tp", expert=expert)
        return jnp.mean(y.astype(jnp.float32) ** 2)

    weights = (
        shape(mesh, WIDTH, WIDTH, spec=("fsdp", "tp")),
        shape(mesh, WIDTH, WIDTH, spec=("tp", "fsdp")),
    )
    return descent(loss), (weights, shape(mesh, 32, 512, WIDTH, spec=("fsdp", "tp")))


@written("the cache of a sampling loop starts as zeros without a sharding", data=8, tp=8)
def key_value_cache(mesh: Mesh, expert: bool) -> Built:
    """Sampling: each token's keys and values are written at the loop's index."""
    tokens, heads, dim = 64, HEADS, WIDTH // HEADS

    def step(weights: Any, x: Any) -> Any:
        qkv, out = weights
        cache = jnp.zeros((2, x.shape[0], SEQUENCE, heads, dim), x.dtype)
        cache = at(mesh, cache, None, "data", None, "tp", expert=expert)

        def token(carry: Any, number: Any) -> tuple[Any, None]:
            x, cache = carry
            q, k, v = (norm(x) @ w for w in qkv)
            q, k, v = (y.reshape(x.shape[0], heads, dim) for y in (q, k, v))
            fresh = jnp.stack([k, v])[:, :, None]
            cache = lax.dynamic_update_slice_in_dim(cache, fresh, number, 2)
            cache = at(mesh, cache, None, "data", None, "tp", expert=expert)
            scores = jnp.einsum("bhd,bshd->bhs", q, cache[0]) / dim**0.5
            scores = jnp.where(jnp.arange(SEQUENCE) <= number, scores, -jnp.inf)
            mixed = jnp.einsum("bhs,bshd->bhd", jax.nn.softmax(scores), cache[1])
            return (x + mixed.reshape(x.shape) @ out, cache), None

        (x, _), _ = lax.scan(token, (x, cache), jnp.arange(tokens))
        return x

    weights = (
        (shape(mesh, WIDTH, WIDTH, spec=(None, "tp")),) * 3,
        shape(mesh, WIDTH, WIDTH, spec=("tp", None)),
    )
    return jax.jit(step), (weights, shape(mesh, 256, WIDTH, spec=("data",)))
