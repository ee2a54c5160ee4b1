"""Read the blocks of a page, and run or check each by its language.

    ```python     is run, with the names of `prelude`; blocks of a page share their names
    ```text       is what the Python block before it prints; a line `...` stands for any lines
    ```console    lines with $ are run in an empty folder, and print the lines below them
    ```none       is a diagram, and not checked
    ```sh         every command exists and takes these options; nothing is run

A comment before a block changes that: `<!-- fragment -->` Python that is parsed only,
`<!-- from: tests/FILE.py -->` output that this test checks, `<!-- from: python -m MODULE -->` a
table that this command prints among others (`by_command`; with `../shared` behind it, one whose data
only some machines have), `<!-- nightly -->` a page's blocks that are run by night, as it takes long.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import io
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import typer

from jaxoverlap.cli import app

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>[^\n]*?) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


# A program's hash, which every change of a pass changes, and a number that counts in a process.
_HASH = re.compile(r"(?<=_)[0-9a-f]{8}\b|\b[0-9a-f]{12}\b|(?<=matmul_group\.)\d+")
_SPACE = re.compile(r"[ ─]+")


@dataclass(frozen=True)
class Block:
    """A block of a page.

    Attributes:
        language: of its fence; mark: of the comment before it, "" for none.
        text: its lines; line: the number of its first one.
    """

    language: str
    mark: str
    text: str
    line: int


def pages() -> list[Path]:
    """Return README and all pages."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def of(page: Path) -> str:
    """Return a file's path within the repository."""
    return str(page.relative_to(ROOT))


def blocks(page: Path) -> list[Block]:
    """Return a page's fenced blocks, in order."""
    text = page.read_text()
    return [
        Block(m["language"], m["mark"] or "", m["text"], text.count("\n", 0, m.start("text")) + 1)
        for m in _BLOCK.finditer(text)
    ]


def matches(shown: str, printed: str) -> bool:
    """Return whether output is as shown, where a line `...` stands for any lines."""
    parts = re.split(r"^ *\.\.\.$\n?", _plain(shown), flags=re.MULTILINE)
    pattern = r"(?:.*\n)*?".join(re.escape(part) for part in parts)
    return re.fullmatch(pattern, _plain(printed)) is not None


def _plain(text: str) -> str:
    """Return text without what differs from run to run, and without its columns' widths."""
    lines = (_SPACE.sub(" ", _HASH.sub("HASH", line)).rstrip() for line in text.splitlines())
    return "\n".join(lines).strip("\n") + "\n"


def by_command(block: Block) -> str:
    """Return the command that prints a block's table, "" if it is no such block."""
    found = re.match(r"from: (python -m [\w.]+)", block.mark)
    return found[1] if found else ""


@functools.cache
def printed(command: str) -> str:
    """Return what a command prints in the repository's folder."""
    words = [sys.executable, *shlex.split(command)[1:]]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        words, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout


def table_in(output: str, block: Block) -> str:
    """Return the table of a command's output that begins as a block's; "" if there is none."""
    title = block.text.partition("\n")[0]
    found = re.search(rf"^{re.escape(title)}\n.*?(?=\n\n\n|\Z)", output, re.MULTILINE | re.DOTALL)
    return f"{found[0].rstrip()}\n" if found else ""


class Runner:
    """Runs the blocks of a page in order."""

    def __init__(self, folder: Path, names: dict[str, Any]):
        self._folder, self._names, self._printed = folder, names, ""

    def run(self, block: Block) -> str:
        """Check a block; return what is wrong with it, "" for nothing."""
        if by_command(block):
            return ""  # by a test of its own
        if block.mark.startswith("from: "):
            test = ROOT / block.mark.removeprefix("from: ")
            return "" if test.is_file() else f"there is no {test}"
        check = getattr(self, f"_{block.language}", None)
        return check(block) if check else f"no check for ```{block.language}"

    def _python(self, block: Block) -> str:
        if block.mark == "fragment":
            ast.parse(block.text)
            return ""
        out, before = io.StringIO(), Path.cwd()
        os.chdir(self._folder)
        try:
            with contextlib.redirect_stdout(out):
                exec(compile(block.text, "example.py", "exec"), self._names)
        finally:
            os.chdir(before)
        self._printed = out.getvalue()
        return ""

    def _text(self, block: Block) -> str:
        if matches(block.text, self._printed):
            return ""
        return f"shown:\n{block.text}\nprinted:\n{self._printed}"

    def _console(self, block: Block) -> str:
        for command, shown in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block.text, re.MULTILINE):
            environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
            environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
            done = subprocess.run(
                command, shell=True, cwd=self._folder, env=environment, capture_output=True,
                text=True, check=False,
            )  # fmt: skip
            if not matches(shown, done.stdout):
                printed = done.stdout or done.stderr[-2000:]  # stderr has a line for each stage
                return f"$ {command}\nshown:\n{shown}\nprinted:\n{printed}"
        return ""

    def _sh(self, block: Block) -> str:
        wrong = []
        for line in block.text.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            while words and re.fullmatch(r"\w+=.*", words[0]):  # NAME=value before a command
                words = words[1:]
            if words and (why := unknown(words)):
                wrong.append(f"{line}: {why}")
        return "\n".join(wrong)

    def _yaml(self, block: Block) -> str:
        return ""

    _none = _yaml  # a diagram


def unknown(words: list[str]) -> str:
    """Return what a command line names that is not there; "" if all is."""
    if words[0] == "jaxoverlap":
        return _unknown_option(words[1:])
    if words[0] == "make":
        targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return "" if words[1] in targets else f"no target {words[1]}"
    if words[0].endswith("python") and words[1] == "-m":
        return "" if find_spec(words[2]) else f"no module {words[2]}"
    known = ("pip", "python", "git", "sudo", "unshare", "srun", "sbatch", "kubectl", "source")
    known += ("export", "echo", "tensorboard", ".venv/bin/pytest", "cd", "docker")
    return "" if words[0] in known else f"unknown command {words[0]}"


def _unknown_option(words: list[str]) -> str:
    """Parse a command line of jaxoverlap without running it."""
    group: Any = typer.main.get_command(app)
    while words and not words[0].startswith("-") and hasattr(group, "commands"):
        if words[0] not in group.commands:
            return f"no command {words[0]}"
        group, words = group.commands[words[0]], words[1:]
    options = {name for p in group.params for name in p.opts} | {"-h", "--help", "--version"}
    wrong = [w for w in words if w.startswith("--") and w.partition("=")[0] not in options]
    return f"no option {', '.join(wrong)}" if wrong else ""
