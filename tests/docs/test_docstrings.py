"""Docstrings name fields and parameters that exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.support.processes import ROOT

FILES = [*ROOT.glob("jaxoverlap/**/*.py"), *ROOT.glob("passes/**/*.py")]
_ITEM = re.compile(r"^    ([\w*][\w*, ]*):(?= |$)", re.MULTILINE)


def section(docstring: str, title: str) -> set[str]:
    """Return the names that a section of a docstring describes, as in "lhs, rhs: the operands"."""
    found = re.search(rf"^{title}:\n((?: .*\n?|\n)*)", docstring + "\n", re.MULTILINE)
    items = _ITEM.findall(found[1]) if found else []
    return {name.strip().lstrip("*") for item in items for name in item.split(",")}


def fields(node: ast.ClassDef) -> set[str]:
    """Return the names of a class's fields, methods and what it assigns to itself."""
    names = set[str]()
    for one in ast.walk(node):
        if isinstance(one, ast.AnnAssign | ast.Assign):
            for target in one.targets if isinstance(one, ast.Assign) else [one.target]:
                for at in ast.walk(target):
                    if isinstance(at, ast.Name | ast.Attribute):
                        names.add(at.id if isinstance(at, ast.Name) else at.attr)
        elif isinstance(one, ast.FunctionDef):
            names.add(one.name)
    return names


def parameters(node: ast.FunctionDef) -> set[str]:
    every = node.args
    named = [*every.posonlyargs, *every.args, *every.kwonlyargs]
    return {a.arg for a in (*named, every.vararg, every.kwarg) if a is not None}


def wrong(path: Path) -> Iterator[str]:
    """Yield each name of a docstring in a file that the code does not have."""
    tree = ast.parse(path.read_text())
    parents = {base: node for node in ast.walk(tree) for base in ast.iter_child_nodes(node)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.ClassDef | ast.FunctionDef):
            continue
        docstring = ast.get_docstring(node) or ""
        if isinstance(node, ast.ClassDef):
            inherits = any(not isinstance(base, ast.Subscript) for base in node.bases)
            names, known = section(docstring, "Attributes"), fields(node)
            names = set() if inherits and not fields(node) else names
        else:
            names, known = section(docstring, "Args"), parameters(node)
        inside = parents.get(node)
        for name in sorted(names - known):
            where = f"{inside.name}." if isinstance(inside, ast.ClassDef) else ""
            yield f"{path.relative_to(ROOT)}: {where}{node.name} has no {name}"


def test_docstrings_name_what_exists():
    assert [line for path in FILES for line in wrong(path)] == []
