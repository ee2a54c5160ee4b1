"""Compile one step for a pod of GPUs and audit it: the row that several benchmarks print.

Each compile runs in a child process, so that a compiler that aborts is a row and not the end.
"""

import datetime
import json
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import jaxoverlap
from jaxoverlap.flags import options_for
from jaxoverlap.hardware import pods
from jaxoverlap.step.trial import how_it_ended

STEPS = ("plain", "plain, same flags", "overlapped")


def compile_step(model: Any, pod: str, axes: dict[str, int], step: str) -> dict[str, Any]:
    """A row for one of STEPS of a model at its pod's size; `model` is a module of models/."""
    mesh = jaxoverlap.pod_mesh(pod, axes)
    config = model.RECIPE.config.pod(**axes)
    args = model.abstract_args(config, mesh)
    return compile_on(model.make_step(config, mesh), args, mesh, pod, step).row


@dataclass(frozen=True)
class Compiled:
    """A step compiled for a pod.

    Attributes:
        row: what benchmarks write down of it.
        text: its scheduled module.
        audit: of that.
        function: the step, overlapped if it was to be.
    """

    row: dict[str, Any]
    text: str
    audit: jaxoverlap.Audit
    function: Any


def compile_on(function: Any, args: tuple[Any, ...], mesh: Any, pod: str, step: str) -> Compiled:
    """Compile a jitted step for a pod, as one of STEPS.

    Compiling uses all cores that it gets: its seconds depend on what else the machine does,
    its seconds of CPU time hardly.
    """
    if step == "overlapped":
        function = jaxoverlap.overlap(function, cluster=pod, never_slower=False)
        options = options_for(mesh)
    else:
        options = pods.compiler_options() if step == "plain" else options_for(mesh)
    began = time.perf_counter()
    lowered = function.lower(*args)
    lowered_s, cpu_s = time.perf_counter() - began, time.process_time()
    compiled = lowered.compile(compiler_options=options)
    compile_s, cpu_s = time.perf_counter() - began - lowered_s, time.process_time() - cpu_s
    text = compiled.as_text() or ""
    report = jaxoverlap.audit(text)
    memory = compiled.memory_analysis()
    assert memory is not None
    row = {
        "pod": pod,
        "mesh": dict(mesh.shape),
        "step": step,
        "flags": options,
        **provenance(),
        "all": dump(report.total),
        "hops": dump(report.hops),
        "temp_bytes": memory.temp_size_in_bytes,
        "lower_s": round(lowered_s, 2),
        "compile_s": round(compile_s, 2),
        "compile_cpu_s": round(cpu_s, 2),
        "audit": str(report),
    }
    return Compiled(row, text, report, function)


def dump(coverage: jaxoverlap.Coverage) -> dict[str, int]:
    names = ("count", "covered", "bytes_moved", "bytes_covered", "synchronous")
    return {name: getattr(coverage, name) for name in names}


def provenance() -> dict[str, str]:
    """Return the versions, commit and date that a row is from."""
    today = datetime.date.today().isoformat()
    return {"jax": metadata.version("jax"), "commit": commit(), "date": today}


def of_cut(plan: jaxoverlap.Plan) -> dict[str, int]:
    """Return a step's batch split, as a row has it; nothing if there is none."""
    return {"parts": plan.cut.parts, "unroll": plan.cut.unroll} if plan.cut else {}


def commit() -> str:
    git = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()


def in_child(benchmark: str, *arguments: str, python: str = sys.executable) -> dict[str, Any]:
    """Run `python -m BENCHMARK child ARGUMENTS`; return its last line's JSON, or {"error"}."""
    command = [python, "-m", benchmark, "child", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"error": how_it_ended(done.returncode, done.stderr)}
    return json.loads(done.stdout.splitlines()[-1])


def in_ms(seconds: float | None) -> str:
    """Write seconds as milliseconds for a table; nothing where there are none."""
    return "" if seconds is None else f"{seconds * 1e3:.1f}"


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read rows from JSON lines; there are none in a file that is not there."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def write_rows(out: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows as JSON lines."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("".join(json.dumps(row) + "\n" for row in rows))


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
