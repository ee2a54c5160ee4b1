"""Run jobs side by side in lanes, and choose which of them share XLA's kernels."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import groupby
from typing import Any

from jaxoverlap._jax.kernel_cache import KnownKernels
from jaxoverlap.hardware.cluster import parse_cluster

Row = dict[str, Any]
Job = tuple[str, str]  # a step and one of its rows


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
    """Map each step to its kernels; steps for one chip share them, in each of the lanes.

    Args:
        lanes: lists of jobs, all of a step in one.
        pods: the pod of each step, as `parse_cluster` takes it.
    """
    by_lane_and_chip: defaultdict[tuple[int, str], KnownKernels] = defaultdict(KnownKernels)
    return {
        step: by_lane_and_chip[lane, parse_cluster(pods[step]).chip.name]
        for lane, jobs in enumerate(lanes)
        for step, _ in jobs
    }
