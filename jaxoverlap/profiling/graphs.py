"""Find the instructions of kernels that ran in CUDA graphs.

XLA records most of a step in CUDA graphs (its command buffers). If CUPTI traces their nodes, each
kernel is an event, but XLA's profiler writes the graph in the place of the instruction:

    loop_add_fusion_3   hlo_op=command_buffer_9
    nvjet_sm90_tst_...  hlo_op=command_buffer_9

->  loop_add_fusion_3   hlo_op=loop_add_fusion.3
    nvjet_sm90_tst_...  hlo_op=custom-call.53

A kernel that XLA made has its instruction's name. Those of libraries are matched by order: between
two kernels of XLA's, the matmuls of the schedule and the matmuls that ran, where there are as many
(or each has as many kernels); attention likewise. What fits no instruction stays as it is.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from jaxoverlap.profiling.formats.events import Device, DeviceEvent, Recording
from jaxoverlap.profiling.kinds import Classifier, named
from jaxoverlap.simulation import hlo

_LIBRARIES = ("matmul", "attention")
_SETS = "Memset"  # cuBLAS's and cuDNN's, before their kernels

Place = tuple[str, int]
"""A computation, and the index of an instruction in its schedule."""


def with_instructions(recording: Recording, classifier: Classifier) -> Recording:
    """Name the instructions of a recording's kernels in CUDA graphs, where one is found."""
    if not any(event.launch >= 0 for device in recording.devices for event in device.events):
        return recording
    schedules: dict[tuple[str, int], _Schedule | None] = {}

    def schedule(event: DeviceEvent) -> _Schedule | None:
        key = event.module, event.program
        if key not in schedules:
            module = classifier.module(*key)
            schedules[key] = _Schedule(module, classifier, *key) if module else None
        return schedules[key]

    devices = []
    for device in recording.devices:
        launches: dict[tuple[str, int, int], list[int]] = defaultdict(list)
        for n, event in enumerate(device.events):
            if event.launch >= 0:
                launches[event.op, event.program, event.launch].append(n)
        events = list(device.events)
        for numbers in launches.values():
            ran = [events[n] for n in numbers]
            if found := schedule(ran[0]):
                for n, op in found.ops(ran).items():
                    events[numbers[n]] = replace(ran[n], op=op)
        devices.append(Device(device.name, device.kind, tuple(events)))
    return replace(recording, devices=tuple(devices))


class _Schedule:
    """The instructions of a module, by the names of their kernels and by what they do."""

    def __init__(self, module: hlo.Module, classifier: Classifier, name: str, program: int):
        self.module = module
        self.by_kernel: dict[str, Place] = {}
        self.of_libraries: dict[str, list[tuple[int, str, str]]] = defaultdict(list)
        for computation, body in module.computations.items():
            for index, i in enumerate(body):
                self.by_kernel.setdefault(re.sub(r"[^\w]", "_", i.name), (computation, index))
                if i.opcode == "custom-call":
                    kind = classifier.label(
                        DeviceEvent("", "", 0, 0, op=i.name, module=name, program=program)
                    ).kind
                    self.of_libraries[computation].append((index, kind, i.name))

    def ops(self, ran: Sequence[DeviceEvent]) -> Mapping[int, str]:
        """Return the instruction of each kernel of one launch of a graph, where one is found."""
        found: dict[int, str] = {}
        known = {n: place for n, e in enumerate(ran) if (place := self.by_kernel.get(e.name))}
        for n, (computation, index) in known.items():
            found[n] = self.module.computations[computation][index].name
        for kernels, computation, instructions in self._gaps(len(ran), known):
            for kind in _LIBRARIES:
                wanted = [
                    name
                    for index, of, name in self.of_libraries[computation]
                    if index in instructions and of == kind
                ]
                mine = [n for n in kernels if n not in known and named(ran[n]) == kind]
                if wanted and len(mine) % len(wanted) == 0:
                    each = len(mine) // len(wanted)
                    found |= {n: wanted[place // each] for place, n in enumerate(mine)}
        for n in reversed(range(len(ran) - 1)):
            if ran[n].name.startswith(_SETS) and n + 1 in found and n + 1 not in known:
                found[n] = found[n + 1]
        return found

    def _gaps(self, kernels: int, known: Mapping[int, Place]) -> Iterator[tuple[range, str, range]]:
        """Yield the kernels between two known ones, and the instructions between those two.

        Equal fusions share one kernel, which has the first one's name: a known kernel counts if it
        comes later in the schedule than the one before it.
        """
        if not known:
            return
        computation = next(iter(known.values()))[0]
        kernel, instruction = -1, -1
        for n, (where, index) in known.items():
            if where == computation and index > instruction:
                yield range(kernel + 1, n), computation, range(instruction + 1, index)
                kernel, instruction = n, index
        last = len(self.module.computations[computation])
        yield range(kernel + 1, kernels), computation, range(instruction + 1, last)
