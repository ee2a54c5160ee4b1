"""Write a plan as the tables and lines that `explain()` prints."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from jaxoverlap._util.text import human_bytes, table
from jaxoverlap.plan.decisions import NO_RINGS, Decision, Remaining, Skip

_SITES = 6  # of equal rows that are listed
_LINES = 3  # of the source lines of matmuls that are skipped for one reason
_REMAINING = 8  # of XLA's own collectives that are shown unless all are asked for


def mesh_text(mesh: Mapping[str, int]) -> str:
    """A mesh's axes and their sizes."""
    return " x ".join(f"{axis} {size}" for axis, size in mesh.items())


def ring_table(entries: Sequence[Decision | Skip], *, verbose: bool) -> list[str]:
    """Write the table of the matmuls that become rings; equal ones are one row, unless verbose."""
    rings = [e for e in entries if isinstance(e, Decision)]
    rows = [_ring_row(group) for group in _groups(rings, _ring_kind, verbose)]
    return [table("", _RINGS, rows, right=("runs", "bytes", "chunks"))] if rows else []


def skipped_table(
    entries: Sequence[Decision | Skip], *, verbose: bool, without_rings: str = ""
) -> list[str]:
    """Write the table of the skipped matmuls that have a collective, a row for each reason.

    Args:
        entries: of all matmuls.
        verbose: whether each matmul has a row of its own.
        without_rings: why the plan has no rings, for matmuls that have none for that reason.
    """
    groups = _groups(_waiting(entries), lambda skip: _numberless(skip.reason), verbose)
    rows = [_skipped_row(group, without_rings) for group in groups]
    return [table("skipped", _SKIPPED, rows, right=("runs",))] if rows else []


_RINGS = (
    "matmuls", "source", "einsum", "runs", "axis", "kind", "bytes", "chunks", "decision",
    "XLA keeps",
)  # fmt: skip
_SKIPPED = ("matmuls", "source", "einsum", "runs", "why")


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
    return d.source, _numberless(d.module), d.einsum, *how


def _numberless(text: str, instead: str = "#") -> str:
    """Leave out the numbers of a text: equal matmuls differ in exposed times and in layers."""
    return re.sub(r"\d+(?:[.,]\d+)*", instead, text)


def _sites(group: Sequence[Decision | Skip]) -> str:
    """List the numbers of matmuls; of many the first, and how many there are."""
    numbers = ", ".join(str(e.site) for e in group[:_SITES])
    return numbers if len(group) <= _SITES else f"{numbers}, ... ({len(group)})"


def _source(group: Sequence[Decision | Skip]) -> str:
    """Write the source line of matmuls and their module, numbers in which they differ as "*"."""
    modules = {e.module for e in group}
    module = group[0].module if len(modules) == 1 else _numberless(group[0].module, "*")
    return f"{group[0].source} {module}".strip()


def _ring_row(group: Sequence[Decision]) -> tuple[str, ...]:
    first = group[0]
    named = str(first.variant) if first.num_chunks > 1 else "no ring"
    decision = f"{named}: {first.why}" if first.why else named
    size, runs = sum(d.bytes_moved for d in group), sum(d.runs for d in group)
    head = (_sites(group), _source(group), first.einsum, str(runs), first.axis, first.kind)
    return (
        *head,
        human_bytes(size) if size else "",
        str(first.num_chunks),
        decision,
        "; ".join(first.others),
    )


def _skipped_row(group: Sequence[Skip], without_rings: str) -> tuple[str, ...]:
    """Write the row of skipped matmuls; of many source lines it names the first."""
    why = without_rings if group[0].why == NO_RINGS and without_rings else group[0].reason
    lines = _groups(group, lambda s: (s.source, _numberless(s.module)), verbose=False)
    sources = [_source(line) for line in lines[:_LINES]]
    if more := len(lines) - len(sources):
        sources.append(f"{more} more")
    einsums = {s.einsum for s in group}
    einsum = group[0].einsum if len(einsums) == 1 else f"{len(einsums)} einsums"
    return _sites(group), ", ".join(sources), einsum, str(sum(s.runs for s in group)), why


def count_line(entries: Sequence[Decision | Skip]) -> str:
    """Count the matmuls by what becomes of them."""
    decisions = [e for e in entries if isinstance(e, Decision)]
    rings = [d for d in decisions if d.num_chunks > 1]
    skipped = len(_waiting(entries))
    moved = human_bytes(sum(d.bytes_moved for d in rings))
    counts = [f"{len(rings)} ringed" + f" ({moved} sent per device and step)" * bool(rings)]
    if readers := len(decisions) - len(rings):
        counts.append(f"{readers} read operands gathered ahead")
    idle = len(entries) - len(decisions) - skipped
    counts += [f"{skipped} skipped", f"{idle} without a collective"]
    return f"{len(entries)} matmuls: {', '.join(counts)}."


def _waiting(entries: Sequence[Decision | Skip]) -> list[Skip]:
    """The skipped matmuls that have a collective."""
    return [e for e in entries if isinstance(e, Skip) and not e.idle]


def remaining_lines(remaining: Sequence[Remaining], *, verbose: bool) -> list[str]:
    """Write the table of the collectives that stay XLA's, largest first; many only if verbose."""
    if not remaining:
        return []
    shown = sorted(remaining, key=lambda r: -r.bytes_moved)
    if not verbose and len(remaining) > _REMAINING + 1:
        shown = shown[:_REMAINING]
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


def late_sums_lines(count: int) -> list[str]:
    """Say how many sums over the batch are added up behind the scans that stack them."""
    if not count:
        return []
    leave = "sums leave their scan" if count > 1 else "sum leaves its scan"
    return [f"  {count} {leave} as partial sums of each device, added up once behind it."]


def split_exchange_lines(parts: Sequence[int]) -> list[str]:
    """Say how many `shard_map`s exchange their columns in chunks.

    Args:
        parts: the chunks of each.
    """
    if not parts:
        return []
    send = "shard_maps send" if len(parts) > 1 else "shard_map sends"
    return [f"  {len(parts)} {send} what is exchanged in {parts[0]} chunks of its columns."]


def partitioning_lines(operations: Sequence[str]) -> list[str]:
    """Name the operations that partition themselves, and are not rewritten."""
    if not operations:
        return []
    return [f"  Not rewritten, as they partition themselves: {', '.join(operations)}."]


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
    """The matmuls with nothing to overlap, one line per reason."""
    by_reason: dict[str, list[Skip]] = {}
    for skip in entries:
        if isinstance(skip, Skip) and skip.idle:
            by_reason.setdefault(skip.reason, []).append(skip)
    return [
        f"  {reason}: " + ", ".join(f"{s.site} ({s.source})" for s in group)
        for reason, group in by_reason.items()
    ]
