"""Where processes run: together on one GPU, alone on it, or on CPU devices in a rehearsal."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.frame import Row, provenance
from benchmarks.gpu.machine import Gpu, Nccl, gpu, mps, nccl
from benchmarks.gpu.processes import Start
from benchmarks.gpu.wires import Wire

NEEDS = (
    "needs one NVIDIA GPU, NVIDIA's MPS, jax with its CUDA plugin and NCCL 2.30.3 or later (--nccl "
    "FILE); --rehearse runs it on CPU devices"
)
NEEDS_ALONE = "needs one NVIDIA GPU and jax with its CUDA plugin; --rehearse runs it on CPU devices"
LAST_S = 15.0  # before time is up: processes and MPS are ended, which has as long to answer
PROCESSES = 4  # that share a GPU
_REHEARSED = 2  # processes of a rehearsal, which have the devices of four
_MEMORY = 0.9  # of the GPU, for one process alone


@dataclass(frozen=True)
class Place:
    """A GPU, or CPU devices in a rehearsal.

    Attributes:
        gpu: None in a rehearsal.
        nccl: the library that processes on one GPU load; None if none was asked for.
        logs: a folder for what processes write.
        silent_s: how long processes may say nothing.
    """

    gpu: Gpu | None
    nccl: Nccl | None
    logs: Path
    silent_s: float = 300.0

    @property
    def about(self) -> Row:
        """Return what all rows say of this place."""
        found: Row = dict(provenance())
        if self.gpu:
            found |= {"driver": self.gpu.driver}
        if self.nccl:
            found |= {"nccl": str(self.nccl)}
        return found

    @contextlib.contextmanager
    def together(
        self, wire: Wire, more: dict[str, str] | None = None, **options: Any
    ) -> Iterator[Start]:
        """Give how to start processes on a wire, on a GPU under an MPS of their own.

        Args:
            wire: how they reach each other.
            more: more variables of each.
            options: more of `Start`.
        """
        if self.gpu is None:
            devices = PROCESSES // _REHEARSED
            yield Start(_REHEARSED, devices, lambda _: {}, self.logs, self.silent_s, **options)
            return
        assert self.nccl is not None
        preload = {"LD_PRELOAD": str(self.nccl.file)}
        with mps() as variables:

            def environment(rank: int) -> dict[str, str]:
                own = wire.environment(rank, PROCESSES)
                return {**own, **variables, **preload, **(more or {})}

            yield Start(PROCESSES, 0, environment, self.logs, self.silent_s, **options)

    def alone(self, devices: int, more: dict[str, str]) -> Start:
        """Return how to start one process on the GPU, or on so many CPU devices.

        Args:
            more: more variables on a GPU.
        """
        if self.gpu is None:
            return Start(1, devices, lambda _: {}, self.logs, self.silent_s)
        variables = {"XLA_PYTHON_CLIENT_MEM_FRACTION": str(_MEMORY), **more}
        return Start(1, 0, lambda _: variables, self.logs, self.silent_s)


def place(*, rehearse: bool, nccl_file: Path | None, together: bool, logs: Path) -> Place:
    """Return where to run.

    Args:
        rehearse: on CPU devices.
        nccl_file: the library to load instead of the environment's.
        together: whether several processes share the GPU, for which NCCL has to be new enough.

    Raises:
        MissingError: if this is no rehearsal, and what is needed is not here.
    """
    if rehearse:
        return Place(None, None, logs)
    found = gpu(NEEDS if together else NEEDS_ALONE)
    return Place(found, nccl(nccl_file) if together else None, logs)
