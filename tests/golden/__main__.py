"""Compare what the library makes of a fixed set of steps with what it made before.

    python -m tests.golden                # print each difference; exit status 1 if there is one
    python -m tests.golden --update       # after a change that is wanted
    python -m tests.golden --only 7b-h100-64

The facts of a step do not depend on how a plan is written: a hash of the program that XLA gets,
its compiler options and scheduler settings, what was changed, by count, and how often XLA's
partitioner was asked. No step is compiled. Hashes are of one jaxlib.
"""

from __future__ import annotations

import json
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.pods.suite import STEPS
from tests.golden.facts import Facts, prepare, timed

GOLDEN = Path(__file__).with_name("golden.json")
SEEDS = (*range(0, 120, 2), 3)  # of drawn steps; those of odd seeds are for pods


def differences(then: Facts, now: Facts) -> list[str]:
    """Say in which facts two programs of one step differ."""
    return [
        f"{fact}: {then.get(fact)}, now {now.get(fact)}"
        for fact in dict.fromkeys((*then, *now))
        if then.get(fact) != now.get(fact)
    ]


def main(
    only: Annotated[list[str] | None, typer.Option(help="Names of steps.")] = None,
    update: Annotated[bool, typer.Option(help="Write what is now.")] = False,
    jobs: Annotated[int, typer.Option(help="Steps at a time.")] = 2,
) -> None:
    kept = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    version, known = metadata.version("jaxlib"), [*STEPS, *(f"drawn-{n}" for n in SEEDS)]
    if not update and kept.get("jaxlib") != version:
        raise typer.BadParameter(f"golden.json is of jaxlib {kept.get('jaxlib')}: --update first")
    if unknown := set(only or ()) - {*known}:
        raise typer.BadParameter(f"--only {', '.join(sorted(unknown))}: no such step")
    before: dict[str, Facts] = kept.get("steps", {})
    found, failed = dict(before) if only else {}, 0
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=spawn, initializer=prepare) as pool:
        for name, now, seconds in pool.map(timed, only or known):
            text = differences(before.get(name, {}), now)
            failed += bool(text)
            said = "; ".join(text) if text else "as before"
            print(f"{name} ({seconds:.1f} s): {said}", flush=True)
            found[name] = now
    if update:
        GOLDEN.write_text(json.dumps(dict(jaxlib=version, steps=found), indent=1) + "\n")
    elif failed:
        print(f"{failed} steps are not as before")
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
