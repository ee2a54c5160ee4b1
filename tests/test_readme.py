"""The README fits on a screen, says what matters before its table, and its picture is its example's.

`tests/docs/test_pages.py` runs its example.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import jax
import pytest

from models import demo
from tests.support.pods import needs_plugin

ROOT = Path(__file__).parents[1]
SVG = "{http://www.w3.org/2000/svg}"
README = (ROOT / "README.md").read_text()


def test_it_names_the_four_tools_and_what_it_needs():
    first = README.split("## Results")[0]
    for words in ("Splitting the batch", "Rings", "Layouts", "Scheduling"):
        assert f"**{words}**" in first
    assert "Python 3.12 or newer and jax 0.11.2 or newer" in first
    project = (ROOT / "pyproject.toml").read_text()
    assert 'requires-python = ">=3.12"' in project and '"jax>=0.11.2"' in project


def test_its_table_can_be_made_again_and_what_was_not_measured_follows_it():
    marked = re.search(
        r"<!-- table: questions -->\n\n(.*?)\n\n.*<!-- end table -->\n\n(.*?)\n", README, re.DOTALL
    )
    assert marked and len(marked[1].splitlines()) >= 7
    assert marked[2].startswith("**None of this was timed on a GPU**")
    assert "**What it costs.**" in README and "To go back" in README


def test_an_extra_of_the_package_is_installed_from_the_checkout():
    """It is on no index, so that `pip install 'jaxoverlap[...]'` finds nothing."""
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        assert "install 'jaxoverlap[" not in page.read_text(), page


def drawn(picture: Path) -> tuple[list[str], list[tuple[str, ...]]]:
    """Return the texts of a picture, and the position, size and colour of its boxes."""
    root = ET.fromstring(picture.read_text())
    texts = [element.text or "" for element in root.iter(f"{SVG}text")]
    looks = ("x", "y", "width", "height", "fill")
    boxes = [tuple(box.get(name, "") for name in looks) for box in root.iter(f"{SVG}rect")]
    return texts, boxes


@needs_plugin
@pytest.mark.pods
def test_its_picture_and_its_gain_are_those_of_the_demo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """docs/demo.svg is what `make demo` draws: cp out/demo/step.svg docs/demo.svg."""
    monkeypatch.chdir(tmp_path)
    demo.simulate()
    shown = capsys.readouterr().out
    gains = re.findall(r"plain \S+ ms -> overlapped \S+ ms, \S+ x", shown)
    assert gains and gains[0] in README
    assert "0 of 0" not in shown
    picture = ROOT / "docs" / "demo.svg"
    assert drawn(tmp_path / "out" / "demo" / "step.svg") == drawn(picture)
    assert "prefers-color-scheme: dark" in picture.read_text()


def test_its_meshs_axes_are_automatic():
    """Explicit axes, the default of `jax.make_mesh`, refuse the example's constraints."""
    line = re.search(r"`(jax\.make_mesh\(\(16, 4\).*?)`", README, re.DOTALL)
    assert line
    made = eval(re.sub(r"\s+", " ", line[1]).replace("(16, 4)", "(2, 4)"), {"jax": jax})
    assert set(made.axis_types) == {jax.sharding.AxisType.Auto}
