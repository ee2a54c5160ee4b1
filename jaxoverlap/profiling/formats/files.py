"""Find a profile's files, read them, and join those of several processes on the host's clock."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from jaxoverlap.profiling.formats import chrome, xplane
from jaxoverlap.profiling.formats.events import Device, DeviceEvent, Recording

_XPLANE, _CHROME = (".xplane.pb",), (".trace.json.gz", ".trace.json", ".json.gz", ".json")
_PROGRAMS = 1 << 40  # more than a process numbers
_NUMBERS = re.compile(r"(\d+)")


def recorded(path: Path) -> Recording:
    """Read a profile: a file, or a folder with the files of one profile in it, at any depth.

    A folder is one profile, of one process or of several that recorded at the same time. Its
    xplane.pb files are read or, if it has none, its Chrome traces. Processes count up in the order
    of the files' names, numbers in them as numbers.

    Raises:
        ValueError: if there is no file that this reads, a file is no profile, or a folder has
            profiles of different times.
    """
    if not path.exists():
        raise ValueError(f"{path}: there is no such file or folder")
    return _joined(path, [_read(file) for file in _files(path)])


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    every = sorted((f for f in path.rglob("*") if f.is_file()), key=_natural)
    for endings in (_XPLANE, _CHROME[:2]):
        if files := [f for f in every if f.name.endswith(endings)]:
            return files
    raise ValueError(
        f"{path} has no *{_XPLANE[0]} and no *{_CHROME[0]} in it: expected the folder that "
        "jax.profiler.trace(FOLDER) was given"
    )


def _natural(path: Path) -> list[tuple[int, str]]:
    return [(int(p), "") if p.isdecimal() else (-1, p) for p in _NUMBERS.split(str(path))]


def _read(path: Path) -> Recording:
    if path.name.endswith(_XPLANE) or path.suffix == ".pb":
        return xplane.read(path)
    if path.name.endswith(_CHROME):
        return chrome.read(path)
    raise ValueError(f"{path}: expected a file *{_XPLANE[0]}, *{_CHROME[0]} or *{_CHROME[3]}")


# -- several processes ----------------------------------------------------------------------------


def _joined(path: Path, parts: Sequence[Recording]) -> Recording:
    if len(parts) == 1:
        return parts[0]
    if timeless := [part.source for part in parts if part.start_ns is None]:
        raise ValueError(
            f"{path} has {len(parts)} profiles, and {timeless[0]} does not say when it began: name "
            "one of the files"
        )
    if len({part.platform for part in parts}) > 1:
        raise ValueError(f"{path} has profiles of GPUs and of CPU devices: name one of the files")
    first_ns = min(part.start_ns or 0 for part in parts)
    shifted = [_part(part, (part.start_ns or 0) - first_ns, n) for n, part in enumerate(parts)]
    _check_times(path, shifted)
    ignored: Counter[str] = Counter()
    for part in parts:
        ignored.update(part.ignored)
    return Recording(
        source=str(path),
        platform=parts[0].platform,
        devices=tuple(device for part in shifted for device in part.devices),
        modules={key: text for part in shifted for key, text in part.modules.items()},
        marks=shifted[0].marks,
        ignored=ignored,
        start_ns=first_ns,
    )


def _part(part: Recording, later_ns: float, process: int) -> Recording:
    """Return a process's part on the common clock, its names and numbers made unique."""

    def program(number: int) -> int:
        return number if number < 0 else process * _PROGRAMS + number

    def moved(e: DeviceEvent) -> DeviceEvent:
        start_ns, end_ns = e.start_ns + later_ns, e.end_ns + later_ns
        return replace(e, start_ns=start_ns, end_ns=end_ns, program=program(e.program))

    devices = (
        Device(f"process {process} {d.name}", d.kind, tuple(map(moved, d.events)))
        for d in part.devices
    )
    return replace(
        part,
        devices=tuple(devices),
        modules={(name, program(number)): text for (name, number), text in part.modules.items()},
        marks=tuple(start + later_ns for start in part.marks),
    )


def _check_times(path: Path, parts: Sequence[Recording]) -> None:
    """Refuse parts that did not record at the same time."""
    spans = [
        (min(d.events[0].start_ns for d in p.devices), max(d.events[-1].end_ns for d in p.devices))
        for p in parts
    ]
    if max(start for start, _ in spans) > min(end for _, end in spans):
        listed = "\n  ".join(part.source for part in parts)
        raise ValueError(
            f"{path} has profiles of different times, or hosts whose clocks differ by more than a "
            f"profile lasts; name the folder or file of one:\n  {listed}"
        )
