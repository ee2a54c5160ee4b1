"""XLA's kernels, kept from one child's compile for the next's.

A kernel changes no schedule, yet generating hundreds of them is a third of what compiling a step
takes, and candidates for one step have most of theirs in common. XLA keeps them in a file
(`xla_gpu_kernel_cache_file`), which it reads before it generates and writes anew afterwards, with
no lock: so each child has a copy of its own.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from threading import Lock


class Kernels:
    """Those of one chip and one version of XLA: it finds a kernel by what it computes alone."""

    def __init__(self, folder: Path) -> None:
        """Into a folder, which is made if it is not there."""
        folder.mkdir(exist_ok=True)
        self._kept, self._lock = folder / "kernels", Lock()

    @contextlib.contextmanager
    def lent(self) -> Iterator[Path]:
        """A file for one child; the kernels in it are kept when that ends.

        Of two that end the larger file is kept, so that some kernels may be generated once more.
        """
        with tempfile.TemporaryDirectory(dir=self._kept.parent) as own:
            file = Path(own) / "kernels"
            with self._lock:
                if self._kept.exists():
                    shutil.copyfile(self._kept, file)
            yield file
            with self._lock:
                if _size(file) > _size(self._kept):
                    file.replace(self._kept)


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0
