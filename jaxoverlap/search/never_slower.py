"""Compare the compiled overlapped step with the original one, and take the faster by simulation.

The candidates are the overlapped step; the original step in the scheduler pass's order, which is
XLA's own if no other order is faster; and the original step as XLA compiles it. If the estimates
with and without a batch split are close, the overlapped step is also compiled the other way; so it
is where those with scans unrolled and not are close. If the fastest of these exposes communication,
the original step is also compiled with published options, and a step of unrolled layers with
options that join their collectives (`joining.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

import msgspec

from jaxoverlap._util.text import human_bytes
from jaxoverlap.cost.model import CostModel
from jaxoverlap.flags.published import COMPARED
from jaxoverlap.flags.required import SEEN
from jaxoverlap.plan.limits import CLEAR_GAIN, CLEARLY_EXPOSED, GAIN, MUCH_LOST
from jaxoverlap.plan.plan import Plan
from jaxoverlap.plan.speedup import CandidateName, Overlapped, Speedup, milliseconds
from jaxoverlap.search.candidate import Candidate
from jaxoverlap.search.joining import joining
from jaxoverlap.search.search import Batches, exposes, gains, quickest, ranked
from jaxoverlap.simulation.replay import UNKNOWN_TRIPS
from jaxoverlap.simulation.simulation import simulate
from jaxoverlap.simulation.slower_rules import lost

_NAMES: tuple[CandidateName, ...] = get_args(CandidateName)  # of equally fast ones the first


@dataclass(frozen=True)
class NeverSlower:
    """The candidates that an overlapped step is compared with, and what is made of their answers.

    Attributes:
        candidates: those that there may be, by name; at least "overlapped" and "plain".
        cost: the cost model to simulate by.
        reorders: whether the scheduler pass may order the original step.
        most_bytes: the memory that a device may need.
    """

    candidates: Mapping[str, Candidate]
    cost: CostModel
    reorders: bool
    most_bytes: float

    @property
    def stages(self) -> tuple[Batches, ...]:
        """The stages of the search among compiled candidates."""
        return self._first, self._reordered, self._with_options

    @property
    def plan(self) -> Plan:
        """The plan of the overlapped step."""
        plan = self.candidates["overlapped"].plan
        assert plan is not None
        return plan

    @property
    def is_close(self) -> bool:
        """Whether the original step, reordered, may be as fast as the overlapped one."""
        price = self.plan.price
        clear = price is not None and gains(price.step_s, price.plain_s, CLEAR_GAIN)
        return self.reorders and bool(self.plan.edits) and not clear

    @property
    def _will_expose(self) -> bool:
        """Whether the overlapped step leaves much exposed by its estimate.

        Published options will be compiled then, and may as well be at once.
        """
        price = self.plan.price
        if price is None:
            return False
        return gains(price.plain_s - price.plain_exposed_s, price.step_s, CLEARLY_EXPOSED)

    def _first(self, rows: Sequence[Candidate]) -> Iterator[list[Candidate]]:
        """Propose what is always compared; the overlapped step first."""
        reordered = ["reordered"] if self.is_close else []
        published = COMPARED if self.reorders and self._will_expose else ()
        names = ("overlapped", "plain", *reordered, "other rows", "other loops", *published)
        yield [self.candidates[name] for name in names if name in self.candidates]
        plain = _of("plain", rows)
        if plain.evaluation.refusal and plain.plan:
            # Triton's kernel for a small all-reduce ends XLA for some steps (docs/upstream.md).
            options = {setting.name: setting.value for setting in SEEN}
            yield [Candidate.planned("plain", plain.plan.left_alone(None, options))]

    def _reordered(self, rows: Sequence[Candidate]) -> Iterator[list[Candidate]]:
        """Propose another order of the original step, where that is the fastest so far."""
        may = self.reorders and not self.is_close and not self._unknown(rows)
        if may and self.taken(rows).stage == "plain":
            yield [self.candidates["reordered"]]

    def _with_options(self, rows: Sequence[Candidate]) -> Iterator[list[Candidate]]:
        """Propose published options, and options that join collectives, where some are exposed."""
        if not self.reorders or self._unknown(rows):
            return
        fit, taken = self._comparable(rows), self.taken(rows)
        if exposes(taken, fit):
            base = taken
            if taken.stage not in get_args(Overlapped):
                base = next((row for row in fit if row.stage == "reordered"), None)
            is_new = all(row.stage not in COMPARED for row in rows)
            published = [self.candidates[name] for name in COMPARED] if is_new else []
            if batch := [*published, *(self._joined(base) if base is not None else ())]:
                yield batch

    def _joined(self, base: Candidate) -> Iterator[Candidate]:
        """Yield a candidate with options that join its collectives."""
        if base.text is None or base.plan is None:
            return
        for more in joining(base.text(), self.cost, base.plan.xla_options):
            options = {**base.plan.xla_options, **more}
            joined = msgspec.structs.replace(base.plan, xla_options=options)
            yield Candidate.planned(base.stage, joined, parent=base)

    # -- what comes of it -------------------------------------------------------------------------

    def taken(self, rows: Sequence[Candidate]) -> Candidate:
        """Return the fastest candidate that fits the device; of equal ones the overlapped step.

        If the seconds of two candidates cannot be compared, the overlapped step is taken. If XLA
        fails on the overlapped step, another candidate is.
        """
        if self._unknown(rows):
            return rows[0]
        fit = sorted(self._comparable(rows), key=lambda row: _NAMES.index(_name(row)))
        return ranked(fit, self.most_bytes)[0]

    def too_large(self, rows: Sequence[Candidate]) -> Candidate | None:
        """Return a candidate that does not fit and is clearly faster than what is taken."""
        if self._unknown(rows):
            return None
        best, taken = quickest(self._comparable(rows)), self.taken(rows)
        if best is None or best.evaluation.peak_bytes <= self.most_bytes:
            return None
        return best if gains(best.seconds, taken.seconds, GAIN) else None

    def speedup(self, rows: Sequence[Candidate]) -> Speedup:
        """Say which candidate is taken, and why, if it is not the overlapped step."""
        overlapped, plain, taken = _of("overlapped", rows), _of("plain", rows), self.taken(rows)
        overlapped_s = overlapped.evaluation.step_s
        if why := self._unknown(rows):
            taken_s = overlapped_s
            return Speedup(
                taken="overlapped", step_s=taken_s, plain_s=None, overlapped_s=taken_s, why=why
            )
        speedup = Speedup(
            taken=_name(taken),
            step_s=taken.seconds,
            plain_s=plain.seconds,
            overlapped_s=overlapped_s,
            repaired=self._repaired if _name(taken) in get_args(Overlapped) else None,
            joined=_joined(taken),
        )
        if speedup.taken == "overlapped":
            return speedup
        why, rules = self._against(overlapped, plain), ""
        if speedup.taken in ("other rows", "other loops"):
            why = why.replace("overlapped", self._planned(speedup.taken), 1)
        elif gains(plain.seconds, overlapped.seconds, 0) and not overlapped.evaluation.refusal:
            rules = self._lost(overlapped, plain)
        return msgspec.structs.replace(speedup, why=why, lost=rules)

    @property
    def _repaired(self) -> float | None:
        """How many times as fast the step is by its shardings alone; None if it loses little."""
        lost = self.plan.price.lost_share if self.plan.price else 0.0
        return 1 / (1 - lost) if lost > MUCH_LOST else None

    def _unknown(self, rows: Sequence[Candidate]) -> str:
        """Return why the overlapped step is not compared with the original one; "" if it is."""
        overlapped, plain = _of("overlapped", rows), _of("plain", rows)
        if plain.evaluation.refusal:
            return f"plain was not compiled: {plain.evaluation.refusal}"
        if overlapped.evaluation.peak_bytes and overlapped.evaluation.refusal:
            return f"not compared with plain: {overlapped.evaluation.refusal}"
        if not overlapped.evaluation.refusal and _loops(overlapped) != _loops(plain):
            return "plain was not compared: XLA says of only one of the two how often its loops run"
        return ""

    def _comparable(self, rows: Sequence[Candidate]) -> list[Candidate]:
        loops = _loops(_of("plain", rows))
        return [row for row in rows if not row.evaluation.refusal and _loops(row) == loops]

    def _against(self, overlapped: Candidate, plain: Candidate) -> str:
        """Return why the overlapped step loses: it does not compile, is slower, does not fit."""
        answer, there = overlapped.evaluation, self.most_bytes
        if answer.refusal:
            return f"overlapped it does not compile: {answer.refusal}"
        seconds = f"overlapped {milliseconds(overlapped.seconds)}"
        if answer.peak_bytes > there >= plain.evaluation.peak_bytes:
            return (
                f"{seconds} and {human_bytes(answer.peak_bytes)} of a device's {human_bytes(there)}"
            )
        return seconds

    def _planned(self, taken: CandidateName) -> str:
        """Return in words what the overlapped step has, where another batch split is taken."""
        split = self.plan.split
        if taken == "other loops" and split:
            return "scans unrolled" if split.unroll > 1 else "scans not unrolled"
        return "batch split" if split else "batch not split"

    def _lost(self, overlapped: Candidate, plain: Candidate) -> str:
        """Return which rules lost how much."""
        assert overlapped.text and plain.text
        slower, as_it_is = simulate(overlapped.text(), self.cost), simulate(plain.text(), self.cost)
        return lost(self.plan, slower, as_it_is)


def _of(name: CandidateName, rows: Sequence[Candidate]) -> Candidate:
    """Return the last candidate of a name, and not one made from it."""
    return next(row for row in reversed(rows) if row.stage == name and row.parent is None)


def _name(row: Candidate) -> CandidateName:
    return next(name for name in _NAMES if name == row.stage)


def _loops(row: Candidate) -> int:
    """Return the number of loops with an unknown trip count; the simulation runs each once."""
    return row.evaluation.simulated.unknown.get(UNKNOWN_TRIPS, 0)


def _joined(taken: Candidate) -> Mapping[str, str]:
    """Return the options that a candidate has beyond the one that it was made from."""
    if taken.parent is None or taken.plan is None or taken.parent.plan is None:
        return {}
    before = taken.parent.plan.xla_options
    return {n: v for n, v in taken.plan.xla_options.items() if before.get(n) != v}


def predicted(plan: Plan | None) -> Speedup | None:
    """Return the comparison stored in a tuned plan; None if it has no prediction of plain."""
    said = plan and plan.predictions
    if plan is None or said is None or said.plain_step_s is None:
        return None
    return Speedup(
        taken="plain" if plan.plain else "overlapped",
        step_s=said.step_s,
        plain_s=said.plain_step_s,
        overlapped_s=None if plan.plain else said.step_s,
        why="as the plan says",
    )
