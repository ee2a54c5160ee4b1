"""Write the output that a page's blocks print into the page: python -m tests.docs.fill docs/PAGE.md.

A block whose output is as shown stays as it is, its lines `...` too.
"""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from pathlib import Path

from tests.docs.blocks import Block, Runner, blocks, by_command, printed, table_in
from tests.docs.prelude import prelude


def fill(page: Path) -> None:
    """Run a page's blocks and replace the output that differs."""
    for block in filter(by_command, blocks(page)):
        if table := table_in(printed(by_command(block)), block):
            page.write_text(page.read_text().replace(block.text, table, 1))
    with tempfile.TemporaryDirectory() as folder:
        steps = Path(folder) / "steps"  # tables show it before a file's name
        for _ in range(20):  # each run fills one output
            shutil.rmtree(steps, ignore_errors=True)
            steps.mkdir()
            if not _filled(page, Runner(steps, prelude())):
                return
        raise SystemExit(f"{page}: a block prints something else each time")


def _filled(page: Path, runner: Runner) -> bool:
    """Replace the first output that differs; return whether there was one."""
    for block in blocks(page):
        if wrong := runner.run(block):
            if "\nprinted:\n" not in wrong:
                raise SystemExit(f"{page}:{block.line}: {wrong}")
            _replace(page, block, wrong)
            return True
    return False


def _replace(page: Path, block: Block, wrong: str) -> None:
    printed = "".join(f"{x.rstrip()}\n" for x in wrong.split("\nprinted:\n")[1].splitlines())
    new = printed.strip("\n") + "\n"
    if block.language == "console":
        command = wrong.partition("\n")[0] + "\n"
        shown = re.search(re.escape(command) + r"((?:(?!\$ ).*\n)*)", block.text)
        assert shown
        new = block.text.replace(command + shown[1], command + new, 1)
    page.write_text(page.read_text().replace(block.text, new, 1))


if __name__ == "__main__":
    import jax

    jax.config.update("jax_num_cpu_devices", 8)
    for name in sys.argv[1:]:
        fill(Path(name))
