"""List the differences between two plans."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from jaxoverlap.plan.edits import Edit, MakeRing, ReadGathered
from jaxoverlap.plan.plan import Decision, Plan, Skip
from jaxoverlap.plan.table import mesh_text


@dataclass(frozen=True)
class Difference:
    """One fact in which two plans differ.

    Attributes:
        part: "step", "matmul", "edit", "compile", "option", "nccl", "predicted", "measured" or
            "made for".
        name: the fact's name, within the part.
        a, b: its value in either plan; None where the plan has none.
    """

    part: str
    name: str
    a: Any
    b: Any


def differences(a: Plan, b: Plan) -> list[Difference]:
    """List the differences in two plans' decisions, predictions and origins.

    Source lines, reasons and what a tuning tried are not compared; nor are the matmuls, edits and
    arguments of different steps, of which none belongs to another.
    """
    left, right = dict(_facts(a)), dict(_facts(b))
    if other_step(a, b):
        left, right = ({k: v for k, v in one.items() if not _of_step(*k)} for one in (left, right))
    return [
        Difference(*key, left.get(key), right.get(key))
        for key in {**left, **right}
        if left.get(key) != right.get(key)
    ]


def _of_step(part: str, name: str) -> bool:
    return part in ("matmul", "edit") or name.startswith(("arguments ", "results "))


def other_step(a: Plan, b: Plan) -> str:
    """Say which steps two plans are for, if these are two; empty if it is one."""
    one, other = (plan.made_for and plan.made_for.step for plan in (a, b))
    if one == other if one and other else a.step == b.step:
        return ""
    said = (f"{p.step} on {mesh_text(p.mesh)}, {len(p.entries)} matmuls" for p in (a, b))
    return f"The plans are for different steps: {'; '.join(said)}"


def _facts(plan: Plan) -> Iterator[tuple[tuple[str, str], Any]]:
    """Yield the facts of a plan, by part and name; values as JSON has them."""
    yield ("step", "name"), plan.step
    for axis, size in plan.mesh.items():
        yield ("step", f"mesh {axis}"), size
    for entry in plan.entries:
        yield ("matmul", str(entry.site)), _does(entry)
    for edit in plan.edits:
        if not isinstance(edit, MakeRing | ReadGathered):  # the matmuls show those
            yield ("edit", _subject(edit)), msgspec.to_builtins(edit)
    for name in ("plain", "schedule"):
        yield ("compile", name), msgspec.to_builtins(getattr(plan, name))
    for name, value in plan.xla_options.items():
        yield ("option", name), value
    for name, value in plan.nccl.env.items():
        yield ("nccl", name), value
    for row in plan.nccl.channels:
        fields = msgspec.to_builtins(row)
        sizes = f"{fields.pop('kind')} {fields.pop('min_bytes')} to {fields.pop('max_bytes')} bytes"
        ranks, nodes = (fields.pop(name) or "any" for name in ("ranks", "nodes"))
        where = f"{ranks} GPUs on {nodes} hosts"
        yield ("nccl", f"{sizes}, {where}"), fields
    for part, record in (
        ("predicted", plan.predictions),
        ("measured", plan.measured),
        ("made for", plan.made_for),
    ):
        for name, value in _flat("", msgspec.to_builtins(record)):
            yield (part, name), value


def _subject(edit: Edit) -> str:
    """Name an edit by its kind and by what it is done to."""
    keys = ("site", "argument", "number")
    named = (f" {getattr(edit, key)}" for key in keys if hasattr(edit, key))
    return type(edit).__name__ + next(named, "")


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested dicts and lists, each with the path to it."""
    if isinstance(value, dict):
        pairs = list(value.items())
    elif isinstance(value, list | tuple):
        pairs = list(enumerate(value))
    else:
        pairs = []
        if value is not None:
            yield name, value
    for key, inner in pairs:
        yield from _flat(f"{name} {key}".strip(), inner)


def _does(entry: Decision | Skip) -> str:
    what = f"{entry.einsum}, {entry.runs} times: "
    if isinstance(entry, Skip):
        return what + "skipped"
    ring = "" if entry.ring == entry.site else f", in ring {entry.ring}"
    others = f"; XLA keeps {', '.join(entry.others)}" if entry.others else ""
    return (
        f"{what}{entry.kind} over {entry.axis}, {entry.variant}, {entry.num_chunks} chunks"
        f"{ring}{others}"
    )
