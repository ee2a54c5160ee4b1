"""Add dataclasses up field by field."""

from __future__ import annotations

import operator
from typing import Any, Self


class Parts:
    """A dataclass of parts that add up: sums and multiples are field by field."""

    @property
    def by_term(self) -> dict[str, Any]:
        """Return each part, by name."""
        return dict(vars(self))

    def __add__(self, other: Self) -> Self:
        return type(self)(*map(operator.add, vars(self).values(), vars(other).values()))

    def __mul__(self, times: float) -> Self:
        return type(self)(*(part * times for part in vars(self).values()))
