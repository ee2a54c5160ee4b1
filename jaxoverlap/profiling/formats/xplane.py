"""Read an xplane.pb, as `jax.profiler` writes it, by `jax.profiler.ProfileData`.

The names are those of XLA's profilers: GPUs from xla/backends/profiler/gpu (a plane for each GPU, a
line for each stream, "hlo_op" and "name" in a kernel's stats), planes and stats those of
xla/tsl/profiler/utils/xplane_schema.cc (both openxla/xla). CPU devices: `thunks`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jax.profiler import ProfileData

from jaxoverlap._jax.xla_schedule import module_text
from jaxoverlap.profiling.formats import wire
from jaxoverlap.profiling.formats.events import (
    COPY_D2D,
    COPY_D2H,
    COPY_H2D,
    GRAPH,
    NO_DURATION,
    Device,
    DeviceEvent,
    Recording,
)
from jaxoverlap.profiling.formats.thunks import cpu_devices

_GPU = re.compile(r"/device:GPU:(\d+)")
_OTHER_DEVICE = re.compile(r"/device:(?!GPU|CUSTOM)(\w+)")
_HOST, _TASK = "/host:CPU", "Task Environment"
STREAM = re.compile(r"Stream #\S+?(?=\(|$)")
# Stats of events that are no work on the device's time, though they stand on its streams.
_NO_WORK = ("MemoryResidency_details", "memalloc_details", "MemFree_details")
# Lines that repeat the streams' events, as tools add them to a profile.
_DERIVED = """
    Steps, XLA Modules, XLA Ops, Async XLA Ops, Framework Name Scope, Framework Ops, Source code,
    Launch Stats, Host Offload Ops, XLA TraceMe
"""
REPEATS = frozenset(name.strip() for name in _DERIVED.split(","))
_COPIES = {  # ROCm's names
    "CopyDeviceToDevice": COPY_D2D,
    "CopyHostToDevice": COPY_H2D,
    "CopyDeviceToHost": COPY_D2H,
}
_NOT_ONE = "expected an xplane.pb as jax.profiler.trace(FOLDER) writes it"


def read(path: Path) -> Recording:
    """Read one process's profile.

    Raises:
        ValueError: if the file is empty, truncated, no profile, or has no GPU or CPU device in it.
    """
    serialized = path.read_bytes()
    if not serialized:
        raise ValueError(f"{path} is empty: {_NOT_ONE}")
    try:
        profile = ProfileData.from_serialized_xspace(serialized)
    except RuntimeError as error:
        raise ValueError(
            f"{path} is no xplane.pb, or is cut short ({error}): {_NOT_ONE}"
        ) from error
    planes = {plane.name: plane for plane in profile.planes}
    ignored: Counter[str] = Counter()
    devices = tuple(_gpus(planes, ignored))
    platform = "GPU" if devices else "CPU"
    if not devices:
        devices = tuple(cpu_devices(planes[_HOST].lines)) if _HOST in planes else ()
    if not any(device.events for device in devices):
        raise ValueError(f"{path} {_nothing(planes)}")
    task = dict(planes[_TASK].stats) if _TASK in planes else {}
    modules = {(name, n): module_text(m) for name, n, m in wire.hlo_modules(serialized)}
    return Recording(
        source=str(path),
        platform=platform,
        devices=devices,
        modules=modules,
        ignored=ignored,
        start_ns=task.get("profile_start_time"),
    )


def _nothing(planes: dict[str, Any]) -> str:
    for name in planes:
        if match := _OTHER_DEVICE.match(name):
            return f"is a profile of {match.group(1)}s: this reads those of GPUs and of XLA:CPU"
    named = ", ".join(planes) or "none"
    return (
        f"has no event of a device (planes: {named}): profile while a compiled step runs, and wait "
        "for it (jax.block_until_ready) before the profile ends"
    )


# -- GPUs -----------------------------------------------------------------------------------------


def _gpus(planes: dict[str, Any], ignored: Counter[str]) -> Iterator[Device]:
    """Yield the GPUs that ran something, in the order of their numbers."""
    numbered = sorted((int(m.group(1)), p) for n, p in planes.items() if (m := _GPU.fullmatch(n)))
    for number, plane in numbered:
        events = sorted(_gpu_events(plane, ignored), key=lambda e: e.start_ns)
        if events:
            stats = dict(plane.stats)
            kind = stats.get("gpu_device_name") or stats.get("device_vendor") or ""
            yield Device(f"GPU {number}", str(kind), tuple(events))


def _gpu_events(plane: Any, ignored: Counter[str]) -> Iterator[DeviceEvent]:
    for line in plane.lines:
        stream = STREAM.match(line.name)
        if stream is None:
            if line.name not in REPEATS:
                ignored[line.name or "a line without a name"] += sum(1 for _ in line.events)
            continue
        for event in line.events:
            stats = dict(event.stats)
            if no_work := next((s for s in _NO_WORK if s in stats), None):
                ignored[no_work.removesuffix("_details")] += 1
            elif event.duration_ns > 0:
                times = (event.start_ns, event.duration_ns)
                yield gpu_event(stream.group(), event.name, *times, stats)
            else:
                ignored[NO_DURATION] += 1


def gpu_event(
    stream: str, name: str, start_ns: float, duration_ns: float, stats: Mapping[str, Any]
) -> DeviceEvent:
    """Return what a GPU ran, by the names that XLA's profiler gives to a kernel's stats."""
    return DeviceEvent(
        stream=stream,
        name=name,
        start_ns=start_ns,
        end_ns=start_ns + duration_ns,
        op=str(stats.get("hlo_op", "")),
        module=str(stats.get("hlo_module", "")),
        program=int(stats.get("program_id", -1)),
        op_name=str(stats.get("name", "")),
        launch=int(stats.get("correlation_id", -1)) if "cuda_graph_node_id" in stats else -1,
        detail=_detail(name, stats),
    )


def _detail(name: str, stats: Mapping[str, Any]) -> str:
    """Return what kind of copy or graph a GPU's event is; empty for a kernel."""
    if "memcpy_details" in stats:
        return _COPIES.get(name, name)
    return GRAPH if "cuda_graph_exec_id" in stats or name.startswith("CudaGraphExec") else ""
