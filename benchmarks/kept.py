"""Is `memory=` as fast as the best policy of `jax.checkpoint`? The GPTs of README's questions.

python -m benchmarks.kept --only "7B, 64 H100, batch 64" --mesh "fsdp 64" --out FILE
python -m benchmarks.kept --table FILE                   # print its rows; make none

A question's step on a mesh has these rows: five policies, each by XLA's defaults, with published
options, and overlapped; `memory=0.9` without a policy; and with nothing recomputed, `memory=` being
what that needs over 1.3. XLA compiles them for GPUs that are not there, and
`jaxoverlap.simulate` gives their seconds. Rows that the file has are not made again. Needs no GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import typer
from rich.console import Console

import jaxoverlap
from benchmarks import frame
from benchmarks.children import import_first, in_fork
from benchmarks.frame import (
    MaybeOut,
    Only,
    Row,
    Shown,
    add_missing,
    chosen,
    conclude,
    filled,
    provenance,
    read_rows,
    shown_or_out,
)
from benchmarks.plain_gpt import EVERYWHERE, abstract_args, make_step
from benchmarks.pods.child import seconds
from benchmarks.pods.questions import QUESTIONS, mesh_name, named
from jaxoverlap._jax.jobs import peak_bytes
from jaxoverlap.flags.published import COMPARED, accepted
from jaxoverlap.hardware.pods import compiler_options, pod_mesh

Policy = Callable[..., Any]
_POLICIES = jax.checkpoint_policies
_DOTS = _POLICIES.dots_with_no_batch_dims_saveable
MEMORY, TOO_LARGE = 0.9, 1.3
CHILD_S = 3000


def attention(primitive: Any, *_: Any, **params: Any) -> bool:
    """Keep what cuDNN's attention gives: its output, and the logarithms of its sums."""
    return primitive.name.startswith("dot_product_attention_fwd")


def dots_and_attention(primitive: Any, *avals: Any, **params: Any) -> bool:
    """Keep that, and matmuls with weights."""
    return bool(attention(primitive) or _DOTS(primitive, *avals, **params))


KEPT: Mapping[str, Policy | None] = {
    "full": None,
    "attention": attention,
    "dots": _DOTS,
    "dots + attention": dots_and_attention,
    "all dots": _POLICIES.dots_saveable,
}
DEFAULTS, OVERLAPPED, WITH_MEMORY = "XLA's defaults", "overlap()", f"memory={MEMORY}"
NOTHING, MADE_TO_FIT = "nothing recomputed", "nothing recomputed, made to fit"
BY_HAND = tuple(f"{kept}, {options}" for kept in KEPT for options in (DEFAULTS, *COMPARED))
BY_BOTH = tuple(f"{kept}, {OVERLAPPED}" for kept in KEPT)  # by hand, and overlapped
ROWS = (*BY_HAND, *BY_BOTH, WITH_MEMORY, NOTHING, MADE_TO_FIT)
ASKED = {name: one for name, one in QUESTIONS.items() if one.gpt is not None}
STEPS = {named(name, axes): (name, axes) for name, one in ASKED.items() for axes in one.meshes}
COLUMNS = ("question", "best by hand", "ms", "GB", "with memory=0.9", "ms", "GB", "times")
console = Console(width=180)
app = frame.app()


@app.command()
def main(
    only: Only = None,
    mesh: Annotated[list[str] | None, typer.Option(help='As in "fsdp 64".')] = None,
    row: frame.OnlyRows = None,
    out: MaybeOut = None,
    table: Shown = None,
) -> None:
    """Compile and simulate; exit 1 if a policy is faster than `memory=0.9` on a question."""

    def show(path: Path) -> None:
        rows = read_rows(path)
        console.print(filled("kept by hand and by memory=", COLUMNS, cells(rows)))
        conclude(
            said(rows), [q for q, (hand, own) in best(rows).items() if own.ms > hand.ms], console
        )

    path = shown_or_out(table, out, show)
    questions, kinds = chosen("only", only, ASKED), chosen("row", row, ROWS)
    import_first(["benchmarks.kept"])
    steps = [s for s, (question, axes) in STEPS.items() if question in questions]
    steps = [s for s in steps if not mesh or s.partition(" | ")[2] in mesh]
    jobs = [(step, kind) for step in steps for kind in kinds]
    add_missing(path, [({"step": s, "row": r}, _job(s, r)) for s, r in jobs], timed=True)
    show(path)


def _job(step: str, row: str) -> Callable[[], Row]:
    return lambda: in_fork(measured, step, row, timeout_s=CHILD_S)


def measured(step: str, row: str) -> Row:
    """Compile and simulate a row of a question's step on a mesh."""
    question, axes = STEPS[step]
    asked = QUESTIONS[question]
    assert asked.gpt is not None
    sizes, mesh = replace(asked.gpt, batch=asked.batch), pod_mesh(asked.pod, axes)
    args = abstract_args(sizes, mesh)
    kept, _, flags = row.rpartition(", ")
    free = row in (NOTHING, MADE_TO_FIT)
    policy = _POLICIES.everything_saveable if free else KEPT.get(kept)
    made: Any = make_step(sizes, mesh, EVERYWHERE, policy=policy)
    options, memory = compiler_options(), None
    if row in (*BY_BOTH, WITH_MEMORY, MADE_TO_FIT):
        if row == WITH_MEMORY:
            memory = MEMORY
        elif row == MADE_TO_FIT:
            plain = made.lower(*args).compile(options)
            memory = f"{peak_bytes(plain.memory_analysis()) / TOO_LARGE / 1e6:.0f}MB"
        made, options = jaxoverlap.overlap(made, cluster=asked.pod, memory=memory), None
    elif flags in COMPARED:
        options |= accepted(flags, mesh.devices.flat[0])[0]
    compiled = made.lower(*args).compile(options)
    return {
        "mesh": dict(axes),
        **provenance(),
        **seconds(jaxoverlap.simulate(compiled, asked.pod), lines=False),
        "peak_bytes": peak_bytes(compiled.memory_analysis()),
        "chip_bytes": jaxoverlap.parse_cluster(asked.pod).chip.memory_bytes,
        **({"memory": memory} if memory else {}),
        **({"taken": compiled.speedup.taken} if options is None and compiled.speedup else {}),
    }


# -- what comes of it -----------------------------------------------------------------------------


class Best(NamedTuple):
    """The fastest row of a question: its mesh and its name, milliseconds and GB."""

    what: str
    ms: float
    gb: float


def best(rows: Sequence[Row]) -> dict[str, tuple[Best, Best]]:
    """Return the best by hand and the best with `memory=`, of each question that has both."""
    found = {}
    for question in ASKED:
        hand = _fastest(rows, question, BY_HAND)
        own = _fastest(rows, question, (WITH_MEMORY,))
        if hand and own:
            found[question] = hand, own
    return found


def _fastest(rows: Sequence[Row], question: str, kinds: Sequence[str]) -> Best | None:
    fit = [
        Best(
            f"{mesh_name(row['mesh'])}, {row['row']}", row["step_s"] * 1e3, row["peak_bytes"] / 1e9
        )
        for row in rows
        if row["row"] in kinds and row.get("step_s") and STEPS[row["step"]][0] == question
        if row["peak_bytes"] <= MEMORY * row["chip_bytes"]
    ]
    return min(fit, key=lambda one: one.ms, default=None)


def cells(rows: Sequence[Row]) -> Iterator[tuple[str, ...]]:
    """Yield each question under COLUMNS."""
    for question, (hand, own) in best(rows).items():
        figures = (f"{hand.ms:.0f}", f"{hand.gb:.1f}"), (f"{own.ms:.0f}", f"{own.gb:.1f}")
        yield question, hand.what, *figures[0], own.what, *figures[1], f"{hand.ms / own.ms:.2f}"


def said(rows: Sequence[Row]) -> list[str]:
    """Say how fast steps are that were made to fit, next to the best policies that fit there."""
    lines = []
    for step in dict.fromkeys(row["step"] for row in rows):
        of_step = {row["row"]: row for row in rows if row["step"] == step and row.get("step_s")}
        if (own := of_step.get(MADE_TO_FIT)) is None:
            continue
        most = float(own["memory"].removesuffix("MB")) * 1e6
        line = f"{step}: {own['step_s'] * 1e3:.0f} ms in {own['peak_bytes'] / 1e9:.1f} GB"
        for kinds in (BY_HAND, BY_BOTH):
            fit = [r for n, r in of_step.items() if n in kinds and r["peak_bytes"] <= most]
            if by_hand := min(fit, key=lambda r: r["step_s"], default=None):
                line += f"; {by_hand['row']}: {by_hand['step_s'] * 1e3:.0f} ms"
        lines.append(line)
    return lines


if __name__ == "__main__":
    app()
