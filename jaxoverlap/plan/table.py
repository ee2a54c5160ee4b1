"""Write a plan as the tables and lines that `explain()` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jaxoverlap._util.text import human_bytes, table
from jaxoverlap.plan.decisions import Decision, Remaining, Scattered, Skip


def mesh_text(mesh: Mapping[str, int]) -> str:
    """A mesh's axes and their sizes."""
    return " x ".join(f"{axis} {size}" for axis, size in mesh.items())


def entry_table(title: str, entries: Sequence[Decision | Skip]) -> str:
    """The table of the matmuls that become rings, and of those that wait for a collective."""
    rings = [e for e in entries if isinstance(e, Decision)]
    rows = [_row(e) for e in (*rings, *_waiting(entries))]
    return table(title, _COLUMNS, rows, right=("site", "runs", "bytes", "chunks"))


def count_lines(entries: Sequence[Decision | Skip]) -> list[str]:
    """Count the matmuls by what becomes of them, and list those without a collective."""
    rings = [e for e in entries if isinstance(e, Decision)]
    waiting = len(_waiting(entries))
    moved = human_bytes(sum(d.bytes_moved for d in rings))
    return [
        f"{len(entries)} matmuls: {len(rings)} ringed ({moved} sent per device and step), "
        f"{waiting} left alone, {len(entries) - len(rings) - waiting} without a collective.",
        *_idle_lines([e for e in entries if isinstance(e, Skip)]),
    ]


def _waiting(entries: Sequence[Decision | Skip]) -> list[Skip]:
    """The matmuls that are left alone, and have a collective."""
    skips = [e for e in entries if isinstance(e, Skip)]
    return [s for s in skips if not s.reason.startswith("no collective")]


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


def remaining_lines(remaining: Sequence[Remaining]) -> list[str]:
    """Write the table of the collectives that stay XLA's."""
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


def scattered_line(scattered: Scattered) -> str:
    """Name a lookup's gradient that is scattered, where XLA would all-reduce it."""
    over, sent = " and ".join(scattered.axes), human_bytes(scattered.bytes_moved)
    return f"  The gradient of the lookup at {scattered.source} is scattered over {over}: {sent}."


def prefetched_lines(prefetched: int) -> list[str]:
    """Say how many gathers run ahead."""
    if not prefetched:
        return []
    return [f"  {prefetched} gathers of scanned weights run one step of their scan ahead."]


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


def _idle_lines(skips: Sequence[Skip]) -> list[str]:
    """The matmuls with nothing to overlap, a line a reason."""
    by_reason: dict[str, list[Skip]] = {}
    for skip in skips:
        if skip.reason.startswith("no collective"):
            by_reason.setdefault(skip.reason, []).append(skip)
    return [
        f"  {reason}: " + ", ".join(f"{s.site} ({s.source})" for s in group)
        for reason, group in by_reason.items()
    ]
