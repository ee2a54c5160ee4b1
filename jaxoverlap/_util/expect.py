"""Check the arguments of public functions: a wrong one is a ValueError that says what to give."""

from __future__ import annotations

import math
import numbers
import re
import reprlib
from typing import Any

_SHORT = reprlib.Repr(maxstring=80, maxother=80)


def expect(holds: bool, name: str, value: object, expected: str) -> None:
    """Refuse an argument unless a condition holds.

    Args:
        holds: the condition.
        name: the argument's name.
        value: what was given.
        expected: what to give, in words.

    Raises:
        ValueError: if the condition does not hold.
    """
    if not holds:
        raise ValueError(f"{name}={_SHORT.repr(value)}: expected {expected}")


def is_number(value: Any) -> bool:
    """Return whether a value is a real number: neither a truth value nor NaN."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return False
    return not math.isnan(float(value))


def is_integer(value: object, least: int = 0) -> bool:
    """Return whether a value is an integer, not a truth value, of at least `least`."""
    return type(value) is int and value >= least


def expect_seconds(name: str, value: Any) -> None:
    """Refuse what is no number of seconds above zero.

    Raises:
        ValueError: if it is none.
    """
    expect(is_number(value) and value > 0, name, value, "seconds, more than zero")


_MEMORY = re.compile(r"(\d+(?:\.\d+)?) ?(MB|GB|TB)?")
_BYTES = {"MB": 1e6, "GB": 1e9, "TB": 1e12}


def expect_memory(name: str, value: Any) -> float | None:
    """Return a share of a device's memory, or bytes above 1; None for None.

    Raises:
        ValueError: unless it is a number above 0 and up to 1, a text as "0.9" or "70GB", or None.
    """
    if value is None:
        return None
    parsed = _MEMORY.fullmatch(value.strip()) if isinstance(value, str) else None
    number = float(parsed[1]) if parsed else float(value) if is_number(value) else 0.0
    unit = parsed[2] if parsed else None
    share, size = (0.0, number * _BYTES[unit]) if unit else (number, 0.0)
    what = "a share of the device's memory up to 1, as 0.9, or a size, as '70GB'"
    expect(0 < share <= 1 or size > 1, name, value, what)
    return size or share


def expect_one_of(name: str, value: object, *choices: str | None) -> None:
    """Refuse what is none of some strings, or None if that is a choice.

    Raises:
        ValueError: if it is none of them.
    """
    *some, last = map(repr, choices)
    known = isinstance(value, str | None) and value in choices
    expect(known, name, value, f"{', '.join(some)} or {last}")


def expect_flag(name: str, value: object) -> None:
    """Refuse what is neither True nor False.

    Raises:
        ValueError: if it is neither.
    """
    expect(isinstance(value, bool), name, value, "True or False")


def hlo_text(name: str, value: Any) -> str:
    """Return the HLO text of a compiled step; a text as it is.

    Raises:
        ValueError: if it is neither.
    """
    holds = isinstance(value, str) or callable(getattr(value, "as_text", None))
    what = "a compiled step, as step.lower(...).compile() gives, or the text of its HLO"
    expect(holds, name, value, what)
    return value if isinstance(value, str) else value.as_text() or ""
