"""Record the answer about a candidate: its seconds and memory, or why it cannot be taken."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import msgspec


class Waited(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The seconds that the collectives of one ring, or of one source line, cost in a step.

    Attributes:
        kind: as HLO writes it.
        ring: the ring's name; empty for XLA's own.
        source: "file:line".
        seconds: the time on their link.
        exposed_s: the part of it in which the kernels wait.
    """

    kind: str
    ring: str
    source: str
    seconds: float
    exposed_s: float


class Times(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The times of a compiled step, by simulation of its schedule with NCCL's own channels.

    Attributes:
        step_s: seconds of the step.
        compute_s: seconds of kernels alone.
        communication_s: seconds of all collectives.
        exposed_s: seconds in which kernels wait.
        bound_s: seconds that no order can beat.
        hops, hops_covered: permutes of rings in a step, and those that overlap with a matmul.
        waited: the costs of collectives, longest exposed first.
        unknown: what the simulation does not know, and how often a step runs it.
    """

    step_s: float
    compute_s: float
    communication_s: float
    exposed_s: float
    bound_s: float
    hops: int = 0
    hops_covered: int = 0
    waited: tuple[Waited, ...] = ()
    unknown: Mapping[str, int] = {}


class Evaluation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The answer about a candidate.

    Attributes:
        step_s: seconds of the step; None where nothing tells them.
        peak_bytes: bytes that a device needs at most, arguments and outputs included; 0 where
            nothing tells them, or XLA did not compile it.
        refusal: why it cannot be taken; empty if it can.
        by: "estimate": from XLA's partitioned program. "compiled": by simulation of the compiled
            step. "measured": by the clock, on the devices that are here.
        again: whether a refused one may end otherwise another time: it was stopped, or killed.
        times: the parts of a compiled step's time; None where it was not simulated.
    """

    step_s: float | None = None
    peak_bytes: int = 0
    refusal: str = ""
    by: Literal["estimate", "compiled", "measured"] = "estimate"
    again: bool = False
    times: Times | None = None

    @property
    def seconds(self) -> float:
        """Its seconds; infinity where they are not known, or it cannot be taken."""
        return math.inf if self.step_s is None or self.refusal else self.step_s

    @property
    def simulated(self) -> Times:
        """The times of a compiled step that was simulated."""
        assert self.times is not None
        return self.times
