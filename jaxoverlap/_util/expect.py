"""Check the arguments of public functions: a wrong one is a ValueError that says what to give."""

from __future__ import annotations

import math
import numbers
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
