"""The commands about the cache of decisions: list, show, clear."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from jaxoverlap._util.files import CACHE_VARIABLE, kept_folder
from jaxoverlap.cli.shell.errors import OK
from jaxoverlap.cli.shell.options import Json
from jaxoverlap.cli.shell.output import command, say, show_json, show_table

cache = typer.Typer(
    no_args_is_help=True, help="List, show or clear what the trials of earlier runs decided."
)
_Folder = Annotated[
    Path | None,
    typer.Option(
        "--cache",
        help=f"The folder, as in overlap(cache=). Default: {CACHE_VARIABLE} of the environment, "
        "or ~/.cache/jaxoverlap.",
    ),
]


@cache.command("list")
@command
def list_(*, cache: _Folder = None, json: Json = False) -> int:
    """List the decisions, the newest first: step, devices, program, times."""
    from jaxoverlap.start.kept import KeptDecision, files

    rows, found = list[tuple[str, ...]](), list[dict[str, object]]()
    for key, path in files(_folder(cache)):
        try:
            one = KeptDecision.from_bytes(path.read_bytes())
        except ValueError as error:
            rows.append((key, _age(path), "", "", "", f"damaged: {error}"))
            found.append({"key": key, "damaged": str(error)})
            continue
        trials = one.trials
        rows.append((key, _age(path), trials.step, one.devices, trials.taken, trials.times))
        found.append({"key": key, "devices": one.devices, "trials": trials})
    if json:
        show_json(found)
    elif rows:
        show_table("decisions", ("key", "written", "step", "devices", "program", "times"), rows)
    else:
        say(f"{_folder(cache)} has no decisions")
    return OK


@cache.command("show")
@command
def show(
    key: Annotated[str, typer.Argument(help="The key, as `list` prints it, or its beginning.")],
    *,
    cache: _Folder = None,
    json: Json = False,
) -> int:
    """Print a decision: the times of each program, which ran when, and the plan to follow."""
    from jaxoverlap.start.kept import KeptDecision

    path = _one(_folder(cache), key)
    try:
        one = KeptDecision.from_bytes(path.read_bytes())
    except ValueError as error:
        removes = f"`jaxoverlap cache clear {path.stem}` removes it"
        raise ValueError(f"{path}: {error}. {removes}") from error
    if json:
        show_json(one)
        return OK
    say(one.trials.text())
    if one.plan is not None:
        say(str(one.plan))
    return OK


@cache.command("clear")
@command
def clear(
    key: Annotated[str | None, typer.Argument(help="The key of one; default: all.")] = None,
    *,
    cache: _Folder = None,
    json: Json = False,
) -> int:
    """Remove the decisions, or one of them, so that the next run decides anew."""
    from jaxoverlap.start.kept import files

    folder = _folder(cache)
    gone = [_one(folder, key)] if key else [path for _, path in files(folder)]
    for path in gone:
        path.unlink(missing_ok=True)
    if json:
        show_json({"removed": [path.stem for path in gone]})
    else:
        say(f"{len(gone)} decision{'s' * (len(gone) != 1)} removed from {folder}")
    return OK


def _folder(cache: Path | None) -> Path:
    from jaxoverlap.start.settings import Start

    return Start(cache=cache or kept_folder()).folder


def _one(folder: Path, key: str) -> Path:
    """Return the file of the only decision whose key begins so.

    Raises:
        ValueError: if there is none, or several.
    """
    from jaxoverlap.start.kept import files

    found = [path for name, path in files(folder) if name.startswith(key)]
    if len(found) != 1:
        raise ValueError(
            f"{len(found) or 'no'} decisions in {folder} have a key that begins with {key!r}: "
            "give one that `jaxoverlap cache list` prints"
        )
    return found[0]


def _age(path: Path) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(path.stat().st_mtime))
