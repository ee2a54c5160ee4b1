"""Weights that all iterations of a loop share: gathered once, before it, if memory allows.

    scan over time:  body:  h' = tanh (add x (dot_general h w@fsdp))     # an all-gather each

->  w' = sharding_constraint[None, None] w@fsdp
    scan over time:  body:  h' = tanh (add x (dot_general h w'))

So do recurrent networks, layers that share weights, and accumulated microbatches, whose loop is
around that over layers. XLA moves no gather out of a loop that makes it larger. This is what FSDP
calls `reshard_after_forward=False` (Zhao et al., VLDB 2023), for iterations.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from jaxoverlap._jax import compat
from jaxoverlap.passes.analysis.einsum import Spec
from jaxoverlap.passes.analysis.jaxprs import REMATS, Body, Dot, bodies, dots
from jaxoverlap.passes.analysis.partitioned import Shardings
from jaxoverlap.passes.evaluated import Evaluated, Proposal
from jaxoverlap.passes.layouts.lost import NOTHING
from jaxoverlap.passes.planning.entries import line_of, type_of
from jaxoverlap.plan.edits import PinArgument, PinValue


def propose(step: Evaluated) -> Iterator[Proposal]:
    """Propose to gather before their loops all weights that matmuls gather in each iteration."""
    edited = step.step.unpinned
    makers = {
        var: (body, position)
        for body in bodies(edited.jaxpr)
        if not body.opaque
        for position, eqn in enumerate(body.eqns)
        for var in eqn.outvars
    }
    arguments = {var: number for number, var in enumerate(edited.jaxpr.invars)}
    names, found = compat.argument_names(edited.jaxpr), dict[Any, tuple[Spec, Any]]()
    for dot in dots(edited.jaxpr):
        known = step.shardings.get(dot.index)
        if known is not None and dot.inside is None and dot.eqn.primitive.name == "dot_general":
            for side in (0, 1):
                if (needed := _needed(dot, side, known)) is not None:
                    shared = _shared(dot, dot.eqn.invars[side], needed)
                    if shared is not None:
                        found.setdefault(shared[0], shared[1:])
    edits, lines = list[PinArgument | PinValue](), list[str]()
    for var, (spec, loop) in found.items():
        if (number := arguments.get(var)) is not None:
            name = names[number]
            edits.append(PinArgument(argument=number, name=name, value=type_of(var), spec=spec))
        elif (made := makers.get(var)) is not None:
            edits.append(_value(*made, var, spec))
        else:
            continue
        lines.append(f"the loop at {line_of(loop, ())} gathers the same weights in each iteration")
    old = {*map(_pinned, step.step.edits)}
    new = tuple(edit for edit in edits if _pinned(edit) not in old)
    if new:
        lost = step.notes.get(PinValue, NOTHING)
        reasons = (*lost.reasons, *dict.fromkeys(lines))
        yield Proposal(new, notes={PinValue: replace(lost, reasons=reasons)})


def _value(body: Body, position: int, var: Any, spec: Spec) -> PinValue:
    source = line_of(body.eqns[position], body.around)
    return PinValue(
        body=body.index, position=position, source=source, value=type_of(var), spec=spec
    )


def _pinned(edit: Any) -> Any:
    """Return the value that an edit pins; None if it pins none."""
    if isinstance(edit, PinArgument):
        return edit.argument
    return (edit.body, edit.position) if isinstance(edit, PinValue) else None


def _needed(dot: Dot, side: int, known: Shardings) -> Spec | None:
    """Return the sharding in which a matmul computes with an operand that it gathers.

    None if it does not gather that. An axis stays on a contracted dim that has it in both operands,
    and on another dim that has it in the result.
    """
    own, other = (known.lhs, known.rhs)[:: 1 if side == 0 else -1]
    if own is None or other is None or known.out is None:
        return None
    (contracted, batched) = dot.eqn.params["dimension_numbers"]
    theirs = dict(zip(contracted[side], contracted[1 - side], strict=True))
    num_batch = len(batched[side])
    free = [d for d in range(len(own)) if d not in theirs and d not in batched[side]]
    first = num_batch + (0 if side == 0 else _num_free(dot))
    results = {d: first + n for n, d in enumerate(free)}
    results |= {d: n for n, d in enumerate(batched[side])}

    def used(dim: int) -> tuple[str, ...]:
        return other[theirs[dim]] if dim in theirs else known.out[results[dim]]  # type: ignore[index]

    needed = tuple(tuple(a for a in axes if a in used(d)) for d, axes in enumerate(own))
    return None if needed == own else needed


def _num_free(dot: Dot) -> int:
    """Count the dims of a matmul's first operand that are neither contracted nor batched."""
    (contracted, _), (batched, _) = dot.eqn.params["dimension_numbers"]
    return dot.eqn.invars[0].aval.ndim - len(contracted) - len(batched)


def _shared(dot: Dot, var: Any, spec: Spec) -> tuple[Any, Spec, Any] | None:
    """Return the value outside of loops that an operand is in all their iterations.

    Args:
        dot: the matmul.
        var: its operand.
        spec: the sharding in which it is needed.

    Returns:
        The value, its sharding, and the outermost loop that shares it; None if none does.
    """
    loop = None
    for eqn in reversed(dot.around):
        inner = [body for body in compat.jaxprs_in(eqn) if var in body.invars]
        name = eqn.primitive.name
        if len(inner) != 1 or name not in ("scan", "jit", *REMATS):
            break
        position = inner[0].invars.index(var)
        if name == "scan":
            num_consts, num_carry = compat.scan_counts(eqn)
            if num_consts <= position < num_consts + num_carry:
                return None
            if position < num_consts and eqn.params["length"] > 1:
                loop = eqn
            elif position >= num_consts:
                spec = ((), *spec)
        var = eqn.invars[position]
        if compat.is_literal(var):
            return None
    return None if loop is None else (var, spec, loop)
