"""Evaluate one candidate: compile it in a child process, audit and simulate it.

A compiler that aborts ends the child, and is a result like any other. The child ends when its
parent does. Results are cached in a folder, under a hash of all that they depend on.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import os
import pickle
import re
import signal
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import jax
import msgspec

from jaxoverlap._jax import jobs
from jaxoverlap._jax.jobs import Job
from jaxoverlap._jax.kernel_cache import KnownKernels
from jaxoverlap._util import workers
from jaxoverlap._util.files import write_atomically
from jaxoverlap._util.source_hash import source_hash
from jaxoverlap._util.text import first_line
from jaxoverlap.cost.model import CostModel
from jaxoverlap.hardware import pods
from jaxoverlap.passes.scheduling.scheduler import SchedulerPass
from jaxoverlap.plan.evaluation import Evaluation, Times, Waited
from jaxoverlap.simulation.audit import audit
from jaxoverlap.simulation.simulation import simulate
from jaxoverlap.simulation.timeline import Timeline


@dataclass(frozen=True)
class Request:
    """The candidate that a child process compiles and simulates.

    Attributes:
        job: the job to compile.
        cost: the cost model to simulate by.
        ordering: the scheduler pass, if any.
    """

    job: Job
    cost: CostModel
    ordering: SchedulerPass | None

    @functools.cached_property
    def key(self) -> str:
        """Hash of all that the result depends on."""
        name = self.ordering.name if self.ordering else ""
        versions = (jax.__version__, version("jaxlib"), os.environ.get("XLA_FLAGS", ""))
        hasher = hashlib.sha256(repr((self.job, self.cost, name, versions)).encode())
        hasher.update(source_hash())
        return hasher.hexdigest()[:24]


def attempt(
    request: Request, kept: Path, timeout_s: float, kernels: KnownKernels | None = None
) -> Evaluation:
    """Try a candidate in a child process, unless its result is cached.

    Args:
        kept: an existing folder of cached results.
        kernels: XLA's kernels, cached from candidates for the same chip.
    """
    with _lock:
        running = _running.setdefault((kept, request.key), threading.Lock())
    with running:  # the same one may have begun before it was asked for (`search/choice.py`)
        return _attempted(request, kept, timeout_s, kernels)


_lock = threading.Lock()
_running: dict[tuple[Path, str], threading.Lock] = {}


def _attempted(
    request: Request, kept: Path, timeout_s: float, kernels: KnownKernels | None
) -> Evaluation:
    path = kept / f"{request.key}.json"
    known, there = _read(path), _schedule_in(kept, request).exists()
    if known is not None and (known.refusal or there):
        return known
    with (kernels or KnownKernels()).lent() as loan:
        borrowed = loan.file.exists()
        result = _in_child(request, _schedule_in(kept, request), loan.file, timeout_s)
        loan.ended_well = not result.refusal
    if borrowed and result.refusal and not result.again:
        return _attempted(request, kept, timeout_s, None)  # XLA may have refused the kernels
    if not result.again:
        write_atomically(path, msgspec.json.encode(result).decode())
    return result


def schedule_of(request: Request, kept: Path) -> str:
    """Read the scheduled module of a candidate that was tried."""
    return gzip.decompress(_schedule_in(kept, request).read_bytes()).decode()


def _schedule_in(kept: Path, request: Request) -> Path:
    return kept / f"{request.key}.hlo.gz"


def _read(path: Path) -> Evaluation | None:
    """Read a cached result; None if there is none, or if it does not decode in this version."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Evaluation)
    except (FileNotFoundError, msgspec.MsgspecError):
        return None


def _in_child(request: Request, schedule: Path, kernels: Path, timeout_s: float) -> Evaluation:
    payload = pickle.dumps((request, schedule, kernels))
    try:
        answer = workers.ask(answered, payload, _environment(request.job), timeout_s)
    except workers.WorkerEndedError as ended:
        if ended.stopped:
            return refused(f"stopped after {timeout_s:.0f} s", again=True)
        why = how_it_ended(ended.code, ended.said)
        return refused(why, again=ended.code == -signal.SIGKILL)
    return msgspec.json.decode(answer, type=Evaluation)


def how_it_ended(code: int, stderr: str) -> str:
    """Say how a child ended, by itself or by a signal, with the line of its stderr that says why.

    That line is the one of XLA's failed check, or of the exception; or else the last one.
    """
    lines = [line for line in stderr.splitlines() if line.strip()]
    last = [line for line in lines if _SAYS_WHY.match(line)] or lines or ["it said nothing"]
    ended = f"exit {code}" if code > 0 else signal.Signals(-code).name
    return f"{ended}: {last[-1].strip()}"


# Matches a failed check in XLA's log, and the line of a traceback that names the exception.
_SAYS_WHY = re.compile(r"F\d{4} |[\w.]+(Error|Exception): ")


def _environment(job: Job) -> Mapping[str, str]:
    """Return a child's environment, without GPUs; a CPU job gets a device for each position."""
    flags = os.environ.get("XLA_FLAGS", "")
    if job.platform == "cpu":
        flags += f" --xla_force_host_platform_device_count={len(job.positions)}"
    return {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags.strip()}


# -- in the child ---------------------------------------------------------------------------------


def compiled(request: Request, schedule: Path, kernels: Path) -> Evaluation:
    """Compile, audit and simulate a candidate in this process.

    Args:
        schedule: the file for its scheduled module.
        kernels: the file where XLA finds and keeps kernels.
    """
    job, ordering, cluster = request.job, request.ordering, request.cost.cluster
    devices = pods.devices(cluster) if job.platform == "cuda" else jax.devices()
    try:
        if ordering is None:
            done, frames = jobs.compile_job(job, devices, kernels), None
        else:
            with ordering.compiling() as scheduling:
                done = jobs.compile_job(job, devices, kernels)
            frames = scheduling.report.frames
    except jax.errors.JaxRuntimeError as error:
        return refused(first_line(error))
    text = frames.restored(done.text) if frames else done.text
    schedule.write_bytes(gzip.compress(text.encode()))
    return evaluated(text, done.peak_bytes, request.cost)


def evaluated(text: str, peak_bytes: int, cost: CostModel) -> Evaluation:
    """Simulate and audit a compiled step; one that cannot be simulated has no seconds.

    Args:
        text: its scheduled module.
        peak_bytes: bytes that a device needs at most.
        cost: the cost model to simulate by.
    """
    try:
        step, hops = simulate(text, cost), audit(text).hops
    except ValueError as error:
        return Evaluation(peak_bytes=peak_bytes, refusal=str(error), by="compiled")
    times = Times(
        step_s=step.step_s,
        compute_s=step.compute_s,
        communication_s=step.communication_s,
        exposed_s=step.exposed_s,
        bound_s=step.bound_s,
        hops=hops.count,
        hops_covered=hops.covered,
        waited=_waited(step),
        unknown=step.unknown,
    )
    return Evaluation(step_s=step.step_s, peak_bytes=peak_bytes, by="compiled", times=times)


def refused(why: str, *, again: bool = False) -> Evaluation:
    """Return the answer about a candidate that has no compiled step.

    Args:
        why: the compiler's last words.
        again: whether it may end otherwise another time.
    """
    return Evaluation(refusal=why, by="compiled", again=again)


def _waited(step: Timeline) -> tuple[Waited, ...]:
    totals: dict[tuple[str, str, str], list[float]] = {}
    for spent in step.spent:
        c = spent.collective
        sums = totals.setdefault((c.kind, c.ring or "", c.source), [0.0, 0.0])
        sums[0] += spent.seconds
        sums[1] += spent.exposed_s
    waited = [Waited(*key, *sums) for key, sums in totals.items()]
    return tuple(sorted(waited, key=lambda w: -w.exposed_s))


def answered(payload: bytes) -> bytes:
    """Answer a request that was sent to this child process."""
    return msgspec.json.encode(compiled(*pickle.loads(payload)))
