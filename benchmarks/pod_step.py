"""Compile one step for a pod of GPUs and audit it: the row that several benchmarks print."""

import time
from dataclasses import dataclass
from typing import Any

import jaxoverlap
from benchmarks.frame import provenance
from jaxoverlap.flags import options_for
from jaxoverlap.hardware import pods

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


def of_cut(plan: jaxoverlap.Plan) -> dict[str, int]:
    """Return a step's batch split, as a row has it; nothing if there is none."""
    return {"parts": plan.split.parts, "unroll": plan.split.unroll} if plan.split else {}


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
