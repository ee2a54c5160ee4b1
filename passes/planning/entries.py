"""Make a plan's entry of each matmul, in automatic and in manual code; `explain()` shows them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from jaxoverlap._jax import compat
from jaxoverlap._util.text import short_source
from jaxoverlap.passes.analysis.einsum import LETTERS, einsum_of
from jaxoverlap.passes.analysis.jaxprs import Dot
from jaxoverlap.plan.collectives import RING_PASSES, Kind
from jaxoverlap.plan.decisions import Decision, Reason, Skip

NO_COLLECTIVE = Reason("no collective")


def source_of(dot: Dot) -> str:
    """Return the "folder/file.py:line" that wrote a matmul."""
    return line_of(dot.eqn, dot.around)


def type_of(var: Any) -> str:
    """Write a value's type, as in "bfloat16[8,64]"."""
    return f"{var.aval.dtype}[{','.join(map(str, var.aval.shape))}]"


def line_of(eqn: Any, around: Sequence[Any]) -> str:
    """Return the "folder/file.py:line" that wrote an equation, or one of those around it."""
    file, line, _ = compat.source_line(compat.lined_as(eqn, around))
    return short_source(file, line)


def described(eqn: Any, around: Sequence[Any] = ()) -> str:
    """Name an equation by its primitive and its source line, or that of an equation around it."""
    return f"{eqn.primitive.name} ({line_of(eqn, around)})"


def module_of(dot: Dot) -> str:
    """Return the named scopes around a matmul, as in "GPT.layers_0.mlp.up"; "" for none."""
    return compat.module_path((*dot.around, dot.eqn))


def names_of(dot: Dot) -> tuple[str, str]:
    """Return the names by which a user may name a matmul: its source line and its module."""
    return source_of(dot), module_of(dot)


def num_dims(dot: Dot) -> int:
    """Count the dims of both operands together."""
    return sum(v.aval.ndim for v in dot.eqn.invars)


def letters_of(dot: Dot) -> str:
    """Return a matmul's einsum, as it is shown."""
    if num_dims(dot) > len(LETTERS) or dot.eqn.primitive.name != "dot_general":
        return "?"
    lhs, rhs = (v.aval.shape for v in dot.eqn.invars)
    return str(einsum_of(dot.eqn.params["dimension_numbers"], lhs, rhs))


def skip_of(dot: Dot, why: Reason) -> Skip:
    """Make the plan entry of a matmul that is not rewritten."""
    source, module = names_of(dot)
    return Skip(
        site=dot.index,
        source=source,
        module=module,
        einsum=letters_of(dot),
        runs=dot.runs,
        why=why,
    )


def with_conversions(
    entries: Sequence[Decision | Skip], dots: Sequence[Dot], converted: Mapping[int, str]
) -> tuple[Decision | Skip, ...]:
    """Name the conversion behind which a matmul without a collective waits for one all the same.

    Args:
        entries: of the matmuls of a step, whose batch may be split.
        dots: the matmuls of the step without a split.
        converted: from `behind_conversions` of its partitioned program.
    """
    waits = {
        (source_of(dot), letters_of(dot)): converted[dot.index]
        for dot in dots
        if dot.index in converted
    }
    return tuple(
        msgspec.structs.replace(entry, why=_behind_conversion(waits[entry.source, entry.einsum]))
        if isinstance(entry, Skip)
        and entry.why == NO_COLLECTIVE
        and (entry.source, entry.einsum) in waits
        else entry
        for entry in entries
    )


def _behind_conversion(opcode: str) -> Reason:
    return Reason(
        "no ring",
        f"a conversion to another dtype is between it and its {opcode}: no ring sees through it",
    )


def reader_entry(
    dot: Dot, *, ring: int, axis: str, moved: str, kind: Kind = "all_gather"
) -> Decision:
    """Make the entry of a matmul that has nothing left to gather.

    Args:
        dot: the matmul.
        ring: the number of the ring that gathers for it; its own where a hoisted gather does.
        axis: the mesh axis of that ring or gather.
        moved: the ring or gather that moved the value that it reads, in words.
        kind: the collective that it carries out.
    """
    return Decision(
        site=dot.index,
        ring=ring,
        source=source_of(dot),
        module=module_of(dot),
        einsum=letters_of(dot),
        kind=RING_PASSES[kind],
        axis=axis,
        letter="",
        num_chunks=1,
        bytes_moved=0,
        runs=dot.runs,
        why=f"reads what {moved} moved",
    )
