"""Adjust tables to chips and steps that were not measured, and describe this machine's cluster."""

from __future__ import annotations

import dataclasses

from msgspec.structs import replace

from jaxoverlap.cost.tables import ChipTables, Here, InAStep
from jaxoverlap.hardware.cluster import Chip, Cluster, Link, chips
from jaxoverlap.plan.collectives import PERMUTE


def with_memory_of(chip: Chip, tables: ChipTables) -> ChipTables:
    """The tables, for a chip that differs from the measured one in its memory alone."""
    was = next((c for c in chips() if c.name == tables.chip), chip)
    faster = chip.memory_bandwidth_bytes_per_s / was.memory_bandwidth_bytes_per_s
    if faster == 1:
        return tables
    scaled = {
        dtype: replace(table, bytes_per_s=table.bytes_per_s * faster)
        for dtype, table in tables.matmuls.items()
    }
    memory = replace(tables.memory, bytes_per_s=tables.memory.bytes_per_s * faster)
    return replace(tables, matmuls=scaled, memory=memory)


# How many times longer the operations of bf16 matmuls take in a step than in the loops that the
# tables were measured by; launches and bytes, which small matmuls are bound by, stay as they are.
# H100s draw their power limit for seconds (fitted, `benchmarks.published.steps`); torchtitan's of
# 500 W: fitted to its steps. GB200: fitted to Megatron-Bridge's Llama3-405B in three dtypes; its
# Llama3-70B asks for as much. B200: as the H100, an assumption; Blackwell Ultra, which may draw a
# sixth more: none, another. A100s keep their clocks: llm-foundry's and Megatron's published steps
# give 0.95 to 1.0.
_MATMULS_IN_A_STEP = {
    "h100-sxm": 1.10,
    "h200": 1.10,
    "h100-sxm-500w": 1.55,
    "b200": 1.10,
    "gb200": 1.20,
}
# Narrow dtypes: operations per second over those in bf16, as in all data sheets, and bytes of an
# element with its scale. The rows of fp8 matmuls are no measure of a step: on H100s, H200s and
# GB200s they are slower than bf16's with a short contraction, so they have the making of fp8 in
# them, which a step counts apart; on B200s a large one reaches 0.7 of this.
_NARROW = {"fp8": (2.0, 1.0)}
_NARROW_ON_BLACKWELL = _NARROW | {"mxfp8": (2.0, 1 + 1 / 32), "nvfp4": (4.0, 1 / 2 + 1 / 16)}
_NARROW_ON_ULTRA = _NARROW_ON_BLACKWELL | {"nvfp4": (6.0, 1 / 2 + 1 / 16)}  # 13.5 of 2.25 PFLOP/s


def with_steps_matmuls(chip: Chip, tables: ChipTables) -> ChipTables:
    """Return the tables with matmuls as slow as published steps of a chip show them."""
    bf16 = tables.matmuls["bf16"]
    flops_per_s = bf16.flops_per_s / _MATMULS_IN_A_STEP.get(chip.name, 1.0)
    matmuls = {"bf16": replace(bf16, flops_per_s=flops_per_s)}
    if "fp8" in tables.matmuls:
        narrow = _NARROW_ON_BLACKWELL if chip.compute_capability >= (10, 0) else _NARROW
        narrow = _NARROW_ON_ULTRA if chip.compute_capability >= (10, 3) else narrow
        matmuls |= {
            dtype: replace(bf16, flops_per_s=rate * flops_per_s, element_bytes=size)
            for dtype, (rate, size) in narrow.items()
        }
    return replace(tables, matmuls=matmuls)


def in_a_step(tables: ChipTables, times: InAStep) -> ChipTables:
    """Tables of loops, with all times as in a step; transposes are timed as a step has them."""
    assert tables.here
    collectives = dict.fromkeys((PERMUTE, *tables.collectives.curves), times.collectives)
    scaled = tables.scaled({"matmul": times.matmuls, "memory": times.memory, **collectives})
    memory = replace(scaled.memory, transposed_s=tables.memory.transposed_s)
    return replace(scaled, memory=memory, here=replace(tables.here, in_a_step=times))


def cluster_here(tables: ChipTables, here: Here) -> Cluster:
    """The cluster that `--here` found, with the links that it measured.

    Devices of several hosts count as one host's, unless links between hosts were measured apart.
    Of a chip that the package does not know, what was not measured (memory, caches, clocks) is 0.
    """
    link = Link("this host", tables.permutes.bytes_per_s, tables.permutes.latency_s)
    network = link
    if tables.between:
        hops = tables.between.permutes
        network = Link("between hosts", hops.bytes_per_s, hops.latency_s)
    known = next((chip for chip in chips() if chip.name == tables.chip), None)
    chip = dataclasses.replace(known or _unknown(tables, here, link), nvlink=link, network=network)
    processes = max(here.processes // here.hosts, 1)
    return Cluster(chip, here.hosts, here.devices // here.hosts, link, network, processes)


def _unknown(tables: ChipTables, here: Here, link: Link) -> Chip:
    return Chip(
        name=tables.chip,
        device_name=tables.chip,
        compute_capability=(0, 0),
        num_sms=1,
        fpus_per_sm=0,
        clock_ghz=0.0,
        memory_bytes=0,
        memory_bandwidth_bytes_per_s=tables.memory.bytes_per_s,
        l2_bytes=0,
        shared_memory_per_sm_bytes=0,
        shared_memory_per_block_bytes=0,
        bf16_flops_per_s=max(table.flops_per_s for table in tables.matmuls.values()),
        nvlinks=0,
        nvlink=link,
        network=link,
        host_link=link,  # not measured
        source=f"measured, {here.versions}",
    )
