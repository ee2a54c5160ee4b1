"""Compile one row of a step, and simulate it: what a child process does.

python -m benchmarks.drawn.child child NAME ROW    # for steps that need another environment
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter, defaultdict
from typing import Any

import jax

import jaxoverlap
from benchmarks.drawn.rows import FALLBACK, OPTIONS, PLAIN
from benchmarks.drawn.step import lower
from benchmarks.drawn.steps import step_of
from benchmarks.frame import Row, provenance
from benchmarks.pod_step import of_cut
from jaxoverlap._jax.jobs import peak_bytes
from jaxoverlap.hardware.pods import compiler_options
from jaxoverlap.plan.plan import Plan
from jaxoverlap.plan.speedup import Speedup
from jaxoverlap.simulation.simulation import Simulation

LONGEST = 12  # collectives and kernels of a row that it keeps


def measured(name: str, row: str) -> Row:
    """Compile and measure a row: seconds by simulation, bytes by link, memory by XLA.

    Args:
        name: the step's name, as `step_of` takes it.
        row: PLAIN; OVERLAPPED: by the rules alone; FALLBACK: plain where that is faster; UNRINGED:
            the scheduler pass and the options of rings, with all collectives whole; ALONE: that
            without halves and layouts too; UNCUT, UNPINNED: the rules without one of the two.
    """
    step = step_of(name)
    mesh = jaxoverlap.pod_mesh(step.pod, step.axes)
    built = step.build(mesh)
    lowered: Any = None
    began = time.perf_counter()
    with built.context():
        if row == PLAIN:
            compiled: Any = lower(built.function, built.args).compile(compiler_options())
        else:
            options = OPTIONS[row]
            overlapped: Any = jaxoverlap.overlap(built.function, cluster=step.pod, **options)
            lowered = lower(overlapped, built.args)
            compiled = lowered.compile()
    compile_s = time.perf_counter() - began
    memory = compiled.memory_analysis()
    assert memory is not None
    return {
        **provenance(),
        **seconds(jaxoverlap.simulate(compiled, step.pod)),
        "peak_bytes": peak_bytes(memory),
        "chip_bytes": jaxoverlap.parse_cluster(step.pod).chip.memory_bytes,
        "compile_s": round(compile_s, 1),
        **(decided(lowered.plan) if lowered and lowered.plan else {}),
        **(held_against_plain(compiled.speedup) if row == FALLBACK else {}),
    }


def seconds(step: Simulation) -> Row:
    """Return a simulated step's seconds and bytes, in all and of the longest parts, as JSON."""
    sent: dict[str, float] = defaultdict(float)
    waited: dict[tuple[str, ...], list[float]] = defaultdict(lambda: [0, 0, 0.0, 0.0])
    for s in step.spent:
        c = s.collective
        sent[s.lane] += s.runs * c.bytes_moved
        values = waited[c.kind, c.ring or "", c.source, s.lane]
        for i, more in enumerate((s.runs, s.runs * c.bytes_moved, s.seconds, s.exposed_s)):
            values[i] += more
    kernels: dict[tuple[str, str], float] = defaultdict(float)
    for e in step.events:
        if e.kind not in ("wait", "collective"):
            kernels[e.kind, e.source] += e.alone_s * e.runs
    names = ("step_s", "compute_s", "slowdown_s", "communication_s", "exposed_s", "bound_s")
    return {
        **{name: getattr(step, name) for name in names},
        "link_s": step.link_s,
        "link_bytes": dict(sent),
        "unknown": step.unknown,
        "collectives": [
            [*which, *values]
            for which, values in sorted(waited.items(), key=lambda item: -item[1][2])
        ][:LONGEST],
        "kernels": [
            [*which, values] for which, values in sorted(kernels.items(), key=lambda item: -item[1])
        ][:LONGEST],
    }


def decided(plan: Plan) -> Row:
    """Count a step's rings, its collectives in slices, and its matmuls left plain or skipped."""
    made = {edit.site for edit in plan.rings}  # others read what was gathered before
    rings = [d for d in plan.decisions if d.site in made]
    sliced = [d for d in rings if d.variant.style == "sliced"]
    none = [s for s in plan.skips if s.idle]
    left = [s for s in plan.skips if s.left_plain]
    return {
        **of_cut(plan),
        "pins": len(plan.pins),
        "rings": len(rings) - len(sliced),
        "slices": len(sliced),
        "left_plain": len(left),
        "skipped": len(plan.skips) - len(none) - len(left),
        "kinds": Counter(f"{d.kind} over {d.axis}, {d.variant}" for d in rings),
        "plan": str(plan),
    }


def held_against_plain(speedup: Speedup) -> Row:
    """Record how the step was compiled, and what the rings lost."""
    return {"taken": speedup.name, "speedup": str(speedup), "lost": speedup.lost}


if __name__ == "__main__":
    # Trainers count jax.devices(), also when they are compiled for a pod.
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    print(json.dumps(measured(*sys.argv[2:])))
