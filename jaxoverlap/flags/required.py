"""XLA options that overlapped steps need on GPUs, each with its reason."""

from __future__ import annotations

import jax
from jax.sharding import Mesh

from jaxoverlap._jax import jits
from jaxoverlap._jax.partitioner import CPU_SUMS_APART, many_processes_of_cpus
from jaxoverlap.flags.setting import Setting
from jaxoverlap.hardware import pods

_TRIED = "tried on jax 0.11.2 and 0.12.0 with benchmarks/pod_audit.py"


def _ring(name: str, value: str, reason: str) -> Setting:
    return Setting(name, value, reason, _TRIED)


BY_COPY = "xla_gpu_collective_permute_mode"
_APART = (
    _ring(
        "xla_gpu_enable_latency_hiding_scheduler",
        "True",
        "XLA turns its overlapping scheduler on by itself from Hopper on; on an A100 the hops of a "
        "reduce-scatter ring were seen synchronous without it",
    ),
    _ring(
        "xla_gpu_experimental_parallel_collective_overlap_limit",
        "8",
        "XLA lets one collective fly at a time: a gather of the next weights then takes the last "
        "matmul of a ring for itself and leaves that ring's hop bare",
    ),
    _ring(
        "xla_gpu_all_gather_combine_threshold_bytes",
        "1",
        "merged gathers wait for the last of what they carry, and hide behind nothing",
    ),
    _ring(
        "xla_gpu_reduce_scatter_combine_threshold_bytes",
        "1",
        "merged scatters wait for the last of what they carry, and hide behind nothing",
    ),
    _ring(
        "xla_gpu_pipeline_reduce_scatter",
        "COLLECTIVE_PIPELINING_MODE_OFF",
        "peels a layer of the backward pass out of its loop, buffers and all, to move a "
        "reduce-scatter into the next step; ours stands right after its ring, with matmuls to come",
    ),
)
_PERMUTES = (
    _ring(
        BY_COPY,
        "COLLECTIVES_PEER_MEMORY",
        "permutes between the GPUs of one process are copies by their copy engines, at the link's "
        "rate and with no SMs. NCCL gives a permute its 32 channels over the communicator's "
        "devices, four of 18 GB/s on a host of eight: rings would lose against its gathers. "
        "Between processes they stay NCCL's; with one process a GPU it is left out",
    ),
    _ring(
        "xla_gpu_collective_permute_connected_components",
        "True",
        "a communicator a ring, and not one of all devices: only that can be of one process, and "
        "where it is not NCCL shares its channels between fewer",
    ),
)
RINGS = (
    *_APART,
    _ring(
        "xla_gpu_collective_permute_combine_threshold_bytes",
        "0",
        "hops of different rings become one, which then waits for both rings' matmuls",
    ),
    *_PERMUTES,
)
_MOST_JOINED = 30 << 20  # bytes; XLA's default
_SUMS_APART = "xla_gpu_all_reduce_combine_threshold_bytes"
_MOST_MERGED_MIB = 64  # that a matmul reads and writes; XLA's default
_MATMULS_APART = "xla_gpu_dot_merger_threshold_mb"


def is_gpu(mesh: Mesh) -> bool:
    """Return whether a mesh is of NVIDIA GPUs, present or only described."""
    return mesh.devices.flat[0].platform in ("gpu", "cuda")


def options_for(
    mesh: Mesh,
    *,
    rings: bool = True,
    parts: bool = False,
    least_sum: int | None = None,
    least_matmul: int | None = None,
) -> dict[str, str]:
    """Compiler options for an overlapped step on a mesh.

    On CPUs of several processes sums stay apart beside rings and parts (`CPU_SUMS_APART`); on
    those of one process there are none. Where each process has one GPU of the mesh no permute is a
    copy, and none is asked for.

    Args:
        mesh: the mesh.
        rings: whether the step has any.
        parts: whether its rows run in parts. With neither, only the permutes that XLA's partitioner
            may add are made copies, as they are priced; its other defaults are as good.
        least_sum: bytes of the smallest all-reduce that each part has for itself, as of the squares
            in a norm. XLA makes one of two if they are small together; that would let each part
            wait for the other, and then neither hides anything. Smaller ones it may join.
        least_matmul: bytes that the smallest matmul of a part reads and writes on a device, of
            those that share an operand with the other parts'. XLA makes one of two if one of them
            is small; smaller ones than this it may join, as those of queries, keys and values.

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
        known = wanted and all(
            jits.accepts_option(name, value, mine) for name, value in CPU_SUMS_APART.items()
        )
        return dict(CPU_SUMS_APART) if known else {}
    together = len({device.process_index for device in devices}) < len(devices)
    settings = RINGS if rings else (*_APART, *_PERMUTES) if parts else _PERMUTES
    wanted = {s.name: s.value for s in settings if together or s.name != BY_COPY}
    if least_sum is not None:
        wanted[_SUMS_APART] = str(min(2 * least_sum - 1, _MOST_JOINED))
    if least_matmul is not None and least_matmul < _MOST_MERGED_MIB << 20:
        wanted[_MATMULS_APART] = str(max(least_matmul - 1, 0) >> 20)
    known = {n: v for n, v in wanted.items() if jits.accepts_option(n, v, mine)}
    return {**known, **(pods.compiler_options() if pods.is_pod(mesh) else {})}
