"""Define `simulate`, which estimates a compiled step's time from its schedule, running nothing."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path

import jax

from jaxoverlap._util.expect import hlo_text
from jaxoverlap._util.text import human_bytes, table
from jaxoverlap.cost.find import cost_of
from jaxoverlap.cost.model import CostModel
from jaxoverlap.hardware.cluster import Cluster
from jaxoverlap.hardware.pods import mesh_of_compiled
from jaxoverlap.hardware.topology import check_is_pods
from jaxoverlap.plan.speedup import Speedup
from jaxoverlap.simulation import report
from jaxoverlap.simulation.advice import UndecomposedCollective, strays
from jaxoverlap.simulation.replay import replay
from jaxoverlap.simulation.streams import scheduled_module
from jaxoverlap.simulation.timeline import Spent, Timeline

_SHOWN = 10  # rows of a printed table
_WORTH = 0.001  # of a step: what is exposed for less is not worth a line of advice


@dataclass(frozen=True)
class Simulation(Timeline):
    """A step's simulated timeline on a cluster, with the collectives outside rings; print it.

    Attributes:
        cluster: the cluster that it is for.
        strays: the collectives that are no hops of a ring, longest exposed first; `advice` says
            what a sharding constraint can do about one, if it can.
        speedup: over the step without overlap, where `overlap` compared them; else None.
    """

    cluster: Cluster
    strays: tuple[UndecomposedCollective, ...]
    speedup: Speedup | None = None

    def to_perfetto(self, path: str | Path) -> None:
        """Write all events, loops unrolled, as a trace that ui.perfetto.dev opens."""
        report.write_perfetto(path, {self.module: self})

    def to_svg(self, path: str | Path, *, plain: Timeline | None = None) -> None:
        """Draw the step, each loop once; above it `plain`, the timeline without overlap."""
        report.write_svg(path, self._timelines(plain))

    def to_html(self, path: str | Path, *, plain: Timeline | None = None) -> None:
        """Write an interactive page of the step; above it `plain`, the timeline without overlap.

        Hovering shows op, bytes, time and source line. The page needs no other file.
        """
        speedup = f": {self.speedup}" if self.speedup else ""
        title = f"{self.module} on {self.cluster}{speedup}"
        report.write_page(path, self._timelines(plain), title=title)

    def _timelines(self, plain: Timeline | None) -> dict[str, Timeline]:
        name = self.speedup.name if self.speedup else "overlapped"
        return {"plain": plain, name: self} if plain else {self.module: self}

    def __str__(self) -> str:
        parts = [report.headline(f"{self.module} on {self.cluster}", self)]
        if self.speedup:
            parts.append(str(self.speedup))
        if self.unknown:
            named = ", ".join(f"{name} ({runs}x)" for name, runs in self.unknown.items())
            parts.append(f"not known, counted by their bytes: {named}")
        parts.append(table("longest exposed", _COLUMNS, _rows(self.spent), right=_RIGHT))
        worth = [s for s in self.strays if s.advice and s.exposed_s > _WORTH * self.step_s]
        if worth:
            parts.append(
                "collectives outside rings that a sharding constraint can remove or halve:"
            )
            parts += [f"  {_ms(s.exposed_s)} ms exposed: {s.advice}" for s in worth[:_SHOWN]]
        return "\n".join(parts)


_COLUMNS = (
    "collective", "ring", "source", "link, stream", "devices", "runs", "bytes", "ms", "exposed ms"
)  # fmt: skip
_RIGHT = ("devices", "runs", "bytes", "ms", "exposed ms")


def _rows(spent: tuple[Spent, ...]) -> list[tuple[str, ...]]:
    """Return the table's contents: the hops of each ring, and the other source lines."""
    groups: dict[tuple, list[Spent]] = {}
    for s in spent:
        c = s.collective
        link = s.lane if c.stream is None else f"{s.lane}, {c.stream}"
        groups.setdefault((c.kind, c.ring or "", c.source, link, c.group_size), []).append(s)
    longest = sorted(groups.items(), key=lambda item: -sum(s.exposed_s for s in item[1]))
    return [
        (
            *map(str, key),
            str(sum(s.runs for s in group)),
            human_bytes(sum(s.runs * s.collective.bytes_moved for s in group)),
            _ms(sum(s.seconds for s in group)),
            _ms(sum(s.exposed_s for s in group)),
        )
        for key, group in longest[:_SHOWN]
    ]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"


def simulate(
    compiled: jax.stages.Compiled | str,
    cluster: str | Cluster | CostModel,
    *,
    multi_streaming: bool | None = None,
    max_ctas: int | None = None,
) -> Simulation:
    """Replay a compiled step in time, as one device of a cluster runs it.

    Kernels run in schedule order, collectives concurrently, one at a time on each class of link
    and on each of the streams on which XLA launches them (`jaxoverlap/simulation/streams.py`);
    while both run, the kernels are slower by what the cost model says
    (`jaxoverlap/simulation/replay.py` has the rules and what they leave out). Nothing runs: only
    the text of the scheduled module is read.

    Args:
        compiled: a compiled step, overlapped or not, or the text of its scheduled HLO module.
        cluster: as "chip:hosts x GPUs a host", with as many devices as the step has; or a cost
            model, as one of a calibrated machine. Devices count up in the order of the mesh.
        multi_streaming: whether the step was compiled with
            `xla_gpu_experimental_enable_collective_multi_streaming`, which its text does not say.
            None: if XLA_FLAGS sets it.
        max_ctas: the channels that a collective has at most, as the processes' NCCL_MAX_CTAS says;
            None: NCCL's own most. `fewer_channels` finds how many are best.

    Raises:
        ValueError: if the text is no such module, the cluster does not parse, has no cost model,
            or has another number of devices, or `max_ctas` is below 1.
    """
    text = hlo_text("compiled", compiled)
    cost = cost_of(cluster)
    if max_ctas is not None:
        cost = replace(cost, most_channels=max_ctas)
    check_is_pods(mesh_of_compiled(compiled), cost.cluster)
    module = scheduled_module(text, multi_streaming=multi_streaming)
    timeline = replay(module, cost)
    values = {f.name: getattr(timeline, f.name) for f in fields(Timeline)}
    return Simulation(**values, cluster=cost.cluster, strays=strays(module, timeline))
