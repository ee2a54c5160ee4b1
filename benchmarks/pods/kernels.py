"""XLA's kernels, kept from one child's compile for the next's.

A kernel changes no schedule, yet generating hundreds of them is a third of what compiling a step
takes, and the rows of a step have most of theirs in common. XLA keeps them in a file
(`--xla_gpu_kernel_cache_file`), which it reads before it generates and writes anew afterwards, with
no lock: so each child has a copy of its own.
"""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from threading import Lock


class Kernels:
    """Files of kernels in a folder, one for each chip: XLA finds a kernel by what it computes."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._lock = folder, Lock()

    @contextlib.contextmanager
    def for_child(self, chip: str) -> Iterator[str]:
        """XLA's flag for a child that compiles for `chip`; its kernels are kept when it ends.

        Of two that end the larger file is kept, so that some kernels may be generated once more.
        """
        kept = self._folder / chip
        with tempfile.TemporaryDirectory(dir=self._folder) as own:
            file = Path(own) / "kernels"
            with self._lock:
                if kept.exists():
                    shutil.copyfile(kept, file)
            yield f"--xla_gpu_kernel_cache_file={file}"
            with self._lock:
                if _size(file) > _size(kept):
                    file.replace(kept)


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0
