"""One step compiled for a pod of GPUs and audited: the row that several benchmarks print.

Each compile runs in a child process, so that a compiler that aborts is a row and not the end.
"""

import json
import subprocess
import sys
import time
from importlib import metadata
from typing import Any

import jaxoverlap
from jaxoverlap import pods
from jaxoverlap.flags import options_for

STEPS = ("plain", "plain, same flags", "overlapped")


def compile_step(model: Any, pod: str, axes: dict[str, int], step: str) -> dict[str, Any]:
    """A row for one of STEPS of a model at its pod's size; `model` is a module of models/."""
    mesh = jaxoverlap.pod_mesh(pod, axes)
    config = model.RECIPE.config.pod(**axes)
    function: Any = model.make_step(config, mesh)
    if step == "overlapped":
        function, options = jaxoverlap.overlap(function, cluster=pod), options_for(mesh)
    else:
        options = pods.compiler_options() if step == "plain" else options_for(mesh)
    began = time.perf_counter()
    lowered = function.lower(*model.abstract_args(config, mesh))
    lowered_s = time.perf_counter() - began
    compiled = lowered.compile(compiler_options=options)
    report = jaxoverlap.audit(compiled.as_text() or "")
    memory = compiled.memory_analysis()
    assert memory is not None
    return {
        "pod": pod,
        "mesh": axes,
        "step": step,
        "jax": metadata.version("jax"),
        "flags": options,
        "commit": commit(),
        "all": dump(report.total),
        "hops": dump(report.hops),
        "temp_bytes": memory.temp_size_in_bytes,
        "lower_s": round(lowered_s, 2),
        "compile_s": round(time.perf_counter() - began - lowered_s, 2),
        "audit": str(report),
    }


def dump(coverage: jaxoverlap.Coverage) -> dict[str, int]:
    names = ("count", "covered", "bytes_moved", "bytes_covered", "synchronous")
    return {name: getattr(coverage, name) for name in names}


def commit() -> str:
    git = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()


def in_child(benchmark: str, *arguments: str, python: str = sys.executable) -> dict[str, Any]:
    """What `python -m BENCHMARK child ARGUMENTS` prints last, as JSON; {"error"} if it failed."""
    command = [python, "-m", benchmark, "child", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return {"error": f"exit {done.returncode}: {lines[-1:]}"}
    return json.loads(done.stdout.splitlines()[-1])


COVERAGE_COLUMNS = (
    "hops covered", "sync hops", "all covered", "GB covered", "temp MB", "compile s"
)  # fmt: skip


def coverage_cells(row: dict[str, Any], plain: dict[str, Any] | None) -> tuple[str, ...]:
    """A row under COVERAGE_COLUMNS; its memory is compared with the plain row's, if given."""
    hops, total = row["hops"], row["all"]
    ratio = f" ({row['temp_bytes'] / plain['temp_bytes']:.2f} x)" if plain else ""
    return (
        f"{hops['covered']} of {hops['count']}" if hops["count"] else "",
        str(hops["synchronous"]) if hops["count"] else "",
        f"{total['covered']} of {total['count']}",
        f"{total['bytes_covered'] / 1e9:.2f} of {total['bytes_moved'] / 1e9:.2f}",
        f"{row['temp_bytes'] / 1e6:.0f}{ratio}",
        f"{row['compile_s']:.0f}",
    )
