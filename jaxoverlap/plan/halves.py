"""Record whether the batch of a step is split in parts, and why not."""

from __future__ import annotations

import msgspec

from jaxoverlap._util.expect import expect, is_integer
from jaxoverlap.plan.speedup import milliseconds


class Halves(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The parts that the batch of a step is split in; one part computes while another waits.

    The estimates are of XLA's partitioned programs.

    Attributes:
        parts: the number of parts.
        rows: the batch, as a dim of an argument; empty if none was found.
        shards: the shards of the batch, each of which is split by itself.
        unroll: how many iterations of a split scan one body of its loop has.
        mixing: the equations that mix sequences, with their source lines: parts are joined there.
        least_sum: bytes of the smallest all-reduce that each part runs for itself; None if there is
            none.
        least_matmul: bytes one device reads and writes in the smallest matmul that every part
            repeats with a shared operand; None if no operand is shared.
        whole_s, step_s: estimated seconds of the best candidate without a split, and of the step in
            parts; None if nothing was estimated.
        other_unroll, other_unroll_s: the other number of iterations per loop body that was
            estimated, and the seconds of the step so; None if there was none.
        why_not: why the batch is not split; empty if it is.
    """

    parts: int
    rows: str = ""
    shards: int = 1
    unroll: int = 1
    mixing: tuple[str, ...] = ()
    least_sum: int | None = None
    least_matmul: int | None = None
    whole_s: float | None = None
    step_s: float | None = None
    other_unroll: int | None = None
    other_unroll_s: float | None = None
    why_not: str = ""

    def __post_init__(self) -> None:
        for name, least in (("parts", 2), ("shards", 1), ("unroll", 1)):
            given = getattr(self, name)
            expect(is_integer(given, least), name, given, f"a whole number, {least} or more")

    @property
    def lines(self) -> list[str]:
        """The lines that are printed below the table of a plan's matmuls."""
        estimate = ""
        if self.whole_s is not None and self.step_s is not None:
            unsplit, split = milliseconds(self.whole_s), milliseconds(self.step_s)
            estimate = f": {unsplit} unsplit, {split} split (estimated)"
        if self.why_not:
            line = f"  The batch is not split in {self.parts} parts: {self.why_not}{estimate}."
            return [line, *self._hint]
        loops = f", scans unrolled {self.unroll} times" if self.unroll > 1 else ""
        lines = [f"  The batch is split in {self.parts} parts: {self.rows}{loops}{estimate}."]
        if self.mixing:
            lines.append(f"    Parts are joined for {', '.join(self.mixing)}.")
        return [*lines, *self._hint]

    @property
    def _hint(self) -> list[str]:
        """Name what a user can say of a `shard_map` that no rule can find out."""
        if not any(text.startswith("shard_map") for text in self.mixing):
            return []
        return [
            "    If the shard_map computes each sequence alone, jaxoverlap.per_sequence(fn) says "
            "so, and it is split too."
        ]
