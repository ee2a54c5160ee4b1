"""The notebook runs, and prints the outputs that are in it."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

from tests.docs.notebook import NOTEBOOK, code_cells, outputs_of, read
from tests.support.pods import needs_plugin


def text(outputs: list[dict[str, Any]]) -> str:
    """Return the output of a cell, without the hash in a module's name."""
    lines = (line for output in outputs for line in output.get("text", ()))
    return re.sub(r"_[0-9a-f]{8}\b", "", "".join(lines))


def test_it_is_a_notebook_whose_cells_have_output():
    notebook = read()
    assert notebook["nbformat"] == 4 and len({cell["id"] for cell in notebook["cells"]}) >= 10
    for cell in code_cells(notebook):
        ast.parse("".join(cell["source"]))
    shown = "".join(text(cell["outputs"]) for cell in code_cells(notebook))
    assert "overlapped" in shown and "loss True weights True" in shown
    assert any(
        "image/svg+xml" in out.get("data", {}) for c in code_cells(notebook) for out in c["outputs"]
    )


@needs_plugin
@pytest.mark.pods
@pytest.mark.nightly
def test_it_prints_what_it_shows(tmp_path: Path):
    for cell, outputs in zip(code_cells(read()), outputs_of(NOTEBOOK, tmp_path), strict=True):
        assert text(outputs) == text(cell["outputs"]), "".join(cell["source"])
