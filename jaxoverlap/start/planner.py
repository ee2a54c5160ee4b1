"""Plan the blocks of a step in process 0: the original step, trial steps, and then the fastest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from jaxoverlap.start.board import Board
from jaxoverlap.start.candidates import Offers
from jaxoverlap.start.course import FAILED, Announcement
from jaxoverlap.start.race import Race
from jaxoverlap.start.record import PLAIN, Timed, Trials


class Made(msgspec.Struct, frozen=True, kw_only=True):
    """Records whether a candidate can run in one process.

    Attributes:
        digest: a hash of what was compiled.
        peak_bytes: bytes that a device needs at most.
        why_not: why it cannot run; empty if it can.
    """

    digest: str = ""
    peak_bytes: int = 0
    why_not: str = ""


class TrialPlanner:
    """Plans which program runs at which step.

    Attributes:
        offers: the candidates, whose numbers begin with 1; set before they are reported as made.
    """

    def __init__(self, board: Board, name: str, trials: int):
        self._board, self._name, self._trials = board, name, trials
        self._race: Race | None = None
        self._unheard: dict[int, tuple[int, ...]] = {}
        self._dropped: dict[int, str] = {}
        self._peaks: dict[int, int] = {}
        self.offers = Offers()

    def plan(self, number: int, steps: int) -> Announcement:
        """Plan a block by what all processes have reported."""
        if self._race is None and not self._begins():
            return Announcement(programs=(0,) * steps)
        assert self._race is not None
        self._hear()
        if (winner := self._race.winner) is not None:
            record = self._record(winner, number * steps)
            return Announcement(programs=(winner,), record=msgspec.json.encode(record).decode())
        begun = [p for _ in range(steps) if (p := self._race.next()) is not None]
        if begun:
            self._unheard[number] = tuple(begun)
        rest = (0,) * (steps - len(begun))  # what is under way decides
        return Announcement(programs=(*begun, *rest), timed=len(begun))

    def drop(self, program: int, why: str) -> None:
        """Take out a candidate that failed."""
        assert self._race is not None
        self._dropped[program] = why
        self._race.drop(program)

    def _begins(self) -> bool:
        """Begin the race, once all processes have compiled what they can."""
        found = self._board.reports("made")
        if found is None:
            return False
        reports = [msgspec.json.decode(one, type=tuple[Made, ...]) for one in found]
        for program, made in enumerate(zip(*reports, strict=True), 1):
            self._peaks[program] = max(one.peak_bytes for one in made)
            why_not = [
                f"{one.why_not} (process {process})" if len(made) > 1 else one.why_not
                for process, one in zip(self._board.processes, made, strict=True)
                if one.why_not
            ]
            if not why_not and len({one.digest for one in made}) > 1:
                why_not = ["it is not the same program in all processes"]
            if why_not:
                self._dropped[program] = why_not[0]
        may = [p for p in self._peaks if p not in self._dropped]
        self._race = Race([0, *may], self._trials)
        few = f"{self._trials} trial steps are too few for it too"
        self._dropped |= {p: few for p in may if p not in self._race.seconds}
        return True

    def _hear(self) -> None:
        """Take the times of trial steps that all processes have reported: the slowest's."""
        assert self._race is not None
        for number, programs in list(self._unheard.items()):
            found = self._board.reports(f"times/{number}")
            if found is None:
                return
            del self._unheard[number]
            times = [msgspec.json.decode(one, type=list[float]) for one in found]
            for program, *seconds in zip(programs, *times, strict=True):
                if FAILED in seconds:
                    self._race.skip()
                else:
                    self._race.put(program, max(seconds))

    def _record(self, winner: int, since: int) -> Trials:
        assert self._race is not None
        names = [PLAIN, *(offer.name for offer in self.offers.offers)]
        seconds: Mapping[int, Sequence[float]] = self._race.seconds
        candidates = [Timed(name=PLAIN, seconds=tuple(seconds.get(0, ())))]
        for program, offer in enumerate(self.offers.offers, 1):
            candidates.append(
                Timed(
                    name=offer.name,
                    seconds=tuple(seconds.get(program, ())),
                    simulated_s=offer.simulated_s,
                    peak_bytes=self._peaks[program],
                    dropped=self._dropped.get(program, ""),
                )
            )
        return Trials(
            step=self._name,
            candidates=tuple(candidates),
            taken=names[winner],
            since=since,
            why=self.offers.why,
        )
