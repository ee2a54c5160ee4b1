"""A GPT for long texts: the sequence is split over an axis from the first layer to the last.

The mesh has two axes. "data" splits the batch and "context" the sequence; as nothing else is split,
both split the weights too (FSDP). Only attention needs more of a text than a device has: queries
stay, and the keys and values of the whole text come to them:

    activation              shape                             sharding
    residual stream         [batch, sequence, hidden]         ("data", "context", None)
    q, k, v, attended       [batch, sequence, heads, size]    ("data", "context", None, None)
    scores, softmax         [batch, heads, query, key]        ("data", None, "context", None)
    MLP inner               [batch, sequence, mlp]            ("data", "context", None)
    logits                  [batch, sequence, vocab]          ("data", "context", None)

Nothing asks for whole keys and values: scores are split by query alone, so the einsums need them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from typer import Option

import jaxoverlap
from jaxoverlap.hardware.cluster import parse_cluster
from models import gpt
from models.attention import ring
from models.config import TextRun
from models.layers import Layout, shard
from models.recipe import Recipe
from models.text import text_batches

BY_SEQUENCE = Layout(
    stream=P("data", "context", None),
    heads=P("data", "context", None, None),
    scores=P("data", None, "context", None),
    inner=P("data", "context", None),
)
GROUPS = P(None, *BY_SEQUENCE.heads)  # the heads in groups: [group, batch, sequence, heads, size]


@dataclass(frozen=True)
class Config(TextRun):
    """The long-context GPT's configuration; the defaults train in seconds on a CPU."""

    AXES = ("data", "context")

    sequence: Annotated[int, Option(help="Bytes.")] = 256
    batch: Annotated[int, Option(help="Texts, over all devices.")] = 4
    heads_at_once: Annotated[int, Option(help="Whose scores are in memory.")] = 2
    data: Annotated[int, Option(help="Mesh axis: batch and FSDP.")] = 2
    context: Annotated[int, Option(help="Mesh axis: sequence and FSDP.")] = 4
    varlen: Annotated[bool, Option("--varlen", help="Train on whole documents.")] = False
    documents: Annotated[
        Path | None, Option(help="Files of --varlen; default: Python's own sources.")
    ] = None
    step_tokens: Annotated[int, Option(help="Of a step of --varlen.")] = 8192
    longest: Annotated[int, Option(help="Tokens of a document of --varlen.")] = 4096
    prices: Annotated[str | None, Option(help="Cluster whose prices --varlen plans by.")] = None
    configuration: Annotated[
        Path | None, Option(help="A file of `jaxoverlap configure --json`: its first mesh.")
    ] = None

    def mistakes(self) -> Iterator[str]:
        yield from super().mistakes()
        if self.varlen and self.has_workers:
            yield "--varlen with --compress or --local-updates: leave out one of them"
        if self.varlen and self.plan:
            yield "--varlen with --plan: a plan is of one program; leave out one of them"
        if self.prices is not None:
            try:
                parse_cluster(self.prices)
            except ValueError as error:
                yield f"--prices {self.prices}: {error}"

    @property
    def tokens(self) -> int:
        return self.step_tokens if self.varlen else super().tokens

    def divisors(self) -> Iterator[tuple[str, str, int]]:
        yield from super().divisors()
        yield "sequence", "context", self.context
        yield "heads", "heads_at_once", self.heads_at_once

    @classmethod
    def pod(cls, *, data: int = 1, context: int = 8, **changes: Any) -> "Config":
        """Four layers of a 7B GPT, one text of 32768 a data rank, at least two (see gpt's pod)."""
        sizes = dict(hidden=4096, heads=32, mlp=16384, sequence=32768, heads_at_once=4)
        sizes |= dict(data=data, context=context, batch=max(2, data))
        return cls.sized(sizes, changes)


class Attention(gpt.Attention):
    """The GPT's attention, a few heads at a time: the scores of all would not fit in memory.

    With cuDNN's kernel there are none: keys and values travel in a ring, all heads at once.

    Heads, not queries: each device gathers the keys and values of these heads only, so that all
    groups together gather them once. Blocks of queries would gather all of them for every block.
    """

    config: Config

    def __init__(self, config: Config, *args: Any):
        super().__init__(config, *args)
        self.at_once = config.heads_at_once

    def attend(self, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        if self.fused:
            spec, causal = self.at.heads, self.ordered
            ringed = ring(q, k, v, mesh=self.mesh, spec=spec, axis="context", causal=causal)
            return shard(ringed, self.mesh, spec)
        if self.config.ops:  # keys and values travel, and no device holds more than a block
            attended = jaxoverlap.attention(q, k, v, is_causal=self.ordered)
            return shard(attended, self.mesh, self.at.heads)

        def grouped(x: jax.Array) -> jax.Array:
            apart = x.reshape(*x.shape[:2], -1, self.at_once, x.shape[-1])
            return shard(jnp.moveaxis(apart, 2, 0), self.mesh, GROUPS)

        def group(_, qkv):
            return None, super(Attention, self).attend(*qkv)

        # Remat: the backward pass makes one group's scores again, uses them and drops them.
        group = jax.checkpoint(group, prevent_cse=False)
        _, attended = jax.lax.scan(group, None, tuple(map(grouped, (q, k, v))))
        attended = shard(attended, self.mesh, GROUPS)
        return shard(jnp.moveaxis(attended, 0, 2).reshape(q.shape), self.mesh, self.at.heads)


class Block(gpt.Block):
    """The GPT's layer, with this attention."""

    attention_type = Attention


class LongContext(gpt.GPT):
    """The GPT with a sharded sequence."""

    block, at = Block, BY_SEQUENCE


RECIPE = Recipe(Config, LongContext, text_batches)
abstract_args, make_step, build = RECIPE.abstract_args, RECIPE.make_step, RECIPE.build
