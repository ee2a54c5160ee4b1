"""Compute values of the forward pass again in the backward pass, that the program would keep.

    scan over w:         body:  h = dot x w ;  y = tanh h                  stacked: h, y
    scan over w, h, y:   body:  ... y ... h ...

->  scan over w:         body:  h = dot x w ;  y = tanh h                  stacked: x
    scan over w, x:      body:  h, y = remat[{ h = dot x w ;  y = tanh h }] x w ;  ... y ... h ...

It is what `jax.checkpoint` of the layer would have made, and `keep.py` may keep some of it again.
In a body whose layers are written one after the other, what a layer computes for the backward pass
is computed again before the first equation there that reads it, behind a barrier that the gradient
passes as well; so XLA neither shares the values nor computes them early. Recomputed values have the
bits that kept ones have, but for how XLA fuses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from jax import lax

from jaxoverlap._jax import compat, inlining
from jaxoverlap.passes.analysis.jaxprs import Body, bodies, map_bodies
from jaxoverlap.passes.edited import EditedStep, misfit
from jaxoverlap.passes.keep.layers import SavingLayer, is_backward, joined, layer_at, layers_of
from jaxoverlap.passes.keep.opened import opened
from jaxoverlap.passes.keep.scans import widened, without_slices
from jaxoverlap.passes.planning.entries import line_of
from jaxoverlap.plan.edits import Recompute


def recomputations(jaxpr: Any, count: int = 1) -> list[Recompute]:
    """Return edits by which the backward pass recomputes all that the layers of a step save.

    Their bytes are not sharded.

    Args:
        jaxpr: the step.
        count: how many layers are recomputed as one, where they are no steps of scans; what stands
            between two such groups is all that is saved.
    """
    found: dict[Any, Recompute] = {}
    for body in bodies(opened(jaxpr)):
        for layer in joined(() if body.opaque else layers_of(body), count):
            again = _Again.of(layer)
            if again is None:
                continue
            source = line_of(again.eqns[0], (*body.around, body.eqns[layer.first]))
            key = source, tuple(map(compat.type_text, layer.saved))
            before = found.get(key)
            found[key] = Recompute(
                source=source,
                values=len(layer.saved),
                places=(*(before.places if before else ()), (body.index, layer.first, layer.last)),
                bytes_freed=(before.bytes_freed if before else 0) + layer.bytes,
            )
    return list(found.values())


def run(step: EditedStep, edits: Sequence[Recompute]) -> EditedStep:
    """Recompute what layers save that edits name."""
    jaxpr = opened(step.jaxpr)
    wanted: dict[int, list[tuple[Recompute, int, int]]] = {}
    for edit in edits:
        for number, first, last in edit.places:
            wanted.setdefault(number, []).append((edit, first, last))

    def visit(body: Body) -> list[Any] | None:
        if (here := wanted.pop(body.index, None)) is None:
            return None
        eqns = [*body.eqns]
        layers = [_named(body, *one) for one in here]
        for layer in sorted(layers, key=lambda one: -one.reader):  # places before it stay
            eqns = _in_scan(eqns, layer) if layer.is_scanned else _in_body(eqns, layer)
        return eqns

    jaxpr = map_bodies(jaxpr, visit)
    for number, ((edit, *_), *_) in wanted.items():
        raise misfit(edit, f"the step has no body {number}")
    return step.to(compat.without_dead(jaxpr))


def _named(body: Body, edit: Recompute, first: int, last: int) -> SavingLayer:
    """Return the layer that an edit names."""
    inside = not body.opaque and 0 <= first < len(body.eqns) and first <= last <= len(body.eqns)
    is_scan = inside and first == last and body.eqns[first].primitive.name == "scan"
    layer = layer_at(body, first, last) if is_scan or (inside and first < last) else None
    if layer is None or _Again.of(layer) is None:
        raise misfit(edit, f"equations {first} to {last} save nothing that can be recomputed")
    return layer


class _Again(NamedTuple):
    """These equations compute the saved values of a layer again.

    Attributes:
        eqns: the equations.
        inputs: the variables that they need.
    """

    eqns: tuple[Any, ...]
    inputs: tuple[Any, ...]

    @classmethod
    def of(cls, layer: SavingLayer) -> _Again | None:
        """Find it; None where it would have effects."""
        body = layer.body
        if layer.is_scanned:
            there = body.eqns[layer.first].params["jaxpr"].eqns
        else:
            there = body.eqns[layer.first : layer.last]
        needed, eqns = dict.fromkeys(layer.saved), list[Any]()
        for eqn in reversed(there):
            if any(v in needed for v in eqn.outvars):
                eqns.append(eqn)
                needed |= dict.fromkeys(compat.variables(eqn.invars))
        made = {v for eqn in eqns for v in eqn.outvars}
        if any(compat.ordered_effects(eqn) for eqn in eqns):
            return None
        return cls(tuple(reversed(eqns)), tuple(v for v in needed if v not in made))

    def remat(self, inputs: Sequence[Any], values: Sequence[Any], results: Any, like: Any) -> Any:
        """Return the remat.

        Args:
            inputs: the operands in place of `self.inputs`.
            values: the values that it computes.
            results: the variables for them.
            like: an equation that needs them.
        """
        computed = compat.jaxpr_of(self.inputs, values, self.eqns)
        return compat.new_remat(computed, inputs, results, like)


def _in_scan(eqns: Sequence[Any], layer: SavingLayer) -> list[Any]:
    """Let each step of a later scan recompute what one of a scan stacked; return its eqns."""
    scan, slicer, again = eqns[layer.first], eqns[layer.reader], _Again.of(layer)
    assert again is not None
    inside, (num_consts, num_carry) = scan.params["jaxpr"], compat.scan_counts(scan)
    stacked = [*zip(inside.outvars[num_carry:], scan.outvars[num_carry:], strict=True)]
    whole = {var: stack for var, stack in stacked if not compat.is_literal(var)}
    outside = dict(zip(inside.invars, scan.invars, strict=True))
    consts, slices, stacks = {}, {}, {}
    inputs = list[Any]()
    for var in again.inputs:
        inputs.append(compat.like_var(var))
        position = inside.invars.index(var)
        if position < num_consts:
            consts[inputs[-1]] = outside[var]
        elif position >= num_consts + num_carry:
            slices[inputs[-1]] = outside[var]
        else:
            if var not in whole:
                whole[var] = stacks[var] = compat.typed_stack_var(var, scan.params["length"])
            slices[inputs[-1]] = whole[var]
    there = slicer.params["jaxpr"]
    pairs = zip(slicer.invars, there.invars, strict=True)
    binders = {stack: binder for stack, binder in pairs if not compat.is_literal(stack)}
    results = {binders[stack]: v for v, stack in stacked if v in layer.saved and stack in binders}
    remat = again.remat(inputs, [*results.values()], [*results], slicer)
    slicer = without_slices(slicer, [*results])
    there = slicer.params["jaxpr"]
    there = there.replace(eqns=[remat, *there.eqns])
    slicer = slicer.replace(params={**slicer.params, "jaxpr": there})
    new = [*eqns]
    new[layer.first] = widened(scan, {}, {}, stacks)
    new[layer.reader] = widened(slicer, consts, slices, {})
    return new


def _in_body(eqns: Sequence[Any], layer: SavingLayer) -> list[Any]:
    """Recompute what a layer saves before its first reader; return the equations of the body."""
    again = _Again.of(layer)
    assert again is not None
    before, after = eqns[: layer.reader], eqns[layer.reader :]
    reader, results = after[0], {v: compat.like_var(v) for v in layer.saved}
    waits = [v for v in again.inputs if compat.has_numbers(v)]
    made = (v for eqn in before if is_backward(eqn) for v in eqn.outvars if compat.has_numbers(v))
    late = dict.fromkeys(made)
    first = [v for v in dict.fromkeys(compat.variables(reader.invars)) if v in late]
    first = first or [*late][-1:]
    passed = {v: compat.like_var(v) for v in waits}
    barrier = inlining.inline(
        lambda *values: lax.optimization_barrier(values),
        [*waits, *first],
        [*passed.values(), *map(compat.unused_var, first)],
        reader,
    )
    inputs = [passed.get(v, v) for v in again.inputs]
    remat = again.remat(inputs, [*results], [*results.values()], reader)

    def now(eqn: Any) -> Any:
        if not is_backward(eqn):
            return eqn
        read = (a if compat.is_literal(a) else results.get(a, a) for a in eqn.invars)
        return eqn.replace(invars=list(read))

    return [*before, *barrier, remat, *map(now, after)]
