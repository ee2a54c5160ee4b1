"""Measure a compiled step by a crude yardstick: seconds of matmul, and of exposed communication.

It takes two rates and two latencies, and the order of XLA's schedule. Matmuls run one after the
other at MATMUL_FLOPS; a collective takes its latency and its bytes at the rate of the slowest link
that it uses. Everything else (softmax, norms, the optimizer) is taken to cost nothing, and matmuls
are taken not to slow down beside communication. The result compares two schedules of the same step;
it is no prediction of a step's time.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from rich.table import Table

import jaxoverlap
from jaxoverlap._util.text import human_bytes
from jaxoverlap.simulation import hlo
from jaxoverlap.simulation.audit import Collective
from jaxoverlap.simulation.device_groups import domains
from jaxoverlap.simulation.hlo_work import work

MATMUL_FLOPS = 650e12  # per second: bf16 on an H100, as large matmuls run
HOST_BYTES_PER_S = 317e9  # sent by each GPU, over NVLink within a host
NETWORK_BYTES_PER_S = 45e9  # sent by each GPU, to another host
HOP_S, COLLECTIVE_S = 8e-6, 15e-6  # latency of a permute, and of anything that NCCL synchronizes


@dataclass(frozen=True)
class Seconds:
    """The seconds that a device spends in a step.

    Attributes:
        matmul: seconds in matmuls.
        collective: seconds in collectives, hidden or not.
        exposed: seconds in collectives while no matmul runs.
    """

    matmul: float = 0.0
    collective: float = 0.0
    exposed: float = 0.0

    @property
    def total(self) -> float:
        """The seconds of the step: matmul + exposed."""
        return self.matmul + self.exposed

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(
            self.matmul + other.matmul,
            self.collective + other.collective,
            self.exposed + other.exposed,
        )

    def __mul__(self, times: int) -> Seconds:
        return Seconds(self.matmul * times, self.collective * times, self.exposed * times)


@dataclass(frozen=True)
class Yardstick:
    """The seconds of a step, and which collectives are exposed for how many of them.

    Attributes:
        seconds: of all of a step's runs.
        exposed: by collective: what a device waits for it in one step.
    """

    seconds: Seconds
    exposed: dict[Collective, float]


def yardstick(text: str, gpus_per_host: int) -> Yardstick:
    """Lay a scheduled module out in time.

    The matmuls run in schedule order. A collective begins at its start, or when the link that it
    needs is free, if that is later; a synchronous one also keeps the matmuls waiting. At its done
    the device waits for what is missing: that is exposed. Links are two, within a host and between
    hosts, and each carries one collective at a time. Loops run their known trips.

    Args:
        text: of a scheduled HLO module.
        gpus_per_host: devices are numbered host after host.

    Raises:
        ValueError: if the text is no such module, or has matmuls of unknown size.
    """
    module = hlo.parse(text)
    collectives = jaxoverlap.audit(text).collectives
    walk = _Walk(module, {(c.computation, c.name): c for c in collectives}, gpus_per_host)
    seconds = walk.computation(module.entry)
    exposed = {c: walk.waits[c.computation, c.name] * c.runs for c in collectives}
    return Yardstick(seconds, exposed)


def seconds_row(measured: Yardstick, most: int = 12) -> dict[str, Any]:
    """Return a row of a step's seconds, with the collectives that are exposed most.

    Hops of one ring, and other collectives of one source line and size of group, are one entry.
    """
    by: dict[tuple, dict[str, Any]] = {}
    for c, seconds in measured.exposed.items():
        key = (c.kind, c.ring or "", c.source, c.group_size)
        entry = by.setdefault(key, {"exposed_s": 0.0, "runs": 0, "bytes_moved": 0})
        entry["exposed_s"] += seconds
        entry["runs"] += c.runs
        entry["bytes_moved"] += c.runs * c.bytes_moved
    names = ("kind", "ring", "source", "devices")
    worst = sorted(by.items(), key=lambda item: -item[1]["exposed_s"])[:most]
    return {
        "matmul_s": round(measured.seconds.matmul, 4),
        "collective_s": round(measured.seconds.collective, 4),
        "exposed_s": round(measured.seconds.exposed, 4),
        "exposed": [
            dict(zip(names, key, strict=True)) | entry | {"exposed_s": round(entry["exposed_s"], 4)}
            for key, entry in worst
        ],
    }


SECONDS_COLUMNS = ("matmul ms", "exposed ms", "collectives ms")


def seconds_cells(row: dict[str, Any]) -> tuple[str, ...]:
    """A row under SECONDS_COLUMNS."""
    return tuple(f"{row[key] * 1e3:.0f}" for key in ("matmul_s", "exposed_s", "collective_s"))


def exposed_table(row: dict[str, Any], title: str) -> Table:
    """Tabulate the collectives that a row's step waits for longest."""
    table = Table(title=title)
    for name in ("collective", "ring", "source"):
        table.add_column(name)
    for name in ("devices", "runs", "bytes", "exposed ms"):
        table.add_column(name, justify="right")
    for e in row["exposed"]:
        head = (e["kind"], e["ring"], e["source"], str(e["devices"]), str(e["runs"]))
        table.add_row(*head, human_bytes(e["bytes_moved"]), f"{e['exposed_s'] * 1e3:.1f}")
    return table


@dataclass
class _Lane:
    """The progress of a device in one run of a computation, in seconds from its start."""

    spent: Seconds = Seconds()
    free: dict[bool, float] = field(default_factory=dict)  # by link: whether it is the network
    due: dict[str, tuple[str, float]] = field(default_factory=dict)  # by who to wait for: who, end

    def begin(self, network: bool, seconds: float) -> float:
        """Put a collective on a link; return when it ends."""
        end = max(self.spent.total, self.free.get(network, 0.0)) + seconds
        self.free[network] = end
        self.spent += Seconds(collective=seconds)
        return end

    def wait(self, until: float) -> float:
        """Wait for the end of a collective; return how long that takes."""
        waited = max(0.0, until - self.spent.total)
        self.spent += Seconds(exposed=waited)
        return waited


class _Walk:
    """A module, read in the order in which it runs."""

    def __init__(
        self, module: hlo.Module, collectives: dict[tuple[str, str], Collective], gpus_per_host: int
    ):
        self.module, self.collectives, self.gpus_per_host = module, collectives, gpus_per_host
        self.waits: dict[tuple[str, str], float] = {}  # by collective: in one run of it

    def computation(self, name: str) -> Seconds:
        lane = _Lane()
        instructions = self.module.body(name)
        shapes = {i.name: i.shape for i in instructions}
        counted = set()
        for i in instructions:
            collective = self.collectives.get((name, i.name))
            if i.opcode in ("while", "conditional", "call"):
                trips = i.trip_count or 1 if i.opcode == "while" else 1
                for called in i.called:
                    lane.spent += self.computation(called) * trips
            elif collective:
                end = lane.begin(*self.cost(collective))
                if collective.asynchronous:
                    lane.due[i.name] = (i.name, end)
                else:
                    self.waits[name, i.name] = lane.wait(end)
            elif i.operands[:1] and i.operands[0] in lane.due:
                start, end = lane.due.pop(i.operands[0])
                if i.opcode.endswith("-update"):
                    lane.due[i.name] = (start, end)
                else:
                    self.waits[name, start] = lane.wait(end)
            elif flops := _flops(self.module, i, shapes):
                lane.spent += Seconds(matmul=flops / MATMUL_FLOPS)
                counted.add(i.name)
        self.check(name, counted)
        return lane.spent

    def cost(self, collective: Collective) -> tuple[bool, float]:
        """Return the link of a collective (whether it is the network), and its seconds."""
        network = domains(collective.groups, self.module.num_devices, self.gpus_per_host) > 1
        rate = NETWORK_BYTES_PER_S if network else HOST_BYTES_PER_S
        latency = HOP_S if collective.kind == "collective-permute" else COLLECTIVE_S
        return network, latency + collective.bytes_moved / rate

    def check(self, computation: str, counted: set[str]) -> None:
        """Raise an error for a matmul that the audit sees and this walk would count as no time."""
        seen = {
            m
            for (c, _), collective in self.collectives.items()
            if c == computation
            for m in collective.matmuls
        }
        missed = [name for name in seen - counted if not self.runs_more(computation, name)]
        if missed:
            raise ValueError(f"matmuls of unknown size: {', '.join(sorted(missed))}")

    def runs_more(self, computation: str, name: str) -> bool:
        """Return whether an instruction is a loop or a call, whose matmuls are counted inside."""
        instruction = next(i for i in self.module.body(computation) if i.name == name)
        return instruction.opcode in ("while", "conditional", "call")


# -- matmuls --------------------------------------------------------------------------------------


def _flops(module: hlo.Module, instruction: hlo.Instruction, shapes: dict[str, str]) -> int:
    """Count the floating-point operations of an instruction's matmul, or of those inside it."""
    asked = work(module, instruction, shapes)
    return sum(kernel.flops for kernel in (*asked.matmuls, asked.attention) if kernel)


def dims(shape: str) -> list[int]:
    """Parse the dims of an array, or of a tuple's first one, which is a matmul's result."""
    return [int(d) for d in re.findall(r"\d+", hlo.array_shapes(shape)[0].partition("[")[2])]
