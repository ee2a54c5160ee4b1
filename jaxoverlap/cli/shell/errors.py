"""Classify an error: its kind, the user's line that raised it, and the command's exit code."""

from __future__ import annotations

import linecache
import re
import sys
import sysconfig
import traceback
from dataclasses import dataclass
from pathlib import Path

OK, NO = 0, 1
USAGE, INTERNAL, TARGET, COMPILER, MISSING = 2, 3, 4, 5, 6
INTERRUPTED, PIPE_CLOSED = 130, 141  # 128 + SIGINT, 128 + SIGPIPE, as shells report them

MEANINGS = {
    OK: "the command succeeded",
    NO: "the answer is no: nothing to overlap, too little hidden, a dead flag, plans that differ",
    USAGE: "a mistake on the command line, or in a file that it names",
    INTERNAL: "jaxoverlap failed; please report it",
    TARGET: "the target's own code raised an error",
    COMPILER: "XLA could not compile the step",
    MISSING: "a package is not installed",
    INTERRUPTED: "interrupted by Ctrl-C",
    PIPE_CLOSED: "the reader of a pipe closed it",
}
_NAMES = {
    USAGE: "usage",
    INTERNAL: "internal",
    TARGET: "target",
    COMPILER: "compiler",
    MISSING: "missing",
}

_PACKAGE = Path(__file__).resolve().parents[2]
# The checkout has the passes beside the package, an installed package inside it.
_NOT_THE_USERS = (
    str(_PACKAGE),
    str(_PACKAGE / "passes"),
    str((_PACKAGE / "passes").resolve()),
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
)


@dataclass(frozen=True)
class Report:
    """An error as a command reports it.

    Attributes:
        code: the exit code.
        kind: the code's name in JSON.
        message: one or more lines; the type's name leads them unless it is a ValueError.
        at: "file:line in function: source line" of the user's code; empty if none took part.
    """

    code: int
    kind: str
    message: str
    at: str

    def __str__(self) -> str:
        hint = "" if self.code == USAGE else "\n--debug shows the traceback"
        return f"Error: {self.message}{self.at and f'{chr(10)}  at {self.at}'}{hint}"


def report(error: Exception) -> Report:
    """Classify an error that a command ended with."""
    at = _place(error)
    code = _code(error, at)
    if code == COMPILER and (inside := _in_python(str(error))):
        message, at = inside
        return Report(code, _NAMES[code], f"XLA does not compile the step: {message}", at)
    named = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
    return Report(code, _NAMES[code], f"{named}{error}", at)


def _in_python(text: str) -> tuple[str, str] | None:
    """Return the error that a Python function raised while XLA partitioned its operation, if any.

    XLA's text has that function's full traceback, and then the operation's own.

    Returns:
        The error, and the innermost of the user's lines that wrote the operation.
    """
    raised, _, wrote = text.partition("\nSuspected Python Code Location:")
    errors = re.findall(r"^[A-Za-z_.]*(?:Error|Exception): .*", raised, re.MULTILINE)
    if "Traceback (most recent call last):" not in raised or not errors:
        return None
    lines = re.findall(r"^\s+(.*):(\d+):\d+ \[(.*?)\]", wrote, re.MULTILINE)
    users = (f"{_short(file)}:{line} in {name}" for file, line, name in lines if _is_users(file))
    return errors[-1], next(users, "")


def _code(error: Exception, at: str) -> int:
    jax = sys.modules.get("jax")
    if jax is not None and isinstance(error, jax.errors.JaxRuntimeError):
        return COMPILER
    if at:
        return TARGET
    if isinstance(error, ImportError):
        return MISSING
    return USAGE if isinstance(error, ValueError | OSError) else INTERNAL


def _place(error: Exception) -> str:
    """Return the innermost line of the user's own code that the error passed through."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{_short(error.filename)}:{error.lineno}"
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        file = frame.f_code.co_filename
        if _is_users(file):
            source = linecache.getline(file, line).strip()
            return f"{_short(file)}:{line} in {frame.f_code.co_name}{source and f': {source}'}"
    return ""


def _is_users(file: str) -> bool:
    """Return whether a file is neither Python's, nor an installed package's, nor this package's."""
    if file.startswith("<") or Path(file).resolve().is_relative_to(_PACKAGE):
        return False
    return not any(folder and file.startswith(folder) for folder in _NOT_THE_USERS)


def _short(file: str) -> str:
    try:
        return str(Path(file).resolve().relative_to(Path.cwd()))
    except ValueError:
        return file
