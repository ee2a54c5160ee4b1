"""Pages: blocks run, links lead somewhere, words are plain, and the site builds."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.docs.blocks import (
    ROOT,
    Block,
    Runner,
    blocks,
    by_command,
    matches,
    of,
    pages,
    printed,
    table_in,
)
from tests.docs.prelude import prelude
from tests.support.pods import needs_plugin

DOCS = ROOT / "docs"
PAGES = pages()


def is_nightly(page: Path) -> bool:
    return any(block.mark == "nightly" for block in blocks(page))


def run_page(page: Path, folder: Path) -> None:
    steps = folder / "steps"  # tables show it before a file's name
    steps.mkdir()
    runner = Runner(steps, prelude())
    for block in blocks(page):
        wrong = runner.run(block)
        assert not wrong, f"{of(page)}:{block.line}: {wrong}"


WITH_BLOCKS = [page for page in PAGES if blocks(page)]


@needs_plugin
@pytest.mark.pods
@pytest.mark.parametrize("page", [p for p in WITH_BLOCKS if not is_nightly(p)], ids=of)
def test_the_blocks_of_a_page_are_true(page: Path, tmp_path: Path):
    run_page(page, tmp_path)


@needs_plugin
@pytest.mark.pods
@pytest.mark.nightly
@pytest.mark.parametrize("page", [p for p in WITH_BLOCKS if is_nightly(p)], ids=of)
def test_the_blocks_of_a_long_page_are_true(page: Path, tmp_path: Path):
    run_page(page, tmp_path)


@needs_plugin
@pytest.mark.parametrize(
    ("page", "block"),
    [(page, block) for page in pages() for block in blocks(page) if by_command(block)],
    ids=lambda value: of(value) if isinstance(value, Path) else f"line {value.line}",
)
def test_a_table_is_what_its_command_prints(page: Path, block: Block):
    if "../shared" in block.mark and not (ROOT.parent / "shared").is_dir():
        pytest.skip("../shared is not there: it has what others measured")
    assert matches(block.text, table_in(printed(by_command(block)), block)), block.text


def test_output_is_compared_line_by_line():
    assert matches("a\n...\nd\n", "a\nb\nc\nd  \n\n") and matches("a\n...\n", "a\nb\n")
    assert not matches("a\nd\n", "a\nb\nd\n") and not matches("b\n", "a\nb\n")


def test_a_wrong_block_is_found(tmp_path: Path):
    runner = Runner(tmp_path, {})
    assert runner.run(Block("python", "", "print(1 + 1)\n", 1)) == ""
    assert runner.run(Block("text", "", "2\n", 1)) == ""
    assert "shown" in runner.run(Block("text", "", "3\n", 1))
    assert "no option --nope" in runner.run(Block("sh", "", "jaxoverlap explain x --nope\n", 1))
    assert "no target" in runner.run(Block("sh", "", "make nothing\n", 1))
    assert "no check" in runner.run(Block("perl", "", "x\n", 1))


@pytest.mark.parametrize("page", PAGES, ids=of)
def test_code_stands_in_fences(page: Path):
    """An indented block has no language, so nothing would check it."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert not re.findall(
        r"\n\n(    \S.*)",
        re.sub(r"^\s*(?:[-*]|\d+\.) .*(?:\n    .*)*", "", text, flags=re.MULTILINE),
    )


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    named = re.findall(r'<a id="([^"]*)"', page.read_text())
    return {*named, *(heading.strip().replace(" ", "-") for heading in plain)}


@pytest.mark.parametrize("page", pages(), ids=of)
def test_links_lead_somewhere(page: Path):
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)]+)\)", text):
        if target.startswith(("http:", "https:")):
            continue
        file, _, anchor = target.partition("#")
        there = (page.parent / file).resolve() if file else page
        assert there.exists(), f"{of(page)}: {target}"
        assert not anchor or anchor in anchors(there), f"{of(page)}: no heading for {target}"


def test_readme_and_pages_are_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120
    texts = (page.read_text() for page in DOCS.rglob("*.md"))  # tables from rows are data
    words = [re.sub(r"<!-- table: .*?<!-- end table -->", "", t, flags=re.DOTALL) for t in texts]
    assert sum(len(text.split()) for text in words) <= 40_000


@pytest.mark.parametrize("page", ["results.md", "accuracy.md"])
def test_figures_leave_room_for_what_they_mean(page: str):
    """Tables and output are data; the rest is read."""
    text = re.sub(
        r"```.*?```|<!--.*?-->|^\\|.*?$",
        "",
        (DOCS / page).read_text(),
        flags=re.DOTALL | re.MULTILINE,
    )
    assert len(text.split()) <= 1500


@pytest.mark.parametrize("page", [p for p in PAGES if p.parent == DOCS], ids=of)
def test_a_page_opens_with_whom_it_is_for(page: Path):
    lines = page.read_text().splitlines()
    assert lines[0].startswith("# ") and lines[2].startswith("**For"), lines[2][:80]


def test_every_page_is_in_the_sites_contents():
    contents = (ROOT / "mkdocs.yml").read_text().split("nav:")[1]
    for page in DOCS.rglob("*.md"):
        assert f"{page.relative_to(DOCS)}\n" in contents, page


@pytest.mark.parametrize("page", PAGES, ids=of)
def test_modules_that_a_page_names_are_there(page: Path):
    named = re.findall(r"python -m ([\w.]+)", page.read_text())
    assert [name for name in named if find_spec(name) is None] == []


@pytest.mark.parametrize("picture", sorted(DOCS.glob("*.svg")), ids=of)
def test_the_letters_of_a_picture_can_be_read(picture: Path):
    """The smallest ones, on a page of 830 pixels; matplotlib writes glyphs of 100 units, scaled."""
    text = picture.read_text()
    width = re.search(r'viewBox="0 0 ([\d.]+)', text)
    sizes = [float(size) for size in re.findall(r"font: (\d+)px", text)]
    sizes += [100 * float(scale) for scale in re.findall(r"scale\(([\d.]+) -[\d.]+\)", text)]
    assert width and min(sizes) * 830 / float(width[1]) >= 11


def test_the_bars_of_the_operations_have_the_numbers_of_their_rows(tmp_path: Path):
    from benchmarks import pictures

    pictures.draw("ops", tmp_path / "ops.svg")
    drawn, shown = (
        re.findall(r"<!-- (\d\.\d\d) -->", picture.read_text())
        for picture in (tmp_path / "ops.svg", DOCS / "ops.svg")
    )
    assert len(drawn) == 20 and drawn == shown


def test_no_two_lines_of_a_picture_look_alike(tmp_path: Path):
    """The colour, the dashes and the marker of each line of compression.svg, as it is drawn."""
    import matplotlib.pyplot as plt

    from benchmarks import pictures

    pictures.draw("compression", tmp_path / "a.svg")
    lines = plt.gcf().axes[0].get_lines()[:-1]
    looks = [(line.get_color(), line.get_linestyle(), line.get_marker()) for line in lines]
    assert len(looks) == 7 == len(set(looks))
    assert (tmp_path / "a.svg").read_bytes()[:200] == (DOCS / "compression.svg").read_bytes()[:200]
