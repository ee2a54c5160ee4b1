"""Classify the events of a device: by the HLO instruction that launched them, or by their names.

The HLO comes with the profile, so a kernel of XLA's is known by what the instruction does, whatever
library ran it. Names decide for what no instruction is known of: NCCL's kernels (`ncclDevKernel_*`,
`ncclSymkDevKernel_*`), DeepEP's, copies, and the kernels of programs that are not XLA's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from jaxoverlap.cost.kernels import FREE, KernelWork
from jaxoverlap.plan.collectives import OPCODES, PERMUTE
from jaxoverlap.profiling.formats.events import COPY_D2H, COPY_H2D, COPY_P2P, GRAPH, DeviceEvent
from jaxoverlap.simulation import hlo
from jaxoverlap.simulation.audit import collectives, ring_of
from jaxoverlap.simulation.device_groups import parties
from jaxoverlap.simulation.hlo_work import work
from jaxoverlap.simulation.host_copies import FROM_HOST, TO_HOST, host_copies
from jaxoverlap.simulation.schedule import Collective

Kind = Literal["matmul", "attention", "memory", "collective", "graph", "unknown", "container"]

_CONTAINERS = ("while", "call", "conditional", "async-start")
_WAITS = ("-done", "-update")
_ATTENTION = re.compile(r"fmha|flash|attention|(?<![a-z])attn", re.IGNORECASE)
_MATMUL = re.compile(
    r"gemm|cutlass|cublas|nvjet|Cijk_|matmul|_dot(?![a-z])|conv\d?d|convolve|[dw]grad|fprop|im\dd?2col"
    r"|bmm_",
    re.IGNORECASE,
)
_MEMORY = re.compile(
    r"fusion|elementwise|reduce|copy|cast|convert|transpose|norm|softmax|scatter|gather|index|fill"
    r"|memset|memcpy|triton_(?:poi|red|per)_|concatenate|broadcast|select|slice|sort|topk|rotary"
    r"|swiglu|wrapped_|CatArray|quant|max_pool|TensorOp",
    re.IGNORECASE,
)
_NCCL = re.compile(r"(?:nccl|rccl)\w*Kernel\w*?_([A-Z]\w+)|^(?:nccl|rccl)\w*Kernel")
_NCCL_KINDS = {
    "AllGather": "all-gather",
    "AllReduce": "all-reduce",
    "ReduceScatter": "reduce-scatter",
    "SendRecv": "send and receive",
    "AllToAll": "all-to-all",
    "AlltoAll": "all-to-all",
    "Broadcast": "collective-broadcast",
}
_EXPERTS = re.compile(r"(?<![A-Za-z0-9])ep::(?:internode|intranode)\w*::")  # DeepEP's
_PEERS = re.compile(r"nvshmem|multimem_all|(?:one|two)_?shot_?all_?reduce", re.IGNORECASE)


@dataclass(frozen=True)
class Label:
    """What an event is.

    Attributes:
        kind: "container" for what only wraps other events, as a loop does.
        op: the HLO instruction or, without one, the kernel's name.
        source: the "folder/file.py:line" that it came from; empty if unknown.
        op_name: the path of names above the JAX operation.
        work: the work of the instruction on a device.
        collective: the collective; bytes and devices are 0 where no HLO says them.
        entry: whether it is in the module's entry computation, so that a step runs it once.
    """

    kind: Kind
    op: str
    source: str = ""
    op_name: str = ""
    work: KernelWork = FREE
    collective: Collective | None = None
    entry: bool = False


class Classifier:
    """Labels the events of a profile; each kind of event is classified once.

    Args:
        texts: scheduled HLO modules by name and program.
        num_devices: how many the profile shows; the module's own number where it is larger.
        nested: whether events wrap others, as a loop's thunk does on a CPU device. All that a GPU
            runs is work of its own, also what a loop launches.
    """

    def __init__(
        self, texts: Mapping[tuple[str, int], str], num_devices: int, *, nested: bool = False
    ):
        self._texts, self._num_devices, self._nested = texts, num_devices, nested
        self._modules: dict[tuple[str, int], _Module | None] = {}
        self._known: dict[tuple[str, ...], Label] = {}

    def label(self, event: DeviceEvent) -> Label:
        """Return what an event is."""
        key = (event.module, str(event.program), event.op, event.name, event.detail)
        if key not in self._known:
            self._known[key] = self._label(event)
        return self._known[key]

    def module(self, name: str, program: int) -> hlo.Module | None:
        """Return a module of the profile; None if it does not carry it."""
        found = self._module(name, program)
        return found and found.module

    def text(self, name: str, program: int) -> str | None:
        """Return a module's text; None if the profile does not carry it."""
        found = self._module(name, program)
        return found and found.text

    def _label(self, event: DeviceEvent) -> Label:
        module = self._module(event.module, event.program) if event.op else None
        by_name = _by_name(event, self._nested)
        by_hlo = module.label(event.op, self._nested) if module else None
        if by_hlo is None:
            return by_name
        if by_hlo.kind == "unknown" and by_name.kind != "unknown":  # a custom call: ask its kernels
            return replace(by_hlo, kind=by_name.kind, collective=by_name.collective)
        if by_name.kind == "collective" and by_hlo.kind != "collective":  # NCCL, in a custom call
            return replace(by_hlo, kind="collective", collective=by_name.collective)
        return replace(by_hlo, op_name=by_hlo.op_name or event.op_name)

    def _module(self, name: str, program: int) -> _Module | None:
        key = (name, program)
        if key not in self._modules:
            text = self._texts.get(key)
            if text is None:  # the profiler did not number it: the only one of that name
                same = [t for (n, p), t in self._texts.items() if n == name and -1 in (p, program)]
                text = same[0] if len(same) == 1 else None
            self._modules[key] = _Module(text, self._num_devices) if text else None
        return self._modules[key]


class _Module:
    """A scheduled module, and what its instructions are."""

    def __init__(self, text: str, num_devices: int):
        module, self.text = hlo.parse(text), text
        most = max(module.num_devices, num_devices, _devices_of(module))
        self.module = replace(module, num_devices=most)
        moved = (*collectives(self.module), *host_copies(self.module))
        self._collectives = {c.name: c for c in moved}
        self._place = {
            i.name: (computation, i)
            for computation, body in self.module.computations.items()
            for i in body
        }

    def label(self, op: str, nested: bool) -> Label | None:
        """Return what an instruction is; None if the module lacks it."""
        if op not in self._place:
            return None
        computation, i = self._place[op]
        source, entry = self.module.source(i), computation == self.module.entry
        if moved := self._collectives.get(op):
            return Label("collective", op, moved.source, moved.op_name, FREE, moved, entry)
        if nested and (i.opcode in _CONTAINERS or i.opcode.endswith(_WAITS)):
            return Label("container", op, source, i.op_name, entry=entry)
        shapes = {one.name: one.shape for one in self.module.computations[computation]}
        asked = work(self.module, i, shapes)
        return Label(_kind(asked), op, source, i.op_name, asked, entry=entry)


def _kind(asked: KernelWork) -> Kind:
    if asked.attention:
        return "attention"
    if asked.matmuls:
        return "matmul"
    return "unknown" if asked.unknown else "memory"


# -- by name --------------------------------------------------------------------------------------


def _by_name(event: DeviceEvent, nested: bool) -> Label:
    """Classify an event without its module."""
    op = event.op or event.name
    if moved := _moved(event):
        collective = Collective(
            name=op,
            computation=event.module,
            kind=moved,
            bytes_moved=0,
            group_size=0,
            runs=1,
            source="",
            ring=ring_of(event.op_name) if moved == PERMUTE else None,
            asynchronous=True,
            matmuls=(),
            op_name=event.op_name,
        )
        return Label("collective", op, "", event.op_name, collective=collective)
    base = re.sub(r"(?:\.clone|[.\d])+$", "", event.op)
    if nested and (base in _CONTAINERS or base.endswith(_WAITS)):
        return Label("container", op, op_name=event.op_name)
    if event.detail == GRAPH:
        return Label("graph", op, op_name=event.op_name)
    kind = "memory" if event.detail else named(event)  # what else is detailed are copies
    asked = KernelWork(unknown=event.name) if kind == "unknown" else FREE
    return Label(kind, op, op_name=event.op_name, work=asked)


def named(event: DeviceEvent) -> Kind:
    """Classify a kernel by its name, its instruction's and its JAX operation's."""
    names = f"{event.name} {event.op} {event.op_name.rpartition('/')[2]}"
    if _ATTENTION.search(names):
        return "attention"
    if _MATMUL.search(names):
        return "matmul"
    return "memory" if _MEMORY.search(names) else "unknown"


def _moved(event: DeviceEvent) -> str:
    """Return the kind of collective that an event is; empty if it moves nothing off the device."""
    base = re.sub(r"(?:\.clone|[.\d])+$", "", event.op).removesuffix("-start")
    if base in OPCODES:
        return base
    if match := _NCCL.search(event.name):
        named = match.group(1) or ""
        kinds = (kind for name, kind in _NCCL_KINDS.items() if named.startswith(name))
        return next(kinds, "NCCL")
    if _EXPERTS.search(event.name):
        return "all-to-all"
    if _PEERS.search(event.name):
        return "peer kernel"
    copies = {COPY_P2P: PERMUTE, COPY_H2D: FROM_HOST, COPY_D2H: TO_HOST}
    return copies.get(event.detail, "")


def _devices_of(module: hlo.Module) -> int:
    """Return how many devices a module's groups name: the text in a profile has no number."""
    groups = {c.groups for c in collectives(module) if c.groups}
    named = (d for g in groups for group in parties(g, module.num_devices) for d in group)
    return max(named, default=0) + 1
