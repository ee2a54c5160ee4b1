"""Know which program runs at which step, in all processes alike.

Steps come in blocks. Process 0 writes the programs of a block while it enters the block before, so
that the others find them written, as a rule: none waits for another, and no step has two programs.
In one process a block is one step, planned when it is entered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec

from jaxoverlap.start.board import Board

FAILED = -1.0  # the seconds of a trial step that failed
_BLOCK = 4  # steps


class Announcement(msgspec.Struct, frozen=True, kw_only=True):
    """The programs of successive steps, as process 0 writes them.

    Attributes:
        programs: the number of each step's program; 0 is the original step.
        timed: how many of them, the first, are trial steps.
        record: of the last block, whose last program stays: the record of the trials, as JSON.
    """

    programs: tuple[int, ...]
    timed: int = 0
    record: str = ""


class StepTurn(NamedTuple):
    """The program of one step; whether the step is timed; and the record, once all is decided."""

    program: int
    timed: bool = False
    record: str = ""


class Course:
    """The programs of a step's calls, which are counted from 0."""

    def __init__(self, board: Board, plan: Callable[[int, int], Announcement]):
        """Follow the blocks of process 0.

        Args:
            board: where the processes write.
            plan: plans a block, by its number and its steps; called in process 0.
        """
        self._board, self._plan = board, plan
        self._steps, self._ahead = (1, 0) if board.is_alone else (_BLOCK, 1)
        self._planned: dict[int, Announcement] = {}
        self._block: Announcement | None = None
        self._times: dict[int, list[float]] = {}  # of blocks that are under way
        self._timed: dict[int, int] = {}

    def turn(self, step: int) -> StepTurn:
        """Return the turn of a step; called once for each, in order."""
        number, position = divmod(step, self._steps)
        if self._block is not None and self._block.record:
            return StepTurn(self._block.programs[-1], record=self._block.record)
        if position == 0:
            self._block = self._entered(number)
            if self._block.timed:
                self._times[number], self._timed[number] = [], self._block.timed
        assert self._block is not None
        block = self._block
        if block.record:
            position = 0
        return StepTurn(block.programs[position], position < block.timed, block.record)

    def put(self, step: int, seconds: float | None) -> None:
        """Report the seconds of a trial step; None if its program failed."""
        number = step // self._steps
        times = self._times[number]
        times.append(FAILED if seconds is None else seconds)
        if len(times) == self._timed[number]:
            self._board.report(f"times/{number}", msgspec.json.encode(times).decode())
            del self._times[number], self._timed[number]

    def _entered(self, number: int) -> Announcement:
        if not self._board.leads:
            return msgspec.json.decode(self._board.get(f"block/{number}"), type=Announcement)
        for due in range(number, number + self._ahead + 1):
            if due not in self._planned and not self._is_decided:
                self._planned[due] = block = self._plan(due, self._steps)
                if not self._board.is_alone:
                    self._board.give(f"block/{due}", msgspec.json.encode(block).decode())
        return self._planned.pop(number)

    @property
    def _is_decided(self) -> bool:
        return any(block.record for block in self._planned.values())
