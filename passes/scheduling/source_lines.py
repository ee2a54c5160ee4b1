"""Restore the source lines of a module that a Python pass gave back to XLA.

XLA renumbers the stack frames of such a module and gets them wrong, also where the pass changed
nothing (jaxlib 0.11.2 and 0.12.0): a matmul then seems to be written at some other line of the
step. The text that the pass was given still has them right, by instruction.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_ID = re.compile(r" ?stack_frame_id=(\d+)")
_NAME = re.compile(r"  (?:ROOT )?%?([\w.\-]+) = ")


@dataclass(frozen=True)
class SourceLines:
    """The stack frames of a module's text.

    Attributes:
        tables: the lines between the module's head and its first computation.
        ids: the frame of each instruction that has one.
    """

    tables: tuple[str, ...]
    ids: dict[str, str]

    @classmethod
    def of(cls, text: str) -> SourceLines:
        """Read them off a text that has them right."""
        lines = text.splitlines()
        ids = {}
        for line in lines:
            name, frame = _NAME.match(line), _ID.search(line)
            if name and frame:
                ids[name.group(1)] = frame.group(1)
        return cls(tuple(lines[1 : _first_computation(lines)]), ids)

    def restored(self, text: str) -> str:
        """Return another text of the module with these frames.

        An instruction that came later, and so is not known here, has none.
        """
        lines = text.splitlines()
        body = lines[_first_computation(lines) :]
        return "\n".join([lines[0], *self.tables, *self._with_ids(body), ""])

    def _with_ids(self, lines: list[str]) -> Iterator[str]:
        for line in lines:
            if not (match := _ID.search(line)):
                yield line
                continue
            name = _NAME.match(line)
            frame = self.ids.get(name.group(1), "") if name else ""
            yield line.replace(match.group(), f" stack_frame_id={frame}" if frame else "", 1)


def _first_computation(lines: list[str]) -> int:
    return next(i for i, line in enumerate(lines) if i and line.endswith("{"))
