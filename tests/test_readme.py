"""The README's example prints what the README shows."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

from tests.support.pods import needs_plugin

_README = Path(__file__).parents[1] / "README.md"
_FIRST = 4  # lines of explain() that are shown


def example() -> tuple[str, list[str]]:
    """Return the README's example, and the lines that it shows of its output."""
    text = _README.read_text()
    shown = re.search(r"```python\n(.*?)```.*?```\n(.*?)```", text, re.DOTALL)
    assert shown is not None
    return shown.group(1), shown.group(2).splitlines()


@needs_plugin
def test_the_example_prints_what_is_shown():
    code, shown = example()
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(code, "mlp.py", "exec"), {})
    lines = out.getvalue().splitlines()
    assert shown == [*lines[:_FIRST], "...", lines[-1]]
