"""Compare a measured step with its simulation, instruction by instruction."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from jaxoverlap.profiling.measured import CollectiveRun, DeviceStep
from jaxoverlap.simulation import timeline as lanes
from jaxoverlap.simulation.timeline import Event, Spent, Timeline

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
    """What the simulation says of each instruction, in a step.

    Attributes:
        kernel_s: seconds of kernels, by instruction.
        kinds: their kind, by instruction.
        collective_s, exposed_s: seconds of collectives on their link, and those exposed.
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
        """Look a simulated step's seconds up by instruction; nothing without one."""
        if timeline is None:
            return cls()
        kernel_s: dict[str, float] = defaultdict(float)
        kinds: dict[str, str] = {}
        for event in timeline.events:
            if event.kind in ("matmul", "memory") and not event.work.unknown:
                kernel_s[event.name] += event.seconds
                kinds[event.name] = _kind(event)
        names = {s.collective.name: s for s in timeline.spent}
        return cls(
            kernel_s,
            kinds,
            {name: s.seconds for name, s in names.items()},
            {name: s.exposed_s for name, s in names.items()},
            {name: s.lane for name, s in names.items()},
            {name: _class(s) for name, s in names.items()},
        )


def _kind(event: Event) -> str:
    return "attention" if event.work.attention else event.kind


def _class(spent: Spent) -> str:
    across, copied = spent.lane == lanes.NETWORK, spent.collective.by_copy
    return spent.collective.kind + (NETWORK if across else COPIES if copied else "")


def ratios(
    steps: Sequence[DeviceStep],
    runs: Sequence[Sequence[CollectiveRun]],
    predicted: Predicted,
    *,
    with_waits: bool,
) -> tuple[KindRatio, ...]:
    """Return the ratio of each class that some measured and predicted instruction is in.

    Args:
        steps: what each device ran.
        runs: its collectives.
        predicted: by instruction.
        with_waits: whether the predictions of collectives have the wait for the last device.
    """
    measured: dict[tuple[str, str], float] = defaultdict(float)  # by kind and instruction
    for step in steps:
        for event, label in step.events:
            if kind := predicted.kinds.get(label.op):
                measured[kind, label.op] += event.seconds / len(steps)
    for of_device in runs:
        for run in of_device:
            if run.collective.name in predicted.collective_s:
                name = run.collective.name
                seconds = run.seconds if with_waits else run.seconds - run.waited_s
                measured[predicted.classes[name], name] += seconds / len(steps)
    return tuple(_summed(measured, {**predicted.kernel_s, **predicted.collective_s}))


def _summed(
    measured: Mapping[tuple[str, str], float], predicted_s: Mapping[str, float]
) -> Iterator[KindRatio]:
    kinds = dict.fromkeys(kind for kind, _ in measured)
    for kind in sorted(kinds, key=lambda k: (_KERNELS.index(k) if k in _KERNELS else 9, k)):
        mine = {op: s for (k, op), s in measured.items() if k == kind and predicted_s[op] > 0}
        if mine:
            seconds = sum(predicted_s[op] for op in mine)
            yield KindRatio(kind, len(mine), sum(mine.values()), seconds)
