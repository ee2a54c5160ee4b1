"""Record whether NVLink's collectives get a communication stream of their own, and why not."""

from __future__ import annotations

import msgspec

from jaxoverlap.plan.speedup import milliseconds


class Streams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The communication streams of a step on a cluster with NVLink and a network.

    The estimates are of XLA's partitioned program.

    Attributes:
        one_s, two_s: seconds with one stream for all collectives, and with a second one for those
            within an NVLink domain; None if nothing was estimated.
        why_not: why all collectives share one stream; empty if they do not.
    """

    one_s: float | None = None
    two_s: float | None = None
    why_not: str = ""

    @property
    def are_two(self) -> bool:
        """Return whether there is a second stream."""
        return not self.why_not

    @property
    def lines(self) -> list[str]:
        """The lines that are printed below the table of a plan's matmuls."""
        estimate = ""
        if self.one_s is not None and self.two_s is not None:
            estimate = f": {milliseconds(self.one_s)} -> {milliseconds(self.two_s)} (estimated)"
        if not self.are_two:
            return [f"  All collectives share one stream: {self.why_not}."]
        return [f"  Collectives over NVLink have a stream of their own{estimate}."]
