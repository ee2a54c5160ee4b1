"""Define `Profile`: what a profiler measured of a step, added up, next to the prediction."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax

from jaxoverlap._util.expect import hlo_text
from jaxoverlap.cost.model import CostModel
from jaxoverlap.hardware.cluster import Cluster
from jaxoverlap.profiling import text
from jaxoverlap.profiling.compare import KindRatio, Predicted, ratios
from jaxoverlap.profiling.formats.events import Recording
from jaxoverlap.profiling.formats.files import recorded
from jaxoverlap.profiling.graphs import with_instructions
from jaxoverlap.profiling.intervals import length, union
from jaxoverlap.profiling.kinds import Classifier
from jaxoverlap.profiling.measured import CollectiveRun, DeviceStep, Straggler, Sums, waits
from jaxoverlap.profiling.steps import Steps, programs, steps_of
from jaxoverlap.profiling.timeline import MeasuredTimeline, timeline_of
from jaxoverlap.simulation import report
from jaxoverlap.simulation.simulation import Simulation, simulate
from jaxoverlap.simulation.timeline import Timeline

ClusterLike = str | Cluster | CostModel
_COUNTS = re.compile(r"(?:, num_partitions=\d+|, replica_count=\d+)")


@dataclass(frozen=True)
class Row:
    """Collectives of one kind, ring and source line, in a step: the mean over devices.

    Attributes:
        kind, ring, source, devices: which collectives. The source is a line; without HLO the JAX
            operation or, where that is not known either, the kernel. Devices take part together, 0
            if unknown.
        runs: how many a device runs.
        bytes_moved: bytes that a device sends in them; 0 if no HLO says it.
        seconds: of all of them.
        exposed_s: the part that no kernel overlaps. Where two collectives overlap each other, both
            rows have the time, so that rows may add up to more than the step's exposed seconds.
        waited_s: the part of `seconds` spent waiting for the device that came last.
        predicted_s, predicted_exposed_s: by the simulation; None without one.
        overlapped_with: the kernels that overlapped them longest.
    """

    kind: str
    ring: str
    source: str
    devices: int
    runs: float
    bytes_moved: float
    seconds: float
    exposed_s: float
    waited_s: float
    predicted_s: float | None
    predicted_exposed_s: float | None
    overlapped_with: tuple[str, ...]


@dataclass(frozen=True)
class LineRow:
    """What a source line takes in a step, the mean over devices: unions of intervals."""

    source: str
    compute_s: float
    communication_s: float
    exposed_s: float


@dataclass(frozen=True)
class StreamRow:
    """A stream of a device: the seconds of a step in which it is busy."""

    device: str
    stream: str
    events: int
    busy_s: float


@dataclass(frozen=True)
class Profile:
    """A measured step; print it. Every sum over time is of a union of the devices' intervals.

    The step is the one of median length among the complete steps, so that its parts add up; its
    numbers are means over devices.

    Attributes:
        source: the file or folder.
        program: the program's name; empty if the profile names none.
        platform: "GPU" or "CPU"; kind: the model's name, if the profile says it.
        sums: the step.
        steps_s: seconds of every complete step, the mean over devices; `chosen` is the step taken.
        devices: the step on each device, by name.
        collectives: each collective of the device that the pictures show, by start.
        rows: collectives by kind, ring and source line; lines: all work by source line.
        streams: of the device that the pictures show.
        stragglers: devices that others waited for, longest first.
        timeline: the step of the device whose exposed seconds are the median.
        simulation: the same step, simulated; None if no cluster was given.
        ratios: measured against predicted, by class of kernel.
        unknown: seconds of kernels that no rule knows, by name; they count as compute.
        graph_s: seconds of CUDA graphs, each one event: what runs inside is not seen.
        other_programs: seconds of a step's devices in other programs, over all of the profile.
        ignored: events that are no work of a device, and their number.
        incomplete: runs that the profile does not have from start to end.
        absent: devices that ran something else only.
    """

    source: str
    program: str
    platform: str
    kind: str
    sums: Sums
    steps_s: tuple[float, ...]
    chosen: int
    devices: Mapping[str, Sums]
    collectives: tuple[CollectiveRun, ...]
    rows: tuple[Row, ...]
    lines: tuple[LineRow, ...]
    streams: tuple[StreamRow, ...]
    stragglers: tuple[Straggler, ...]
    timeline: MeasuredTimeline
    simulation: Simulation | None
    ratios: tuple[KindRatio, ...]
    unknown: Mapping[str, float]
    graph_s: float
    other_programs: Mapping[str, float]
    ignored: Mapping[str, int]
    incomplete: int
    absent: tuple[str, ...]

    def __str__(self) -> str:
        return text.render(self)

    def to_perfetto(self, path: str | Path) -> None:
        """Write the step, simulated and measured, as a trace that ui.perfetto.dev opens."""
        report.write_perfetto(path, self._both)

    def to_svg(self, path: str | Path) -> None:
        """Draw the measured step below the simulated one, at one scale."""
        report.write_svg(path, self._both)

    def to_html(self, path: str | Path) -> None:
        """Write a page to zoom into: the measured step below the simulated one, at one scale."""
        report.write_page(path, self._both, title=f"{text.name(self)}, measured")

    @property
    def _both(self) -> dict[str, Timeline]:
        simulated = {"simulated": self.simulation} if self.simulation else {}
        return {**simulated, "measured": self.timeline}


def read(
    path: str | Path,
    cluster: ClusterLike | None = None,
    *,
    compiled: jax.stages.Compiled | str | None = None,
    module: str | None = None,
) -> Profile:
    """Read a profile, add one step of it up and, given a cluster, simulate that step.

    Args:
        path: an xplane.pb, a Chrome trace, or a folder with those of one profile.
        cluster: where it ran, as `jaxoverlap.simulate` takes it.
        compiled: the step that ran, or its scheduled HLO's text, where the profile has no HLO
            (Chrome traces have none) or the text should have the source lines that it has.
        module: the program's name, instead of the one that takes most of the devices' time.

    Raises:
        ValueError: if it is no such profile, has no such program, or no complete step; if a cluster
            is given without HLO, or has another number of devices; if `compiled` is of another
            program.
    """
    return analyzed(recorded(Path(path)), cluster, compiled=compiled, module=module)


def analyzed(
    recording: Recording,
    cluster: ClusterLike | None = None,
    *,
    compiled: jax.stages.Compiled | str | None = None,
    module: str | None = None,
) -> Profile:
    """Add one step of a recording up; the arguments are `read`'s."""
    is_cpu = recording.platform == "CPU"
    classifier = Classifier(_texts(recording, compiled), len(recording.devices), nested=is_cpu)
    recording = with_instructions(recording, classifier)
    steps = steps_of(recording, classifier, module)
    simulation = _simulated(recording, classifier, steps, cluster)
    predicted = Predicted.from_timeline(simulation)
    steps_s, chosen, devices = _median_step(steps, classifier)
    sums = {device.device: device.sums for device in devices}
    waited, stragglers = waits(devices)
    runs = [list(device.runs(w)) for device, w in zip(devices, waited, strict=True)]
    by_exposed = sorted(range(len(devices)), key=lambda n: sums[devices[n].device].exposed_s)
    shown = by_exposed[len(devices) // 2]
    return Profile(
        source=recording.source,
        program=steps.program,
        platform=recording.platform,
        kind=recording.devices[0].kind,
        sums=Sums.mean(list(sums.values())),
        steps_s=steps_s,
        chosen=chosen,
        devices=sums,
        collectives=tuple(runs[shown]),
        rows=tuple(_rows(runs, predicted)),
        lines=tuple(_lines(devices)),
        streams=tuple(_streams(devices[shown])),
        stragglers=stragglers,
        timeline=timeline_of(steps.program or "step", devices[shown], predicted.lanes),
        simulation=simulation,
        ratios=ratios(devices, runs, predicted, with_waits=is_cpu),
        unknown=_of_kind(devices, "unknown"),
        graph_s=sum(_of_kind(devices, "graph").values()),
        other_programs={n: s for n, s in programs(recording).items() if n != steps.program},
        ignored=recording.ignored,
        incomplete=steps.incomplete,
        absent=tuple(d.name for d in recording.devices if d.name not in sums),
    )


def _texts(
    recording: Recording, compiled: jax.stages.Compiled | str | None
) -> Mapping[tuple[str, int], str]:
    """Return the modules of a profile; a given one replaces those of its name."""
    if compiled is None:
        return recording.modules
    text = hlo_text("compiled", compiled)
    name = text.partition(",")[0].removeprefix("HloModule ")
    if name not in programs(recording):
        known = ", ".join(sorted(programs(recording))) or "no program's name"
        raise ValueError(f"the given HLO is of {name!r}, but {recording.source} has {known}")
    others = {key: other for key, other in recording.modules.items() if key[0] != name}
    return {**others, (name, -1): text}


def _median_step(
    steps: Steps, classifier: Classifier
) -> tuple[tuple[float, ...], int, list[DeviceStep]]:
    """Return the seconds of each step, the index of the median step, and its devices."""
    seconds = [
        sum(end - start for start, end in windows) * 1e-9 / len(windows)
        for windows in steps.windows
    ]
    chosen = sorted(range(len(seconds)), key=lambda n: seconds[n])[(len(seconds) - 1) // 2]
    windows = steps.windows[chosen]
    devices = [
        DeviceStep.from_device(device, window, classifier)
        for device, window in zip(steps.devices, windows, strict=True)
    ]
    return tuple(seconds), chosen, devices


def _simulated(
    recording: Recording, classifier: Classifier, steps: Steps, cluster: ClusterLike | None
) -> Simulation | None:
    """Simulate the step that was measured."""
    if cluster is None:
        return None
    module = classifier.module(steps.program, steps.number)
    module_text = classifier.text(steps.program, steps.number)
    if module is None or module_text is None:
        named = steps.program or "its kernels"
        raise ValueError(
            f"{recording.source} does not carry the HLO of {named}: nothing can be predicted "
            "without it. Give the compiled step, or its text (--hlo FILE)"
        )
    head, body = module_text.split("\n", 1)
    head = f"{_COUNTS.sub('', head)}, num_partitions={module.num_devices}"
    return simulate(f"{head}\n{body}", cluster)


# -- tables ---------------------------------------------------------------------------------------


def _rows(runs: Sequence[Sequence[CollectiveRun]], predicted: Predicted) -> Iterable[Row]:
    groups: dict[tuple[str, str, str, int], list[CollectiveRun]] = defaultdict(list)
    for run in (run for of_device in runs for run in of_device):
        c = run.collective
        groups[c.kind, c.ring or "", c.source or c.op_name or c.name, c.group_size].append(run)
    rows = [_row(key, group, len(runs), predicted) for key, group in groups.items()]
    return sorted(rows, key=lambda row: -row.exposed_s)


def _row(
    key: tuple[str, str, str, int], group: list[CollectiveRun], devices: int, predicted: Predicted
) -> Row:
    names = [n for run in group if (n := run.collective.name) in predicted.collective_s]
    predicted_s, exposed_s = (
        sum(by_name[n] for n in names) / devices if names else None
        for by_name in (predicted.collective_s, predicted.exposed_s)
    )
    overlaps: dict[str, float] = defaultdict(float)
    for kernel, seconds in (pair for run in group for pair in run.overlapped_with):
        overlaps[kernel] += seconds
    return Row(
        *key,
        runs=len(group) / devices,
        bytes_moved=sum(run.collective.bytes_moved for run in group) / devices,
        seconds=sum(run.seconds for run in group) / devices,
        exposed_s=sum(run.exposed_s for run in group) / devices,
        waited_s=sum(run.waited_s for run in group) / devices,
        predicted_s=predicted_s,
        predicted_exposed_s=exposed_s,
        overlapped_with=tuple(sorted(overlaps, key=lambda kernel: -overlaps[kernel])[:3]),
    )


def _lines(steps: Sequence[DeviceStep]) -> Iterable[LineRow]:
    """Add up each source line, or JAX operation where no line is known."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for step in steps:
        spans: dict[tuple[str, bool], list[tuple[float, float]]] = defaultdict(list)
        for event, label in step.events:
            line = label.source or label.op_name or "no line"
            spans[line, label.kind == "collective"].append((event.start_ns, event.end_ns))
        for (line, moves), intervals in spans.items():
            took = union(intervals)
            parts = (0.0, length(took), length(step.alone(took))) if moves else (length(took), 0, 0)
            sums[line] = [a + b * 1e-9 / len(steps) for a, b in zip(sums[line], parts, strict=True)]
    return sorted((LineRow(k, *v) for k, v in sums.items()), key=lambda r: -r.exposed_s)


def _streams(step: DeviceStep) -> Iterable[StreamRow]:
    spans: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for event, _ in step.events:
        spans[event.stream].append((event.start_ns, event.end_ns))
    rows = (
        StreamRow(step.device, stream, len(mine), length(union(mine)) * 1e-9)
        for stream, mine in spans.items()
    )
    return sorted(rows, key=lambda row: -row.busy_s)


def _of_kind(steps: Sequence[DeviceStep], kind: str) -> dict[str, float]:
    """Return the seconds of a kind's events by kernel, the mean over devices, longest first."""
    seconds: dict[str, float] = defaultdict(float)
    for event, label in (pair for step in steps for pair in step.events):
        if label.kind == kind:
            seconds[event.name] += event.seconds / len(steps)
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))
