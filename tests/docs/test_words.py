"""Words: pages, help, printed texts and docstrings use the field's terms, and name what is there."""

from __future__ import annotations

import ast
import inspect
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

import jaxoverlap
from jaxoverlap.cli import app
from tests.docs.blocks import ROOT, blocks, of, pages, unknown

PAGES = pages()
RETIRED = [
    "place", "places", "cut", "cuts", "rows", "whole", "site", "sites", "ways", "priced",
    "by price", "asked", "asks", "unasked", "lie", "lies", "laid", "kept", "beside", "motion",
    "said", "told", "tells", "stands", "stood", "subject", "raw", "bare", "rival", "rivals",
    "left alone", "left plain", "turned", "anchored", "rooms", "strangers", "drawn",
]  # fmt: skip
WORDS = re.compile(rf"\b(?:{'|'.join(RETIRED)})\b", re.IGNORECASE)
PRINTING = ("jaxoverlap/cli", "jaxoverlap/flags", "jaxoverlap/simulation")


def retired(text: str) -> list[str]:
    return sorted(set(map(str.lower, WORDS.findall(text))))


def fenceless(page: Path) -> str:
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def prose(page: Path) -> str:
    """Return a page without its blocks, its code and the targets of its links."""
    text = re.sub(r"<!--.*?-->|`[^`]*`", "", fenceless(page), flags=re.DOTALL)
    return re.sub(r"\]\([^)]*\)", "]", text)


def test_pages_have_no_word_of_their_own():
    found = {of(page): retired(prose(page)) for page in PAGES}
    assert not {page: words for page, words in found.items() if words}


def helps(command: Any, name: str) -> Iterator[tuple[str, str]]:
    """Yield the help of a command, of its options and of its subcommands."""
    for text in (command.help, command.short_help, getattr(command, "epilog", None)):
        yield name, text or ""
    for parameter in command.params:
        yield f"{name} {parameter.name}", getattr(parameter, "help", None) or ""
    for inner, subcommand in getattr(command, "commands", {}).items():
        yield from helps(subcommand, f"{name} {inner}".strip())


def test_help_has_no_word_of_its_own():
    found = {name: retired(text) for name, text in helps(typer.main.get_command(app), "")}
    assert len(found) > 60
    assert not {name: words for name, words in found.items() if words}


def modules(*folders: str) -> list[Path]:
    return [file for folder in folders for file in sorted((ROOT / folder).rglob("*.py"))]


def docstrings(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            name = getattr(node, "name", "module")
            yield f"line {getattr(node, 'lineno', 1)} {name}", ast.get_docstring(node) or ""


def test_first_lines_have_no_word_of_their_own():
    """The first line of each docstring, of private functions and classes too."""
    found = {
        f"{of(file)} {name}": retired(text.partition("\n")[0])
        for file in modules("jaxoverlap", "passes", "models")
        for name, text in docstrings(ast.parse(file.read_text()))
    }
    assert not {name: words for name, words in found.items() if words}


def printed(file: Path) -> Iterator[tuple[str, str]]:
    """Yield every string of more than one word that is no docstring, with its line."""
    tree = ast.parse(file.read_text())
    documented = {text for _, text in docstrings(tree)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = inspect.cleandoc(node.value)
            if " " in text and text not in documented:
                yield f"{of(file)}:{node.lineno}", text


def test_printed_texts_have_no_word_of_their_own():
    found = {at: retired(text) for file in modules(*PRINTING) for at, text in printed(file)}
    assert not {at: words for at, words in found.items() if words}


# -- code within sentences ------------------------------------------------------------------------


def spans(page: Path) -> list[str]:
    return re.findall(r"(?<!`)`([^`\n]+)`(?!`)", fenceless(page))


def test_commands_within_sentences_are_there():
    wrong = {}
    for page, span in ((one, span) for one in PAGES for span in spans(one)):
        if span.startswith(("jaxoverlap ", "make ", "python -m ")):
            words = shlex.split(span)
            known = [word for word in words if not word.isupper()]  # COMMAND, FILE
            wrong[of(page), span] = len(known) > 1 and unknown(known)
    assert not {at: why for at, why in wrong.items() if why}


def calls(page: Path) -> Iterator[ast.Call]:
    """Yield the calls in a page's sentences and in its fragments, which nothing runs."""
    fragments = (block.text for block in blocks(page) if block.mark == "fragment")
    for text in (*spans(page), *fragments):
        try:
            tree = ast.parse(text)
        except SyntaxError:  # no Python: a command, a flag
            continue
        yield from (node for node in ast.walk(tree) if isinstance(node, ast.Call))


def named(path: str) -> Any:
    """Return the public function or class of a dotted name, with `jaxoverlap` before it or not."""
    value: Any = jaxoverlap
    for name in path.removeprefix("jaxoverlap.").split("."):
        if name.startswith("_") or name not in dir(value):
            return None
        value = getattr(value, name)
    return value


def test_arguments_within_sentences_are_there():
    wrong = []
    for call in (call for page in PAGES for call in calls(page)):
        function = named(ast.unparse(call.func))
        if callable(function) and getattr(function, "__module__", "").startswith("jaxoverlap"):
            parameters = inspect.signature(function).parameters
            if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
                wrong += [ast.unparse(call) for k in call.keywords if k.arg not in parameters]
    assert not wrong


def test_quoted_messages_are_ours():
    """The messages that the troubleshooting page quotes are in the source."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    quoted = re.findall(r'^\| "([^"]+)"', page, re.MULTILINE)
    source = "".join(f.read_text() for f in (ROOT / "jaxoverlap").rglob("*.py"))
    assert len(quoted) > 1
    assert not [q for q in quoted if q.replace("train_step", "{name}") not in source]
