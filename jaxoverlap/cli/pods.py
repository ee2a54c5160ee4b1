"""The command that lists the known GPUs, and the meshes that fit a cluster."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from jaxoverlap.cli.shell.errors import OK
from jaxoverlap.cli.shell.options import Json
from jaxoverlap.cli.shell.output import command, say, show_json, show_table
from jaxoverlap.hardware.cluster import Cluster, chips, parse_cluster


@command
def pods(
    cluster: Annotated[
        str | None, typer.Argument(help="As in h100-sxm:8x8: meshes that fit it.")
    ] = None,
    *,
    json: Json = False,
) -> int:
    """List the known chips and the presets; or the meshes that fit a cluster."""
    if cluster is not None:
        _meshes(parse_cluster(cluster), json)
    elif json:
        from jaxoverlap.flags import PRESETS

        presets = {p.name: {"about": p.about, "chip": p.chip} for p in PRESETS.values()}
        show_json({"chips": chips(), "presets": presets})
    else:
        _chips()
    return OK


def _chips() -> None:
    rows = [
        (
            c.name,
            c.device_name,
            f"{c.memory_bytes / 1e9:.0f}",
            f"{c.bf16_flops_per_s / 1e12:.0f}",
            f"{c.nvlink.bandwidth_bytes_per_s / 1e9:.0f}",
            f"{c.network.bandwidth_bytes_per_s / 1e9:.0f}",
            str(c.nvlink_rack_gpus or ""),
        )
        for c in chips()
    ]
    numbers = ("memory GB", "bf16 TFLOP/s", "NVLink GB/s", "network GB/s", "GPUs a rack")
    columns = ("chip", "CUDA's name", *numbers)
    show_table(
        "chips; a cluster is CHIP:HOSTSxGPUS, or CHIP:HOSTSxGPUS/PROCESSES_A_HOST",
        columns,
        rows,
        right=numbers,
    )
    from jaxoverlap.flags import PRESETS

    presets = [(p.name, p.about, p.chip) for p in PRESETS.values()]
    show_table("presets, for `jaxoverlap flags`", ("preset", "machines", "chip"), presets)


def _meshes(cluster: Cluster, json: bool) -> None:
    domain, hosts = cluster.gpus_per_nvlink_domain, cluster.hosts_per_nvlink_domain
    meshes = [
        {"data": cluster.num_devices // size, "model": size}
        for size in range(1, domain + 1)
        if domain % size == 0
    ]
    facts: dict[str, Any] = {
        "cluster": str(cluster),
        "devices": cluster.num_devices,
        "gpus_per_nvlink_domain": domain,
        "hosts_per_nvlink_domain": hosts,
        "processes_per_host": cluster.processes_per_host,
        "meshes": meshes,
    }
    if json:
        show_json(facts)
        return
    say(
        f"{cluster}: {cluster.num_devices} GPUs, {cluster.gpus_per_process} per process; "
        f"an NVLink domain has {domain}, on {hosts} host{'s' * (hosts > 1)}.\n"
        "The last axis of a mesh varies fastest: give it the parallelism that communicates most, "
        f"and at most {domain} GPUs. Meshes that fit:"
    )
    for mesh in meshes:
        say("  --mesh " + ",".join(f"{name}={size}" for name, size in mesh.items()))
