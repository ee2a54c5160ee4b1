"""Pictures can be read: at the width of a page, on a telephone, in the dark."""

from __future__ import annotations

import html
import re
import shutil
import subprocess
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from jaxoverlap.simulation import report
from jaxoverlap.simulation.replay import replay
from jaxoverlap.simulation.timeline import Timeline
from tests.support.clock import clock
from tests.support.steps import computation, gemm, loop, module

SVG = "{http://www.w3.org/2000/svg}"
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "google-chrome", "chromium-headless-shell"))), None
)


@pytest.fixture(scope="module")
def timeline() -> Timeline:
    body = computation("%body", "\n  ".join(gemm(f"g{n}") for n in range(3)))
    return replay(module(loop(4), before=body), clock())


def test_an_svg_has_letters_of_12_pixels_at_the_width_of_a_readme(
    timeline: Timeline, tmp_path: Path
):
    report.write_svg(tmp_path / "a.svg", {"plain": timeline, "overlapped": timeline})
    text = (tmp_path / "a.svg").read_text()
    root = ET.fromstring(text)
    width, letters = float(root.attrib["width"]), re.search(r"font: (\d+)px", text)
    assert letters and int(letters[1]) * 830 / width >= 12  # GitHub shows 830 pixels
    assert "prefers-color-scheme: dark" in text and 'fill="white"' not in text
    for one in root.iter(f"{SVG}text"):
        assert len(one.text or "") * 7.2 < width, one.text


def run_in_chromium(page: str, script: str, width: int, folder: Path) -> str:
    """Open a page in a frame of some width, run a script in it, and return what it gives."""
    assert CHROMIUM
    inside = page + f"<script>parent.document.title = String((() => {{ {script} }})());</script>"
    frame = f'<iframe width="{width}" height="800" srcdoc="{html.escape(inside)}"></iframe>'
    (folder / "frame.html").write_text(frame)
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    command += ["--virtual-time-budget=3000", f"file://{folder}/frame.html"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = re.search(r"<title>(.*?)</title>", done.stdout)
    assert found, done.stdout[:500]
    return found[1]


def test_a_page_knows_telephones_and_the_dark(timeline: Timeline, tmp_path: Path):
    report.write_page(tmp_path / "p.html", {"plain": timeline}, title="t")
    page = (tmp_path / "p.html").read_text()
    assert 'name="viewport"' in page and "prefers-color-scheme: dark" in page


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
def test_a_page_fits_400_pixels_and_finds_what_is_searched_for(timeline: Timeline, tmp_path: Path):
    report.write_page(tmp_path / "p.html", {"plain": timeline, "other": timeline}, title="t")
    page = (tmp_path / "p.html").read_text()
    width = "return document.documentElement.scrollWidth;"
    assert int(run_in_chromium(page, width, 400, tmp_path)) <= 400
    shown = """
      const heads = [...document.querySelectorAll("th")].filter(h => h.textContent === "exposed ms");
      return heads.length && heads.every(head => head.getBoundingClientRect().right <= 400);"""
    assert run_in_chromium(page, shown, 400, tmp_path) == "true"
    search = """
      const box = document.getElementById("find");
      box.value = "G1"; box.dispatchEvent(new Event("input"));
      return document.getElementById("hits").textContent;"""
    assert run_in_chromium(page, search, 400, tmp_path) == "4 hits"
    keys = """
      const press = key => window.dispatchEvent(new KeyboardEvent("keydown", { key }));
      press("+"); press("ArrowRight"); press("a");
      return from > 0 && to - from < longest && document.getElementById("align").checked;"""
    assert run_in_chromium(page, keys, 400, tmp_path) == "true"


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
def test_layers_are_aligned(tmp_path: Path):
    """The second step's layers are twice as long: its third stands under the first step's."""
    steps = {}
    for name, count in (("plain", 4), ("overlapped", 2)):
        body = computation("%body", "\n  ".join(gemm(f"g{n}") for n in range(count)))
        steps[name] = replay(module(loop(4), before=body), clock())
    report.write_page(tmp_path / "p.html", steps, title="t")
    script = """
      const [first, second] = panels.map(panel => loops(panel.step)[0]);
      show(first[0] + 2.2 * first[1], first[0] + 2.8 * first[1]);
      const before = shift(panels[1]);
      document.getElementById("align").checked = true;
      const wanted = second[0] + 2 * second[1] - first[0] - 2 * first[1];
      return before === 0 && Math.abs(shift(panels[1]) - wanted) < 1e-6 && wanted !== 0;"""
    page = (tmp_path / "p.html").read_text()
    assert run_in_chromium(page, script, 900, tmp_path) == "true"
