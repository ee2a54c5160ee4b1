"""Requests for single matmuls: the user's, by source line; a plan's or a search's, by site."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from jaxoverlap.passes.analysis.errors import UserError
from jaxoverlap.plan.decisions import LEFT_PLAIN
from jaxoverlap.plan.plan import Variant

Granularity = Variant | Mapping[str, Variant] | None


@dataclass(frozen=True)
class Requests:
    """The requests for single matmuls that `overlap` was given.

    Attributes:
        skip: source lines ("gpt.py:88") whose matmuls are left alone.
        granularity: how the pieces of every ring travel, or of those of some lines.
        choices: how the pieces of single rings travel, by the site that a ring is named after;
            "plain" leaves all the matmuls of the ring alone.
        alone: sites that are left alone, and have no part in any ring.
        rejected: site -> reason, for matmuls whose rings cost the step more than they hide.
    """

    skip: Collection[str] = ()
    granularity: Granularity = None
    choices: Mapping[int, Variant] = field(default_factory=dict)
    alone: Collection[int] = ()
    rejected: Mapping[int, str] = field(default_factory=dict)

    def check(self, sources: Mapping[int, str]) -> None:
        """Check that every named line writes a matmul, and that every site is one.

        Args:
            sources: the line of each matmul, by its site.

        Raises:
            ValueError: if one does not.
        """
        if strange := sorted({*self.choices, *self.alone} - sources.keys()):
            raise UserError(
                f"a choice for site {', '.join(map(str, strange))}: the step has {len(sources)} "
                "matmuls, counted from 0"
            )
        lines = self.granularity if isinstance(self.granularity, Mapping) else ()
        named = [("skip", line) for line in self.skip] + [("granularity", line) for line in lines]
        for option, line in named:
            if not any(_names(line, source) for source in sources.values()):
                known = ", ".join(dict.fromkeys(sources.values())) or "none"
                raise UserError(
                    f"{option}={line!r} names no line that writes a matmul; the step's matmuls "
                    f"are written at: {known}"
                )

    def refusal(self, site: int, source: str) -> str | None:
        """Return why a matmul is left alone; None if it is not."""
        if site in self.alone:
            return "left alone as planned"
        if any(_names(line, source) for line in self.skip):
            return "left alone as asked (skip=)"
        if (asked := self._of_line(source)) is not None and asked.style == "plain":
            return "left plain as asked (granularity=)"
        return None

    @property
    def left_plain(self) -> dict[int, str]:
        """Site -> reason of its skip, for the rejected matmuls."""
        return {site: LEFT_PLAIN + why for site, why in self.rejected.items()}

    def variant(self, site: int, source: str) -> Variant | None:
        """Return how the pieces of a ring are to travel; None if that was not said.

        Args:
            site: the site that the ring is named after.
            source: its line.
        """
        return self.choices.get(site) or self._of_line(source)

    def _of_line(self, source: str) -> Variant | None:
        if not isinstance(self.granularity, Mapping):
            return self.granularity
        return next((v for line, v in self.granularity.items() if _names(line, source)), None)


def _names(line: str, source: str) -> bool:
    return source == line or source.endswith("/" + line) or line.endswith("/" + source)
