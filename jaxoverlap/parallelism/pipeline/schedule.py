"""Lay out 1F1B, plain and interleaved, as integers: who does what in which tick.

All stages tick together, as they are one program. In a tick a stage runs one piece forward and
then another micro-batch's piece backward. Piece k of stage s is virtual stage k p + s, for p stages
of v pieces each; m micro-batches go through in rounds of p. With micro-batch r p + q:

    forward  of piece k in tick s + (r v + k) p + q
    backward of piece k in tick v p - 1 + (p - 1 - s) + (r v + v - 1 - k) p + q

What a piece sends is needed one tick later by the next stage of the ring, always: the last virtual
stage starts a micro-batch's backward pass in the tick of its forward pass. Forward passes take
m v + p - 1 ticks in all, backward passes as many, so that a step lasts

    (m v + p - 1) (forward + backward of a piece) = (m + (p - 1) / v) (the same of a stage)

whose bubble is 1F1B's (Narayanan et al., arXiv 2104.04473, section 2.2). It costs memory that
1F1B without a common clock does not: stage s has p v + p - 1 - 2 s pieces in flight, which is
2 (p - s) - 1 where v = 1, and not p - s. With separate ticks for forward and backward passes it
would be p - s, but neighbours, one of which runs forward while the other runs backward, would wait
for each other: a third longer, or half with recompute.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

NONE = -1  # no micro-batch


@dataclass(frozen=True)
class PipelineSchedule:
    """The ticks of a pipeline.

    Attributes:
        stages: p.
        micro_batches: m.
        pieces: v, of each stage.
    """

    stages: int
    micro_batches: int
    pieces: int = 1

    def __post_init__(self) -> None:
        if self.stages < 1 or self.micro_batches < 1 or self.pieces < 1:
            raise ValueError(f"{self}: give at least one stage, micro-batch and piece")
        if self.pieces > 1 and self.micro_batches % self.stages:
            raise ValueError(
                f"{self.micro_batches} micro-batches in rounds of {self.stages} stages: "
                "interleaving needs a multiple; change the micro-batch or the stages"
            )

    @property
    def warm_up_ticks(self) -> int:
        """Ticks at the start in which no stage runs backward; as many at the end, forward."""
        return self.pieces * self.stages - 1

    @property
    def forward_ticks(self) -> int:
        """Ticks in which any stage runs forward; as many in which any runs backward."""
        return self.micro_batches * self.pieces + self.stages - 1

    @property
    def ticks(self) -> int:
        """Ticks in all."""
        return self.warm_up_ticks + self.forward_ticks

    @property
    def bubble_ticks(self) -> int:
        """Forward ticks, of pieces, in which a stage has nothing to do; backward as many."""
        return self.stages - 1

    @property
    def bubble_share(self) -> float:
        """Return the bubble over the work: (p - 1) / (v m)."""
        return self.bubble_ticks / (self.micro_batches * self.pieces)

    def live_pieces(self, stage: int) -> int:
        """The most pieces of a stage whose inputs are saved, in closed form."""
        p, v = self.stages, self.pieces
        return min(v * p + p - 1 - 2 * stage, self.micro_batches * v)

    def sends(self) -> int:
        """Sends of activations of a stage in a step, in idle ticks too; as many of cotangents."""
        return self.forward_ticks

    def forward(self, stage: int, tick: int) -> tuple[int, int]:
        """Return the micro-batch and piece that a stage runs forward in a tick, or (NONE, 0)."""
        return self._at(tick - stage)

    def backward(self, stage: int, tick: int) -> tuple[int, int]:
        """Return the micro-batch and piece that a stage runs backward in a tick, or (NONE, 0)."""
        first = self.warm_up_ticks + self.stages - 1 - stage
        micro_batch, piece = self._at(tick - first)
        return micro_batch, (self.pieces - 1 - piece if micro_batch != NONE else 0)

    def _at(self, number: int) -> tuple[int, int]:
        """Return the micro-batch and the piece that come as the number-th."""
        p, v = self.stages, self.pieces
        if not 0 <= number < self.micro_batches * v:
            return NONE, 0
        if v == 1:
            return number, 0
        turn, within = divmod(number, p * v)
        piece, place = divmod(within, p)
        return turn * p + place, piece

    def tables(self) -> Tables:
        """Return what each stage does, as arrays."""
        rows = np.full((6, self.stages, self.ticks), NONE, np.int32)
        for stage in range(self.stages):
            self._fill(stage, rows[:3, stage], rows[3:, stage])
        return Tables(rows, slots=max(int(rows[2].max()), 0) + 1)

    def _fill(self, stage: int, forward: np.ndarray, backward: np.ndarray) -> None:
        """Give each input the lowest slot of the buffer that is free while it is saved.

        Args:
            stage: which.
            forward, backward: its rows of the tables, int32 [3, ticks], which are filled.
        """
        free, held = list[int](), dict[tuple[int, int], int]()
        for tick in range(self.ticks):
            if (of := self.forward(stage, tick))[0] != NONE:
                free.sort()
                held[of] = free.pop(0) if free else len(held)
                forward[:, tick] = (*of, held[of])
            if (of := self.backward(stage, tick))[0] != NONE:
                free.append(held.pop(of))
                backward[:, tick] = (*of, free[-1])


class Tables(NamedTuple):
    """A schedule as arrays.

    Attributes:
        rows: int32 [6, stages, ticks], NONE where a stage has nothing to do: the micro-batch, the
            piece and the slot of its input that run forward, and the same three backward.
        slots: slots of the buffer of inputs.
    """

    rows: np.ndarray
    slots: int


def stage_order(stages: int, pieces: int) -> list[int]:
    """Return the virtual stages in the order in which devices hold them, stage by stage."""
    return [piece * stages + stage for stage in range(stages) for piece in range(pieces)]
