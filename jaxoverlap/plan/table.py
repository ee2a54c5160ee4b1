"""Write a plan as the tables and lines that `explain()` prints."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from jaxoverlap._util.text import human_bytes, table
from jaxoverlap.plan.decisions import Decision, Remaining, Scattered, Skip

_SITES = 6  # of equal rows that are listed
_REMAINING = 8  # of XLA's own collectives that are shown unless all are asked for


def mesh_text(mesh: Mapping[str, int]) -> str:
    """A mesh's axes and their sizes."""
    return " x ".join(f"{axis} {size}" for axis, size in mesh.items())


def ring_table(entries: Sequence[Decision | Skip], *, verbose: bool) -> list[str]:
    """Write the table of the matmuls that become rings; equal ones are one row, unless verbose."""
    rings = [e for e in entries if isinstance(e, Decision)]
    rows = [_ring_row(group) for group in _groups(rings, _ring_kind, verbose)]
    return [table("", _RINGS, rows, right=("runs", "bytes", "chunks"))] if rows else []


def left_table(entries: Sequence[Decision | Skip], *, verbose: bool) -> list[str]:
    """Write the table of the matmuls that are left alone and have a collective, likewise."""
    rows = [_left_row(group) for group in _groups(_waiting(entries), _left_kind, verbose)]
    return [table("left alone", _LEFT, rows, right=("runs",))] if rows else []


_RINGS = (
    "matmuls", "source", "einsum", "runs", "axis", "kind", "bytes", "chunks", "decision",
    "XLA keeps",
)  # fmt: skip
_LEFT = ("matmuls", "source", "einsum", "runs", "why")


def _groups[E: (Decision, Skip)](
    entries: Iterable[E], kind: Callable[[E], object], verbose: bool
) -> list[list[E]]:
    """Put entries of a kind together, in the order in which the first of each comes."""
    groups: dict[object, list[E]] = {}
    for entry in entries:
        groups.setdefault(entry.site if verbose else kind(entry), []).append(entry)
    return list(groups.values())


def _ring_kind(d: Decision) -> object:
    others = tuple(map(_numberless, d.others))
    how = d.kind, d.axis, d.variant, d.num_chunks, _numberless(d.why), others
    return d.source, d.einsum, *how


def _left_kind(s: Skip) -> object:
    return s.source, s.einsum, _numberless(s.reason)


def _numberless(text: str) -> str:
    """Leave out the numbers of a text: equal matmuls differ in the time that theirs is exposed."""
    return re.sub(r"\d[\d.,]*", "#", text)


def _sites(group: Sequence[Decision | Skip]) -> str:
    """List the numbers of matmuls; of many the first, and how many there are."""
    numbers = ", ".join(str(e.site) for e in group[:_SITES])
    return numbers if len(group) <= _SITES else f"{numbers}, ... ({len(group)})"


def _ring_row(group: Sequence[Decision]) -> tuple[str, ...]:
    first = group[0]
    named = str(first.variant) if first.num_chunks > 1 else "whole"
    decision = f"{named}: {first.why}" if first.why else named
    size, runs = sum(d.bytes_moved for d in group), sum(d.runs for d in group)
    head = (_sites(group), first.source, first.einsum, str(runs), first.axis, first.kind)
    return (*head, human_bytes(size), str(first.num_chunks), decision, "; ".join(first.others))


def _left_row(group: Sequence[Skip]) -> tuple[str, ...]:
    first, runs = group[0], sum(s.runs for s in group)
    return _sites(group), first.source, first.einsum, str(runs), first.reason


def count_line(entries: Sequence[Decision | Skip]) -> str:
    """Count the matmuls by what becomes of them."""
    rings = [e for e in entries if isinstance(e, Decision)]
    waiting = len(_waiting(entries))
    moved = human_bytes(sum(d.bytes_moved for d in rings))
    return (
        f"{len(entries)} matmuls: {len(rings)} ringed ({moved} sent per device and step), "
        f"{waiting} left alone, {len(entries) - len(rings) - waiting} without a collective."
    )


def _waiting(entries: Sequence[Decision | Skip]) -> list[Skip]:
    """The matmuls that are left alone, and have a collective."""
    skips = [e for e in entries if isinstance(e, Skip)]
    return [s for s in skips if not s.reason.startswith("no collective")]


def remaining_lines(remaining: Sequence[Remaining], *, verbose: bool) -> list[str]:
    """Write the table of the collectives that stay XLA's; of many the largest, unless verbose."""
    if not remaining:
        return []
    shown = remaining
    if not verbose and len(remaining) > _REMAINING + 1:
        shown = sorted(remaining, key=lambda r: -r.bytes_moved)[:_REMAINING]
    rows = [
        (r.kind, " x ".join(r.axes), r.source, str(r.runs), human_bytes(r.bytes_moved))
        for r in shown
    ]
    if len(shown) < len(remaining):
        rest = sum(r.bytes_moved for r in remaining) - sum(r.bytes_moved for r in shown)
        rows.append((f"{len(remaining) - len(shown)} more", "", "", "", human_bytes(rest)))
    columns = ("collective", "axes", "source", "runs", "bytes")
    sent = human_bytes(sum(r.bytes_moved for r in remaining))
    title = f"XLA's own: {sent} sent per device and step"
    return [table(title, columns, rows, right=("runs", "bytes"))]


def scattered_line(scattered: Scattered) -> str:
    """Name a lookup's gradient that is scattered, where XLA would all-reduce it."""
    over, sent = " and ".join(scattered.axes), human_bytes(scattered.bytes_moved)
    return f"  The gradient of the lookup at {scattered.source} is scattered over {over}: {sent}."


def prefetched_lines(prefetched: int) -> list[str]:
    """Say how many gathers run ahead."""
    if not prefetched:
        return []
    return [f"  {prefetched} gathers of scanned weights run one step of their scan ahead."]


def partitioning_lines(operations: Sequence[str]) -> list[str]:
    """Name the operations that partition themselves, and are left alone."""
    if not operations:
        return []
    return [f"  Left as they partition themselves: {', '.join(operations)}."]


def cluster_lines(cluster: str | None, domains: Mapping[str, int]) -> list[str]:
    """Say for which GPUs a plan was decided, where these are known.

    Args:
        cluster: as `parse_cluster` takes it.
        domains: over how many NVLink domains each axis spreads.
    """
    if cluster is None:
        return []
    links = ", ".join(
        f"{axis} {'the network' if spread > 1 else 'NVLink'}" for axis, spread in domains.items()
    )
    return [
        f"  The cluster is taken to be {cluster} (hosts x GPUs / processes a host): {links}. "
        "If it is another, name it in overlap(cluster=)."
    ]


def idle_lines(entries: Sequence[Decision | Skip]) -> list[str]:
    """The matmuls with nothing to overlap, a line a reason."""
    by_reason: dict[str, list[Skip]] = {}
    for skip in entries:
        if isinstance(skip, Skip) and skip.reason.startswith("no collective"):
            by_reason.setdefault(skip.reason, []).append(skip)
    return [
        f"  {reason}: " + ", ".join(f"{s.site} ({s.source})" for s in group)
        for reason, group in by_reason.items()
    ]
