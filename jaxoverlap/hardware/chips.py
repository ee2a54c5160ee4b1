"""Chips by name, with the sources of their numbers.

Two kinds of numbers stand here. Facts: core counts, memory, caches and clocks are those of the
GPU target configurations that XLA keeps for compiling without a GPU (openxla/xla,
xla/backends/gpu/target_config/specs; the commit is in each chip's `source`); peak matmul and
NVLink rates are from NVIDIA's data sheets, dense (data sheets like to print the sparse rate, twice
as much) and one direction of a link (they print both). Assumptions: what network a cluster has is
its owner's choice, so `network` is what NVIDIA's own DGX systems of that chip have a GPU; and
NVIDIA publishes no latencies, so those are the start and hop times that NCCL's tuning model
assumes. Where yours differ, say so:

    dataclasses.replace(parse_cluster("h100-sxm:8x8"), network=Link("RoCE", 25e9, 20e-6))
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Link:
    """A link that carries bytes between two GPUs.

    Attributes:
        name: Its name, for people.
        bandwidth_bytes_per_s: Peak of one GPU in one direction; it sends as much as it receives.
        latency_s: Seconds of one transfer, however few its bytes: its start and the first byte's
            way.
        simple_only: Whether NCCL's plugin for this network allows its Simple protocol alone.
    """

    name: str
    bandwidth_bytes_per_s: float
    latency_s: float
    simple_only: bool = False

    def __post_init__(self) -> None:
        if not self.bandwidth_bytes_per_s > 0 or not self.latency_s >= 0:
            raise ValueError(
                f"a link of {self.bandwidth_bytes_per_s} bytes/s and {self.latency_s} s: give a "
                "bandwidth above zero and a latency of zero or more"
            )


# The latency is that of a copy by a copy engine, launch included; an assumption.
_PCIE_4 = Link("PCIe 4 x16", 32e9, 10e-6)
_PCIE_5 = Link("PCIe 5 x16", 64e9, 10e-6)


@dataclass(frozen=True, kw_only=True)
class Chip:
    """One GPU model.

    Attributes:
        name: As `parse_cluster` takes it.
        device_name: What CUDA calls it.
        compute_capability: CUDA's (major, minor).
        num_sms: Streaming multiprocessors; XLA's core_count.
        fpus_per_sm: Float32 lanes of an SM.
        clock_ghz: Highest SM clock.
        memory_bytes: Device memory that a program can use.
        memory_bandwidth_bytes_per_s: Peak, of the device memory.
        l2_bytes: Second-level cache.
        shared_memory_per_sm_bytes: Shared memory of an SM.
        shared_memory_per_block_bytes: The most that one block can ask for (opt-in).
        bf16_flops_per_s: Dense bf16 matmul peak, a multiply-add counted as two.
        nvlinks: NVLink links of a GPU.
        nvlink: Its link to the GPUs of its NVLink domain.
        network: Its link to all others. An assumption: see the module's text.
        host_link: Its link to its host's memory, which carries as much the other way beside it.
        nvlink_rack_gpus: The most GPUs that NVLink joins across hosts; 0 where it ends at the host.
        source: Where these facts come from.
    """

    name: str
    device_name: str
    compute_capability: tuple[int, int]
    num_sms: int
    fpus_per_sm: int
    clock_ghz: float
    memory_bytes: int
    memory_bandwidth_bytes_per_s: float
    l2_bytes: int
    shared_memory_per_sm_bytes: int
    shared_memory_per_block_bytes: int
    bf16_flops_per_s: float
    nvlinks: int
    nvlink: Link
    network: Link
    host_link: Link = _PCIE_4
    nvlink_rack_gpus: int = 0
    source: str


# NCCL's tuning model (NVIDIA/nccl, src/graph/tuning.cc; ring, Simple protocol: the one for large
# messages): 8.4 µs to start, then 3.4 µs a hop over NVLink and 9.6 µs over the network.
_NVLINK_HOP_S = 12e-6
_NETWORK_HOP_S = 18e-6

_SPECS = "xla/backends/gpu/target_config/specs"

_A100_40 = Chip(
    name="a100-sxm-40",
    device_name="NVIDIA A100-SXM4-40GB",
    compute_capability=(8, 0),
    num_sms=108,
    fpus_per_sm=64,
    clock_ghz=1.41,
    memory_bytes=42_331_013_120,
    memory_bandwidth_bytes_per_s=1.5552e12,
    l2_bytes=41_943_040,
    shared_memory_per_sm_bytes=167_936,
    shared_memory_per_block_bytes=166_912,
    bf16_flops_per_s=312e12,
    nvlinks=12,  # XLA's file leaves it out; NVIDIA's NVLink page says twelve
    nvlink=Link("NVLink 3", 300e9, _NVLINK_HOP_S),
    network=Link("InfiniBand HDR, 200 Gb/s a GPU", 25e9, _NETWORK_HOP_S),  # assumed, as DGX A100
    host_link=_PCIE_4,
    source=f"openxla/xla@4336d12e0706 {_SPECS}/a100_sxm_40.txtpb; NVIDIA A100 data sheet",
)
_A100_80 = replace(
    _A100_40,
    name="a100-sxm-80",
    device_name="NVIDIA A100-SXM4-80GB",
    memory_bytes=85_100_068_864,
    memory_bandwidth_bytes_per_s=2.03904e12,
    source=f"openxla/xla@4336d12e0706 {_SPECS}/a100_sxm_80.txtpb; NVIDIA A100 data sheet",
)
_H100 = Chip(
    name="h100-sxm",
    device_name="NVIDIA H100 80GB HBM3",
    compute_capability=(9, 0),
    num_sms=132,
    fpus_per_sm=128,
    clock_ghz=1.98,  # matmuls run at 1.83, which the peak below counts with
    memory_bytes=84_942_979_072,
    memory_bandwidth_bytes_per_s=3.35232e12,
    l2_bytes=52_428_800,
    shared_memory_per_sm_bytes=233_472,
    shared_memory_per_block_bytes=232_448,
    bf16_flops_per_s=989.4e12,
    nvlinks=18,
    nvlink=Link("NVLink 4", 450e9, _NVLINK_HOP_S),
    network=Link("InfiniBand NDR, 400 Gb/s a GPU", 50e9, _NETWORK_HOP_S),  # assumed, as DGX H100
    host_link=_PCIE_5,
    source=f"openxla/xla@0774019d97e7 {_SPECS}/h100_sxm.txtpb; NVIDIA H100 data sheet",
)
# The H100s on which torchtitan's published steps ran. XLA has no description of them.
_H100_500W = replace(
    _H100,
    name="h100-sxm-500w",
    device_name="NVIDIA H100 96GB HBM2e",
    memory_bytes=102_000_000_000,
    memory_bandwidth_bytes_per_s=2.4e12,
    source="pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md: 96 GB HBM2e, 500 W",
)
_H200 = replace(  # the H100's die with more and faster memory
    _H100,
    name="h200",
    device_name="NVIDIA H200 141GB HBM3e",
    memory_bytes=151_397_597_184,
    memory_bandwidth_bytes_per_s=4.8e12,
    source=f"openxla/xla@4336d12e0706 {_SPECS}/h200.txtpb; NVIDIA H200 data sheet",
)
_B200 = Chip(
    name="b200",
    device_name="NVIDIA B200",
    compute_capability=(10, 0),
    num_sms=148,
    fpus_per_sm=128,
    clock_ghz=1.965,
    memory_bytes=191_514_411_008,
    memory_bandwidth_bytes_per_s=7.67232e12,
    l2_bytes=132_644_864,
    shared_memory_per_sm_bytes=233_472,
    shared_memory_per_block_bytes=232_448,
    bf16_flops_per_s=2.25e15,  # HGX B200, 1000 W
    nvlinks=18,
    nvlink=Link("NVLink 5", 900e9, _NVLINK_HOP_S),
    network=Link("InfiniBand NDR, 400 Gb/s a GPU", 50e9, _NETWORK_HOP_S),  # assumed, as DGX B200
    host_link=_PCIE_5,
    source=f"openxla/xla@300ec95ab85f {_SPECS}/b200.txtpb; NVIDIA Blackwell data sheet",
)
_GB200 = replace(  # the network, as DGX GB200: also one ConnectX-7 of 400 Gb/s a GPU
    _B200,
    name="gb200",
    device_name="NVIDIA GB200",
    num_sms=152,
    clock_ghz=2.062,
    memory_bytes=197_897_748_480,
    memory_bandwidth_bytes_per_s=7.928064e12,
    l2_bytes=135_528_448,
    bf16_flops_per_s=2.5e15,  # 1200 W; a GPU, not the superchip of two
    host_link=Link("NVLink-C2C, half of a Grace's", 225e9, 10e-6),  # 450 GB/s a way, for two GPUs
    nvlink_rack_gpus=72,  # GB200 NVL72: 18 hosts of four, one NVLink domain
    source=f"openxla/xla@300ec95ab85f {_SPECS}/gb200.txtpb; NVIDIA Blackwell data sheet",
)
# Blackwell Ultra: more memory, FP4 units and power on Blackwell's matrix units. XLA has these,
# too; no compilation for them was tried here, so they are known to `configure` only.
_B300 = replace(
    _B200,
    name="b300",
    device_name="NVIDIA B300",
    compute_capability=(10, 3),
    num_sms=158,
    memory_bytes=297_021_865_984,
    memory_bandwidth_bytes_per_s=7.936e12,
    l2_bytes=135_528_448,
    network=Link("InfiniBand XDR, 800 Gb/s a GPU", 100e9, _NETWORK_HOP_S),  # assumed, as DGX B300
    source=f"openxla/xla@4336d12e0706 {_SPECS}/b300.txtpb; NVIDIA Blackwell Ultra data sheet",
)
_GB300 = replace(
    _GB200,
    name="gb300",
    device_name="NVIDIA GB300",
    compute_capability=(10, 3),
    clock_ghz=2.07,
    memory_bytes=297_021_079_552,
    network=_B300.network,  # as DGX GB300
    source=f"openxla/xla@4336d12e0706 {_SPECS}/gb300.txtpb; NVIDIA Blackwell Ultra data sheet",
)
# A graphics compute die of an MI250X, which is a device to the software; eight on a Frontier host.
# XLA's compiler without a GPU is CUDA's, so this chip has facts only (`jaxoverlap.parallelism`).
_MI250X = Chip(
    name="mi250x-gcd",
    device_name="AMD Instinct MI250X",
    compute_capability=(0, 0),  # not CUDA's
    num_sms=110,
    fpus_per_sm=64,
    clock_ghz=1.7,
    memory_bytes=68_702_699_520,
    memory_bandwidth_bytes_per_s=1.6384e12,
    l2_bytes=8_388_608,
    shared_memory_per_sm_bytes=65_536,
    shared_memory_per_block_bytes=65_536,
    bf16_flops_per_s=191.5e12,
    nvlinks=0,
    # Two dies of a package have 200 GB/s, packages 50 to 100 GB/s: a ring goes by the slowest.
    nvlink=Link("Infinity Fabric", 50e9, 15e-6),
    network=Link("Slingshot, 4 x 200 Gb/s a host", 12.5e9, 20e-6),
    host_link=Link("Infinity Fabric to the CPU", 36e9, 10e-6),
    source="AMD CDNA 2 white paper; OLCF, Frontier user guide (64 GB and 191.5 TFLOP/s a die)",
)
# CHIPS can be compiled for without a GPU; `parse_cluster` takes all of KNOWN.
CHIPS = {c.name: c for c in (_A100_40, _A100_80, _H100, _H200, _B200, _GB200)}
KNOWN = CHIPS | {c.name: c for c in (_H100_500W, _B300, _GB300, _MI250X)}
