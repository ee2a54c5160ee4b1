"""Read a trace in Chrome's format, as ui.perfetto.dev opens it: of jax.profiler, or of PyTorch.

The format: "Trace Event Format" (Google, 2016); times in microseconds. jax.profiler names a GPU's
process "/device:GPU:3" and its threads as the streams in an xplane.pb; PyTorch's profiler marks
kernels and copies by their category, and gives device and stream as arguments.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

from jaxoverlap.profiling.formats.events import NO_DURATION, Device, DeviceEvent, Recording
from jaxoverlap.profiling.formats.xplane import REPEATS, STREAM, gpu_event

_GPU = re.compile(r"/device:GPU:(\d+)")
_COPY = re.compile(r"Memcpy ([HDP])to([HDP])")
_TORCH = ("kernel", "gpu_memcpy", "gpu_memset")
_MARK = "ProfilerStep#"
_NOT_ONE = (
    'expected JSON with "traceEvents" (.trace.json or .trace.json.gz), as jax.profiler and '
    "PyTorch's profiler write it"
)

_Raw = dict[str, Any]
_Found = tuple[int, DeviceEvent]  # a GPU's number, what it ran


def read(path: Path) -> Recording:
    """Read one process's trace.

    Raises:
        ValueError: if the file is empty, truncated or no such trace, or has no event of a GPU.
    """
    content = _content(path)
    raw = content.get("traceEvents") if isinstance(content, dict) else content
    if not isinstance(raw, list) or not all(isinstance(event, dict) for event in raw):
        raise ValueError(f"{path} is no trace: {_NOT_ONE}")
    complete = [e for e in raw if e.get("ph") == "X" and "ts" in e and "dur" in e]
    first_us = min((e["ts"] for e in complete), default=0)
    for event in complete:  # microseconds since 1970 have no room for fractions
        event["ts"] -= first_us
    ignored: Counter[str] = Counter()
    torch = any(event.get("cat") in _TORCH for event in complete)
    found = list(_torch(complete) if torch else _jax(raw, complete, ignored))
    ignored[NO_DURATION] = sum(1 for _, e in found if e.end_ns <= e.start_ns)
    devices: dict[int, list[DeviceEvent]] = {number: [] for number, _ in found}
    for number, event in found:
        if event.end_ns > event.start_ns:
            devices[number].append(event)
    if not any(devices.values()):
        raise ValueError(f"{path} {_nothing(complete)}")
    base_ns = content.get("baseTimeNanoseconds", 0) if isinstance(content, dict) else 0
    return Recording(
        source=str(path),
        platform="GPU",
        devices=tuple(
            Device(f"GPU {n}", "", tuple(sorted(devices[n], key=lambda e: e.start_ns)))
            for n in sorted(devices)
        ),
        marks=tuple(_marks(complete)),
        ignored=+ignored,
        start_ns=int(base_ns + 1000 * Fraction(first_us)) if torch else None,
    )


def _content(path: Path) -> Any:
    data = path.read_bytes()
    if not data:
        raise ValueError(f"{path} is empty: {_NOT_ONE}")
    try:
        return json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is no JSON, or is cut short ({error}): {_NOT_ONE}") from error


def _nothing(complete: list[_Raw]) -> str:
    if any("device_ordinal" in e.get("args", {}) for e in complete):
        return (
            "is of CPU devices, whose thunks' ends this format does not tie to their starts: read "
            "the xplane.pb in the same folder"
        )
    return (
        f"has no event of a GPU among {len(complete)} events: profile while a compiled step runs, "
        "and wait for it (jax.block_until_ready) before the profile ends"
    )


def _named_times(event: _Raw) -> tuple[str, float, float]:
    """Return an event's name, its start in ns, and how many ns it took."""
    return str(event.get("name", "")), event["ts"] * 1e3, event["dur"] * 1e3


# -- PyTorch --------------------------------------------------------------------------------------


def _torch(complete: list[_Raw]) -> Iterator[_Found]:
    for event in complete:
        if event.get("cat") in _TORCH:
            args = event.get("args", {})
            name, start_ns, duration_ns = _named_times(event)
            match = _COPY.search(name)
            copied = "Memcpy{}2{}".format(*match.groups()) if match else ""
            stream = f"Stream #{args.get('stream', event.get('tid'))}"
            ran = DeviceEvent(stream, name, start_ns, start_ns + duration_ns, detail=copied)
            yield int(args.get("device", 0)), ran


def _marks(complete: list[_Raw]) -> list[float]:
    """Return when the profiler's steps begin on the GPU, in ns.

    Each stream may have a mark of its own, and a mark ends with the last kernel that no inner mark
    has, often long before the step does.
    """
    first: dict[str, float] = {}
    for e in complete:
        name = str(e.get("name", ""))
        if e.get("cat") == "gpu_user_annotation" and name.startswith(_MARK):
            first[name] = min(e["ts"] * 1e3, first.get(name, e["ts"] * 1e3))
    return sorted(first.values())


# -- JAX ------------------------------------------------------------------------------------------


def _jax(raw: list[_Raw], complete: list[_Raw], ignored: Counter[str]) -> Iterator[_Found]:
    gpus: dict[Any, int] = {}
    lines: dict[tuple[Any, Any], str] = {}
    for event in raw:
        name = str(event.get("args", {}).get("name", "")) if event.get("ph") == "M" else ""
        if event.get("name") == "process_name" and (match := _GPU.match(name)):
            gpus[event.get("pid")] = int(match.group(1))
        elif event.get("name") == "thread_name":
            lines[event.get("pid"), event.get("tid")] = name
    for event in complete:
        if (number := gpus.get(event.get("pid"))) is None:
            continue
        line = lines.get((event.get("pid"), event.get("tid")), "")
        if stream := STREAM.match(line):
            yield number, gpu_event(stream.group(), *_named_times(event), event.get("args", {}))
        elif line not in REPEATS:
            ignored[line or "a line without a name"] += 1
