"""Cache the kernels that XLA generates in one child process for the compilations of others.

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
        file: the file of known kernels; it need not be there.
        ended_well: whether the child ended well, so that its file is complete.
    """

    file: Path
    ended_well: bool = False


class KnownKernels:
    """The known kernels of one chip and one XLA version, as XLA's keys name neither."""

    def __init__(self) -> None:
        self._known, self._lock = b"", Lock()

    @contextlib.contextmanager
    def lent(self) -> Iterator[Loan]:
        """Lend all known kernels to one child as a file, and keep those that it adds.

        Of two children side by side the one that wrote more counts. Their files cannot be put
        together: XLA refuses one in which a kernel has two names.
        """
        with tempfile.TemporaryDirectory() as folder:
            loan = Loan(Path(folder) / "kernels")
            if self._known:
                loan.file.write_bytes(self._known)
            yield loan
            if loan.ended_well and loan.file.exists():
                written = loan.file.read_bytes()
                with self._lock:
                    self._known = max(self._known, written, key=len)
