"""Record how the results of matmuls are pinned, where the user had left that to XLA."""

from __future__ import annotations

import msgspec

from jaxoverlap._util.text import human_bytes


class PinnedResult(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A matmul's result that is constrained to a layout.

    Attributes:
        site: the matmul's number in the step.
        source: its source line.
        type: the type of the result.
        spec: the mesh axes on each of its dims, major to minor.
    """

    site: int
    source: str
    type: str
    spec: tuple[tuple[str, ...], ...]

    @property
    def layout(self) -> str:
        """The mesh axes on each dim, as a `PartitionSpec` has them."""
        dims = [axes[0] if len(axes) == 1 else str(axes).replace("'", "") for axes in self.spec]
        shown = [dim if axes else "None" for dim, axes in zip(dims, self.spec, strict=True)]
        return f"({', '.join(shown)})"


class Layouts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The results that are pinned, and what that is estimated to bring.

    The estimates are of XLA's partitioned programs, before any ring. They tell the gain of layouts
    from that of hiding.

    Attributes:
        pins: the pinned results, in the order of their matmuls.
        plain_s, step_s: seconds of a step without the pins, and with them.
        plain_peak_bytes, peak_bytes: the estimated memory of a device.
        questions: how many layouts XLA's partitioner was asked about.
    """

    pins: tuple[PinnedResult, ...]
    plain_s: float
    step_s: float
    plain_peak_bytes: int
    peak_bytes: int
    questions: int

    @property
    def lines(self) -> list[str]:
        """The lines that are printed below the table of a plan's matmuls."""
        gain = (
            f"  {len(self.pins)} results are pinned: {self.plain_s * 1e3:.4g} -> "
            f"{self.step_s * 1e3:.4g} ms by price, before any ring; memory "
            f"{human_bytes(self.plain_peak_bytes)} -> {human_bytes(self.peak_bytes)} "
            f"({self.questions} layouts asked)."
        )
        return [gain, *(f"    {p.type} at {p.source} to {p.layout}" for p in self.pins)]
