"""One stranger in a process of its own: python -m benchmarks.strangers.child CASE WHAT.

WHAT is numbers (plain against overlapped, on 8 CPU devices), plain or overlapped (compiled for a
pod). The last line of output is the row.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import re
import sys
import time
from collections import Counter
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax

jax.config.update("jax_num_cpu_devices", 8)  # trainers count them, also when compiling for a pod

import numpy as np
from jax.sharding import AxisType, Mesh

import jaxoverlap
from benchmarks.strangers.cases import CASES
from benchmarks.strangers.stranger import Case, Stranger
from jaxoverlap import pods

POD = "h100-sxm:1x8"
STEPS = 3
_VERSIONS = ("jax", "flax", "optax", "google-tunix", "gemma", "kauldron", "maxtext")


def main(name: str, what: str) -> dict[str, Any]:
    case = next(c for c in CASES if c.name == name)
    explicit = case.options.get("shard_mode") == "explicit"
    kind = AxisType.Explicit if explicit else AxisType.Auto
    mesh = jaxoverlap.pod_mesh(POD, case.axes) if what != "numbers" else _cpu_mesh(case)
    mesh = Mesh(mesh.devices, mesh.axis_names, axis_types=(kind,) * len(mesh.axis_names))
    row = {"case": name, "what": what, "mesh": case.axes, "axes": kind.name}
    measured = numbers(case, mesh) if what == "numbers" else pod(case, mesh, what)
    return {**row, **measured, "versions": _versions()}


def _cpu_mesh(case: Case) -> Mesh:
    return jax.make_mesh(tuple(case.axes.values()), tuple(case.axes))


def _versions() -> dict[str, str]:
    found = {}
    for package in _VERSIONS:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def build(case: Case, mesh: Mesh, real: bool) -> Stranger:
    return importlib.import_module(f"benchmarks.strangers.{case.module}").build(case, mesh, real)


# -- numbers, on the CPU --------------------------------------------------------------------------


def numbers(case: Case, mesh: Mesh) -> dict[str, Any]:
    """Relative differences of what plain and overlapped steps make of the same start."""
    plain = _trained(build(case, mesh, real=False), overlapped=False)
    ringed = _trained(build(case, mesh, real=False), overlapped=True)
    differences = {
        path: _difference(plain["state"][path], ringed["state"][path]) for path in plain["state"]
    }
    # Adam's first moments after one step are the gradients, a tenth of each.
    gradients = {p: d for p, d in differences.items() if re.search(r"\bmu\b", p)}
    others = {p: d for p, d in differences.items() if p not in gradients}
    worst = max(gradients, key=lambda p: gradients[p])
    dead = [p for p in gradients if not np.any(plain["state"][p])]
    return {
        "losses": plain["losses"],
        "loss_difference": max(map(_difference, plain["losses"], ringed["losses"])),
        "gradients": len(gradients),
        "gradients_zero": len(dead),
        "gradient_difference": gradients[worst],
        "worst_gradient": worst,
        "state_difference": max(others.values()),
        **ringed["plan"],
    }


def _trained(stranger: Stranger, *, overlapped: bool) -> dict[str, Any]:
    """Losses of a few steps, and the state after the first."""
    step, args = stranger.step, stranger.args
    losses, state, plan = [], {}, {}
    with stranger.context():
        if overlapped:
            step = jaxoverlap.overlap(step)
            plan = summary(step.explain(*args))
        for _ in range(STEPS):
            out = step(*args)
            loss, tree = stranger.after(out)
            losses.append(float(loss))
            state = state or _values(tree)
            args = stranger.carried(out) if stranger.carried else args
    return {"losses": losses, "state": state, "plan": plan}


def _values(tree: Any) -> dict[str, np.ndarray]:
    """The float leaves of a state, by path."""
    return {
        jax.tree_util.keystr(path): np.asarray(leaf, np.float64)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if jax.dtypes.issubdtype(leaf.dtype, np.floating)
    }


def _difference(plain: Any, other: Any) -> float:
    """The norm of the difference, relative to plain's norm."""
    gap, size = np.linalg.norm(np.subtract(plain, other)), np.linalg.norm(plain)
    return 0.0 if gap == 0 else float(gap / size) if size else float("inf")


def summary(plan: jaxoverlap.Plan) -> dict[str, Any]:
    """What became of the matmuls."""
    reasons = Counter(s.reason for s in plan.skips if s.reason != "no collective")
    return {
        "sites": len(plan.entries),
        "ringed": len(plan.decisions),
        "no_collective": sum(s.reason == "no collective" for s in plan.skips),
        "skips": dict(reasons.most_common()),
        "planned_bytes": sum(d.bytes_moved for d in plan.decisions),
        "plan": str(plan),
    }


# -- schedules, for a pod -------------------------------------------------------------------------


def pod(case: Case, mesh: Mesh, what: str) -> dict[str, Any]:
    """Compile one step for the pod and audit its schedule."""
    stranger = build(case, mesh, real=True)
    row: dict[str, Any] = {}
    began = time.perf_counter()
    if what == "plain":
        lowered = stranger.lower(stranger.step)
        compiled = lowered.compile(compiler_options=pods.compiler_options())
    else:
        lowered = stranger.lower(jaxoverlap.overlap(stranger.step, cluster=POD))
        assert lowered.plan is not None
        row |= summary(lowered.plan)
        compiled = lowered.compile()
    report = jaxoverlap.audit(compiled.as_text() or "")
    memory = compiled.memory_analysis()
    return {
        **row,
        "all": dump(report.total),
        "hops": dump(report.hops),
        "temp_bytes": memory.temp_size_in_bytes,
        "compile_s": round(time.perf_counter() - began, 1),
        "audit": str(report),
    }


def dump(coverage: jaxoverlap.Coverage) -> dict[str, int]:
    names = ("count", "covered", "bytes_moved", "bytes_covered", "synchronous")
    return {name: getattr(coverage, name) for name in names}


if __name__ == "__main__":
    result = main(*sys.argv[1:])
    print(json.dumps(result))
