"""Rings whose blocks are cuDNN's fused kernel for packed sequences; no scores in memory.

Blocks are merged by the log of the softmax's sums, as in `passes/rings/fused_ring_attention.py`:

    log_sums' = log(exp(log_sums) + exp(its log_sums))
    output'   = output exp(log_sums - log_sums') + block exp(its log_sums - log_sums')

A hop is one call of the kernel (`packed.py`). It computes pairs of one sequence only, so its time
is the batch's; the matmuls of `matmul_rings.py` compute all static slots. Backward the kernel gives
the gradients of queries, keys and values at once, in 16 bits; their sums are in float32, and travel
so under the next hop's block. The last ones go home under nothing.
"""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from jaxoverlap._jax import fused_attention
from jaxoverlap.passes.rings.chunks import tied
from jaxoverlap.train.varlen.device import packed
from jaxoverlap.train.varlen.device.blocks import in_float32
from jaxoverlap.train.varlen.device.packed import Chunks, RunsBlock, Softmax
from jaxoverlap.train.varlen.device.routing import send
from jaxoverlap.train.varlen.device.sets import RingSet


class FusedRings(RingSet):
    """Sequences of a ring round which keys and values go, attended to by the fused kernel."""

    def forward(self, q: Array, k: Array, v: Array) -> tuple[Array, Any]:
        """Return the output, like q, and the residuals: the output and the log of its sums."""
        out, log_sums = super().forward(q, k, v)
        return out, (out, log_sums)

    def _blocks(self) -> list[RunsBlock]:
        """Return the block of each hop."""
        chunks = Chunks.of(self.ring, self.engine.bounds.ringed)
        size = jnp.int32(self.size)
        others = (lax.rem(self.rank - jnp.int32(h) + size, size) for h in range(self.size))
        return [chunks.block(self.rank, other) for other in others]

    def _forward(self, q: Array, k: Array, v: Array) -> tuple[Array, Array]:
        route, heads, state = self.engine.route(self.size), _in_heads(q), None
        attend = functools.partial(packed.forward, scale=self.engine.scale)
        with fused_attention.tracing_for(self.engine.chip):
            for hop, block in enumerate(self._blocks()):
                if state is not None:
                    (k, v), state = tied(((k, v), state))
                arriving = send(route, (k, v)) if hop + 1 < self.size else (k, v)
                new: Softmax = attend(block, heads, k, v, causal=not hop)
                state = new.with_empty_slots() if state is None else state.merged(new)
                k, v = arriving
        assert state is not None
        return state.output.astype(q.dtype).reshape(q.shape), state.log_sums.reshape(q.shape[:-1])

    def _backward(self, own: tuple[Any, ...], k: Array, v: Array) -> tuple[Array, Array, Array]:
        q, given, (out, log_sums), _ = own
        log_sums = log_sums.reshape(*log_sums.shape[:2], -1)
        queries = _in_heads(q), _in_heads(out), log_sums, _in_heads(given)
        route = self.engine.route(self.size, backward=True)
        grads = functools.partial(packed.backward, scale=self.engine.scale)
        held, to_q, home, joined = (k, v), None, None, None
        with fused_attention.tracing_for(self.engine.chip):
            for hop, block in enumerate(self._blocks()):
                if to_q is not None:
                    held, to_q = tied((held, to_q))
                arriving = send(route, held) if hop + 1 < self.size else held
                parts = grads(block, queries, *held, causal=not hop)
                # What is sent under the kernel arrives after it: XLA then ends no hop sooner.
                arriving, joined, parts = tied((arriving, joined, parts))
                more, *sums = map(in_float32, block.alone(parts))
                if joined is not None:
                    sums = [a + b for a, b in zip(sums, joined, strict=True)]
                to_q = more if to_q is None else to_q + more
                if hop:
                    sums, to_q = tied((sums, to_q))
                    joined = send(route, tuple(sums))
                else:
                    home = sums
                held = arriving
        assert to_q is not None and home is not None and joined is not None
        to_k, to_v = (a + b for a, b in zip(home, joined, strict=True))
        return to_q.reshape(q.shape), to_k, to_v


def _in_heads(x: Array) -> Array:
    """Join kv heads and groups: [1, slots, kv heads, group, head] -> [1, slots, heads, head]."""
    return x.reshape(*x.shape[:2], -1, x.shape[-1])
