"""Define what a profile holds, whatever file it came from: devices, their events, HLO modules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class DeviceEvent:
    """An interval in which a device worked: a kernel, a copy, a thunk of a CPU device.

    Attributes:
        stream: the device's queue that ran it.
        name: the kernel's name, as the profiler gives it.
        start_ns, end_ns: host clock, from the profile's start.
        op: the HLO instruction that launched it; empty if the profile does not say.
        module: the HLO module's name; program: the number of its executable, -1 if unknown.
        op_name: the path of names above the JAX operation; empty if the profile does not say.
        run: the number of the execution that it belongs to, where the profiler numbers them.
        launch: the number of the launch of a CUDA graph that it is a node of; -1 if of none.
        detail: what the profiler says of a copy ("MemcpyP2P") or a graph ("CudaGraph").
    """

    stream: str
    name: str
    start_ns: float
    end_ns: float
    op: str = ""
    module: str = ""
    program: int = -1
    op_name: str = ""
    run: int = -1
    launch: int = -1
    detail: str = ""

    @property
    def seconds(self) -> float:
        """Return how long it took."""
        return (self.end_ns - self.start_ns) * 1e-9


# The copies that `detail` names, by CUPTI's names; PyTorch's and ROCm's are renamed to these.
COPY_P2P, COPY_D2D, COPY_H2D, COPY_D2H = "MemcpyP2P", "MemcpyD2D", "MemcpyH2D", "MemcpyD2H"
GRAPH = "CudaGraph"
NO_DURATION = "events without a duration"


@dataclass(frozen=True)
class Device:
    """One device of a profile.

    Attributes:
        name: as in "GPU 3" or, of several files, "host1 GPU 3".
        kind: the model's name, as in "NVIDIA H100 80GB HBM3"; empty if the profile does not say.
        events: by start.
    """

    name: str
    kind: str
    events: tuple[DeviceEvent, ...]


@dataclass(frozen=True)
class Recording:
    """The recording of a profiler, of one process or of several.

    Attributes:
        source: the file or folder, for messages.
        platform: "GPU" or "CPU".
        devices: in the order of their numbers, process by process.
        modules: texts of scheduled HLO modules by (name, program), as the profile carries them.
        marks: when the steps begin that the profiler marked, in ns.
        ignored: events that are no work of a device, by what they are, with their number.
        start_ns: the host's clock (ns since 1970) at the profile's start; None if unknown.
    """

    source: str
    platform: str
    devices: tuple[Device, ...]
    modules: Mapping[tuple[str, int], str] = field(default_factory=dict)
    marks: tuple[float, ...] = ()
    ignored: Mapping[str, int] = field(default_factory=Counter)
    start_ns: int | None = None
