"""Define the GPT and the mixture of experts on a mesh of six axes, for `models.configured`.

    activation              shape                             sharding
    residual stream         [batch, sequence, hidden]         (BATCH, ("context", "model"), None)
    q, k, v, attended       [batch, sequence, heads, size]    (BATCH, "context", "model", None)
    scores                  [batch, heads, query, key]        (BATCH, "model", "context", None)
    MLP inner               [batch, sequence, mlp]            (BATCH, "context", "model")
    at the experts          [expert, group, slot, hidden]     ("expert", DATA, None, None)

DATA is ("data", "fsdp"), BATCH is ("data", "fsdp", "expert"). Weights are sharded over fsdp and
model, experts over expert too, layers over pipeline, and tables over fsdp, model and pipeline.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.nn import gelu
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxoverlap.parallelism.configuration import Configuration
from jaxoverlap.parallelism.model import Transformer
from jaxoverlap.parallelism.sharding import ACTIVATIONS, BATCH
from models import gpt, micro_batches, moe
from models.attention import ring, uses_cudnn
from models.config import TextRun
from models.layers import Layout, Norm, Weight, cross_entropy, shard, stack, wide

TABLE = P(("fsdp", "model", "pipeline"), None)
SLACK, GROUP = 1.25, 1024  # of a named model's experts, as models.moe has them for pods
SIX_AXES = Layout(**{name: ACTIVATIONS[name] for name in ("stream", "heads", "scores", "inner")})


@dataclasses.dataclass(frozen=True)
class Config(TextRun):
    """The GPT's or the mixture's sizes, on a mesh of six axes."""

    AXES: ClassVar[tuple[str, str]] = ("fsdp", "model")  # of weights: rows, columns
    FROM_0: ClassVar[frozenset[str]] = TextRun.FROM_0 | {"experts", "choices", "balance"}
    dispatch: ClassVar[str] = "slots"  # ragged experts know the mesh axes data and expert alone

    split: Configuration = dataclasses.field(default_factory=Configuration)
    order: tuple[str, ...] = AXES  # the placement: axes over devices, slowest first
    pipeline_order: str = "1F1B"
    kv_heads: int | None = None
    head_dim: int | None = None
    gated: bool = False
    tied: bool = True
    experts: int = 0
    choices: int = 0
    group: int = 64
    slack: float = 2.0
    balance: float = 1e-2

    @property
    def mesh(self) -> dict[str, int]:
        return self.split.axes

    @property
    def micro_batches(self) -> int:
        return self.split.micro_batches(self.batch)

    @property
    def capacity(self) -> int:
        return moe.Config.capacity.fget(self)  # type: ignore[attr-defined]

    @property
    def head_size(self) -> int:
        return self.head_dim or self.hidden // self.heads

    @property
    def chunks(self) -> tuple[int, ...]:
        """Return the number of layers of each pipeline chunk."""
        return self.split.chunk_layers(self.transformer)

    @property
    def transformer(self) -> Transformer:
        """Return the sizes as a `jaxoverlap.Transformer`."""
        return Transformer(
            name="trained", layers=self.layers, hidden=self.hidden, heads=self.heads,
            kv_heads=self.kv_heads, head_dim=self.head_dim, mlp=self.mlp, vocab=self.vocab,
            sequence=self.sequence, experts=self.experts, choices=self.choices, gated=self.gated,
            tied=self.tied, biases=False,
        )  # fmt: skip

    def divisors(self) -> Iterator[tuple[str, str, int]]:
        split = self.split
        if self.head_dim is None:
            yield "hidden", "heads", self.heads
        yield "hidden", "fsdp", split.fsdp
        yield "batch", "micro-batches of all devices", split.batch_ways * split.micro_batch
        yield "heads", "model", split.model
        yield "mlp", "model", split.model
        yield "vocab", "fsdp x model x pipeline", split.fsdp * split.model * split.pipeline
        yield "sequence", "context x model", split.context * split.model


class Attention(gpt.Attention):
    """Grouped-query attention with heads of any size, and cuDNN's kernel on GPUs.

    Where the sequence is sharded the kernel is a ring's block, if `attention` is "cudnn".
    """

    config: Config

    def __init__(self, config: Config, mesh: Mesh, rngs: nnx.Rngs, layout: Layout):
        hidden, heads, size = config.hidden, config.heads, config.head_size
        keys = config.kv_heads or heads
        std = hidden**-0.5
        back = (heads * size) ** -0.5 * (2 * config.layers) ** -0.5
        columns = "model" if keys % config.split.model == 0 else None
        into = P("fsdp", columns, None)
        self.q = Weight(config, mesh, rngs, P("fsdp", "model", None), (hidden, heads, size), std)
        self.k = Weight(config, mesh, rngs, into, (hidden, keys, size), std)
        self.v = Weight(config, mesh, rngs, into, (hidden, keys, size), std)
        out = (heads, size, hidden)
        self.out = Weight(config, mesh, rngs, P("model", None, "fsdp"), out, back)
        self.config, self.mesh, self.at = config, mesh, layout
        self.ringed = config.split.context > 1
        # The plans of `configure` count plain attention where a sequence is sharded.
        self.fused = uses_cudnn(config, mesh) and (not self.ringed or config.attention == "cudnn")
        self.einsum = gpt.einsum_of(config)

    def attend(self, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        if self.fused and self.ringed:
            spec = self.at.heads
            ringed = ring(q, k, v, mesh=self.mesh, spec=spec, axis="context", causal=True)
            return shard(ringed, self.mesh, spec)
        return super().attend(q, k, v)

    def __call__(self, x: jax.Array) -> jax.Array:
        mesh, heads = self.mesh, self.at.heads
        q = shard(self.einsum("bsd,dnh->bsnh", x, self.q()), mesh, heads)
        k, v = (self.repeated(self.einsum("bsd,dnh->bsnh", x, w())) for w in (self.k, self.v))
        q, k = shard(gpt.rotate(q), mesh, heads), shard(gpt.rotate(k), mesh, heads)
        q, k, v = (checkpoint_name(y, "qkv") for y in (q, k, v))
        attended = checkpoint_name(shard(self.attend(q, k, v), mesh, heads), "attention")
        out = shard(self.einsum("bsnh,nhd->bsd", attended, self.out()), mesh, self.at.stream)
        return checkpoint_name(out, "out")

    def repeated(self, keys: jax.Array) -> jax.Array:
        """Return keys or values with repeated heads: one per device or, without cuDNN, query."""
        have, want = keys.shape[2], self.config.split.model
        if not self.fused:
            want = self.config.heads
        if have % want:
            keys = jnp.repeat(keys, want // have, axis=2)
        return shard(keys, self.mesh, self.at.heads)


class MLP(gpt.MLP):
    """The GPT's MLP; if `gated`, SwiGLU."""

    def __init__(self, config: Config, mesh: Mesh, rngs: nnx.Rngs, layout: Layout):
        super().__init__(config, mesh, rngs, layout)
        if config.gated:
            shape, std = (config.hidden, config.mlp), config.hidden**-0.5
            self.gate = Weight(config, mesh, rngs, P("fsdp", "model"), shape, std)
        self.gated = config.gated

    def __call__(self, x: jax.Array) -> jax.Array:
        up = self.named(x, self.up, "up")
        inner = up * jax.nn.silu(self.named(x, self.gate, "gate")) if self.gated else gelu(up)
        inner = checkpoint_name(shard(inner, self.mesh, self.at.inner), "activation")
        return shard(self.einsum("bsf,fd->bsd", inner, self.down()), self.mesh, self.at.stream)

    def named(self, x: jax.Array, weight: Weight, name: str) -> jax.Array:
        """Return x times a weight, as the value of a name."""
        made = shard(self.einsum("bsd,df->bsf", x, weight()), self.mesh, self.at.inner)
        return checkpoint_name(made, name)


class NamedNorm(Norm):
    """The norm, whose result has a name."""

    def __call__(self, x: jax.Array) -> jax.Array:
        return checkpoint_name(super().__call__(checkpoint_name(x, "norms")), "norms")


class Dense(gpt.Block):
    """The GPT's block on six axes."""

    attention_type, mlp_type, norm_type = Attention, MLP, NamedNorm


class GPT(gpt.GPT):
    """The GPT in three parts: before the layers, a run of layers, after them."""

    at, block = SIX_AXES, Dense
    config: Any

    def __init__(self, config: Config, mesh: Mesh, rngs: nnx.Rngs):
        shape, std = (config.vocab, config.hidden), config.hidden**-0.5
        self.embedding = Weight(config, mesh, rngs, TABLE, shape, std)
        if not config.tied:
            self.head = Weight(config, mesh, rngs, TABLE, shape, std)
        self.norm = Norm(config, mesh, self.at.stream)
        self.layers = stack(lambda r: self.block(config, mesh, r, self.at), config.layers, rngs)
        self.config, self.mesh, self.einsum = config, mesh, gpt.einsum_of(config)

    def table(self, weight: Weight) -> jax.Array:
        """Return an embedding table replicated, in the dtype of activations."""
        return shard(weight(), self.mesh, P(None, None))

    def first(self, batch: dict[str, jax.Array]) -> Any:
        rows = jnp.take(self.table(self.embedding), batch["inputs"], axis=0)
        return shard(rows, self.mesh, self.at.stream)

    def last(self, x: Any, batch: dict[str, jax.Array]) -> jax.Array:
        table = self.table(self.embedding if self.config.tied else self.head)
        return cross_entropy(self.score(x, table), batch["targets"])

    def loss(self, batch: dict[str, jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
        layers = micro_batches.run_layers(self.layers, self.first(batch), self.config.split)
        return self.last(layers, batch), {}


class Experts(moe.Experts):
    """The mixture's layer: sequences replicated for routing, experts sharded over model."""

    router_at = P("fsdp", None)
    up_at, down_at = P("expert", "fsdp", "model"), P("expert", "model", "fsdp")
    tokens_at, mask_at = P(BATCH, None, None), P(BATCH, None, None, None)
    there_at = P("expert", ("data", "fsdp"), None, None)
    inner_at = P("expert", ("data", "fsdp"), None, "model")

    def __init__(self, config: Any, mesh: Mesh, rngs: nnx.Rngs, layout: Layout):
        super().__init__(config, mesh, rngs, layout)
        if config.gated:
            shape, std = (config.experts, config.hidden, config.mlp), config.hidden**-0.5
            self.gate = Weight(config, mesh, rngs, self.up_at, shape, std)

    def activated(self, there: jax.Array) -> jax.Array:
        there = checkpoint_name(there, "dispatch")
        up = self.named(there, self.up, "up")
        gated = self.config.gated  # type: ignore[attr-defined]
        inner = up * jax.nn.silu(self.named(there, self.gate, "gate")) if gated else gelu(up)
        return checkpoint_name(inner, "activation")

    def named(self, there: jax.Array, weight: Weight, name: str) -> jax.Array:
        """Return tokens at their experts times a weight of these, as the value of a name."""
        made = shard(self.einsum("egcd,edf->egcf", there, weight()), self.mesh, self.inner_at)
        return checkpoint_name(made, name)


class Block(moe.Block):
    """The mixture's block on six axes."""

    attention_type, mlp_type, norm_type = Attention, Experts, NamedNorm
    load_at = P(BATCH)


class MoE(GPT):
    """The GPT with experts, with a load-balancing loss."""

    block = Block

    def first(self, batch: dict[str, jax.Array]) -> Any:
        groups = batch["inputs"].size // self.config.group
        even = shard(jnp.zeros(groups, wide(self.config.dtype)), self.mesh, P(BATCH))
        return super().first(batch), even

    def last(self, x: Any, batch: dict[str, jax.Array]) -> jax.Array:
        stream, load = x
        text = super().last(stream, batch)
        return text + self.config.balance * jnp.mean(load) / self.config.layers
