"""Compile one row of a step, and simulate it: what a child process does."""

import resource
import time
from collections import defaultdict
from typing import Any

import jaxoverlap
from benchmarks.frame import Row, provenance
from benchmarks.pod_step import of_cut
from benchmarks.pods.names import HALVES, HALVES_RINGS, OVERLAPPED, PRESET_ROWS, RULES, SCHEDULED
from benchmarks.pods.suite import ALL, Step
from jaxoverlap._jax.jobs import peak_bytes
from jaxoverlap.flags import options_for
from jaxoverlap.flags.published import accepted
from jaxoverlap.hardware.pods import compiler_options
from jaxoverlap.simulation.simulation import Simulation

SETTINGS: dict[str, dict[str, Any]] = {  # of overlap(), besides the scheduler pass
    OVERLAPPED: {"schedule": None},
    SCHEDULED: {},
    HALVES: {"halves": 2, "granularity": "plain"},
    HALVES_RINGS: {"halves": 2},
}


def measured(step: str, row: str) -> Row:
    """Measure a row of a step of the suite, by `measure`."""
    return measure(ALL[step], row)


def measure(step: Step, row: str) -> Row:
    """Compile and measure a row: seconds by simulation, memory by XLA, and compile times."""
    mesh = jaxoverlap.pod_mesh(step.pod, step.axes)
    plain, args = step.build(row, mesh)
    function: Any = plain
    refused: tuple[str, ...] = ()
    options = None  # overlap() has its own
    if row in SETTINGS:
        asked = {"schedule": jaxoverlap.Scheduler(), **SETTINGS[row]}
        function = jaxoverlap.overlap(plain, cluster=step.pod, never_slower=False, **asked)
    elif row in PRESET_ROWS:
        options, refused = accepted(row.removeprefix("plain, "), mesh.devices.flat[0])
        options |= compiler_options()
    elif row == RULES:
        options = options_for(mesh)
    else:
        options = compiler_options()
    cpu_s, began = _cpu_s(), time.perf_counter()
    compiled = function.lower(*args).compile(options)
    compile_s, cpu_s = time.perf_counter() - began, _cpu_s() - cpu_s
    memory = compiled.memory_analysis()
    assert memory is not None
    return {
        "mesh": step.axes,
        **provenance(),
        **({"flags": options} if options else {}),
        **({"refused": refused} if refused else {}),
        **seconds(jaxoverlap.simulate(compiled, step.pod), lines=row not in SETTINGS),
        "peak_bytes": peak_bytes(memory),
        "temp_bytes": memory.temp_size_in_bytes,
        "chip_bytes": jaxoverlap.parse_cluster(step.pod).chip.memory_bytes,
        "compile_s": round(compile_s, 2),
        "compile_cpu_s": round(cpu_s, 2),
        **(_of_pass(compiled.schedule) if row in SETTINGS and compiled.schedule else {}),
        **(
            of_cut(compiled.plan) | {"rings": len(compiled.plan.rings)}
            if row in SETTINGS and compiled.plan
            else {}
        ),
    }


def seconds(step: Simulation, *, lines: bool) -> Row:
    """Return a simulated step's seconds, in all and by source line, as JSON.

    By line: of its kernels, each alone; what these take longer during collectives; and how long
    kernels wait for its collectives. Those that come to less than a thousandth are left out.

    Args:
        lines: not for a module that a Python pass touched: jax 0.12.0.1 then numbers its stack
            frames anew, and leaves the instructions' references to them as they were.
    """
    by_line: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for e in step.events if lines else ():
        seconds_of = by_line[e.source]
        if e.kind == "wait":
            seconds_of[2] += e.seconds
        elif e.kind != "collective":
            seconds_of[0] += e.alone_s * e.runs
            seconds_of[1] += e.seconds - e.alone_s * e.runs
    names = ("step_s", "compute_s", "slowdown_s", "communication_s", "exposed_s", "bound_s")
    return {
        **{name: getattr(step, name) for name in names},
        "link_s": step.link_s,
        "unknown": step.unknown,
        "by_line": {
            line: seconds_of
            for line, seconds_of in by_line.items()
            if sum(seconds_of) > 1e-3 * step.step_s
        },
    }


def _of_pass(report: Any) -> Row:
    return {
        "pass_s": round(report.seconds, 2),
        "reordered": sorted(report.orders),
        "order_kept": report.reason,
    }


def _cpu_s() -> float:
    """Return the seconds of CPU time of this process, all its threads."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
