"""Attend to unsharded sequences by cuDNN's fused kernel, which skips what the mask hides.

For sets of one device and for groups that exchange heads; `fused_rings.py` has it for rings. It is
compared with plain matmuls once on a GPU before it is used there, a ring's block too.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from jaxoverlap._jax import fused_attention
from jaxoverlap._jax.fused_attention import PackedRuns
from jaxoverlap.train.varlen.costs import HOPPER
from jaxoverlap.train.varlen.device import packed
from jaxoverlap.train.varlen.device.blocks import (
    AttentionSide,
    Grads,
    Where,
    finished,
    folded,
    in_float32,
    local_backward,
    local_forward,
)
from jaxoverlap.train.varlen.device.packed import RunsBlock

_TYPES = ("bfloat16", "float16")
_LARGEST_HEAD = 128
_RESULTS = ("output", "dq", "dk", "dv")
_TOLERANCE = 0.05  # of the largest value: a mask that is off by a token errs by more


def has_kernel(mesh: Mesh) -> bool:
    """Return whether a mesh's devices have the kernel; on a GPU that is here it is tried once.

    Raises:
        RuntimeError: if the kernel here computes something else.
    """
    if _capability(mesh) < HOPPER:
        return False
    if jax.default_backend() == "gpu":
        with jax.ensure_compile_time_eval():  # this may be asked while a step is traced
            check()
    return True


def described(mesh: Mesh) -> tuple[int, int] | None:
    """Return the chip that JAX is to answer for while it traces; None where GPUs are here."""
    chip = _capability(mesh)
    return None if jax.default_backend() == "gpu" or not chip else (chip[0], chip[1])


def _capability(mesh: Mesh) -> tuple[int, ...]:
    """Return the compute capability of a mesh's devices; () if they are no NVIDIA GPUs."""
    version = getattr(mesh.devices.flat[0], "compute_capability", None)
    return tuple(int(part) for part in str(version).split(".")) if version else ()


def fits(q: Array) -> bool:
    """Return whether the kernel takes queries of this dtype and head size, f[..., head]."""
    size = q.shape[-1]
    return q.dtype.name in _TYPES and size % 8 == 0 and size <= _LARGEST_HEAD


def forward(
    where: Where,
    q: Array,
    k: Array,
    v: Array,
    *,
    scale: float,
    most: int,
    chip: fused_attention.Capability | None = None,
) -> tuple[Array, Any]:
    """Attend causally within each sequence, f[1, slots, kv heads, group, head] by kv heads.

    Args:
        where: of the slots; those of a sequence stand side by side in order, empty ones last.
        q, k, v: queries, and f[1, slots, kv heads, head].
        scale: the factor of scores.
        most: sequences that there can be.
        chip: as `described` gives it.

    Returns:
        The output, like q, and the function from its gradient to those of q, k and v.
    """
    lengths, starts = runs(where.segment, most + 1)

    def attend(q: Array, k: Array, v: Array) -> Array:
        heads = q.reshape(*q.shape[:2], -1, q.shape[-1])
        out = fused_attention.packed_causal(heads, k, v, lengths, starts, scale=scale)
        return out.reshape(q.shape)

    with fused_attention.tracing_for(chip):
        return jax.vjp(attend, q, k, v)


def runs(segment: Array, most: int) -> tuple[Array, Array]:
    """Return the lengths, i32[1, most], and the starts, i32[1, most + 1], of runs of one segment.

    Runs that are not there are -1.
    """
    new = jnp.concatenate([jnp.ones(1, bool), segment[1:] != segment[:-1]])
    starts = jnp.nonzero(new, size=most, fill_value=-1)[0].astype(jnp.int32)
    ends = jnp.append(starts[1:], -1)
    ends = jnp.where(ends < 0, segment.size, ends)
    lengths = jnp.where(starts < 0, -1, ends - starts).astype(jnp.int32)
    return lengths[None], jnp.append(starts, jnp.int32(-1))[None]


@functools.cache
def check() -> None:
    """Compare the kernel with plain matmuls on this process's GPU, forward and backward.

    Raises:
        RuntimeError: if they differ, for unsharded sequences or for a block of a ring.
    """
    rng = np.random.default_rng(0)
    shapes = (1, 512, 2, 2, 64), (1, 512, 2, 64), (1, 512, 2, 64), (1, 512, 2, 2, 64)
    arrays = [jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in shapes]
    for compared in (_unsharded, _ring_block):
        results, live = jax.jit(functools.partial(compared))(*arrays)  # traced anew
        for name, (got, want) in results.items():
            off = _error(got, want, live[name in ("dk", "dv")])
            if not off < _TOLERANCE:
                raise RuntimeError(
                    f"cuDNN's attention of packed sequences is off by {off:.3f} of the largest "
                    f"{name} on this GPU, by plain matmuls: pass fused=False, and report it"
                )


def _error(got: Array, want: Array, live: Array) -> float:
    """Return the largest difference in slots that count, over the largest value."""
    one, other = (np.asarray(x, np.float32)[:, np.asarray(live)] for x in (got, want))
    return float(np.abs(one - other).max() / np.abs(other).max())


def _where(*lengths: int) -> Where:
    """Return where sequences of so many tokens are, one after the other, the last one empty."""
    segment = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    position = np.concatenate([np.arange(n, dtype=np.int32) for n in lengths])
    return Where(jnp.where(segment == len(lengths) - 1, -1, segment), jnp.asarray(position))


def _unsharded(q: Array, k: Array, v: Array, given: Array) -> Any:
    """Return results of the kernel and of matmuls by name, and which slots of them count."""
    where = _where(130, 1, 301, 80)
    ours, back = forward(where, q, k, v, scale=0.125, most=3)
    out, log_sums = local_forward(where, q, k, v, 0.125)
    delta = jnp.einsum("bskgd,bskgd->bskg", in_float32(given), in_float32(out))
    plain = out, *local_backward(where, (q, given, log_sums, delta), k, v, 0.125)
    live = where.segment >= 0
    results = dict(zip(_RESULTS, zip((ours, *back(given)), plain, strict=True), strict=True))
    return results, (live, live)


def _ring_block(q: Array, k: Array, v: Array, given: Array) -> Any:
    """Return the same of a ring's block, in which one sequence has no queries and one no keys."""
    own, there = _where(200, 0, 60, 60, 192), _where(199, 30, 0, 121, 162)
    there = there._replace(position=jnp.zeros_like(there.position))  # queries see all keys
    lengths = jnp.array([[200, 0, 60, 60], [199, 30, 0, 121]], jnp.int32)
    starts = jnp.cumsum(lengths, axis=1) - lengths
    both = jnp.where((lengths > 0).all(axis=0), lengths, 0)
    run = (jnp.where(x.segment < 0, len(lengths[0]), x.segment) for x in (own, there))
    block = RunsBlock(PackedRuns(*both, *starts), *run)
    heads, to_out = (x.reshape(*x.shape[:2], -1, x.shape[-1]) for x in (q, given))
    ours = packed.forward(block, heads, k, v, causal=False, scale=0.125)
    sides = AttentionSide((q,), own), AttentionSide((k, v), there)
    out, log_sums = (
        jnp.where(block.queries.reshape(-1, *(1,) * (x.ndim - 2)), x, 0)
        for x in finished(folded(None, *sides, 0.125), q.dtype)
    )
    delta = jnp.einsum("bskgd,bskgd->bskg", in_float32(given), in_float32(out))
    grads = Grads.of(AttentionSide((q, given, log_sums, delta), own), sides[1], 0.125)
    queries = heads, out.reshape(heads.shape), log_sums.reshape(heads.shape[:-1]), to_out
    parts = packed.backward(block, queries, k, v, causal=False, scale=0.125)
    to_q, *back = block.alone(parts)
    found = ours.output.reshape(q.shape), to_q.reshape(q.shape), *back
    plain = out, grads.query(), *grads.keys
    results = dict(zip(_RESULTS, zip(found, plain, strict=True), strict=True))
    return results, (own.segment >= 0, there.segment >= 0)
