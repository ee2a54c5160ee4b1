"""One of the processes that share a GPU: start JAX, run a function, send what it finds.

    python -m benchmarks.gpu.child DESCRIPTOR MODULE:FUNCTION PROCESS ARGUMENTS

It dies when its parent does, and is killed by it when all are done: leaving jax.distributed in
order would need every process to come.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import sys
import traceback
from dataclasses import dataclass
from typing import Any, TextIO

_PR_SET_PDEATHSIG = 1
_JOIN_S = 60  # within which all processes have to come


@dataclass(frozen=True)
class Process:
    """This process among those that run the same function.

    Attributes:
        rank: its number.
        count: of processes.
        answers: where messages go.
    """

    rank: int
    count: int
    answers: TextIO

    def send(self, kind: str, **content: Any) -> None:
        """Send a message; every process has to send messages of the same kinds in one order."""
        print(json.dumps(dict(kind=kind, **content)), file=self.answers, flush=True)

    def all(self, here: bool) -> bool:
        """Return whether a condition holds in all processes, which have to come here."""
        if self.count == 1:
            return here
        import numpy as np
        from jax.experimental import multihost_utils

        return bool(np.min(multihost_utils.process_allgather(np.int32(here))))

    def barrier(self) -> None:
        """Wait for all processes."""
        if self.count > 1:
            from jax.experimental import multihost_utils

            multihost_utils.sync_global_devices("turn")


def main() -> None:
    """Run the function; send its failure, if it fails."""
    descriptor, function, told, arguments = sys.argv[1:]
    here = json.loads(told)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != here["parent"]:
        raise SystemExit("the parent has ended")
    answers = os.fdopen(int(descriptor), "w")
    process = Process(here["rank"], here["count"], answers)
    end: dict[str, Any] = {}
    try:
        if here["jax"]:
            _start_jax(here)
        module, _, name = function.partition(":")
        getattr(importlib.import_module(module), name)(process, **json.loads(arguments))
    except Exception as error:
        traceback.print_exc()
        lines = str(error).splitlines() or [""]
        end = dict(failed=f"{type(error).__name__}: {lines[0][:500]}")
    process.send("end", **end)
    if not end:
        sys.stdin.read()  # until the parent has heard all
    os._exit(1 if end else 0)


def _start_jax(here: dict[str, Any]) -> None:
    import jax

    one_gpu: dict[str, Any] = {}
    if here["devices"]:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.config.update("jax_num_cpu_devices", here["devices"])
    else:
        jax.config.update("jax_platforms", "cuda")  # and never CPUs instead
        one_gpu = dict(local_device_ids=[0])
    if here["count"] > 1:
        coordinator = f"127.0.0.1:{here['port']}"
        jax.distributed.initialize(
            coordinator,
            here["count"],
            here["rank"],
            initialization_timeout=_JOIN_S,
            heartbeat_timeout_seconds=round(here["heartbeat_s"]),
            **one_gpu,
        )


if __name__ == "__main__":
    main()
