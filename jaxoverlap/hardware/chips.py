"""Chips by name, with the sources of their numbers, out of chips.toml.

Two kinds of numbers stand there. Facts: core counts, memory, caches and clocks are those of the
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

from dataclasses import dataclass
from functools import partial
from typing import Annotated

from jaxoverlap._util.files import converted, entries
from jaxoverlap._util.limits import Above0, AtLeast0, AtLeast1, checked, number, whole_pair


@dataclass(frozen=True)
@checked
class Link:
    """A link that carries bytes between two GPUs.

    Attributes:
        name: Its name, for people.
        bandwidth_bytes_per_s: Peak of one GPU in one direction; it sends as much as it receives.
        latency_s: Seconds of one transfer, however few its bytes: its start and the first byte's
            way.
        simple_only: Whether NCCL's plugin for this network allows its Simple protocol alone.
        between_sockets_bytes_per_s: What a host's GPUs together send between its sockets, where
            rings over some of them have to: those that come in by one GPU's NIC and go out by
            another's (NCCL before 2.12, which had no PXN); None: NVLink brings them to the NIC.
    """

    name: str
    bandwidth_bytes_per_s: Above0
    latency_s: Annotated[float, partial(number, least=0)]
    simple_only: bool = False
    between_sockets_bytes_per_s: Above0 | None = None


_PCIE_4 = Link("PCIe 4 x16", 32e9, 10e-6)


@dataclass(frozen=True, kw_only=True)
@checked
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
        host_link: Its link to its host's memory, which carries as much in both directions at once.
        nvlink_rack_gpus: The most GPUs that NVLink joins across hosts; 0 where it ends at the host.
        source: Where these facts come from.
    """

    name: str
    device_name: str
    compute_capability: Annotated[tuple[int, int], whole_pair]
    num_sms: AtLeast1
    fpus_per_sm: AtLeast0
    clock_ghz: Annotated[float, partial(number, least=0)]
    memory_bytes: AtLeast0
    memory_bandwidth_bytes_per_s: Above0
    l2_bytes: AtLeast0
    shared_memory_per_sm_bytes: AtLeast0
    shared_memory_per_block_bytes: AtLeast0
    bf16_flops_per_s: Above0
    nvlinks: AtLeast0
    nvlink: Link
    network: Link
    host_link: Link = _PCIE_4
    nvlink_rack_gpus: AtLeast0 = 0
    source: str


_all = entries("jaxoverlap.hardware", "chips.toml")
_compiled = {name for name, fields in _all.items() if fields.pop("compiles", True)}
_chips = {name: converted(Chip, {"name": name, **fields}) for name, fields in _all.items()}
# CHIPS can be compiled for without a GPU; `parse_cluster` takes all of KNOWN.
CHIPS = {name: chip for name, chip in _chips.items() if name in _compiled}
KNOWN = CHIPS | _chips
