"""XLA's kernels, kept from one child's compile for the next's.

A kernel changes no schedule, yet generating hundreds of them is a third of what compiling a step
takes, and candidates for one step have most of theirs in common. XLA keeps them in a file
(`xla_gpu_kernel_cache_file`), which it reads before it generates, and writes afterwards if it made
new ones, with no lock: so each child has a file of its own.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Lock


@dataclass
class Loan:
    """A file for one child.

    Attributes:
        file: with the kernels that are known; it need not be there.
        ended_well: the child, so that what it wrote is whole.
    """

    file: Path
    ended_well: bool = False


class Kernels:
    """Those of one chip and one version of XLA: it finds a kernel by what it computes alone."""

    def __init__(self) -> None:
        # What children wrote that ran side by side. Each is a map in protobuf's format, of which
        # two, one behind the other, are one that has both.
        self._maps: tuple[bytes, ...] = ()
        self._lock = Lock()

    @contextlib.contextmanager
    def lent(self) -> Iterator[Loan]:
        """All that is known, for one child; what it adds is known afterwards."""
        with tempfile.TemporaryDirectory() as folder:
            loan, known = Loan(Path(folder) / "kernels"), self._maps
            if known:
                loan.file.write_bytes(b"".join(known))
            yield loan
            if not loan.ended_well or not loan.file.exists():
                return
            written = loan.file.read_bytes()
            if written != b"".join(known):
                with self._lock:
                    self._maps = (written, *(one for one in self._maps if one not in known))
