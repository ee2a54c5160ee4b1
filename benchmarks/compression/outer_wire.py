"""Count the bytes that compressed outer gradients take on the lab's links, against the closed form.

    python -m benchmarks.compression.outer_wire --out rows.jsonl     # in the lab; as root

Four hosts train the byte GPT by CO2, an average every 12 steps on a second device of each host.
Bytes are those that a host's network interface has sent in a round, headers included.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import typer
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.table import Table

from benchmarks.frame import Out, add_rows

HOSTS, ROUNDS, WARM = 4, 6, 14  # L-GreCo's settings of round 12 are in use from round 13 on
METHODS = ("int4", "PowerSGD", "L-GreCo, PowerSGD")


def host_main(host: Any, *, method: str) -> dict[str, float]:
    """Train on one host; return the bytes that it sent in a round, and the closed form."""
    from benchmarks.compression.learning import OUTER, OUTER_EVERY
    from benchmarks.local_updates.learning import make_step, rounds, start
    from benchmarks.local_updates.tasks import text
    from jaxoverlap.train import LocalUpdates, co2
    from models.loop import placed

    host.start_jax(devices=2)
    first = {d.process_index: d for d in sorted(jax.devices(), key=lambda d: -d.id)}
    devices = np.array([first[n] for n in range(host.count)], dtype=object)
    mesh = Mesh(
        devices.reshape(-1, 1, 1), ("worker", "data", "model"), axis_types=(AxisType.Auto,) * 3
    )
    task = text()
    updates = LocalUpdates(
        make_step(task, mesh), mesh, axis="worker", outer=co2(every=OUTER_EVERY, momentum=0.2),
        sync=OUTER[method], stacked=("layers",) if OUTER[method] else (), overlap=False,
    )  # fmt: skip
    state = updates.init(start(task, 0))
    counted = list[int]()
    for number, batches in zip(range(WARM + ROUNDS), rounds(task, 0, OUTER_EVERY), strict=False):
        batches = placed(batches, mesh, P(None, "worker"))
        multihost_utils.sync_global_devices("round")
        before = host.sent_bytes()
        state, _ = updates.round(state, batches)
        jax.block_until_ready(state)
        if number >= WARM:
            counted.append(host.sent_bytes() - before)
    return dict(sent=float(np.median(counted)), form=updates.sent_bytes(state))


def main(out: Out) -> None:
    """Run each method, print and write its bytes."""
    from benchmarks.lab.lab import Lab
    from benchmarks.lab.network import Network

    sheet = Table("outer gradients", "kB a round", "closed form", "of it", box=None)
    with Lab(Network(hosts=HOSTS, rate_mbit=None)) as lab:
        lab.shape(1000.0)
        for method in METHODS:
            with lab.processes() as hosts:
                found = hosts.call("benchmarks.compression.outer_wire:host_main", method=method)
            sent, form = float(np.median([h["sent"] for h in found])), found[0]["form"]
            add_rows(out, dict(method=method, sent_bytes=sent, form_bytes=form))
            sheet.add_row(method, f"{sent / 1e3:.1f}", f"{form / 1e3:.1f}", f"{sent / form:.3f}")
    Console().print(sheet)


if __name__ == "__main__":
    typer.run(main)
