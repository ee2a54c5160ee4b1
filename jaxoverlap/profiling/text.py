"""Print a profile: its step in a line, tables, and what it could not see."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from jaxoverlap._util.text import human_bytes, table
from jaxoverlap.simulation import report

if TYPE_CHECKING:
    from jaxoverlap.profiling.profile import Profile, Row

_SHOWN = 10  # rows of a table
_NAME = 44  # letters of a name
_WORTH = 0.001  # of a step: what others wait less for is not worth a line
_GRAPHS = "XLA_FLAGS=--xla_gpu_enable_command_buffer= (nothing after the =)"


def name(profile: Profile) -> str:
    """Return what was measured, in a few words."""
    kind = f" ({profile.kind})" if profile.kind else ""
    count = len(profile.devices)
    devices = f"{count} {profile.platform}{'s' * (count > 1)}{kind}"
    return f"{profile.program or profile.source} on {devices}"


def render(profile: Profile) -> str:
    """Return a profile as text."""
    parts = [_headline(profile), *_which(profile), *_predicted(profile)]
    if profile.rows:
        parts.append(_collectives(profile))
    if profile.lines:
        parts.append(_lines(profile))
    if profile.platform == "GPU":
        parts.append(_streams(profile))
    return "\n".join([*parts, *_stragglers(profile), *_notes(profile)])


def _headline(profile: Profile) -> str:
    s = profile.sums
    hidden = f" ({s.hidden:.0%} hidden)" if s.communication_s else ""
    return (
        f"{name(profile)}: step {_ms(s.step_s)} ms = compute {_ms(s.compute_s)} + exposed "
        f"{_ms(s.exposed_s)} + idle {_ms(s.idle_s)}; communication {_ms(s.communication_s)}, of "
        f"which {_ms(s.overlapped_s)} under compute{hidden}"
    )


def _which(profile: Profile) -> Iterator[str]:
    steps = profile.steps_s
    if len(steps) > 1:
        yield (
            f"step {profile.chosen + 1} of {len(steps)}, the median of {_ms(min(steps))} to "
            f"{_ms(max(steps))} ms; means over devices"
        )
    elif not profile.program:
        yield "no event names a program, so that the whole profile, or its one mark, is the step"


def _predicted(profile: Profile) -> Iterator[str]:
    if profile.simulation is None:
        return
    yield report.headline(f"simulated on {profile.simulation.cluster}", profile.simulation)
    rows = [
        (r.kind, str(r.instructions), _ms(r.measured_s), _ms(r.predicted_s), f"{r.ratio:.2f}")
        for r in profile.ratios
    ]
    columns = ("kind", "instructions", "measured ms", "predicted ms", "ratio")
    yield table("measured / predicted", columns, rows, right=columns[1:])


# -- tables ---------------------------------------------------------------------------------------


def _collectives(profile: Profile) -> str:
    columns = ["collective", "ring", "source", "devices", "runs", "bytes", "ms", "exposed ms"]
    columns += ["waited ms"]
    if profile.simulation:
        columns += ["predicted ms", "predicted exposed"]
    right = columns[3:]
    rows = [
        (*_row(profile, row), ", ".join(map(_short, row.overlapped_with)))
        for row in profile.rows[:_SHOWN]
    ]
    more = len(profile.rows) - len(rows)
    title = "longest exposed" + (f" ({more} more)" if more else "")
    return table(title, [*columns, "under"], rows, right=right)


def _row(profile: Profile, row: Row) -> tuple[str, ...]:
    given = (
        row.kind,
        row.ring,
        _short(row.source),
        str(row.devices or ""),
        f"{row.runs:g}",
        human_bytes(row.bytes_moved) if row.bytes_moved else "",
        _ms(row.seconds),
        _ms(row.exposed_s),
        _ms(row.waited_s),
    )
    if profile.simulation is None:
        return given
    return (*given, _or_none(row.predicted_s), _or_none(row.predicted_exposed_s))


def _short(name: str) -> str:
    """Shorten a kernel's name, which may have hundreds of letters of template arguments."""
    plain = name.removeprefix("void ")
    return plain if len(plain) <= _NAME else f"{plain[:_NAME]}..."


def _or_none(seconds: float | None) -> str:
    return "" if seconds is None else _ms(seconds)


def _lines(profile: Profile) -> str:
    longest = sorted(profile.lines, key=lambda r: -(r.exposed_s + r.compute_s))[:_SHOWN]
    rows = [(r.source, _ms(r.compute_s), _ms(r.communication_s), _ms(r.exposed_s)) for r in longest]
    columns = ("source", "compute ms", "communication ms", "exposed ms")
    return table("by source line", columns, rows, right=columns[1:])


def _streams(profile: Profile) -> str:
    rows = [(r.stream, str(r.events), _ms(r.busy_s)) for r in profile.streams]
    columns = ("stream", "events", "busy ms")
    return table(f"streams of {profile.streams[0].device}", columns, rows, right=columns[1:])


def listed(profile: Profile) -> str:
    """List each collective of the device that the pictures show, by start."""
    columns = ("start ms", "ms", "exposed ms", "waited ms", "collective", "instruction", "ring")
    rows = [
        (
            *map(_ms, (run.start_s, run.seconds, run.exposed_s, run.waited_s)),
            run.collective.kind,
            _short(run.collective.name),
            run.collective.ring or "",
            run.stream,
            ", ".join(
                f"{_short(kernel)} {_ms(seconds)}" for kernel, seconds in run.overlapped_with
            ),
        )
        for run in profile.collectives
    ]
    title = f"collectives of {profile.streams[0].device}"
    return table(title, (*columns, "stream", "under, ms"), rows, right=columns[:4])


# -- notes ----------------------------------------------------------------------------------------


def _stragglers(profile: Profile) -> Iterator[str]:
    if not profile.stragglers:
        return
    slowest = profile.stragglers[0]
    if slowest.waited_for_s > _WORTH * profile.sums.step_s:
        times = f"{slowest.times} collective{'s' * (slowest.times != 1)}"
        yield (
            f"slowest: {slowest.device} came last to {times}, and the others waited "
            f"{_ms(slowest.waited_for_s)} ms for it"
        )
    if len(profile.devices) > 1 and profile.sums.communication_s:
        first, last = (
            max(profile.devices.items(), key=lambda d: sign * d[1].exposed_s) for sign in (-1, 1)
        )
        yield (
            f"exposed on the devices: {_ms(first[1].exposed_s)} ({first[0]}) to "
            f"{_ms(last[1].exposed_s)} ms ({last[0]})"
        )


def _notes(profile: Profile) -> Iterator[str]:
    if profile.graph_s:
        yield (
            f"{_ms(profile.graph_s)} ms are CUDA graphs, each one event: what runs inside, "
            f"collectives too, is not seen and counts as compute. To see it: {_GRAPHS}"
        )
    if profile.unknown:
        named = ", ".join(
            f"{_short(kernel)} ({_ms(s)} ms)" for kernel, s in profile.unknown.items()
        )
        yield f"not known, counted as compute: {named}"
    if profile.incomplete:
        yield f"incomplete runs, left out: {profile.incomplete}"
    if profile.absent:
        yield f"did not run it: {', '.join(profile.absent)}"
    if profile.ignored:
        named = ", ".join(f"{what} ({count})" for what, count in profile.ignored.items())
        yield f"no work of a device, left out: {named}"
    if profile.other_programs:
        longest = sorted(profile.other_programs.items(), key=lambda item: -item[1])[:_SHOWN]
        named = ", ".join(f"{program} ({_ms(s)} ms)" for program, s in longest)
        yield f"other programs, all devices and the whole profile: {named}"


def _ms(seconds: float) -> str:
    """Give milliseconds three digits or more."""
    ms = seconds * 1e3
    return f"{ms:.{1 if ms >= 10 else 2 if ms >= 1 else 3}f}"
