"""The site builds, and nothing of it is cut: a browser lays out every page at two widths."""

from __future__ import annotations

import functools
import http.server
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
WIDTHS = (1280, 500)
# Lays out each page in a frame, and lists what reaches beyond it without a scroll bar of its own.
HARNESS = """<body><script>
const scrolls = e => ['auto', 'scroll'].includes(getComputedStyle(e).overflowX);
function cut(page) {
  const wide = page.documentElement.clientWidth, bad = [];
  if (page.documentElement.scrollWidth > wide) bad.push('the page scrolls sideways');
  for (const e of page.querySelectorAll('article *')) {
    let scrolled = false;
    for (let up = e; up && up !== page.body; up = up.parentElement) scrolled ||= scrolls(up);
    const box = e.getBoundingClientRect();
    if (box.width && box.right > wide + 1 && !scrolled && getComputedStyle(e).position !== 'absolute')
      bad.push(e.tagName + ' ' + e.textContent.slice(0, 40));
  }
  for (const i of page.images) if (!i.complete || !i.naturalWidth) bad.push('no image ' + i.src);
  return bad;
}
async function all(pages, widths) {
  const found = {seen: 0, bad: []};
  for (const width of widths) for (const page of pages) {
    const frame = document.createElement('iframe');
    frame.style = `width: ${width}px; height: 900px`;
    const loaded = new Promise(done => frame.onload = done);
    frame.src = page;
    document.body.append(frame);
    await loaded;
    found.seen += frame.contentDocument.querySelector('article') ? 1 : 0;
    found.bad.push(...cut(frame.contentDocument).map(what => [width, page, what]));
    frame.remove();
  }
  await fetch('/found', {method: 'POST', body: JSON.stringify(found)});
}
all(PAGES, WIDTHS);
</script>"""


def build_site(folder: Path) -> Path:
    """Build it; strict: a link that leads nowhere, or a name the API's page does not find, fails."""
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_the_site_builds(tmp_path: Path):
    page = (build_site(tmp_path) / "api" / "index.html").read_text()
    assert 'id="jaxoverlap.overlap"' in page and "never_slower" in page


class Pages(http.server.SimpleHTTPRequestHandler):
    """Serves the site, and takes what the harness found.

    Attributes:
        found: the queue for it.
    """

    found: queue.Queue[dict]

    def do_POST(self) -> None:
        self.found.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_args) -> None:
        pass


def laid_out(site: Path, pages: list[str], profile: Path) -> dict:
    """Return how many pages a browser has laid out, and what of them is cut."""
    script = HARNESS.replace("PAGES", json.dumps(pages)).replace("WIDTHS", json.dumps(WIDTHS))
    (site / "harness.html").write_text(script)
    handler = type("Handler", (Pages,), {"found": queue.Queue()})
    serve = functools.partial(handler, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), serve) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/harness.html"
        command = [
            str(BROWSER),
            "--headless",
            "--no-sandbox",
            f"--user-data-dir={profile}",
            address,
        ]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        browser = subprocess.Popen(command, start_new_session=True, **quiet)
        try:
            return handler.found.get(timeout=100)
        finally:
            os.killpg(browser.pid, signal.SIGKILL)
            browser.wait()
            server.shutdown()


@pytest.mark.nightly
@pytest.mark.skipif(BROWSER is None, reason="no chromium on the path")
def test_nothing_is_cut_on_wide_and_narrow_screens(tmp_path: Path):
    site = build_site(tmp_path / "site")
    pages = sorted(p.relative_to(site).as_posix() for p in site.rglob("index.html"))
    found = laid_out(site, pages, tmp_path / "profile")
    assert len(pages) > 50 and found == {"seen": 2 * len(pages), "bad": []}
    wide = '<article><div style="width: 1400px">x</div></article>'  # what is cut is found
    (site / "wide.html").write_text(f"<body>{wide}</body>")
    found = laid_out(site, ["wide.html"], tmp_path / "profile")
    assert [what for _, _, what in found["bad"]][:2] == ["the page scrolls sideways", "DIV x"]
