"""Build the steps, and find out what the library makes of them."""

from __future__ import annotations

import contextlib
import hashlib
import re
import time
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax

import jaxoverlap
from benchmarks.pods.names import SCHEDULED
from benchmarks.pods.suite import STEPS
from jaxoverlap import Plan
from jaxoverlap._jax import partitioner
from jaxoverlap.plan.edits import ScatterLookup
from tests.differential.plans import REFUSALS, Drawn, drawn

_AHEAD = "run one step of their scan ahead"
_NAME = re.compile(r"^module @\S+", re.MULTILINE)  # it counts the programs of a process

Facts = dict[str, Any]


def built(name: str) -> Drawn:
    """Build a step of the pods suite, or a drawn one."""
    if name not in STEPS:
        return drawn(int(name.removeprefix("drawn-")))
    step = STEPS[name]
    fn, args = step.build(SCHEDULED, jaxoverlap.pod_mesh(step.pod, step.axes))
    return Drawn(fn, lambda f: f(*args), contextlib.nullcontext, pod=True)


def facts(step: Drawn) -> Facts:
    """Return what the library makes of a step; how it refuses it, if JAX has no plain program."""
    overlapped = jaxoverlap.overlap(step.fn, never_slower=False)
    with counted() as questions, step.context():
        try:
            lowered = step.call(overlapped.lower)
        except REFUSALS as error:
            return {"refused": type(error).__name__}
    text = _NAME.sub("module", lowered.as_text())
    plan = lowered.plan
    return {
        "module": hashlib.sha256(text.encode()).hexdigest()[:16],
        "questions": len(questions),
        **(of_plan(plan) if plan else {}),
    }


def of_plan(plan: Plan) -> Facts:
    """Count what a plan changes, and read its settings."""
    return {
        "matmuls": len(plan.entries),
        "rings": sum(d.num_chunks > 1 for d in plan.decisions),
        "gathered ahead": next(
            (int(line.split()[0]) for line in plan.applied if _AHEAD in line), 0
        ),
        "scattered": sum(isinstance(edit, ScatterLookup) for edit in plan.edits),
        "pins": len(plan.pins),
        "parts": plan.split.parts if plan.split else 1,
        "options": dict(sorted(plan.xla_options.items())),
        "schedule": repr(plan.schedule),
    }


@contextlib.contextmanager
def counted() -> Iterator[list[str]]:
    """Collect the names of the programs that XLA's partitioner is asked about."""
    asked: list[str] = []
    original = partitioner._partitioned

    def partitioned(lowering: Any, module: Any, name: str, options: Any) -> Any:
        asked.append(name)
        return original(lowering, module, name, options)

    with mock.patch.object(partitioner, "_partitioned", partitioned):
        yield asked


def timed(name: str) -> tuple[str, Facts, float]:
    """Return a step's name and facts, and the seconds that they took."""
    began = time.perf_counter()
    return name, facts(built(name)), time.perf_counter() - began


def prepare() -> None:
    """Give a child the devices of the drawn steps."""
    jax.config.update("jax_num_cpu_devices", 8)
    warnings.simplefilter("ignore")
