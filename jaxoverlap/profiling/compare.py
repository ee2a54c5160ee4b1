"""Compare a measured step with its simulation, instruction by instruction."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from jaxoverlap.profiling.measured import CollectiveRun, DeviceStep
from jaxoverlap.simulation import timeline as lanes
from jaxoverlap.simulation.timeline import Spent, Timeline

_KERNELS = ("matmul", "attention", "memory")
NETWORK, COPIES = " on the network", " by copy engines"


@dataclass(frozen=True)
class KindRatio:
    """One class of kernels, measured and predicted: of the instructions that both have.

    Attributes:
        kind: "matmul", "attention", "memory", or a kind of collective as HLO writes it, with
            NETWORK or COPIES after it if it crosses NVLink domains or copy engines carry it.
        instructions: how many.
        measured_s: seconds of a step, the mean over devices; of a GPU's collective without its
            wait for the device that came last, which the predictions of GPUs do not have either.
        predicted_s: by the simulation.
    """

    kind: str
    instructions: int
    measured_s: float
    predicted_s: float

    @property
    def ratio(self) -> float:
        """Return how many times longer than predicted it took."""
        return self.measured_s / self.predicted_s


@dataclass(frozen=True)
class Predicted:
    """The simulated seconds of one run of each instruction, by name.

    Attributes:
        kernel_s: seconds of a kernel; kinds: its kind.
        collective_s: seconds of a collective on its link; exposed_s: those exposed.
        lanes: the collectives' links; classes: their class, as `KindRatio.kind` has it.
    """

    kernel_s: Mapping[str, float] = field(default_factory=dict)
    kinds: Mapping[str, str] = field(default_factory=dict)
    collective_s: Mapping[str, float] = field(default_factory=dict)
    exposed_s: Mapping[str, float] = field(default_factory=dict)
    lanes: Mapping[str, str] = field(default_factory=dict)
    classes: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_timeline(cls, timeline: Timeline | None) -> Predicted:
        """Look up a simulated step's instructions; nothing without one."""
        if timeline is None:
            return cls()
        total_s: dict[str, float] = defaultdict(float)
        runs: dict[str, int] = defaultdict(int)
        kinds: dict[str, str] = {}
        for event in timeline.events:
            if event.kind in ("matmul", "memory") and not event.work.unknown:
                total_s[event.name] += event.seconds
                runs[event.name] += event.runs
                kinds[event.name] = "attention" if event.work.attention else event.kind
        spent = {s.collective.name: s for s in timeline.spent}
        return cls(
            {name: seconds / runs[name] for name, seconds in total_s.items()},
            kinds,
            {name: s.seconds / s.runs for name, s in spent.items()},
            {name: s.exposed_s / s.runs for name, s in spent.items()},
            {name: s.lane for name, s in spent.items()},
            {name: _class(s) for name, s in spent.items()},
        )


def _class(spent: Spent) -> str:
    across, copied = spent.lane == lanes.NETWORK, spent.collective.by_copy
    return spent.collective.kind + (NETWORK if across else COPIES if copied else "")


@dataclass
class _Sum:
    """The seconds of one class, devices added up."""

    instructions: set[str] = field(default_factory=set)
    measured_s: float = 0.0
    predicted_s: float = 0.0

    def add(self, instruction: str, measured_s: float, predicted_s: float) -> None:
        self.instructions.add(instruction)
        self.measured_s += measured_s
        self.predicted_s += predicted_s


def ratios(
    steps: Sequence[DeviceStep],
    runs: Sequence[Sequence[CollectiveRun]],
    predicted: Predicted,
    *,
    with_waits: bool,
) -> tuple[KindRatio, ...]:
    """Return the ratio of each class that some measured and predicted instruction is in.

    An instruction counts as often as it ran: the simulation may not know how often a loop runs.

    Args:
        steps: what each device ran.
        runs: its collectives.
        predicted: by instruction.
        with_waits: whether the predictions of collectives have the wait for the last device.
    """
    sums: dict[str, _Sum] = defaultdict(_Sum)
    for step in steps:
        for op, (seconds, count) in _kernels(step).items():
            if kind := predicted.kinds.get(op):
                sums[kind].add(op, seconds, count * predicted.kernel_s[op])
    for run in (run for of_device in runs for run in of_device):
        if kind := predicted.classes.get(name := run.collective.name):
            seconds = run.seconds if with_waits else run.seconds - run.waited_s
            sums[kind].add(name, seconds, predicted.collective_s[name])
    kinds = sorted(sums, key=lambda k: (_KERNELS.index(k) if k in _KERNELS else 9, k))
    return tuple(
        KindRatio(k, len(t.instructions), t.measured_s / len(steps), t.predicted_s / len(steps))
        for k in kinds
        if (t := sums[k]).predicted_s > 0
    )


def _kernels(step: DeviceStep) -> dict[str, tuple[float, int]]:
    """Return for each instruction the seconds of its kernels, and how often it ran.

    An instruction may launch several kernels, some of them more than once.
    """
    seconds: dict[str, float] = defaultdict(float)
    launches: dict[str, Counter[str]] = defaultdict(Counter)
    for event, label in step.events:
        if not label.collective:
            seconds[label.op] += event.seconds
            launches[label.op][event.name] += 1
    return {op: (s, min(launches[op].values())) for op, s in seconds.items()}
