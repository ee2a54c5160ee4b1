"""XLA options that overlapped steps need on GPUs; required.toml has each with its reason."""

from __future__ import annotations

import os

import jax
import msgspec
from jax.sharding import Mesh

from jaxoverlap._jax import jits
from jaxoverlap._jax.partitioner import CPU_SUMS_APART, many_processes_of_cpus
from jaxoverlap.flags.graphs import without_collectives
from jaxoverlap.flags.setting import Setting
from jaxoverlap.flags.xla import read
from jaxoverlap.hardware import pods
from jaxoverlap.hardware.cluster import Cluster

BY_COPY = "xla_gpu_collective_permute_mode"
# Its values with which permutes inside a process take no SMs, as XLA_FLAGS may name them too.
COPIES = frozenset(("COLLECTIVES_PEER_MEMORY", "COLLECTIVES_SYMMETRIC_MEMORY", "peer", "symmetric"))
MOST_GATHERED = "xla_gpu_all_gather_combine_threshold_bytes"


class _Option(msgspec.Struct, forbid_unknown_fields=True):
    """An option's value, and why it is set."""

    value: str
    reason: str


class _Tried(msgspec.Struct, forbid_unknown_fields=True):
    """Options that go together, and where they were tried."""

    tried: str
    options: dict[str, _Option]

    def settings(self) -> tuple[Setting, ...]:
        """Return the options as settings."""
        return tuple(Setting(n, o.value, o.reason, self.tried) for n, o in self.options.items())


_all = msgspec.toml.decode(read("required.toml"), type=dict[str, _Tried])
_APART, _PERMUTES = _all["apart"].settings(), _all["permutes"].settings()
RINGS = (*_APART, *_all["hops"].settings(), *_PERMUTES)
NVLINK_STREAM = _all["nvlink_stream"].settings()
SEEN = _all["seen"].settings()  # wherever the scheduler pass orders a step, rewritten or not
LAYERS_AHEAD = _all["layers_ahead"].settings()  # and the threshold of gathers: a layer's bytes
STREAMS_VARIABLE = "JAXOVERLAP_STREAMS"  # "one" keeps all collectives on one stream
_MOST_JOINED = 30 << 20  # bytes; XLA's default
_SUMS_APART = "xla_gpu_all_reduce_combine_threshold_bytes"
_MOST_MERGED_MIB = 64  # that a matmul reads and writes; XLA's default
_MATMULS_APART = "xla_gpu_dot_merger_threshold_mb"


def is_gpu(mesh: Mesh) -> bool:
    """Return whether a mesh is of NVIDIA GPUs, present or only described."""
    return mesh.devices.flat[0].platform in ("gpu", "cuda")


def why_one_stream(mesh: Mesh, cluster: Cluster, asked: str = "auto") -> str | None:
    """Return why NVLink's collectives cannot have their own stream on a mesh; empty if they can.

    Args:
        mesh: the mesh.
        cluster: its GPUs.
        asked: "one" requests one stream for all, as the environment variable does.

    Returns:
        The reason; None where there is but one kind of link.

    Raises:
        ValueError: if the environment variable is neither "auto" nor "one".
    """
    if not is_gpu(mesh) or not 1 < cluster.gpus_per_nvlink_domain < cluster.num_devices:
        return None
    forced = os.environ.get(STREAMS_VARIABLE, "auto")
    if forced not in ("auto", "one"):
        raise ValueError(f"{STREAMS_VARIABLE}={forced}: expected 'auto' or 'one'")
    if asked == "one":
        return "streams='one' is set"
    if forced == "one":
        return f"{STREAMS_VARIABLE}=one is set"
    device = mesh.devices.flat[0]
    wanted = {s.name: s.value for s in NVLINK_STREAM}
    if jits.accepted_options(wanted, device) != wanted:
        return "the installed XLA has no option for a second one"
    return ""


def options_for(
    mesh: Mesh,
    *,
    rings: bool = True,
    parts: bool = False,
    least_sum: int | None = None,
    least_matmul: int | None = None,
    nvlink_stream: bool = False,
    joined_bytes: int = 0,
) -> dict[str, str]:
    """Return the compiler options for an overlapped step on a mesh.

    On CPUs of several processes all-reduces are not combined if there are rings or parts
    (`CPU_SUMS_APART`); on those of one process there are no options. Where each process has one GPU
    of the mesh no permute is a copy, and the option for copies is not set.

    Args:
        mesh: the mesh.
        rings: whether the step has any.
        parts: whether its batch is split in parts. With neither, only the permutes that XLA's
            partitioner may add are made copies, as estimated; its other defaults are as good.
        least_sum: bytes of the smallest all-reduce that each part has for itself, as of the squares
            in a norm. XLA's combiner merges two that are small together; then each part would wait
            for the other, and neither would hide anything. It may combine smaller ones.
        least_matmul: bytes that the smallest matmul of a part reads and writes on a device, of
            those that share an operand with the other parts'. XLA merges two if one of them is
            small; it may merge smaller ones than this, as those of queries, keys and values.
        nvlink_stream: whether NVLink's collectives get a stream of their own.
        joined_bytes: bytes that XLA may gather with one all-gather, as all weights of a layer; 0
            for each gather by itself.

    Returns:
        What `jax.jit(compiler_options=...)` takes, less those that the installed XLA lacks; a
        step's own options win over these.
    """
    devices = list(mesh.devices.flat)
    mine = next((d for d in devices if d.process_index == jax.process_index()), devices[0])
    if not is_gpu(mesh):
        # Joined in one, sums hide behind nothing. Where there are neither rings nor parts they are
        # left to XLA: apart they hid no more there (data parallelism on four hosts) and took 1 to
        # 4% longer.
        wanted = (rings or parts) and many_processes_of_cpus(devices)
        return jits.accepted_options(CPU_SUMS_APART, mine) if wanted else {}
    together = len({device.process_index for device in devices}) < len(devices)
    settings = RINGS if rings else (*_APART, *_PERMUTES) if parts else _PERMUTES
    settings += (*SEEN, *(NVLINK_STREAM if nvlink_stream else ()))
    wanted = {s.name: s.value for s in settings if together or s.name != BY_COPY}
    if joined_bytes:
        wanted |= {s.name: s.value for s in LAYERS_AHEAD} | {MOST_GATHERED: str(joined_bytes)}
    if least_sum is not None:
        wanted[_SUMS_APART] = str(min(2 * least_sum - 1, _MOST_JOINED))
    if least_matmul is not None and least_matmul < _MOST_MERGED_MIB << 20:
        wanted[_MATMULS_APART] = str(max(least_matmul - 1, 0) >> 20)
    known = jits.accepted_options(wanted, mine)
    known |= without_collectives()
    return {**known, **(pods.compiler_options() if pods.is_pod(mesh) else {})}
