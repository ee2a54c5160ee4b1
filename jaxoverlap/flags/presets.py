"""Presets of flags and variables for DGX systems, Google's A3 and A4, and AWS's P5.

XLA options are those that rings need (`flags.required`) and what sources agree on beside them;
variables are the network's, as its owner publishes them. Sources disagree, and most of their XLA
options are for steps without rings: a `Conflict` says who says what, and what was taken.

None of this was timed on a GPU here.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import replace

from jaxoverlap.flags import networks as net
from jaxoverlap.flags import sources as src
from jaxoverlap.flags.required import BY_COPY, RINGS
from jaxoverlap.flags.setting import Conflict, Preset, Setting
from jaxoverlap.hardware.cluster import parse_cluster

# -- XLA's options --------------------------------------------------------------------------------

_CUBLAS = Setting(
    "xla_gpu_enable_triton_gemm",
    "False",
    "matmuls by cuBLAS, as in the rings' compiled and audited schedules",
    f"{src.AXLEARN}; {src.RECIPES}; {src.MAXTEXT}",
)
_GRAPHS = Setting(
    "xla_gpu_enable_command_buffer",
    "FUSION,CUSTOM_CALL",
    "CUDA graphs of these commands only: on a B200 faster for all models that NVIDIA tried",
    f"{src.TOOLBOX}, Blackwell tips; {src.RECIPES}; {src.AXLEARN}",
)


def _thresholds(*claims: tuple[str, str]) -> Conflict:
    return Conflict(
        "xla_gpu_{all_reduce,all_gather,reduce_scatter}_combine_threshold_bytes",
        claims,
        "gather and scatter 1; all-reduce: XLA's default",
        "a combined gather or scatter waits for the last of its arrays; single ones are hidden "
        "better, also next to rings. All-reduces belong to no ring",
    )


_PIPELINING = Conflict(
    "xla_gpu_enable_pipelined_{all_gather,all_reduce,reduce_scatter}",
    (
        ("true", f"{src.AXLEARN}; {src.RECIPES}; {src.TOOLBOX_CI}"),
        ("on, by the new names xla_gpu_pipeline_*", src.MAXTEXT),
    ),
    "xla_gpu_pipeline_reduce_scatter off; the others: XLA's default",
    "overlap() moves the first gathers of a loop itself; a scatter that is moved costs a layer's "
    "buffers. XLA_FLAGS still take the old names, compiler options do not",
)
_DOUBLE_BUFFERING = Conflict(
    "xla_gpu_enable_while_loop_double_buffering",
    (("true", f"{src.AXLEARN}; {src.RECIPES}; {src.MAXTEXT}; {src.TOOLBOX_CI}"),),
    "",
    src.DOUBLE_BUFFERING_TRIED,
)
_REMATERIALIZATION = Conflict(
    "xla_disable_hlo_passes",
    (("rematerialization", f"{src.AXLEARN}; {src.RECIPES}; {src.MAXTEXT}; {src.TOOLBOX_CI}"),),
    "",
    src.REMATERIALIZATION_TRIED,
)
_LOOPS = (_PIPELINING, _DOUBLE_BUFFERING, _REMATERIALIZATION)
_HOPPER_GRAPHS = Conflict(
    "xla_gpu_enable_command_buffer",
    (
        ("empty: no CUDA graphs", f"{src.MAXTEXT}; {src.TOOLBOX_CI}; {src.RECIPES_405B}"),
        ("not set", src.AXLEARN),
        (
            "xla_gpu_graph_level=0, which XLA no longer has",
            f"{src.RECIPES_70B}; {src.AXLEARN_ULTRA}",
        ),
    ),
    "",
    "XLA's default puts no NCCL collective into a graph",
)

# -- the process ----------------------------------------------------------------------------------

_MEMORY = Setting(
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "0.90",
    "what is left is NCCL's buffers and the libraries'",
    f"{src.TOOLBOX}: 'typically 0.9 or 0.8'",
)
_MEMORY_CONFLICT = Conflict(
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    (
        ("0.85", f"{src.AXLEARN}, a3-mega and a3-ultra"),
        ("0.92", f"{src.AXLEARN}, a4"),
        ("0.98", src.RECIPES),
        ("0.9 or 0.8", src.TOOLBOX),
    ),
    "0.90",
    "0.98 leaves 1.6 GB of 80; every ring has a communicator of its own, with buffers outside "
    "JAX's share. Raise it once a run has shown what is free",
)
_ONE_QUEUE = Setting(
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "1",
    "kernels start in the order that XLA gave them: else a collective may wait behind matmuls",
    f"{src.TOOLBOX}; {src.TOOLBOX_CI}, below compute capability 10",
)
_QUEUES_CONFLICT = Conflict(
    "CUDA_DEVICE_MAX_CONNECTIONS",
    (
        ("not set: 1 is slower on Blackwell", f"{src.TOOLBOX}, Blackwell tips"),
        ("1", f"{src.AXLEARN}, a4; {src.RECIPES}, a4"),
    ),
    "",
    "NVIDIA has measured it, and says why: kernels of higher priority need not wait there",
)
_LAUNCH_ORDER = Setting(
    "NCCL_LAUNCH_ORDER_IMPLICIT",
    "1",
    "overlapped steps may run NVLink's and the network's collectives on a stream each: NCCL then "
    "starts those of all communicators in the order in which the host launched them, the same on "
    "every device, so that no two wait for each other for ever",
    src.NCCL_COMMUNICATORS,
)


# -- clusters -------------------------------------------------------------------------------------


def _preset(
    name: str, about: str, chip: str, variables: tuple[Setting, ...], *conflicts: Conflict
) -> Preset:
    blackwell = "b200" in chip
    return Preset(
        name,
        about,
        chip,
        (
            *RINGS,
            _CUBLAS,
            *((_GRAPHS,) if blackwell else (_ONE_QUEUE,)),
            _MEMORY,
            _LAUNCH_ORDER,
            *variables,
        ),
        (
            *conflicts,
            *_LOOPS,
            _QUEUES_CONFLICT if blackwell else _HOPPER_GRAPHS,
            _MEMORY_CONFLICT,
        ),
    )


_1G, _2G, _8G = "1 GiB", "2 GiB", "8 GiB"
_NVIDIAS = _thresholds((f"{_8G} each", src.TOOLBOX), (f"{_1G}, {_1G}, 128 MiB", src.TOOLBOX_CI))
_NO_SL = Conflict(
    "NCCL_IB_SL",
    (("1", src.TOOLBOX_SLURM),),
    "",
    "the owner of the fabric assigns InfiniBand service levels",
)
_MNNVL = net.published(
    f"{src.NCCL}: its default, set explicitly",
    NCCL_MNNVL_ENABLE="2",
)
_NVL72 = Conflict(
    "all of it",
    (("nothing for JAX", f"{src.TOOLBOX}; {src.RECIPES}; {src.AXLEARN}; {src.MAXTEXT}"),),
    "as for a B200, with NVLink between hosts",
    "no preset of a GB200 NVL72 for JAX was found",
)

PRESETS: Mapping[str, Preset] = {
    p.name: p
    for p in (
        _preset("dgx-a100", "NVIDIA DGX A100, InfiniBand", "a100-sxm-80", (), _NVIDIAS, _NO_SL),
        _preset("dgx-h100", "NVIDIA DGX H100, InfiniBand", "h100-sxm", (), _NVIDIAS, _NO_SL),
        _preset("dgx-h200", "NVIDIA DGX H200, InfiniBand", "h200", (), _NVIDIAS, _NO_SL),
        _preset("dgx-b200", "NVIDIA DGX B200, InfiniBand", "b200", (), _NVIDIAS, _NO_SL),
        _preset("gb200-nvl72", "NVIDIA GB200 NVL72", "gb200", _MNNVL, _NVL72, _NVIDIAS),
        _preset(
            "gcp-a3-high",
            "Google A3 High: H100, GPUDirect-TCPX",
            "h100-sxm",
            net.TCPX,
            _thresholds((f"{_1G} each", f"{src.AXLEARN}, a3-high"), *src.MAXTEXT_THRESHOLDS),
            net.TCPX_CHANNELS,
        ),
        _preset(
            "gcp-a3-mega",
            "Google A3 Mega: H100, GPUDirect-TCPXO",
            "h100-sxm",
            net.TCPXO,
            _thresholds(
                ("128 MiB, 1 GiB, 32 MiB", f"{src.AXLEARN}, a3-mega"), *src.MAXTEXT_THRESHOLDS
            ),
            net.TCPXO_BUFFERS,
            net.TUNER,
        ),
        _preset(
            "gcp-a3-ultra",
            "Google A3 Ultra: H200, RoCE",
            "h200",
            net.published(f"{src.AXLEARN}, a3-ultra", **net.ROCE),
            _thresholds(
                (f"{_2G}, {_2G}, 16 MiB", f"{src.RECIPES_70B}; {src.AXLEARN}, a3-ultra"),
                (f"{_2G} each", src.RECIPES_405B),
            ),
            net.GIB,
        ),
        _preset(
            "gcp-a4",
            "Google A4: B200, RoCE",
            "b200",
            net.published(f"{src.AXLEARN}, a4", **net.ROCE),
            _thresholds(
                (f"{_2G}, {_2G}, 16 MiB", f"{src.RECIPES}, a4, Llama 3.1 70B"),
                ("16 GiB each", f"{src.RECIPES}, a4, Llama 3.1 405B"),
                (f"{_2G} each", f"{src.AXLEARN}, a4"),
            ),
            net.GIB,
        ),
        _preset(
            "aws-p5",
            "AWS P5: H100, EFA",
            "h100-sxm",
            net.EFA,
            _thresholds(("32 MiB of all-reduces", src.AWS_JAX), (f"{_8G} each", src.TOOLBOX_EKS)),
            net.EFA_OLD,
        ),
    )
}

_OF_CHIP = {
    "a100-sxm-40": "dgx-a100",
    **{p.chip: p.name for p in PRESETS.values() if p.name.startswith(("dgx", "gb200"))},
}


def preset(pod: str) -> Preset:
    """Return the preset of a name in `PRESETS`, or of a cluster such as "h100-sxm:8x8".

    A cluster's network is taken to be that of NVIDIA's own systems of its chip. With one process a
    GPU no permute is a copy, and none is asked for.

    Raises:
        ValueError: if it is neither.
    """
    if pod in PRESETS:
        return PRESETS[pod]
    if ":" not in pod:
        near = difflib.get_close_matches(pod.lower(), PRESETS, n=2, cutoff=0.4)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise ValueError(
            f"unknown preset {pod!r}: {hint}Known are {', '.join(PRESETS)}, and clusters such as "
            "'h100-sxm:8x8'"
        )
    cluster = parse_cluster(pod)
    chip_preset = PRESETS[_OF_CHIP[cluster.chip.name]]
    if cluster.gpus_per_process > 1:
        return chip_preset
    return replace(
        chip_preset, settings=tuple(s for s in chip_preset.settings if s.name != BY_COPY)
    )
