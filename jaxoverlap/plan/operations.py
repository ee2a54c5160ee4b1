"""Decisions on custom-partitioned operations, recorded when XLA's partitioner calls them.

Such an operation has a number, which all that it becomes carries in the compiled module, in its
name: "matmul_group.7". So what was decided is found again by the module's text.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from typing import Any

import msgspec

from jaxoverlap._util.expect import hlo_text
from jaxoverlap.plan.decisions import Decision, Skip

OPERATIONS = (  # the names of such operations
    "matmul_group",
    "sharded_attention",
    "sharded_attention_backward",
    "sharded_cross_entropy",
    "sharded_cross_entropy_backward",
)
NAME = re.compile(rf"\b({'|'.join(OPERATIONS)})\.(\d+)\b")
_MAX_NOTED = 65536  # operations; a step of 100 unrolled layers has some 2,000
_lock = threading.Lock()
_noted: dict[int, tuple[Decision | Skip, ...]] = {}


def note(number: int, entries: Sequence[Decision | Skip], source: str) -> None:
    """Note what was decided for the matmuls of an operation.

    Args:
        number: the operation's number.
        entries: the decisions on its matmuls, numbered from 0.
        source: "folder/file.py:line" of the code that wrote it.
    """
    written = tuple(msgspec.structs.replace(entry, source=source) for entry in entries)
    with _lock:
        _noted[number] = written
        while len(_noted) > _MAX_NOTED:
            del _noted[next(iter(_noted))]


def noted(number: int) -> tuple[Decision | Skip, ...]:
    """Return what was decided for the matmuls of an operation; () if that is not known here."""
    return _noted.get(number, ())


def described(text: str) -> tuple[tuple[str, str], ...]:
    """Say what was decided for each matmul of a module's operations: pairs of a name and words."""
    names = sorted({(int(m.group(2)), m.group(0)) for m in NAME.finditer(text)})
    return tuple((name, _words(entry)) for number, name in names for entry in noted(number))


def _words(entry: Decision | Skip) -> str:
    if isinstance(entry, Skip):
        return f"{entry.einsum} at {entry.source}: {entry.reason}"
    why = f": {entry.why}" if entry.why else ""
    return (
        f"{entry.kind} of {entry.einsum} over {entry.axis}, {entry.variant}, at {entry.source}{why}"
    )


def decisions(compiled: Any) -> tuple[Decision | Skip, ...]:
    """List what was decided for each matmul of a compiled step's own operations.

    Args:
        compiled: what `.compile()` gave, or the text of its module.

    Returns:
        An entry for each matmul of `jaxoverlap.dot_general`, `einsum` and `matmul` and of their
        gradients, as a plan has them: where it was written, its einsum, its ring and variant, or
        why it has none. `site` and `ring` count from the first matmul of the step. `runs` is 1 and
        bytes are those of one run: the audit says how often a line runs. What XLA's persistent
        cache gives was decided in another process, and is not listed.
    """
    text = hlo_text("compiled", compiled)
    entries: list[Decision | Skip] = []
    for number in sorted({int(match.group(2)) for match in NAME.finditer(text)}):
        first = len(entries)
        for entry in noted(number):
            moved: dict[str, Any] = {"site": first + entry.site}
            if isinstance(entry, Decision):
                moved["ring"] = first + entry.ring
            entries.append(msgspec.structs.replace(entry, **moved))
    return tuple(entries)
