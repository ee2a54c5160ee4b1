"""The command: `python -m tests.differential --seeds 0:200`, or `--seed 17`."""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
import traceback
from collections import defaultdict
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # XLA warns of every odd layout
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")  # compiles are most of it

import jax

jax.config.update("jax_num_cpu_devices", 8)

from tests.differential.case import Case, draw  # noqa: E402 - after the devices
from tests.differential.compare import Comparison, compared, typed_case  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.differential", description=__doc__)
    some = parser.add_mutually_exclusive_group(required=True)
    some.add_argument("--seeds", help="first:last, the last not among them")
    some.add_argument("--seed", type=int, help="one, with what was drawn")
    parser.add_argument(
        "--always",
        action="store_true",
        help="run each reference, also where overlapped and plain agree",
    )
    parser.add_argument("--halved", action="store_true", help="cut the rows in halves")
    parser.add_argument(
        "--typed",
        action="store_true",
        help="steps that state shardings, on explicit and mixed meshes; the seed chooses the edits",
    )
    asked = parser.parse_args()
    if asked.seed is not None:
        return _one(asked.seed, asked)
    match = re.fullmatch(r"(\d+):(\d+)", asked.seeds)
    if not match:
        parser.error(f"--seeds {asked.seeds}: expected first:last, as in 0:200")
    return _many(range(int(match[1]), int(match[2])), asked)


def _drawn(seed: int, asked: argparse.Namespace) -> tuple[Case, dict[str, Any]]:
    """Return the step of a seed, and the arguments of `compared`."""
    case, more = typed_case(seed) if asked.typed else (draw(seed), {"halved": asked.halved})
    return case, {**more, "always": asked.always}


def _one(seed: int, asked: argparse.Namespace) -> int:
    case, more = _drawn(seed, asked)
    comparison = compared(case, **more)
    print(case)
    print(f"  {comparison.ringed} matmuls ringed")
    for note in comparison.notes:
        print(f"note: {note}")
    for text in comparison.differences:
        print(f"differs: {text}")
    if comparison.error is not None:
        traceback.print_exception(comparison.error)
    return 1 if comparison.differences else 0


def _many(seeds: range, asked: argparse.Namespace) -> int:
    kinds: dict[str, list[int]] = defaultdict(list)
    failed, ringed, began = [], 0, time.perf_counter()
    for n, seed in enumerate(seeds):
        print(f"{n + 1}/{len(seeds)} seed {seed}", end=" ", flush=True)
        start = time.process_time()
        comparison = _tried(seed, asked)
        ringed += comparison.ringed
        print(f"{time.process_time() - start:.1f} s of CPU, {comparison.ringed} ringed", end="")
        print(f", {comparison.differences[0]}" if comparison.differences else "", flush=True)
        if comparison.differences:
            failed.append(seed)
        for text in {
            kind(t) for t in [*comparison.differences, *(f"note: {n}" for n in comparison.notes)]
        }:
            kinds[text].append(seed)
        if n % 20 == 19:
            jax.clear_caches()
    print(
        f"\n{len(failed)} of {len(seeds)} differ; {ringed} matmuls ringed; {time.perf_counter() - began:.0f} s"
    )
    for text, where in sorted(kinds.items(), key=lambda item: -len(item[1])):
        shown = " ".join(map(str, where[:12])) + (" ..." if len(where) > 12 else "")
        print(f"{len(where):4}  {text:100}  {shown}")
    return 1 if failed else 0


def _tried(seed: int, asked: argparse.Namespace) -> Comparison:
    try:
        case, more = _drawn(seed, asked)
        print(case.name, end=" ", flush=True)
        return compared(case, **more)
    except Exception as error:
        return Comparison(
            [f"harness: {type(error).__name__}: {str(error).splitlines()[0][:200]}"], []
        )


def kind(text: str) -> str:
    """Return a difference less its names, numbers and specs, so that like ones count as one."""
    text = re.sub(r"^call \d+: ", "", text.removeprefix("note: ")) + (
        " (note)" * text.startswith("note: ")
    )
    text = re.sub(r"^\S*\[[^ ]*", "<leaf>", text)
    text = re.sub(r"(sharding ).*, plain .*", r"\1differs", text)
    text = re.sub(r"\d[\d.e+-]*", "N", text)
    return text[:100]


if __name__ == "__main__":
    sys.exit(main())
