"""Tables for a chip that was not measured itself, and a cluster for tables of this machine."""

from __future__ import annotations

import msgspec

from jaxoverlap.cluster import Chip, Cluster, Link, chips
from jaxoverlap.measured import Here, Tables


def with_memory_of(chip: Chip, tables: Tables) -> Tables:
    """The tables, for a chip that differs from the measured one in its memory alone."""
    was = next((c for c in chips() if c.name == tables.chip), chip)
    faster = chip.memory_bandwidth_bytes_per_s / was.memory_bandwidth_bytes_per_s
    if faster == 1:
        return tables
    scaled = {
        dtype: msgspec.structs.replace(table, bytes_per_s=table.bytes_per_s * faster)
        for dtype, table in tables.matmuls.items()
    }
    memory = msgspec.structs.replace(tables.memory, bytes_per_s=tables.memory.bytes_per_s * faster)
    return msgspec.structs.replace(tables, matmuls=scaled, memory=memory)


def cluster_here(tables: Tables, here: Here) -> Cluster:
    """The cluster that `--here` found: one host, whose devices all reach each other.

    What was not measured (memory, caches, clocks) is zero.
    """
    link = Link("this host", tables.permutes.bytes_per_s, tables.permutes.latency_s)
    chip = Chip(
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
        source=f"measured, {here.versions}",
    )
    return Cluster(chip, 1, here.devices, link, link)
