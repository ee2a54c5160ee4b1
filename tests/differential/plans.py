"""Compare the program that a plan gave with the one that another process makes by following it.

`python -m tests.differential.plans --seeds 0:300` asks about 300 drawn steps. Half of them run on
8 CPU devices, as in the other comparisons; the others are for pods whose prices are known.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import jax

import jaxoverlap
from benchmarks.drawn.steps import drawn_name, step_of
from jaxoverlap import Plan, Tuning
from jaxoverlap.api import Overlapped
from tests.differential.case import draw

_TOGETHER = 20  # steps that one process plans before another follows
# Errors by which JAX has no program for a plain step: its types do not fit on explicit meshes, or
# there is no rule for an operation (of a batch of convolutions of one filter each, for example).
REFUSALS: tuple[type[Exception], ...] = (
    importlib.import_module("jax._src.core").ShardingTypeError,  # it has no public name
    NotImplementedError,
)
_BUDGET_S = 1.0  # of a tuning: it looks at few candidates, and compiles two
_TUNED, _TUNES_ITSELF = 7, 13  # of so many steps for pods one is tuned by either way in


class Drawn(NamedTuple):
    """A drawn step and what it is called with.

    Attributes:
        fn: the step.
        call: calls a function with the step's arguments.
        context: what the user calls it in.
        pod: whether it is for a pod; only such a step can be tuned before it runs.
    """

    fn: Callable[..., Any]
    call: Callable[[Callable[..., Any]], Any]
    context: Callable[[], AbstractContextManager[Any]]
    pod: bool


def drawn(seed: int) -> Drawn:
    """Draw a step: for even seeds one on 8 CPU devices, for odd ones one for a pod."""
    if seed % 2 == 0:
        case = draw(seed)
        fn = case.step if case.bare else case.fn
        state = case.first_state()
        return Drawn(fn, lambda f: case.call(f, state, 0)[0], contextlib.nullcontext, pod=False)
    step = step_of(drawn_name(seed))
    built = step.build(jaxoverlap.pod_mesh(step.pod, step.axes))
    return Drawn(built.function, lambda f: f(*built.args), built.context, pod=True)


def program(overlapped: Overlapped, step: Drawn) -> dict[str, str]:
    """Return the facts of the program that a step becomes: its module, options and schedule."""
    with step.context():
        lowered = step.call(overlapped.lower)
    plan = lowered.plan
    return {
        "module": hashlib.sha256(lowered.as_text().encode()).hexdigest(),
        "options": repr(sorted(plan.xla_options.items())) if plan else "",
        "schedule": repr(plan.schedule) if plan else "",
        "rows": repr(plan.split and (plan.split.parts, plan.split.unroll)) if plan else "",
    }


def planned(seed: int, folder: Path) -> None:
    """Plan a step, by explain(), tune() or tune=True; keep the plan and the facts of its program."""
    step = drawn(seed)
    if _refused(step):
        return
    tuning = Tuning(budget_s=_BUDGET_S, cache=str(folder), show=False)
    if step.pod and seed % _TUNES_ITSELF == 0:
        overlapped = jaxoverlap.overlap(step.fn, tune=tuning)
        facts = program(overlapped, step)
        with step.context():
            plan = step.call(overlapped.explain)
    else:
        overlapped = jaxoverlap.overlap(step.fn, never_slower=False)
        with step.context():
            if step.pod and seed % _TUNED == 0:
                plan = step.call(functools.partial(overlapped._tune, tuning))
                overlapped = jaxoverlap.overlap(step.fn, plan=plan)
            else:
                plan = step.call(overlapped.explain)
        facts = program(overlapped, step)
    plan.write(folder / f"{seed}.plan")
    (folder / f"{seed}.json").write_text(json.dumps(facts))


def _refused(step: Drawn) -> bool:
    """Return whether JAX has no program for the plain step; any other error is the drawn step's."""
    plain: Any = step.fn if hasattr(step.fn, "lower") else jax.jit(step.fn)
    try:
        with step.context():
            step.call(plain.lower)
    except REFUSALS:
        return True
    return False


def followed(seed: int, folder: Path) -> str:
    """Follow a step's plan; say in what its program differs, or how it was refused."""
    if not (folder / f"{seed}.plan").exists():
        return ""
    plan = Plan.read(folder / f"{seed}.plan")
    then = json.loads((folder / f"{seed}.json").read_text())
    step = drawn(seed)
    try:
        now = program(jaxoverlap.overlap(step.fn, plan=plan), step)
    except ValueError as error:
        return f"refused: {error}"
    differ = [f"{fact} {then[fact]}, then {now[fact]}" for fact in then if then[fact] != now[fact]]
    return "; ".join(differ)


def differences(seeds: range) -> dict[int, str]:
    """Plan some steps in one process, follow the plans in another; list what came out otherwise."""
    with tempfile.TemporaryDirectory(prefix="jaxoverlap-plans-") as folder:
        for task in ("plan", "follow"):
            command = [
                sys.executable,
                "-m",
                __spec__.name,
                "--seeds",
                f"{seeds.start}:{seeds.stop}",
            ]
            # Hashes of strings differ between processes, and so does the order of sets.
            environment = os.environ | {
                "PYTHONHASHSEED": str(len(task)),
                "JAX_PLATFORMS": "cpu",
                "TF_CPP_MIN_LOG_LEVEL": "2",  # XLA warns of every odd layout
            }
            subprocess.run(
                [*command, "--task", task, "--folder", folder], env=environment, check=True
            )
        return {int(seed): text for seed, text in json.loads(Path(folder, "found").read_text())}


def main() -> int:
    parser = argparse.ArgumentParser(prog=f"python -m {__spec__.name}", description=__doc__)
    parser.add_argument("--seeds", required=True, help="first:last, the last not among them")
    parser.add_argument("--task", choices=("plan", "follow"), help="what one process does")
    parser.add_argument("--folder", type=Path, help="where plans are kept between the two")
    asked = parser.parse_args()
    match = re.fullmatch(r"(\d+):(\d+)", asked.seeds)
    if not match:
        parser.error(f"--seeds {asked.seeds}: expected first:last, as in 0:300")
    seeds = range(int(match[1]), int(match[2]))
    if asked.task is None:
        return _many(seeds)
    jax.config.update("jax_num_cpu_devices", 8)
    warnings.simplefilter("ignore")
    found = []
    for seed in seeds:
        if asked.task == "plan":
            planned(seed, asked.folder)
        elif text := followed(seed, asked.folder):
            found.append((seed, text))
    (asked.folder / "found").write_text(json.dumps(found))
    return 0


def _many(seeds: range) -> int:
    failed = 0
    for first in range(seeds.start, seeds.stop, _TOGETHER):
        some = range(first, min(first + _TOGETHER, seeds.stop))
        found = differences(some)
        failed += len(found)
        print(f"{some.start}:{some.stop} {len(found)} differ", flush=True)
        for seed, text in found.items():
            print(f"  {seed}: {text}", flush=True)
    print(f"{failed} of {len(seeds)} plans are not followed to the same program")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
