"""Start JAX in one process or several; only the first prints."""

import contextlib
import math
import os

import jax
from rich.console import Console

from models.config import Run

console = Console()


def start(config: Run) -> None:
    """Initialize jax.distributed if the job has several processes, and set the CPU's device count.

    A collective on CPUs waits `timeout_s` for the others. The coordinator gives up processes it
    has not heard of for three times as long: the step's own error, which says more, comes first.
    CPU devices: those that the mesh needs, eight at least in one process.
    """
    if config.distributed or config.coordinator:
        waits = f"--xla_cpu_collective_timeout_seconds={config.timeout_s}"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {waits}".strip()
        jax.distributed.initialize(
            config.coordinator,
            config.processes,
            config.process,
            initialization_timeout=config.timeout_s,
            heartbeat_timeout_seconds=round(3 * within_s(config)),
            shutdown_timeout_seconds=config.timeout_s,
        )
    many = jax.distributed.is_initialized()
    needed, processes = config.devices, config.processes
    wanted = math.ceil(needed / processes) if many and processes else max(8, needed)
    if processes or not many:  # else the job's manager knows how many there are, and we do not
        with contextlib.suppress(RuntimeError):  # JAX has started: it keeps the devices it has
            jax.config.update("jax_num_cpu_devices", wanted)
    console.quiet = jax.process_index() != 0


def within_s(config: Run) -> float:
    """Return how long a failed process waits for the others: the timeout of collectives.

    Those of XLA:CPU wait `timeout_s`, its reduce-scatters 30 s whatever was asked for.
    """
    return max(config.timeout_s, 30) + 5.0
