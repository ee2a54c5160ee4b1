"""One third-party trainer in a process of its own: python -m benchmarks.strangers.child CASE WHAT.

WHAT: numbers or halves compare plain with overlapped, on 8 CPU devices, by the
rules or with the rows in two parts; by_rules compares plain there with layers that are given
`jaxoverlap.dot_general`. Plain, overlapped and ruled (those layers) are compiled for a pod. Picture
holds what decisions rest on against what XLA partitions for it. The last line of output is the row.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

import jaxoverlap
from benchmarks.picture import agreement
from benchmarks.pod_step import dump
from benchmarks.strangers.cases import CASES
from benchmarks.strangers.rows import ON_CPU, Row, compare, summary
from benchmarks.strangers.stranger import Stranger
from jaxoverlap._jax.jit_wrappers import arguments_reach, find_jit
from jaxoverlap.flags import options_for
from jaxoverlap.hardware import pods
from jaxoverlap.step.options import HalvesMode

POD = "h100-sxm:1x8"
STEPS = 3
_VERSIONS = ("jax", "jaxlib", "flax", "optax", "google-tunix", "gemma", "kauldron", "maxtext")


def main(name: str, what: str) -> Row:
    case = next(c for c in CASES if c.name == name)
    on_cpu = what in ON_CPU
    mesh = jax.make_mesh(tuple(case.axes.values()), tuple(case.axes))
    if not on_cpu:
        mesh = jaxoverlap.pod_mesh(POD, case.axes)
    explicit = case.options.get("shard_mode") == "explicit"
    kind = AxisType.Explicit if explicit else AxisType.Auto
    mesh = Mesh(mesh.devices, mesh.axis_names, axis_types=(kind,) * len(mesh.axis_names))
    module = importlib.import_module(f"benchmarks.strangers.{case.module}")

    def build(by_rules: bool = what == "ruled") -> Stranger:
        return module.build(replace(case, by_rules=by_rules), mesh, real=not on_cpu)

    def on_8_devices() -> Row:
        if what == "by_rules":
            return compare(_trained(build()), _trained(build(True)))
        return numbers(build, 2 if what == "halves" else "auto")

    return {
        "case": name,
        "what": what,
        "device": "8 CPU devices" if on_cpu else POD,
        "mesh": case.axes,
        "axes": kind.name,
        "versions": _versions(),
        **(on_8_devices() if on_cpu else _on_pod(build(), mesh, what)),
    }


def _versions() -> dict[str, str]:
    versions = {}
    for package in _VERSIONS:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


# -- numbers, on the CPU --------------------------------------------------------------------------


def numbers(build: Callable[[], Stranger], halves: HalvesMode = "auto") -> Row:
    """Compare plain and overlapped steps from the same start; steps may change it in place."""
    plain = _trained(build())
    ringed = _trained(build(), {"halves": halves})
    return {**compare(plain, ringed), **ringed["plan"]}


def _trained(stranger: Stranger, options: dict[str, Any] | None = None) -> Row:
    """Train a few steps; return their losses, and the state after the first.

    Args:
        stranger: the step.
        options: of `overlap`; None to leave it plain.
    """
    step: Any = stranger.step
    args = stranger.args
    losses, state, plan = [], {}, {}
    with stranger.context():
        if options is not None:
            step = jaxoverlap.overlap(step, **options)
            plan = summary(step.explain(*args))
        for _ in range(STEPS):
            out = step(*args)
            loss, tree = stranger.after(out)
            losses.append(float(loss))
            state = state or _values(tree)
            args = stranger.carried(out) if stranger.carried else args
    return {"losses": losses, "state": state, "plan": plan}


def _values(tree: Any) -> dict[str, np.ndarray]:
    """Return the float leaves of a state, by path."""
    return {
        jax.tree_util.keystr(path): np.asarray(leaf, np.float64)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if jax.numpy.issubdtype(leaf.dtype, np.floating)
    }


# -- for a pod ------------------------------------------------------------------------------------


def _on_pod(stranger: Stranger, mesh: Mesh, what: str) -> Row:
    return picture(stranger, mesh) if what == "picture" else pod(stranger, mesh, what)


def picture(stranger: Stranger, mesh: Mesh) -> Row:
    """Check whether XLA does with each matmul what its shardings say."""
    wrapped_jit = find_jit(stranger.step)
    assert wrapped_jit is not None
    with stranger.context():
        traced = arguments_reach(wrapped_jit, wrapped_jit.jitted.trace, stranger.args, {})
        return agreement(traced, mesh)._asdict()


def pod(stranger: Stranger, mesh: Mesh, what: str) -> Row:
    """Compile one step for the pod and audit its schedule."""
    began = time.perf_counter()
    if what in ("plain", "ruled"):
        options = pods.compiler_options() if what == "plain" else options_for(mesh)
        lowered, row = stranger.lower(stranger.step), {}
    else:
        overlapped = jaxoverlap.overlap(stranger.step, cluster=POD, never_slower=False)
        lowered = stranger.lower(overlapped)
        row, options = summary(lowered.plan), options_for(mesh)
    compiled = lowered.compile(compiler_options=options)
    report = jaxoverlap.audit(compiled.as_text() or "")
    return {
        **row,
        "flags": options,
        "all": dump(report.total),
        "hops": dump(report.hops),
        "temp_bytes": compiled.memory_analysis().temp_size_in_bytes,
        "compile_s": round(time.perf_counter() - began, 1),
        "audit": str(report),
    }


if __name__ == "__main__":
    # Trainers count jax.devices(), also when they are compiled for a pod.
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    result = main(*sys.argv[1:])
    print(json.dumps(result))
