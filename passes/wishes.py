"""What the user wants of single matmuls, by the source line that writes them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from jaxoverlap.plan import Variant

Granularity = Variant | Mapping[str, Variant] | None


@dataclass(frozen=True)
class Wishes:
    """What `overlap` was asked for.

    Attributes:
        skip: source lines ("gpt.py:88") whose matmuls are left alone.
        granularity: how the pieces of every ring travel, or of those of some lines.
    """

    skip: Collection[str] = ()
    granularity: Granularity = None

    def check(self, sources: Sequence[str]) -> None:
        """Every line has to write a matmul.

        Raises:
            ValueError: if one does not.
        """
        lines = self.granularity if isinstance(self.granularity, Mapping) else ()
        named = [("skip", line) for line in self.skip] + [("granularity", line) for line in lines]
        for option, line in named:
            if not any(_names(line, source) for source in sources):
                known = ", ".join(dict.fromkeys(sources)) or "none"
                raise ValueError(
                    f"{option}={line!r} names no line that writes a matmul; the step's matmuls "
                    f"are written at: {known}"
                )

    def refusal(self, source: str) -> str | None:
        """Why a line's matmuls are left alone, if so."""
        if any(_names(line, source) for line in self.skip):
            return "left alone as asked (skip=)"
        if (asked := self.variant(source)) is not None and asked.style == "plain":
            return "left plain as asked (granularity=)"
        return None

    def variant(self, source: str) -> Variant | None:
        """How the pieces of a line's rings are to travel, if that was said."""
        if not isinstance(self.granularity, Mapping):
            return self.granularity
        return next((v for line, v in self.granularity.items() if _names(line, source)), None)


def _names(line: str, source: str) -> bool:
    return source == line or source.endswith("/" + line) or line.endswith("/" + source)
