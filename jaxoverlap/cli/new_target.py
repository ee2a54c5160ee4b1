"""The command that writes a target to start from."""

from __future__ import annotations

from enum import StrEnum
from importlib import resources
from pathlib import Path
from typing import Annotated

import typer

from jaxoverlap._util.files import write_atomically
from jaxoverlap.cli.shell.errors import OK
from jaxoverlap.cli.shell.options import Json
from jaxoverlap.cli.shell.output import command, say, show_json


class Style(StrEnum):
    """The library in which a target's step is written."""

    PLAIN = "plain"
    NNX = "nnx"
    LINEN = "linen"
    EQUINOX = "equinox"


@command
def new_target(
    file: Annotated[Path, typer.Argument(help="The file to write, as in mine.py.")],
    *,
    style: Annotated[
        Style, typer.Option(help="The library of the step: plain is functions and dicts.")
    ] = Style.PLAIN,
    json: Json = False,
) -> int:
    """Write a file with a `build(mesh)` that the other commands take; put your step into it."""
    if file.suffix != ".py":
        raise ValueError(f"{file}: a target is a Python file; give a name that ends in .py")
    if file.exists():
        raise ValueError(f"{file} exists already: give another name")
    if not file.parent.is_dir():
        raise ValueError(f"{file}: there is no folder {file.parent}; make it first")
    template = resources.files("jaxoverlap.cli") / "targets" / f"{style}.py"
    write_atomically(file, template.read_text().replace("FILE", str(file), 1))
    line = f"jaxoverlap explain {file} --pod h100-sxm:8x8 --mesh data=16,model=4"
    if json:
        show_json({"file": str(file), "next": line})
    else:
        say(f"written to {file}; next:\n  {line}")
    return OK
