"""What is to be done with each matmul of a step: data, and how it reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

import msgspec

from jaxoverlap._text import human_bytes, table

Style = Literal["one_way", "two_way", "direct", "sliced", "plain"]


class Variant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the pieces of a decomposed collective travel.

    Attributes:
        style: "one_way": a ring, every hop to the next device. "two_way": two rings at once, one a
            direction, each half as long (Wang et al., ASPLOS '23). "direct": each piece straight to
            where it is needed, so that no hop waits for another (CommFuse, arXiv 2604.24013).
            "sliced": no ring; the whole collective in slices, each under another slice's matmul.
            "plain": the matmul is left alone, for where a hop costs more than the chunk over it.
        slices: pieces that each chunk of a ring is cut into, each with a hop and a matmul of its
            own; for "sliced" the slices of the whole collective, at least 2.
    """

    style: Style = "one_way"
    slices: int = 1

    def __post_init__(self) -> None:
        if self.style not in get_args(Style):
            raise ValueError(f"style {self.style!r}: expected one of {', '.join(get_args(Style))}")
        least = 2 if self.style == "sliced" else 1
        whole = isinstance(self.slices, int) and not isinstance(self.slices, bool)
        if not whole or self.slices < least:
            raise ValueError(
                f"{self.slices!r} slices of style {self.style}: expected a whole number, "
                f"{least} or more"
            )

    def __str__(self) -> str:
        return self.style if self.slices == 1 else f"{self.style} x {self.slices}"

    @classmethod
    def parse(cls, text: str) -> Variant:
        """The variant that `str` wrote, as in "one_way" or "two_way x 2".

        Raises:
            ValueError: if `text` is not one; it says what was expected.
        """
        style, times, slices = (part.strip() for part in text.partition(" x "))
        if style not in get_args(Style) or (times and not slices.isdecimal()):
            raise ValueError(
                f"variant {text!r}: expected a style ({', '.join(get_args(Style))}), alone or with "
                'slices, as in "two_way x 2"'
            )
        return cls(style, int(slices) if times else 1)  # type: ignore[arg-type]


class Decision(msgspec.Struct, frozen=True, kw_only=True, tag="ring", forbid_unknown_fields=True):
    """One matmul that becomes a ring.

    Attributes:
        site: the matmul's place among the step's `dot_general`s.
        ring: the site that its ring is named after: its own, or that of the first matmul in it.
        source: "file:line" of the code that wrote it.
        einsum: its letters, as in "abc,cd->abd".
        kind: the pass that decomposes it, as in "all_gather_matmul".
        axis: the mesh axis of the ring.
        letter: the dim that is cut into chunks.
        variant: how the pieces of the collective travel.
        num_chunks: pieces that the matmul is cut into.
        bytes_moved: bytes that each device sends for it in one step; 0 where the first matmul of
            its ring has them.
        runs: how often one step runs it.
        others: collectives of this matmul on other axes, which stay XLA's, with their bytes.
        why: the reason for this axis, if there was a choice.
    """

    site: int
    ring: int
    source: str
    einsum: str
    kind: str
    axis: str
    letter: str
    num_chunks: int
    bytes_moved: int
    runs: int
    variant: Variant = Variant()
    others: tuple[str, ...] = ()
    why: str = ""


class Skip(msgspec.Struct, frozen=True, kw_only=True, tag="skip", forbid_unknown_fields=True):
    """One matmul that is left alone, and why.

    Attributes:
        site, source, einsum, runs: as in `Decision`.
        reason: why; it starts with "no collective" where there is nothing to overlap.
    """

    site: int
    source: str
    einsum: str
    runs: int
    reason: str


class Remaining(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Collectives of one source line that stay XLA's.

    Attributes:
        kind: all_gather, all_reduce, reduce_scatter, all_to_all or collective_permute.
        axes: the mesh axes whose devices take part.
        source: "file:line" of the code that wrote the value that moves.
        runs: how many of them one step runs.
        bytes_moved: bytes that each device sends in them in one step.
    """

    kind: str
    axes: tuple[str, ...]
    source: str
    runs: int
    bytes_moved: int


class Scattered(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The gradient of an embedding lookup, scattered where XLA would all-reduce it.

    Attributes:
        source: "file:line" of the lookup.
        axes: the mesh axes that it is scattered over, in order.
        bytes_moved: bytes that each device sends in one run.
    """

    source: str
    axes: tuple[str, ...]
    bytes_moved: int


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A `Decision` or a `Skip` for every `dot_general` of a step, in order.

    Attributes:
        step: the step's name.
        mesh: devices along each mesh axis.
        entries: one a matmul.
        prefetched: gathers of scanned weights that run one step of their scan ahead.
        scattered: the gradients of embedding lookups that are scattered.
        remaining: the collectives that stay XLA's, where they were asked for (`explain()` does).
    """

    step: str
    mesh: Mapping[str, int]
    entries: tuple[Decision | Skip, ...]
    prefetched: int = 0
    scattered: tuple[Scattered, ...] = ()
    remaining: tuple[Remaining, ...] = ()

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """The matmuls that become rings."""
        return tuple(e for e in self.entries if isinstance(e, Decision))

    @property
    def skips(self) -> tuple[Skip, ...]:
        """The matmuls that are left alone."""
        return tuple(e for e in self.entries if isinstance(e, Skip))

    def to_json(self) -> str:
        """The plan as JSON."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> Plan:
        """The plan that `to_json` wrote.

        Raises:
            ValueError: if `text` is not such a plan; it says where.
        """
        try:
            return msgspec.json.decode(text, type=cls)
        except msgspec.MsgspecError as error:
            raise ValueError(
                f"not a plan: {error}; expected the JSON that Plan.to_json() writes"
            ) from error

    def __str__(self) -> str:
        mesh = " x ".join(f"{axis} {size}" for axis, size in self.mesh.items())
        waiting = [s for s in self.skips if not s.reason.startswith("no collective")]
        rows = [_row(e) for e in (*self.decisions, *waiting)]
        moved = sum(d.bytes_moved for d in self.decisions)
        title = f"{self.step} on {mesh}"
        idle = len(self.skips) - len(waiting)
        return "\n".join(
            (
                table(title, _COLUMNS, rows, right=("site", "runs", "bytes", "chunks")),
                f"{len(self.entries)} matmuls: {len(self.decisions)} ringed "
                f"({human_bytes(moved)} sent per device and step), {len(waiting)} left alone, "
                f"{idle} without a collective.",
                *_idle_lines(self.skips),
                *_prefetched_lines(self.prefetched),
                *map(_scattered_line, self.scattered),
                *_remaining_lines(self.remaining),
            )
        )


_COLUMNS = (
    "site", "source", "einsum", "runs", "axis", "kind", "bytes", "chunks", "decision", "XLA keeps"
)  # fmt: skip


def _row(entry: Decision | Skip) -> tuple[str, ...]:
    head = (str(entry.site), entry.source, entry.einsum, str(entry.runs))
    if isinstance(entry, Skip):
        return (*head, "", "", "", "", f"skip: {entry.reason}", "")
    named = str(entry.variant) if entry.num_chunks > 1 else "whole"
    decision = f"{named}: {entry.why}" if entry.why else named
    size, chunks = human_bytes(entry.bytes_moved), str(entry.num_chunks)
    return (*head, entry.axis, entry.kind, size, chunks, decision, "; ".join(entry.others))


def _remaining_lines(remaining: tuple[Remaining, ...]) -> list[str]:
    """The table of what stays XLA's."""
    if not remaining:
        return []
    rows = [
        (r.kind, " x ".join(r.axes), r.source, str(r.runs), human_bytes(r.bytes_moved))
        for r in remaining
    ]
    columns = ("collective", "axes", "source", "runs", "bytes")
    sent = human_bytes(sum(r.bytes_moved for r in remaining))
    title = f"XLA's own: {sent} sent per device and step"
    return ["", table(title, columns, rows, right=("runs", "bytes"))]


def _scattered_line(scattered: Scattered) -> str:
    over, sent = " and ".join(scattered.axes), human_bytes(scattered.bytes_moved)
    return f"  The gradient of the lookup at {scattered.source} is scattered over {over}: {sent}."


def _prefetched_lines(prefetched: int) -> list[str]:
    if not prefetched:
        return []
    return [f"  {prefetched} gathers of scanned weights run one step of their scan ahead."]


def _idle_lines(skips: tuple[Skip, ...]) -> list[str]:
    """The matmuls with nothing to overlap, a line a reason."""
    by_reason: dict[str, list[Skip]] = {}
    for skip in skips:
        if skip.reason.startswith("no collective"):
            by_reason.setdefault(skip.reason, []).append(skip)
    return [
        f"  {reason}: " + ", ".join(f"{s.site} ({s.source})" for s in group)
        for reason, group in by_reason.items()
    ]
