"""What goes wrong in a pass, as opposed to in what it was given."""

from __future__ import annotations

from collections.abc import Iterable


class RewriteError(Exception):
    """A step could not be read or rewritten; the message says where, and the way out."""


def could_not_rewrite(
    sites: Iterable[int], what: str, sources: Iterable[str], error: Exception
) -> RewriteError:
    """The error for a ring that failed.

    Args:
        sites: the numbers of its matmuls.
        what: which they are, in words.
        sources: the "file:line" of each.
        error: how it failed.
    """
    lines = tuple(dict.fromkeys(sources))
    return RewriteError(
        f"could not rewrite matmul {', '.join(map(str, sites))} {what} written at "
        f"{', '.join(lines)}: {type(error).__name__}: {error}. To leave it alone, pass "
        f"skip={lines!r} to overlap(); to run the step as it is, on_error='plain'"
    )
