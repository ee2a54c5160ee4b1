"""Print the commands' output, and turn their errors into lines and exit codes."""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console

from jaxoverlap._util.text import WIDTH, table

OK, NO, MISTAKE, FAILED = 0, 1, 2, 3  # exit codes

Json = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
_Debug = Annotated[bool, typer.Option("--debug", help="Show where an error comes from.")]


def command(function: Callable[..., int]) -> Callable[..., None]:
    """Turn a function that gives an exit code into a command: errors are a line each.

    A ValueError is a mistake of the user's; it says what to do. The command gets a flag --debug,
    with which errors show their trace.
    """

    @functools.wraps(function)
    def run(*args: Any, debug: bool, **kwargs: Any) -> None:
        try:
            with warnings.catch_warnings():
                warnings.showwarning = _warn
                code = function(*args, **kwargs)
        except Exception as error:
            if debug or isinstance(error, typer.BadParameter):
                raise
            code = _report(error)
        raise typer.Exit(code)

    given = inspect.signature(function, eval_str=True)
    keyword = inspect.Parameter.KEYWORD_ONLY
    more = inspect.Parameter("debug", keyword, default=False, annotation=_Debug)
    parameters = (*given.parameters.values(), more)
    run.__signature__ = given.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


def _warn(message: Warning | str, *_: Any, **__: Any) -> None:
    print(f"Warning: {message}", file=sys.stderr)


def _report(error: Exception) -> int:
    mistake = isinstance(error, ValueError)
    what = "" if mistake else f"{type(error).__name__}: "
    where = "" if mistake else "\n--debug shows where"
    print(f"Error: {what}{error}{where}", file=sys.stderr)
    return MISTAKE if mistake else FAILED


def say(text: str) -> None:
    """Print text as it is."""
    sys.stdout.write(f"{text}\n")


def show_json(value: Any) -> None:
    """Print a value, dataclasses and all, as JSON."""
    say(msgspec.json.format(msgspec.json.encode(value, enc_hook=str)).decode())


def show_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[str] = ()
) -> None:
    """Print a table, as wide as the terminal; elsewhere as wide as the package's other tables."""
    console = Console()
    width = console.width if console.is_terminal else WIDTH
    say(f"{table(title, columns, rows, right=right, width=width)}\n")
