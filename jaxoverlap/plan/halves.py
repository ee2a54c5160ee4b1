"""Record whether the rows of a step run in parts, and why not if they do not."""

from __future__ import annotations

import msgspec

from jaxoverlap.plan.speedup import milliseconds


class Halves(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The parts in which the rows of a step run, side by side.

    The estimates are of XLA's partitioned programs.

    Attributes:
        parts: the number of parts.
        rows: the rows that are cut, as a dim of an argument; empty if there are none.
        shards: the shards of the rows, each of which is cut by itself.
        unroll: how many steps of a cut scan stand in one body of its loop.
        mixing: the equations that mix the rows, with their source lines: parts are joined there.
        least_sum: bytes of the smallest all-reduce that each part has for itself; None if there is
            none.
        least_matmul: bytes that the smallest matmul of a part reads and writes on one device, of
            those whose parts share an operand; None if there is none.
        whole_s, step_s: seconds of the best way that does not cut the rows, and of the step in
            parts; None where no price is known, or nobody asked.
        why_not: why the rows are not cut; empty if they are.
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
    why_not: str = ""

    def __post_init__(self) -> None:
        for name, least in (("parts", 2), ("shards", 1), ("unroll", 1)):
            given = getattr(self, name)
            if not isinstance(given, int) or isinstance(given, bool) or given < least:
                raise ValueError(f"{name}={given!r}: expected a whole number, {least} or more")

    @property
    def lines(self) -> list[str]:
        """The lines that are printed below the table of a plan's matmuls."""
        price = ""
        if self.whole_s is not None and self.step_s is not None:
            price = f": {milliseconds(self.whole_s)} -> {milliseconds(self.step_s)} by price"
        if self.why_not:
            return [f"  The rows are not cut in {self.parts} parts: {self.why_not}{price}."]
        loops = f", scans unrolled {self.unroll} times" if self.unroll > 1 else ""
        lines = [f"  The rows run in {self.parts} parts: {self.rows}{loops}{price}."]
        if self.mixing:
            lines.append(f"    Parts are joined for {', '.join(self.mixing)}.")
        return lines
