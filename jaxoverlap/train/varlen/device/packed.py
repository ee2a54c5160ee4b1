"""Attend from a rank's slots of a ring to another rank's, by cuDNN's kernel for packed sequences.

A rank's slots are sequence by sequence, the early chunk before the late one, so what a hop computes
of a sequence is one run of queries by one of keys, and nothing is copied (as Transformer Engine
has it for packed sequences):

    keys of the rank itself      both chunks x both chunks, causal
    of an earlier rank           both chunks x early chunk
    of a later rank              late chunk x both chunks
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxoverlap._jax import fused_attention
from jaxoverlap._jax.fused_attention import PackedRuns
from jaxoverlap.train.varlen.device.blocks import Where, in_float32

NO_SEQUENCE = int(np.iinfo(np.int32).max)


class Chunks(NamedTuple):
    """Where the chunks of a ring's sequences are, on each of its ranks.

    Attributes:
        starts: i32[ranks, most], the first slot of each sequence.
        early, lengths: i32[ranks, most], slots of its early chunk, and of both.
        run: i32[ranks, slots], which sequence of the ring a slot is of; `most` where it is empty.
    """

    starts: Array
    early: Array
    lengths: Array
    run: Array

    @classmethod
    def of(cls, where: Where, most: int) -> Chunks:
        """Find them by where the slots of all ranks are, i32[ranks, slots] each.

        Rank 0 has tokens of every sequence: the last chunk of one is never empty.
        """
        segment, position = where
        keys = jnp.where(segment < 0, NO_SEQUENCE, segment)
        new = (segment[0] >= 0) & (jnp.diff(segment[0], prepend=-1) != 0)
        number = jnp.cumsum(new) - 1
        first = new & (number == jnp.arange(most)[:, None])
        ids = jnp.min(jnp.where(first, segment[0], NO_SEQUENCE), axis=1)
        of_id = (keys[:, None] == ids[:, None]) & (ids[:, None] != NO_SEQUENCE)
        lengths = jnp.sum(of_id, axis=2, dtype=jnp.int32)
        is_early = position[:, None] < (lengths.sum(axis=0) // 2)[:, None]
        return cls(
            starts=jnp.sum(keys[:, None] < ids[:, None], axis=2, dtype=jnp.int32),
            early=jnp.sum(of_id & is_early, axis=2, dtype=jnp.int32),
            lengths=lengths,
            run=jnp.where(
                segment < 0, most, jnp.sum(ids < keys[..., None], axis=2, dtype=jnp.int32)
            ),
        )

    def block(self, rank: Array, other: Array) -> RunsBlock:
        """Return the block of a rank's queries by another rank's keys, or its own."""
        own, there = (
            Chunks(*(lax.dynamic_index_in_dim(x, i, keepdims=False) for x in self))
            for i in (rank, other)
        )
        queries = jnp.where(rank < other, own.lengths - own.early, own.lengths)
        keys = jnp.where(rank > other, there.early, there.lengths)
        both = (queries > 0) & (keys > 0)
        runs = PackedRuns(
            jnp.where(both, queries, 0),
            jnp.where(both, keys, 0),
            jnp.where(rank < other, own.starts + own.early, own.starts),
            there.starts,
        )
        return RunsBlock(runs, own.run, there.run)


class RunsBlock(NamedTuple):
    """One block of a ring's attention.

    Attributes:
        runs: what the kernel computes.
        query_run, key_run: i32[slots], which run a slot would be of.
    """

    runs: PackedRuns
    query_run: Array
    key_run: Array

    @property
    def queries(self) -> Array:
        """Return which slots' queries see a key, bool[slots]."""
        return _within(self.query_run, self.runs.query_starts, self.runs.query_lengths)

    @property
    def keys(self) -> Array:
        """Return which slots' keys are seen, bool[slots]."""
        return _within(self.key_run, self.runs.key_starts, self.runs.key_lengths)

    def alone(self, grads: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        """Return the gradients of queries, keys and values, zero where the kernel wrote none."""
        seen, read = (x[:, None, None] for x in (self.queries, self.keys))
        to_q, to_k, to_v = grads
        return jnp.where(seen, to_q, 0), jnp.where(read, to_k, 0), jnp.where(read, to_v, 0)

    def by_slot(self, by_run: Array) -> Array:
        """Turn f[most, heads, index in the run] into f[slots, heads]."""
        run = jnp.minimum(self.query_run, len(by_run) - 1)
        index = jnp.arange(run.size) - self.runs.query_starts[run]
        return by_run[run, :, jnp.clip(index, 0, run.size - 1)]

    def by_run(self, by_slot: Array) -> Array:
        """Turn f[slots, heads] into f[most, heads, index in the run]."""
        slots = len(by_slot)
        index = jnp.minimum(self.runs.query_starts[:, None] + jnp.arange(slots), slots - 1)
        return jnp.moveaxis(by_slot[index], -1, 1)


def _within(run: Array, starts: Array, lengths: Array) -> Array:
    """Return which slots are within the part of their run that is used."""
    start, length = (jnp.append(x, 0)[run] for x in (starts, lengths))
    index = jnp.arange(run.size) - start
    return (index >= 0) & (index < length)


class Softmax(NamedTuple):
    """Attention to the keys so far: the output and the log of the softmax's sums.

    Attributes:
        output: f[1, slots, heads, head], in float32 once merged.
        log_sums: f32[1, slots, heads]; -inf for a query that has seen no key.
    """

    output: Array
    log_sums: Array

    def merged(self, more: Softmax) -> Softmax:
        """Merge with attention of the same queries to other keys; these have seen a key before."""
        log_sums = jnp.logaddexp(self.log_sums, more.log_sums)
        one, other = (
            in_float32(x.output) * jnp.exp(x.log_sums - log_sums)[..., None] for x in (self, more)
        )
        return Softmax(one + other, log_sums)

    def with_empty_slots(self) -> Softmax:
        """Return the same as if every query had seen a key, so that others can be merged."""
        return self._replace(log_sums=jnp.where(jnp.isneginf(self.log_sums), 0, self.log_sums))


def forward(
    block: RunsBlock, q: Array, k: Array, v: Array, *, causal: bool, scale: float
) -> Softmax:
    """Compute a block's attention of f[1, slots, heads, head]; k and v by kv heads."""
    out, by_run = fused_attention.packed_forward(q, k, v, block.runs, causal=causal, scale=scale)
    seen = block.queries[:, None]
    log_sums = jnp.where(seen, block.by_slot(by_run), -jnp.inf)
    return Softmax(jnp.where(seen[..., None], out, 0), log_sums[None])


def backward(
    block: RunsBlock,
    queries: tuple[Array, Array, Array, Array],
    k: Array,
    v: Array,
    *,
    causal: bool,
    scale: float,
) -> tuple[Array, Array, Array]:
    """Compute a block's parts of the gradients of queries, keys and values; see `RunsBlock.alone`.

    `queries` are the queries, the output and the log of its sums as of all blocks together, and the
    output's gradient.
    """
    q, out, log_sums, to_out = queries
    return fused_attention.packed_backward(
        q, k, v, out, block.by_run(log_sums[0]), to_out, block.runs, causal=causal, scale=scale
    )
