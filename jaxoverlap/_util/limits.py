"""Check values against limits, and fields of dataclasses against those that their types state.

Each check takes a name and a value, and returns the value, of Python's own type; or it raises a
ValueError that states the name, what was given and what was expected.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from dataclasses import is_dataclass
from functools import partial
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import numpy as np

from jaxoverlap._util.expect import expect, expect_one_of

Check = Callable[[str, Any], Any]


def whole(name: str, value: Any, least: int, most: int | None = None) -> int:
    """Return an integer, Python's or numpy's, of at least `least`."""
    try:
        if isinstance(value, bool | np.bool_):
            raise TypeError
        found = operator.index(value)
    except TypeError:
        found = least - 1
    upto = "or more" if most is None else f"to {most}"
    fits = found >= least and (most is None or found <= most)
    expect(fits, name, value, f"a whole number, {least} {upto}")
    return found


def integer(name: str, value: Any) -> int:
    """Return an integer, Python's or numpy's."""
    try:
        if isinstance(value, bool | np.bool_):
            raise TypeError
        return operator.index(value)
    except TypeError:
        expect(False, name, value, "a whole number")
        raise


def number(
    name: str,
    value: Any,
    *,
    above: float | None = None,
    least: float | None = None,
    below: float | None = None,
    most: float | None = None,
    why: str = "",
) -> float:
    """Return a finite number within bounds: above and below are exclusive."""
    try:
        if isinstance(value, bool | np.bool_ | str | bytes):
            raise TypeError
        found = float(value)
    except (TypeError, ValueError):
        found = math.nan
    bounds = (
        ("above", above, operator.gt),
        ("at least", least, operator.ge),
        ("below", below, operator.lt),
        ("at most", most, operator.le),
    )
    given = [(word, bound, holds) for word, bound, holds in bounds if bound is not None]
    fits = math.isfinite(found) and all(holds(found, bound) for _, bound, holds in given)
    options = " and ".join(f"{word} {bound:g}" for word, bound, _ in given)
    expect(fits, name, value, f"a finite number {options}{why}".rstrip())
    return found


def flag(name: str, value: Any) -> bool:
    """Return True or False."""
    expect(isinstance(value, bool | np.bool_), name, value, "True or False")
    return bool(value)


def text(name: str, value: Any) -> str:
    """Return a string."""
    expect(isinstance(value, str), name, value, "a string")
    return value


def one_of(name: str, value: Any, *, choices: tuple[str, ...]) -> str:
    """Return one of some strings."""
    expect_one_of(name, value, *choices)
    return value


def whole_pair(name: str, value: Any) -> tuple[int, int]:
    """Return two integers of zero or more."""
    fits = isinstance(value, tuple | list) and len(value) == 2
    expect(fits, name, value, "two whole numbers")
    return whole(name, value[0], 0), whole(name, value[1], 0)


def instance(name: str, value: Any, *, kind: type) -> Any:
    """Return an object of a class."""
    expect(isinstance(value, kind), name, value, f"a {kind.__module__}.{kind.__qualname__}")
    return value


Integer = Annotated[int, integer]
AtLeast0 = Annotated[int, partial(whole, least=0)]
AtLeast1 = Annotated[int, partial(whole, least=1)]
Above0 = Annotated[float, partial(number, above=0)]


def checked[Kind](kind: type[Kind]) -> type[Kind]:
    """Have each field of a dataclass checked when one is made, before its `__post_init__`.

        @dataclass(frozen=True)
        @checked
        class Limits:
            rank: AtLeast1
            share: Annotated[float, partial(number, above=0, most=1)]
            method: Literal["qr", "svd"]

    What is checked: a type that is `Annotated` with a check, bool, str, `Literal` and a dataclass;
    and one of these, or None. The field then has what the check returns.
    """
    after = getattr(kind, "__post_init__", None)

    def check(self: Any) -> None:
        for name, field_check in _checks(kind).items():
            object.__setattr__(self, name, field_check(name, getattr(self, name)))
        if after is not None:
            after(self)

    kind.__post_init__ = check  # type: ignore[attr-defined]
    return kind


@functools.cache
def _checks(kind: type) -> dict[str, Check]:
    """Return the check of each field that has one; types are looked up when one is first made."""
    hints = get_type_hints(kind, include_extras=True)
    found = {name: _check_of(hint) for name, hint in hints.items()}
    return {name: check for name, check in found.items() if check is not None}


def _check_of(hint: Any) -> Check | None:
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return next(filter(callable, args[1:]), None)
    if origin is Literal:
        return partial(one_of, choices=args)
    if NoneType in args and (inner := [check for a in args if (check := _check_of(a))]):
        return lambda name, value: None if value is None else inner[0](name, value)
    if is_dataclass(hint) and isinstance(hint, type):
        return partial(instance, kind=hint)
    return {bool: flag, str: text}.get(hint) if isinstance(hint, type) else None
