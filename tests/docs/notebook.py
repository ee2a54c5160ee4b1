"""Run the code cells of a notebook in a child, in order, as Jupyter does.

python -m tests.docs.notebook    # write what they print into docs/notebook.ipynb
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import io
import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

from tests.docs.blocks import ROOT

NOTEBOOK = ROOT / "docs" / "notebook.ipynb"


def read(path: Path = NOTEBOOK) -> dict[str, Any]:
    return json.loads(path.read_text())


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def outputs_of(path: Path, folder: Path) -> list[list[dict[str, Any]]]:
    """Run a notebook's code cells in a folder; return what each prints and shows.

    Raises:
        AssertionError: with the traceback, if a cell raises.
    """
    settings = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    settings["PYTHONPATH"] = os.pathsep.join((str(ROOT), settings.get("PYTHONPATH", "")))
    command = [sys.executable, "-m", "tests.docs.notebook", "--run", str(path)]
    done = subprocess.run(
        command, cwd=folder, env=settings, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def _run(path: Path) -> list[list[dict[str, Any]]]:
    """Execute the cells in this process, which nothing else uses."""
    if importlib.util.find_spec("IPython") is None:
        display = types.ModuleType("IPython.display")
        display.SVG = _Svg  # type: ignore[attr-defined]
        sys.modules |= {"IPython": types.ModuleType("IPython"), "IPython.display": display}
    names: dict[str, Any] = {"__name__": "__main__"}
    return [_outputs("".join(cell["source"]), names) for cell in code_cells(read(path))]


class _Svg:
    """Stands for `IPython.display.SVG` where IPython is not installed."""

    def __init__(self, filename: str):
        self.data = Path(filename).read_text()


def _outputs(source: str, names: dict[str, Any]) -> list[dict[str, Any]]:
    tree, shown, printed = ast.parse(source), None, io.StringIO()
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, "cell.py", "exec"), names)
        if last is not None:
            shown = eval(compile(ast.Expression(last.value), "cell.py", "eval"), names)
    text = printed.getvalue()
    found: list[dict[str, Any]] = []
    if text:
        lines = text.splitlines(keepends=True)
        found.append({"name": "stdout", "output_type": "stream", "text": lines})
    if shown is not None:
        data = {"image/svg+xml": shown.data.splitlines(keepends=True)}
        found.append({"data": data, "metadata": {}, "output_type": "display_data"})
    return found


def _write() -> None:
    notebook = read()
    folder = ROOT / "out"
    folder.mkdir(exist_ok=True)
    for cell, outputs in zip(code_cells(notebook), outputs_of(NOTEBOOK, folder), strict=True):
        cell["outputs"] = outputs
    NOTEBOOK.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        result = _run(Path(sys.argv[2]))
        print("\n" + json.dumps(result))
    else:
        _write()
