"""A GPT with Megatron's and FSDP's shardings.

The mesh has two axes. "data" splits the batch, and the hidden dim of every weight (FSDP).
"model" splits heads and the MLP's inner dim (tensor parallelism), and between blocks the sequence
(Megatron's sequence parallelism):

    activation          shape                             sharding
    residual stream     [batch, sequence, hidden]         ("data", "model", None)
    q, k, v, attended   [batch, sequence, heads, size]    ("data", None, "model", None)
    scores, softmax     [batch, heads, query, key]        ("data", "model", None, None)
    MLP inner           [batch, sequence, mlp]            ("data", None, "model")
    logits              [batch, sequence, vocab]          ("data", "model", None)

Every one of them is pinned by a constraint: where one is missing, the compiler is free to choose,
and in attention's backward pass it chooses all-to-alls of gigabytes.
"""

import functools
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from models.attention import cudnn, on_each_device, uses_cudnn
from models.config import Config, Run, TextRun
from models.layers import (
    Layout,
    Norm,
    Weight,
    cross_entropy,
    einsum_of,
    rotate,
    run_stack,
    shard,
    stack,
    wide,
)
from models.recipe import Recipe
from models.text import text_batches, text_like

MEGATRON = Layout(
    stream=P("data", "model", None),
    heads=P("data", None, "model", None),
    scores=P("data", "model", None, None),
    inner=P("data", None, "model"),
)


class Attention(nnx.Module):
    """Multi-head attention; if `ordered`, with positions and a causal mask."""

    ordered = True

    def __init__(self, config: Run, mesh: Mesh, rngs: nnx.Rngs, layout: Layout):
        hidden, heads, size = config.hidden, config.heads, config.hidden // config.heads
        first, second = config.AXES
        std = hidden**-0.5
        back = std * (2 * config.layers) ** -0.5  # keeps the stream's variance independent of depth
        into, shape = P(first, second, None), (hidden, heads, size)
        self.q = Weight(config, mesh, rngs, into, shape, std)
        self.k = Weight(config, mesh, rngs, into, shape, std)
        self.v = Weight(config, mesh, rngs, into, shape, std)
        self.out = Weight(config, mesh, rngs, P(second, None, first), (heads, size, hidden), back)
        self.config, self.mesh, self.at = config, mesh, layout
        self.einsum, self.fused = einsum_of(config), uses_cudnn(config, mesh)

    def __call__(self, x: jax.Array) -> jax.Array:
        mesh, heads = self.mesh, self.at.heads
        weights = self.q(), self.k(), self.v()
        if self.config.ops:  # one operation, which gathers x once
            made = self.einsum("bsd,dnh->bsnh", x, weights)
        else:
            made = [self.einsum("bsd,dnh->bsnh", x, weight) for weight in weights]
        q, k, v = (shard(y, mesh, heads) for y in made)
        if self.ordered:
            q, k = shard(rotate(q), mesh, heads), shard(rotate(k), mesh, heads)
        attended = shard(self.attend(q, k, v), mesh, heads)
        return shard(self.einsum("bsnh,nhd->bsd", attended, self.out()), mesh, self.at.stream)

    def attend(self, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        """Return softmax(queries @ keys) @ values of each head."""
        mesh, at, dtype = self.mesh, self.at, q.dtype
        if self.fused:
            kernel = functools.partial(cudnn, causal=self.ordered)
            attend = on_each_device(kernel, mesh, at.heads, always=False)
            return shard(attend(q, k, v), mesh, at.heads)
        scores = self.einsum("bqnh,bknh->bnqk", q, k)
        scores = scores.astype(wide(dtype)) / math.sqrt(q.shape[-1])
        if self.ordered:
            causal = jnp.arange(q.shape[1])[:, None] >= jnp.arange(k.shape[1])
            scores = jnp.where(causal, scores, -jnp.inf)
        scores = shard(scores, mesh, at.scores)
        probabilities = shard(jax.nn.softmax(scores).astype(dtype), mesh, at.scores)
        return shard(self.einsum("bnqk,bknh->bqnh", probabilities, v), mesh, at.heads)


class MLP(nnx.Module):
    """Up, GELU, down."""

    def __init__(self, config: Run, mesh: Mesh, rngs: nnx.Rngs, layout: Layout):
        hidden, mlp, (first, second) = config.hidden, config.mlp, config.AXES
        back = (2 * config.layers * mlp) ** -0.5
        self.up = Weight(config, mesh, rngs, P(first, second), (hidden, mlp), hidden**-0.5)
        self.down = Weight(config, mesh, rngs, P(second, first), (mlp, hidden), back)
        self.mesh, self.at, self.einsum = mesh, layout, einsum_of(config)

    def __call__(self, x: jax.Array) -> jax.Array:
        inner = shard(self.einsum("bsd,df->bsf", x, self.up()), self.mesh, self.at.inner)
        inner = shard(jax.nn.gelu(inner), self.mesh, self.at.inner)
        return shard(self.einsum("bsf,fd->bsd", inner, self.down()), self.mesh, self.at.stream)


class Block(nnx.Module):
    """One layer: x + attention(norm(x)), then x + mlp(norm(x))."""

    attention_type: ClassVar[type[Attention]] = Attention
    mlp_type: ClassVar[type[Any]] = MLP
    norm_type: ClassVar[type[Norm]] = Norm

    def __init__(self, config: Run, mesh: Mesh, rngs: nnx.Rngs, layout: Layout):
        self.attention_norm = self.norm_type(config, mesh, layout.stream)
        self.attention = self.attention_type(config, mesh, rngs, layout)
        self.mlp_norm = self.norm_type(config, mesh, layout.stream)
        self.mlp = self.mlp_type(config, mesh, rngs, layout)
        self.mesh, self.at = mesh, layout

    def __call__(self, x: Any) -> Any:
        x = shard(x + self.attention(self.attention_norm(x)), self.mesh, self.at.stream)
        return shard(x + self.mlp(self.mlp_norm(x)), self.mesh, self.at.stream)


class GPT(nnx.Module):
    """Token embedding, `layers` blocks in one scan, norm, and a head tied to the embedding."""

    block: ClassVar[type[Block]] = Block
    at = MEGATRON

    def __init__(self, config: TextRun, mesh: Mesh, rngs: nnx.Rngs):
        shape, std = (config.vocab, config.hidden), config.hidden**-0.5
        # Rows over both axes: a gradient that is summed over both is then scattered in one go.
        self.embedding = Weight(config, mesh, rngs, P(config.AXES, None), shape, std)
        self.norm = Norm(config, mesh, self.at.stream)
        self.layers = stack(lambda r: self.block(config, mesh, r, self.at), config.layers, rngs)
        self.config, self.mesh, self.einsum = config, mesh, einsum_of(config)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """tokens [batch, sequence] -> logits [batch, sequence, vocab], in the wide dtype."""
        table = self.embedding()
        return self.score(run_stack(self.layers, self.embed(tokens, table)), table)

    # A table of 256 rows is smaller than the activations: each device gathers it to embed and
    # score its own part of the sequence, and no logits ever move.

    def embed(self, tokens: jax.Array, table: jax.Array) -> jax.Array:
        """Return the embeddings of tokens by a one-hot matmul, whose gradient is a matmul too."""
        rows = jax.nn.one_hot(tokens, self.config.vocab, dtype=table.dtype)
        rows = shard(rows, self.mesh, self.at.stream)
        return shard(self.einsum("bsv,vd->bsd", rows, table), self.mesh, self.at.stream)

    def score(self, x: jax.Array, table: jax.Array) -> jax.Array:
        """Return the logits of the next token."""
        x, dtype = self.norm(x), wide(x.dtype)
        logits = self.einsum("bsd,vd->bsv", x, table, preferred_element_type=dtype)
        return shard(logits, self.mesh, self.at.stream)

    def loss(self, batch: dict[str, jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Return the mean cross-entropy of the next byte, in nats, and no other metrics."""
        return cross_entropy(self(batch["inputs"]), batch["targets"]), {}

    @classmethod
    def batch_like(cls, config: TextRun, mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
        """Return a batch as shapes, with the shardings of its embeddings."""
        return text_like(config, mesh, P(*cls.at.stream[:2]))


RECIPE = Recipe(Config, GPT, text_batches)
make_mesh, init_state, state_shardings = RECIPE.make_mesh, RECIPE.init_state, RECIPE.state_shardings
abstract_args, make_step, make_grads = RECIPE.abstract_args, RECIPE.make_step, RECIPE.make_grads
build = RECIPE.build
