"""Errors tell mistakes in what the user gave from failures of a pass itself."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path

from jaxoverlap._util.text import short_source

_PACKAGE = Path(__file__).parents[2]


class UserError(ValueError):
    """A mistake in what overlap() was given; on_error='plain' does not hide it."""


class RewriteError(Exception):
    """A step could not be read or rewritten; the message says where, and the way out.

    Attributes:
        what: where and how it failed.
        skip: the source lines whose matmuls it failed on, if it is known that it was these.
    """

    def __init__(self, what: str, *, skip: tuple[str, ...] = ()):
        super().__init__(what)
        self.what = what
        self.skip = skip

    def __str__(self) -> str:
        if not self.skip:
            return f"{self.what}. To run the step as it is, pass on_error='plain' to overlap()"
        return f"{self.without_plain}; to run the step as it is, on_error='plain'"

    @property
    def without_plain(self) -> str:
        """The message for a user who has passed on_error='plain' already."""
        if not self.skip:
            return self.what
        return f"{self.what}. To leave it alone, pass skip={self.skip!r} to overlap()"


def could_not_rewrite(
    sites: Iterable[int], what: str, sources: Iterable[str], error: Exception
) -> RewriteError:
    """Make the error for a ring that failed.

    Args:
        sites: the ids of its matmuls.
        what: which they are, in words.
        sources: the "file:line" of each.
        error: how it failed.
    """
    lines = tuple(dict.fromkeys(sources))
    return RewriteError(
        f"could not rewrite matmul {', '.join(map(str, sites))} {what} written at "
        f"{', '.join(lines)}: {type(error).__name__}: {error}",
        skip=lines,
    )


@contextlib.contextmanager
def own_faults(step: str, *expected: type[Exception]) -> Iterator[None]:
    """Turn whatever fails unexpectedly in here, by no mistake of the user's, into a RewriteError.

    Args:
        step: the step's name.
        expected: what may be raised here, and stays as it is.

    Raises:
        UserError, RewriteError, Warning, and what is expected: unchanged.
        RewriteError: from any other exception; it says what failed, and where in this package.
    """
    try:
        yield
    except (UserError, RewriteError, Warning, *expected):  # filters may raise warnings
        raise
    except Exception as error:
        raise RewriteError(
            f"could not rewrite {step}, by a fault of jaxoverlap's own: "
            f"{type(error).__name__}: {error} ({_place(error)})"
        ) from error


def _place(error: Exception) -> str:
    """Return the innermost line of this package that an exception came through."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if Path(frame.filename).is_relative_to(_PACKAGE)]
    return f"{short_source(ours[-1].filename, ours[-1].lineno or 0)}, in {ours[-1].name}"
