"""Run work in child processes: a compiler that aborts, or does not end, is a row and not the end.

Importing JAX and what goes with it takes a process two seconds and more. A server that has Python's
modules does that once, and nothing else: no compiler, no devices and no flags of XLA's, which each
fork of it reads for itself.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import groupby, zip_longest
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.frame import Row, in_ms, rows_in, write_rows
from jaxoverlap._jax.kernel_cache import KnownKernels
from jaxoverlap.hardware.cluster import parse_cluster
from jaxoverlap.step.trial import how_it_ended

_FORKS = multiprocessing.get_context("forkserver")

Job = tuple[str, str]  # a step and one of its rows


def in_child(benchmark: str, *arguments: str, python: str = sys.executable) -> Row:
    """Run `python -m BENCHMARK child ARGUMENTS`; return its last line's JSON, or {"error"}."""
    command = [python, "-m", benchmark, "child", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"error": how_it_ended(done.returncode, done.stderr)}
    return json.loads(done.stdout.splitlines()[-1])


# -- forks ----------------------------------------------------------------------------------------


def import_first(modules: Iterable[str]) -> None:
    """Choose the modules that the server imports; call this before the first fork."""
    _FORKS.set_forkserver_preload(list(modules))


def in_fork(
    work: Callable[..., Row], *arguments: Any, timeout_s: float, xla_flags: str = ""
) -> Row:
    """Return what `work` returns for these arguments in a fork; {"error"} if it failed.

    Args:
        work: a function of a module, and not of a main one.
        xla_flags: flags to put in front of those of the environment.
    """
    mine, theirs = _FORKS.Pipe(duplex=False)
    with tempfile.NamedTemporaryFile("r", errors="replace") as stderr, mine:
        request = theirs, stderr.name, xla_flags, work, arguments
        fork = _FORKS.Process(target=_run, args=request)
        fork.start()
        theirs.close()
        try:
            row = mine.recv() if mine.poll(timeout_s) else None
        except EOFError:  # it ended without a word
            fork.join()
            return {"error": how_it_ended(fork.exitcode or 0, stderr.read())}
        if row is None:
            fork.kill()
        fork.join()
        return {"error": f"stopped after {timeout_s:.0f} s"} if row is None else row


def each_in_fork(
    work: Callable[..., Row],
    wanted: Iterable[tuple[str, ...]],
    out: Path,
    timeout_s: float,
    console: Console,
) -> list[Row]:
    """Run `work` for each tuple in a fork, print its milliseconds, and write all rows.

    Args:
        work: gives a row with `step_s`; as `in_fork` takes it.
        wanted: its arguments; the first names the step, the others the row.
        out: the file of rows; those that are there and not wanted stay.
    """
    rows = rows_in(out)
    for name, *others in wanted:
        row, made = ", ".join(others), in_fork(work, name, *others, timeout_s=timeout_s)
        rows[name, row] = {"step": name, "row": row, **made}
        console.print(f"{name}, {row}: {in_ms(made.get('step_s'))} {made.get('error', '')}")
        write_rows(out, rows.values())
    return list(rows.values())


def _run(
    answer: Connection,
    stderr: str,
    xla_flags: str,
    work: Callable[..., Row],
    arguments: tuple[Any, ...],
) -> None:
    """Run the work in the fork; code that aborts writes to the file, not to Python's stderr."""
    os.dup2(os.open(stderr, os.O_WRONLY), 2)
    os.environ["XLA_FLAGS"] = f"{xla_flags} {os.environ.get('XLA_FLAGS', '')}".strip()
    answer.send(work(*arguments))


# -- several at once ------------------------------------------------------------------------------


def compiled_at_once(
    wanted: list[Job],
    at_once: int,
    pods: Mapping[str, str],
    work: Callable[[Job, KnownKernels], Row],
    console: Console,
) -> Iterator[tuple[Job, Row]]:
    """Yield rows as they are finished, `at_once` at a time, with a progress bar.

    Args:
        wanted: the jobs, those of a step together.
        at_once: how many compile at a time.
        pods: the pod of each step, as `parse_cluster` takes it; steps for one chip share kernels.
        work: makes a job's row.
        console: where the bar is shown.
    """
    lanes = dealt(wanted, at_once)
    known = kernels(lanes, pods)
    turns = [job for together in zip_longest(*lanes) for job in together if job]
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.description}"), console=console) as progress:
        bar = progress.add_task("compiling", total=len(wanted))
        for job, row in done(turns, at_once, lambda job: work(job, known[job[0]])):
            progress.update(bar, advance=1, description=", ".join(job))
            yield job, row


def with_kernels(work: Callable[..., Row], job: Job, known: KnownKernels, timeout_s: float) -> Row:
    """Run a job in a fork that has the kernels which earlier jobs of its lane compiled."""
    with known.lent() as loan:
        flag = f"--xla_gpu_kernel_cache_file={loan.file}"
        row = in_fork(work, *job, timeout_s=timeout_s, xla_flags=flag)
        loan.ended_well = "error" not in row
        return row


def dealt(wanted: list[Job], lanes: int) -> list[list[Job]]:
    """Deal jobs into so many lists of about one length, all of a step in one.

    Jobs side by side then have few kernels in common, and the next job of a list reuses those that
    one finds.
    """
    jobs_by_lane: list[list[Job]] = [[] for _ in range(lanes)]
    for _, jobs in groupby(wanted, key=lambda job: job[0]):
        min(jobs_by_lane, key=len).extend(jobs)
    return jobs_by_lane


def done(wanted: list[Job], at_once: int, work: Callable[[Job], Row]) -> Iterator[tuple[Job, Row]]:
    """Yield rows as they are finished, `at_once` at a time."""
    with ThreadPoolExecutor(at_once) as threads:
        pending = {threads.submit(work, job): job for job in wanted}
        for future in as_completed(pending):
            yield pending[future], future.result()


def kernels(lanes: list[list[Job]], pods: Mapping[str, str]) -> dict[str, KnownKernels]:
    """Map each step to its kernels; steps for one chip share them, in each of the lanes."""
    by_lane_and_chip: defaultdict[tuple[int, str], KnownKernels] = defaultdict(KnownKernels)
    return {
        step: by_lane_and_chip[lane, parse_cluster(pods[step]).chip.name]
        for lane, jobs in enumerate(lanes)
        for step, _ in jobs
    }
