"""Attend to unsharded sequences by cuDNN's fused kernel, which skips what the mask hides.

For sets of one device and for groups that exchange heads. Not for a ring's hops. To fold a hop into
the softmax one needs the log of its sums; for packed sequences JAX returns them as [sequences,
heads, slots] and says nowhere which of these are filled. And the backward pass of a hop, from the
sums of all hops, is a primitive that JAX has no function for.
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
from jaxoverlap.train.varlen.costs import HOPPER
from jaxoverlap.train.varlen.device.blocks import Where, in_float32, local_backward, local_forward

_TYPES = ("bfloat16", "float16")
_LARGEST_HEAD = 128
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
        RuntimeError: if they differ.
    """
    rng = np.random.default_rng(0)
    segment = np.repeat(np.array([0, 1, 2, -1], np.int32), [130, 1, 301, 80])
    position = np.concatenate([np.arange(n, dtype=np.int32) for n in (130, 1, 301, 80)])
    where = Where(jnp.asarray(segment), jnp.asarray(position))
    shapes = (1, 512, 2, 2, 64), (1, 512, 2, 64), (1, 512, 2, 64), (1, 512, 2, 2, 64)
    q, k, v, given = (jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in shapes)

    @jax.jit
    def both(q: Array, k: Array, v: Array) -> Any:
        fused, back = forward(where, q, k, v, scale=0.125, most=3)
        out, log_sums = local_forward(where, q, k, v, 0.125)
        delta = jnp.einsum("bskgd,bskgd->bskg", in_float32(given), in_float32(out))
        plain_back = local_backward(where, (q, given, log_sums, delta), k, v, 0.125)
        return (fused, *back(given)), (out, *plain_back)

    for name, got, want in zip(("output", "dq", "dk", "dv"), *both(q, k, v), strict=True):
        got, want = (np.asarray(x, np.float32)[:, segment >= 0] for x in (got, want))
        off = float(np.abs(got - want).max() / np.abs(want).max())
        if not off < _TOLERANCE:
            raise RuntimeError(
                f"cuDNN's attention of packed sequences is off by {off:.3f} of the largest {name} "
                "on this GPU, beside plain matmuls: pass fused=False, and report it"
            )
