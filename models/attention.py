"""Choose what computes a trainer's attention: XLA's matmuls, or cuDNN's fused kernel."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoverlap
from jaxoverlap._jax import fused_attention
from jaxoverlap.hardware.pods import capability_of
from models.config import Mistake, Run
from models.layers import without


def uses_cudnn(config: Run, mesh: Mesh) -> bool:
    """Return whether attention runs in cuDNN's kernel on a mesh, as `config.attention` says.

    Raises:
        Mistake: if attention is "cudnn", and cuDNN cannot run.
    """
    if config.attention == "xla":
        return False
    why_not = refusal(config, mesh)
    if why_not and config.attention == "cudnn":
        raise Mistake(
            f"attention='cudnn': {why_not}; give attention='xla', or 'auto' for cuDNN where it runs"
        )
    return not why_not


def refusal(config: Run, mesh: Mesh) -> str | None:
    """Return why cuDNN's kernel cannot compute a run's attention; None if it can."""
    device = mesh.devices.flat[0]
    capability = str(getattr(device, "compute_capability", ""))
    if not capability.replace(".", "").isdigit():  # AMD's are gfx and a number
        return f"expected NVIDIA GPUs, and the mesh is of {device.device_kind}"
    if config.has_workers:
        return "expected a run without --compress and --local-updates"
    q = jax.ShapeDtypeStruct((1, 128, config.heads, config.head_size), jnp.dtype(config.dtype))
    with fused_attention.tracing_for(capability_of([NamedSharding(mesh, P())])):
        return fused_attention.refusal(q, q, q)


def cudnn(q: jax.Array, k: jax.Array, v: jax.Array, *, causal: bool) -> jax.Array:
    """Attend by cuDNN's kernel, [batch, sequence, heads, size] each."""
    return jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation="cudnn")


def ring(
    q: jax.Array, k: jax.Array, v: jax.Array, *, mesh: Mesh, spec: P, axis: str, causal: bool
) -> jax.Array:
    """Attend in a ring of cuDNN's kernel over the axis of the sequence, which `spec` shards all."""
    halves = q.shape[1] // mesh.shape[axis] % 2 == 0
    kernel = functools.partial(
        jaxoverlap.ring.ring_attention, axis_name=axis, causal=causal, implementation="cudnn",
        balanced=halves,
    )  # fmt: skip
    return on_each_device(kernel, mesh, spec, always=True)(q, k, v)


def on_each_device(attend: Callable[..., Any], mesh: Mesh, spec: P, always: bool) -> Callable:
    """Run attention on each device's part, inside a shard_map.

    Inside another one, cuDNN's attention has to be told its part: XLA cannot ask Python how to
    partition it where some axes are manual. Elsewhere it is left to XLA, through which `overlap`
    splits the batch.

    Args:
        attend: takes q, k and v.
        mesh: the mesh, where no axis is manual yet.
        spec: the sharding of all of them and of the result.
        always: whether it is not left to XLA anywhere, as a ring.
    """
    inside = jax.sharding.get_abstract_mesh()
    if not inside.manual_axes and not always:
        return attend
    free = set(mesh.axis_names) - set(inside.manual_axes)
    spec = without(spec, inside.manual_axes)
    return jax.shard_map(
        attend,
        mesh=None if inside.manual_axes else mesh,
        in_specs=(spec,) * 3,
        out_specs=spec,
        axis_names=free,
        check_vma=False,
    )
