"""XLA options that overlapped steps need on GPUs, each with its reason."""

from __future__ import annotations

import os

import jax
from jax.sharding import Mesh

from jaxoverlap._jax import jits
from jaxoverlap._jax.partitioner import CPU_SUMS_APART, many_processes_of_cpus
from jaxoverlap.flags.graphs import without_collectives
from jaxoverlap.flags.setting import Setting
from jaxoverlap.hardware import pods
from jaxoverlap.hardware.cluster import Cluster

_TRIED = "tried on jax 0.11.2 and 0.12.0, on four GPT layers compiled for h100-sxm pods"


def _ring(name: str, value: str, reason: str) -> Setting:
    return Setting(name, value, reason, _TRIED)


BY_COPY = "xla_gpu_collective_permute_mode"
_MOST_GATHERED = "xla_gpu_all_gather_combine_threshold_bytes"
_MOST_SCATTERED = "xla_gpu_reduce_scatter_combine_threshold_bytes"
_PIPELINED_SCATTERS = "xla_gpu_pipeline_reduce_scatter"
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
        "XLA keeps one collective in flight at a time: a gather of the next weights then takes the "
        "last matmul of a ring, and that ring's hop is exposed",
    ),
    _ring(
        _MOST_GATHERED,
        "1",
        "a combined gather waits for the last of its arrays, and is not hidden",
    ),
    _ring(
        _MOST_SCATTERED,
        "1",
        "a combined scatter waits for the last of its arrays, and is not hidden",
    ),
    _ring(
        _PIPELINED_SCATTERS,
        "COLLECTIVE_PIPELINING_MODE_OFF",
        "XLA would peel a layer of the backward pass, with its buffers, out of its loop to move a "
        "reduce-scatter into the next iteration; a ring's follows it, with matmuls still to come",
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
        "a communicator for each ring, and not one for all devices: only then can it be within one "
        "process, and otherwise NCCL shares its channels between fewer devices",
    ),
)
RINGS = (
    *_APART,
    _ring(
        "xla_gpu_collective_permute_combine_threshold_bytes",
        "0",
        "combined hops of different rings wait for both rings' matmuls",
    ),
    *_PERMUTES,
)
NVLINK_STREAM = (
    Setting(
        "xla_gpu_collective_domain_assignment",
        "scale_up_fabric",
        "by default all asynchronous collectives share one stream, on which the next hop over "
        "NVLink waits for a gradient's all-reduce over the network that started before it. With "
        "this option XLA launches collectives within NVLink domains on a second stream. Groups of "
        "both kinds share at most one device of a mesh's axes; if they share more, the scheduler "
        "pass keeps them from running at once",
        "tried on jax 0.11.2 and 0.12.0 with tests/simulation/test_streams.py",
    ),
    Setting(
        "xla_gpu_experimental_parallel_scale_up_collective_overlap_limit",
        "8",
        "XLA keeps one of these in flight at a time: a second ring's hop would wait for its done",
        "tried on jax 0.11.2 and 0.12.0 with tests/simulation/test_streams.py",
    ),
)
_OF_LAYERS = "tried on jax 0.12.0 with a 7B step of 32 scanned layers, by simulation"
_PIPELINED = "COLLECTIVE_PIPELINING_MODE_ON"
LAYERS_AHEAD = (  # and the threshold of gathers, which is a layer's bytes
    Setting(
        "xla_gpu_enable_while_loop_unrolling",
        "WHILE_LOOP_UNROLLING_DOUBLE_BUFFER",
        "a loop that gathers a layer's weights for its next iteration would copy them at the end "
        "of each: 17 ms of a step on 64 H100s. Of two iterations each has a buffer of its own",
        _OF_LAYERS,
    ),
    Setting(
        _MOST_SCATTERED,
        str(8 << 30),
        "the gradients of a layer are scattered as one, as its weights are gathered: in half of "
        "the time that they take singly on 64 H100s, so that kernels are slowed for less",
        _OF_LAYERS,
    ),
    Setting(
        _PIPELINED_SCATTERS,
        _PIPELINED,
        "a layer's gradients are scattered under the next layer's kernels; one collective that "
        "waits for the last of them hides behind nothing else",
        _OF_LAYERS,
    ),
    Setting(
        "xla_gpu_pipeline_all_reduce",
        _PIPELINED,
        "most scatters are all-reduces still when XLA pipelines: without this it leaves them",
        _OF_LAYERS,
    ),
)
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
        asked: "one" to have one stream for all. So does the environment variable.

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
    if not all(jits.accepts_option(s.name, s.value, device) for s in NVLINK_STREAM):
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
        known = wanted and all(
            jits.accepts_option(name, value, mine) for name, value in CPU_SUMS_APART.items()
        )
        return dict(CPU_SUMS_APART) if known else {}
    together = len({device.process_index for device in devices}) < len(devices)
    settings = RINGS if rings else (*_APART, *_PERMUTES) if parts else _PERMUTES
    settings += NVLINK_STREAM if nvlink_stream else ()
    wanted = {s.name: s.value for s in settings if together or s.name != BY_COPY}
    if joined_bytes:
        wanted |= {s.name: s.value for s in LAYERS_AHEAD} | {_MOST_GATHERED: str(joined_bytes)}
    if least_sum is not None:
        wanted[_SUMS_APART] = str(min(2 * least_sum - 1, _MOST_JOINED))
    if least_matmul is not None and least_matmul < _MOST_MERGED_MIB << 20:
        wanted[_MATMULS_APART] = str(max(least_matmul - 1, 0) >> 20)
    known = {n: v for n, v in wanted.items() if jits.accepts_option(n, v, mine)}
    known |= without_collectives()
    return {**known, **(pods.compiler_options() if pods.is_pod(mesh) else {})}
