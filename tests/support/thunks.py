"""Read what XLA:GPU launches, in order and on which stream, from what `--xla_dump_to` writes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

DUMP = {"xla_dump_hlo_as_text": "True"}  # beside "xla_dump_to"
BEFORE, AFTER = "thunk_sequence", "thunk_sequence_after_thunk_passes"
_LINE = re.compile(r"^(\s*)(\d+): (k\w+)\s.*?(?:stream=(\w+)\[(\d+)\])?(?:, )?(?:async_id=(\d+))?$")
_COLLECTIVES = (
    *("kAllGather", "kAllReduce", "kAllToAll", "kReduceScatter", "kCollectivePermute"),
    *("kRaggedAllToAll", "kCollectiveBroadcast"),
)


class Launch(NamedTuple):
    """A collective that is launched, or waited for.

    Attributes:
        what: "start", "done", or "whole" for a synchronous one.
        name: the instruction; of a done, that of its start.
        stream: the number of its communication stream; None for the stream of the kernels.
        captured: whether a command buffer (a CUDA graph) has it.
    """

    what: str
    name: str
    stream: int | None
    captured: bool


def launches(folder: Path, step: str, which: str = BEFORE) -> list[Launch]:
    """List the collectives of a step as XLA launches them, bodies of loops where the loops are."""
    name_of = _names(_file(folder, step, "thunk_metadata"))
    found, starts = list[Launch](), dict[str, Launch]()
    inside: int | None = None  # the indent of an asynchronous start whose body is being read
    graph: int | None = None  # the indent of a command buffer whose body is being read
    for line in _file(folder, step, which).splitlines():
        if not (match := _LINE.match(line)):
            continue
        indent, number, kind = len(match[1]), int(match[2]), match[3]
        if inside is not None and indent > inside:
            continue
        inside = None
        graph = graph if graph is not None and indent > graph else None
        captured = graph is not None
        if kind == "kCommandBuffer":
            graph = indent
        elif kind == "kAsyncStart":
            inside = indent
            if match[4] == "communication_stream":
                launch = Launch("start", name_of[number], int(match[5]), captured)
                starts[match[6]] = launch
                found.append(launch)
        elif kind == "kAsyncDone" and match[6] in starts:
            found.append(starts[match[6]]._replace(what="done", captured=captured))
        elif kind in _COLLECTIVES:
            found.append(Launch("whole", name_of[number], None, captured))
    return found


def _file(folder: Path, step: str, kind: str) -> str:
    (path,) = folder.glob(f"*.jit_{step}*.{kind}.txt")
    return path.read_text()


def _names(metadata: str) -> dict[int, str]:
    """Map each thunk's number to the name of its instruction."""
    names = {}
    for block in metadata.split("thunk_metadata {")[1:]:
        name = re.search(r'profile_annotation: "([^"]*)"', block)
        number = re.search(r"thunk_id: (\d+)", block)
        names[int(number[1]) if number else 0] = name[1] if name else ""
    return names
