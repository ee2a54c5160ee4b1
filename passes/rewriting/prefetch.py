"""Gathers of scanned weights, one step ahead: double buffering through the scan's carry.

    scan over w: [L, s@data, d]:        body(c, w_i):  g = all_gather w_i ;  ... g ...

->  g = all_gather w[0]
    scan over w, carry (i, g, c):       body:  next = all_gather w[i + 1] ;  ... g ...

A gather for the first matmul of a body has nothing before it to hide behind, for XLA schedules each
body by itself. As part of the carry, the next step's gather has all of this step to hide in. It
costs one more buffer of what is gathered, and one gather more than steps: the last step's is not
used. Gathers for later matmuls stay, as they can hide behind the first; or all of a layer's run
ahead (`whole_layers`), so that XLA can join them in one, as FSDP has it: over many devices small
gathers use a fraction of the link.

A gather in a remat's body inside the scan's is first moved out of it: its result becomes an operand
of the remat, as the weight itself was one.

The technique is FSDP's own (Zhao et al., arXiv 2304.11277, section 3.3.2: backward and forward
prefetching).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax import lax

from jaxoverlap._jax import compat, inlining
from jaxoverlap.passes.analysis.def_use import DefUse
from jaxoverlap.passes.analysis.jaxprs import REMATS, has_matmul
from jaxoverlap.passes.edited import EditedStep
from jaxoverlap.plan.edits import GatherAhead, MakeRing


def run(step: EditedStep, edits: Sequence[GatherAhead]) -> EditedStep:
    """Gather ahead the operands of rings and matmuls; `EditedStep.facts` has a `Prefetched`."""
    (edit,) = edits
    rings = step.facts.get(MakeRing)
    gathered = rings.gathered if rings else {}
    jaxpr, ahead = prefetch(step.jaxpr, gathered, whole_layers=edit.whole_layers)
    return step.to(jaxpr, {GatherAhead: ahead})


def prefetch(
    jaxpr: Any, gathers: Mapping[Any, int], *, whole_layers: bool = False
) -> tuple[Any, Prefetched]:
    """Make the scans of a jaxpr gather what they read one step ahead.

    Args:
        jaxpr: the jaxpr of a step.
        gathers: the variables of the gathered values, each with the bytes that a device holds.
        whole_layers: whether all that a step reads is gathered ahead, and not only what it reads
            up to its first matmul.

    Returns:
        The jaxpr, and which gathers run ahead.
    """
    ahead = _Ahead(gathers, whole_layers)
    return ahead.jaxpr(jaxpr), Prefetched(ahead.moved, ahead.most_bytes)


class Prefetched(NamedTuple):
    """The gathers that run one step of their scan ahead.

    Attributes:
        gathers: how many there are.
        most_bytes: the bytes that a device then holds for a step of a scan; of the scan with most.
    """

    gathers: int = 0
    most_bytes: int = 0


def joined_bytes(step: EditedStep) -> int:
    """Return the bytes of a layer's weights that are gathered ahead as one; 0 if none are."""
    whole = any(isinstance(edit, GatherAhead) and edit.whole_layers for edit in step.edits)
    return step.facts[GatherAhead].most_bytes if whole else 0


class _Ahead:
    def __init__(self, gathers: Mapping[Any, int], whole_layers: bool):
        self.gathers = dict(gathers)
        self.whole_layers = whole_layers
        self.moved = self.most_bytes = 0

    def jaxpr(self, jaxpr: Any) -> Any:
        eqns: list[Any] = []
        for given in jaxpr.eqns:
            eqn = compat.map_jaxprs(self.jaxpr, given)
            eqns += self.scan(eqn) if eqn.primitive.name == "scan" else [eqn]
        unchanged = len(eqns) == len(jaxpr.eqns) and all(map(operator.is_, eqns, jaxpr.eqns))
        return jaxpr if unchanged else jaxpr.replace(eqns=eqns)

    def scan(self, scan: Any) -> list[Any]:
        """Return the equations that replace a scan."""
        num_consts, num_carry = compat.scan_counts(scan)
        body = scan.params["jaxpr"]
        if scan.params["length"] < 2:
            return [scan]
        body = body.replace(eqns=[e for eqn in body.eqns for e in self.lifted(eqn)])
        xs = body.invars[num_consts + num_carry :]
        slices = _Slices(body)
        wanted = slices.read(self.gathers, whole=self.whole_layers)
        ready = [v for v in wanted if slices.leaves(v) <= {*xs}]
        if not ready:
            return [scan]
        self.moved += len(ready)
        self.most_bytes = max(self.most_bytes, sum(self.gathers[v] for v in ready))
        arrays = dict(zip(xs, scan.invars[num_consts + num_carry :], strict=True))
        return _double_buffered(scan, body, slices, ready, arrays)

    def lifted(self, eqn: Any) -> Iterator[Any]:
        """Move out of a remat's body, before it, the gathers that need nothing but operands."""
        if eqn.primitive.name not in REMATS:
            yield eqn
            return
        inner = eqn.params["jaxpr"]
        slices, outer = _Slices(inner), dict(zip(inner.invars, eqn.invars, strict=True))
        wanted = slices.read(self.gathers, whole=self.whole_layers)
        ready = [v for v in wanted if slices.leaves(v) <= {*outer}]
        if not ready:
            yield eqn
            return
        results = {v: compat.like_var(v) for v in ready}
        self.gathers |= {result: self.gathers[v] for v, result in results.items()}
        for v, result in results.items():
            leaves = [*slices.leaves(v)]
            operands = [outer[leaf] for leaf in leaves]
            yield from inlining.inline(
                slices.function(leaves, v), operands, [result], slices.uses.maker(v)
            )
        body = compat.with_binders(inner, [*inner.invars, *ready], inner.outvars)
        body = body.replace(eqns=slices.without(ready))
        yield eqn.replace(
            invars=[*eqn.invars, *results.values()], params={**eqn.params, "jaxpr": body}
        )


def _double_buffered(
    scan: Any, body: Any, slices: _Slices, ready: Sequence[Any], arrays: Mapping[Any, Any]
) -> list[Any]:
    """Emit the first gathers, and the scan with the others in its carry.

    Args:
        scan: the scan.
        body: its body.
        slices: the equations and operands that its values are made from.
        ready: the gathered values.
        arrays: the stacked value of each slice that a step reads.
    """
    num_consts, num_carry = compat.scan_counts(scan)
    needed = [x for x in arrays if any(x in slices.leaves(v) for v in ready)]
    inside = {x: compat.like_var(arrays[x]) for x in needed}
    step, after = compat.int_var(), compat.int_var()
    first, later = ([compat.like_var(v) for v in ready] for _ in range(2))
    before: list[Any] = []
    ahead = inlining.inline(lambda i: [lax.add(i, np.int32(1))], [step], [after], scan)
    for v, at_first, at_last in zip(ready, first, later, strict=True):
        leaves, like = [*slices.leaves(v)], slices.uses.maker(v)
        gather = _gather(slices.function(leaves, v), scan.params)
        stacked = [arrays[leaf] for leaf in leaves]
        before += inlining.inline(functools.partial(gather, np.int32(0)), stacked, [at_first], like)
        operands = [step, *(inside[leaf] for leaf in leaves)]
        ahead += inlining.inline(gather, operands, [at_last], like)

    def split(values: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        return list(values[:num_consts]), list(values[num_consts:])

    consts, rest = split(body.invars)
    new_body = compat.with_binders(
        body,
        [*consts, *inside.values(), step, *ready, *rest],
        [after, *later, *body.outvars],
    ).replace(eqns=[*ahead, *slices.without(ready)])
    consts, rest = split(scan.invars)
    one = compat.literal(np.int32(1))
    invars = [*consts, *(arrays[x] for x in needed), one, *first, *rest]
    unused = [compat.unused_var(v) for v in (after, *later)]
    counts = num_consts + len(needed), num_carry + 1 + len(ready)
    return [*before, compat.new_scan(scan, new_body, counts, invars, [*unused, *scan.outvars])]


def _gather(function: Callable[..., list[Any]], params: dict[str, Any]) -> Callable[..., list[Any]]:
    """Make gather(step, *stacked), which gathers for one step; past the end, for the last."""
    last, backwards = np.int32(params["length"] - 1), params["reverse"]

    def gather(step: Any, *stacked: Any) -> list[Any]:
        index = lax.min(step, last)
        index = lax.sub(last, index) if backwards else index
        here = [lax.dynamic_index_in_dim(s, index, 0, keepdims=False) for s in stacked]
        return function(*here)

    return gather


class _Slices:
    """The equations and operands that each value of a body is made from."""

    def __init__(self, body: Any):
        self.body = body
        self.uses = DefUse(body.eqns, body.outvars)
        self._eqns: dict[Any, dict[int, Any]] = {}

    def eqns(self, var: Any) -> dict[int, Any]:
        """Return the equations that a value is made by, in order, by their identity."""
        if var not in self._eqns:
            eqns: dict[int, Any] = {}
            if (eqn := self.uses.maker(var)) is not None:
                for atom in eqn.invars:
                    if not compat.is_literal(atom):
                        eqns |= self.eqns(atom)
                eqns[id(eqn)] = eqn
            self._eqns[var] = eqns
        return self._eqns[var]

    def leaves(self, var: Any) -> set[Any]:
        """Return the operands of the body that a value is made from."""
        eqns = self.eqns(var).values()
        read = {a for eqn in eqns for a in eqn.invars if not compat.is_literal(a)}
        return {a for a in read if a not in self.uses.made}

    def read(self, gathers: Collection[Any], *, whole: bool) -> list[Any]:
        """List the gathers that are read, in order.

        Args:
            gathers: the variables of the gathered values.
            whole: whether by any equation; if not, up to the first matmul, as those have none to
                hide behind.
        """
        read: dict[Any, None] = {}
        made = {v for v in gathers if v in self.uses.made}
        for eqn in self.body.eqns:
            read |= dict.fromkeys(a for a in eqn.invars if not compat.is_literal(a) and a in made)
            if not whole and has_matmul(eqn):
                break
        return [*read]

    def function(self, leaves: Sequence[Any], value: Any) -> Callable[..., list[Any]]:
        """Return the function that makes a value of its leaves."""
        jaxpr = compat.with_binders(self.body, leaves, [value])
        jaxpr = jaxpr.replace(eqns=list(self.eqns(value).values()))
        return lambda *operands: compat.evaluate(jaxpr, operands)

    def without(self, values: Sequence[Any]) -> list[Any]:
        """Return the body's equations without those that only these values need."""
        kept: list[Any] = []
        maybe = {key for v in values for key in self.eqns(v)}
        needed = {v for v in self.body.outvars if not compat.is_literal(v)} - {*values}
        for eqn in reversed(self.body.eqns):
            if id(eqn) in maybe and not needed.intersection(eqn.outvars):
                continue
            kept.append(eqn)
            needed |= {a for a in eqn.invars if not compat.is_literal(a)} - {*values}
        return kept[::-1]
