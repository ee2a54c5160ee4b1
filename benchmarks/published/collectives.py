"""Predict published curves of NCCL: `python -m benchmarks.accuracy --collectives FILE`.

A file has the columns chip, nodes, gpus, network, collective, bytes, time_us, busbw_GBps, source
and notes, as ../shared/data/published/nccl.csv has them.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxoverlap._util.text import table
from jaxoverlap.cost.find import cost_model
from jaxoverlap.cost.groups import Group

FILE = Path("../shared/data/published/nccl.csv")
SMALLEST = 256 * 1024  # bytes: below it launches of the sources differ, not their links
_CHIPS = {
    "A100-80": "a100-sxm-80",
    "H100-SXM": "h100-sxm",
    "H200": "h200",
    "B200": "b200",
    "B300": "b300",
    "GB200 NVL72": "gb200",
    "GB300 NVL72": "gb300",
}
_KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")
_NETWORKS = {"TCPX": "tcpx", "gIB": "gib", "EFA": "efa"}  # by a word of the column network
_RING = "NVLS_ENABLE=0"  # a setting that the cost model does not describe


@dataclass(frozen=True)
class Point:
    """A published collective.

    Attributes:
        where: its source and its cluster.
        cluster: the cluster, as `parse_cluster` reads it.
        kind: as HLO writes it.
        bytes_moved: bytes that each device sends by a ring.
        measured_s: its seconds.
    """

    where: str
    cluster: str
    kind: str
    bytes_moved: int
    measured_s: float

    @property
    def off(self) -> float:
        """Return predicted / measured - 1."""
        model = cost_model(self.cluster)
        devices, domain = model.cluster.num_devices, model.cluster.gpus_per_nvlink_domain
        group = Group(devices, -(-devices // domain))
        return model.collective_s(self.kind, self.bytes_moved, group) / self.measured_s - 1


def read(path: Path, smallest: int = SMALLEST) -> tuple[list[Point], list[str]]:
    """Return the points of a file that can be predicted, and why each other row cannot be."""
    points, left_out = list[Point](), list[str]()
    with path.open() as file:
        for fields in csv.DictReader(file):
            kind = fields["collective"].replace("_", "-")
            reason = _reason(fields, kind, smallest)
            if reason:
                left_out.append(f"{fields['chip']}, {kind}, {fields['bytes']} B: {reason}")
            else:
                points.append(_point(fields, kind))
    return points, left_out


def _reason(fields: dict[str, str], kind: str, smallest: int) -> str:
    """Return why a row cannot be predicted; empty if it can."""
    if fields["chip"] not in _CHIPS:
        return "a chip without tables"
    if kind not in _KINDS:
        return "no collective"
    if not fields["gpus"] or not fields["nodes"]:
        return "the number of GPUs is not published"
    if _RING in fields["notes"]:
        return "NVLink's switches are turned off"
    return "" if int(fields["bytes"]) >= smallest else f"below {smallest} bytes"


def _point(fields: dict[str, str], kind: str) -> Point:
    chip, gpus = _CHIPS[fields["chip"]], int(fields["gpus"])
    hosts = int(fields["nodes"].split()[0])
    if chip.startswith("gb"):
        hosts = gpus // 4
    network = next((f"@{n}" for word, n in _NETWORKS.items() if word in fields["network"]), "")
    cluster = f"{chip}:{hosts}x{gpus // hosts}{network}"
    moved = int(fields["bytes"]) * (2 if kind == "all-reduce" else 1) * (gpus - 1) // gpus
    seconds = float(fields["time_us"] or 0) / 1e6
    if not seconds:
        seconds = moved / float(fields["busbw_GBps"]) / 1e9
    source = fields["source"].split()[0]
    return Point(f"{source}, {cluster}, {kind}", cluster, kind, moved, seconds)


def errors(points: Iterable[Point]) -> np.ndarray:
    """Return predicted / measured - 1 of each point."""
    return np.array([point.off for point in points])


def by_curve(path: Path = FILE) -> str:
    """Tabulate the errors of each published curve, from 256 kB on."""
    if not path.exists():
        return f"Published curves of NCCL: {path} is not there"
    points, left_out = read(path)
    curves = defaultdict[str, list[Point]](list)
    for point in points:
        curves[point.where].append(point)
    rows = [(where, *_summary(errors(curve))) for where, curve in curves.items()]
    rows.append(("all", *_summary(errors(points))))
    columns = ("curve", "points", "mean", "worst", "smallest message", "largest")
    title = (
        "Published collectives from 256 kB on: |predicted / measured - 1|; "
        f"left out: {len(left_out)}"
    )
    return table(title, columns, rows, right=columns[1:])


def _summary(off: np.ndarray) -> tuple[str, ...]:
    size = abs(off)
    return (
        str(len(off)),
        f"{size.mean():.1%}",
        f"{size.max():.1%}",
        f"{off[0]:+.1%}",
        f"{off[-1]:+.1%}",
    )
