"""Adjust tables to chips and steps that were not measured, and describe this machine's cluster."""

from __future__ import annotations

import msgspec

from jaxoverlap.cost.tables import Curve, Here, InAStep, Tables
from jaxoverlap.hardware.cluster import Chip, Cluster, Link, chips


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


def in_a_step(tables: Tables, times: InAStep) -> Tables:
    """Tables of loops, with all times as in a step."""
    memory, permutes, skew = tables.memory, tables.permutes, tables.skew
    assert tables.here and memory.curve and permutes.curve and skew
    waits = times.collectives
    curves = {
        kind: {size: _longer(curve, waits) for size, curve in sizes.items()}
        for kind, sizes in tables.collectives.curves.items()
    }
    change = msgspec.structs.replace
    return change(
        tables,
        matmuls={
            dtype: change(
                table,
                launch_s=table.launch_s * times.matmuls,
                flops_per_s=table.flops_per_s / times.matmuls,
                bytes_per_s=table.bytes_per_s / times.matmuls,
            )
            for dtype, table in tables.matmuls.items()
        },
        memory=change(
            memory,
            launch_s=memory.launch_s * times.memory,
            bytes_per_s=memory.bytes_per_s / times.memory,
            curve=_longer(memory.curve, times.memory),
            transcendental_s=memory.transcendental_s * times.memory,
        ),
        collectives=change(tables.collectives, curves=curves),
        permutes=change(
            permutes,
            latency_s=permutes.latency_s * waits,
            bytes_per_s=permutes.bytes_per_s / waits,
            curve=_longer(permutes.curve, waits),
        ),
        skew=change(skew, most_s={size: s * waits for size, s in skew.most_s.items()}),
        here=change(tables.here, in_a_step=times),
    )


def _longer(curve: Curve, times: float) -> Curve:
    return Curve(curve.bytes_moved, tuple(times * s for s in curve.seconds))


def cluster_here(tables: Tables, here: Here) -> Cluster:
    """The cluster that `--here` found: one host, whose devices all reach each other.

    Devices of several hosts count as one host's, as what was measured is the links between them.

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
        host_link=link,  # not measured
        source=f"measured, {here.versions}",
    )
    return Cluster(chip, 1, here.devices, link, link, here.processes)
