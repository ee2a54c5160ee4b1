"""Print the commands' output and progress, and turn their errors into lines and exit codes."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import typer
from rich.console import Console

from jaxoverlap._util.text import table, tables_of_width
from jaxoverlap.cli.shell.errors import PIPE_CLOSED, Report, report
from jaxoverlap.cli.shell.interrupt import interrupted
from jaxoverlap.cli.shell.options import Debug

# A mistake on the command line, by the name that every version of typer has for it.
UsageError: type[Exception] = typer.BadParameter.__bases__[0]


def command(function: Callable[..., int]) -> Callable[..., None]:
    """Turn a function that returns an exit code into a command that reports its errors.

    The command gets a flag --debug, with which errors keep their traceback.
    """

    @functools.wraps(function)
    def run(*args: Any, debug: bool, **kwargs: Any) -> None:
        try:
            with warnings.catch_warnings(), _tables_fit():
                warnings.showwarning = _warn
                code = function(*args, **kwargs)
                sys.stdout.flush()  # a closed pipe shows here, and not when Python ends
        except Exception as error:
            if interrupted():
                raise KeyboardInterrupt from error
            if isinstance(error, BrokenPipeError):
                raise typer.Exit(_pipe_closed()) from error
            if debug or isinstance(error, UsageError):
                raise
            code = show_error(report(error), json=kwargs.get("json", False))
        raise typer.Exit(code)

    signature = inspect.signature(function, eval_str=True)
    keyword = inspect.Parameter.KEYWORD_ONLY
    more = inspect.Parameter("debug", keyword, default=False, annotation=Debug)
    parameters = (*signature.parameters.values(), more)
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


def show_error(error: Report, *, json: bool) -> int:
    """Print an error, to stderr or with `json` as JSON to stdout; return its exit code."""
    if json:
        fields = {"kind": error.kind, "message": error.message, "at": error.at or None}
        show_json({"error": {**fields, "exit_code": error.code}})
    else:
        print(error, file=sys.stderr)
    return error.code


def _warn(message: Warning | str, *_: Any, **__: Any) -> None:
    print(f"Warning: {message}", file=sys.stderr)


def _pipe_closed() -> int:
    """Redirect stdout to /dev/null, so that its flush at exit does not fail."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    with contextlib.suppress(OSError, ValueError):  # a stream without a descriptor, as in tests
        os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
    return PIPE_CLOSED


@contextlib.contextmanager
def _tables_fit() -> Iterator[None]:
    """Make tables as wide as the terminal; in a file or a pipe they have the default width."""
    console = Console()
    with tables_of_width(console.width) if console.is_terminal else contextlib.nullcontext():
        yield


def say(text: str) -> None:
    """Print text as it is."""
    sys.stdout.write(f"{text}\n")


def show_json(value: Any) -> None:
    """Print a value, dataclasses and all, as JSON."""
    say(msgspec.json.format(msgspec.json.encode(value, enc_hook=str)).decode())


def show_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[str] = ()
) -> None:
    """Print a table."""
    say(f"{table(title, columns, rows, right=right)}\n")


def write_pictures(
    step: Any, html: Path | None, svg: Path | None, perfetto: Path | None, **options: Any
) -> None:
    """Write the requested pictures of a simulated or measured step.

    Args:
        step: the step.
        html, svg, perfetto: the files; None: not requested.
        options: of `to_html` and `to_svg`, such as the step to show above it.
    """
    if html:
        step.to_html(html, **options)
    if svg:
        step.to_svg(svg, **options)
    if perfetto:
        step.to_perfetto(perfetto)
