"""Send the exchanges of a user's `shard_map` in chunks of columns, each under others' matmuls.

    y: [rows, d] = ragged_all_to_all x ;  h: [rows, f] = ragged_dot y w: [e, d, f]

->  y0 = ragged_all_to_all x[:, :d/2] ;  y1 = ragged_all_to_all x[:, d/2:]
    h = ragged_dot y0 w[:, :d/2] + ragged_dot y1 w[:, d/2:]       # y1 travels under y0's matmul

Expert parallelism sends each token to the devices of its experts, and what they answer back. A
token goes as a whole, so its columns may go one after the other, whatever the router does with it.
A matmul that contracts the columns adds up those of the chunks; of a matmul that makes the columns
each chunk is sent as soon as it is there. Both hold for the gradients too. Values between that mix
the columns, and equations without a rule, are computed as they were, on the joined value: the
chunks are parts of `passes/halves`, along another dim.

MaxText cuts the gathers of its experts' rings so by hand (pull request 3891); in graphs of PyTorch
torchtitan chunks exchanges along the batch. That a pass finds the columns by the dims' names is
ours.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from jaxoverlap._jax import compat
from jaxoverlap.passes.analysis.batch import BatchSplit
from jaxoverlap.passes.analysis.dim_rules import dim_rule
from jaxoverlap.passes.analysis.dims import DimNames, Name
from jaxoverlap.passes.analysis.jaxprs import MATMULS, equations
from jaxoverlap.passes.edited import EditedStep, misfit
from jaxoverlap.passes.evaluated import Evaluated, Proposal
from jaxoverlap.passes.halves.halve import Halved
from jaxoverlap.plan.edits import SplitExchange
from jaxoverlap.plan.limits import EXCHANGE_CHUNKS

_EXCHANGES = ("ragged_all_to_all", "all_to_all", "all_gather", "reduce_scatter")


def run(step: EditedStep, edits: Sequence[SplitExchange]) -> EditedStep:
    """Exchange the columns of the `shard_map`s that edits name in chunks."""
    wanted = {edit.shard_map: edit for edit in edits}
    number = 0

    def rewritten(jaxpr: Any) -> Any:
        nonlocal number
        eqns = []
        for eqn in jaxpr.eqns:
            if eqn.primitive.name != "shard_map":
                eqns.append(compat.map_jaxprs(rewritten, eqn))
                continue
            edit, number = wanted.pop(number, None), number + 1
            eqns.append(eqn if edit is None else _in_chunks(eqn, edit))
        return jaxpr.replace(eqns=eqns)

    jaxpr = rewritten(step.jaxpr)
    for edit in wanted.values():
        raise misfit(edit, f"the step has {number} shard_maps, counted from 0")
    return step.to(jaxpr)


def propose(step: Evaluated) -> Iterator[Proposal]:
    """Propose to send the exchanges of users' `shard_map`s in chunks, few ones first."""
    for parts in EXCHANGE_CHUNKS:
        if edits := tuple(split_exchanges(step.step, parts)):
            yield Proposal(edits)


def split_exchanges(step: EditedStep, parts: int) -> Iterator[SplitExchange]:
    """Yield an edit for each `shard_map` of a user's whose exchanges can go in so many chunks.

    Those of rings are new; one in which a ring was made has another body.
    """
    users = {id(eqn.params["jaxpr"]) for eqn in _shard_maps(step.numbered.jaxpr)}
    for number, eqn in enumerate(_shard_maps(step.jaxpr)):
        body = eqn.params["jaxpr"]
        if id(body) in users and _columns(body, DimNames(body), parts):
            yield SplitExchange(shard_map=number, parts=parts)


def _shard_maps(jaxpr: Any) -> Iterator[Any]:
    """Yield the `shard_map`s of a step; of nested ones the outer."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "shard_map":
            yield eqn
        else:
            for body in compat.jaxprs_in(eqn):
                yield from _shard_maps(body)


def _in_chunks(eqn: Any, edit: SplitExchange) -> Any:
    """Return a `shard_map` whose values with exchanged columns are in parts along these."""
    body = eqn.params["jaxpr"]
    names = DimNames(body)
    columns = _columns(body, names, edit.parts)
    if not columns:
        raise misfit(edit, "no exchange in that shard_map has columns of such a size and a matmul")

    def column_dim(var: Any) -> int | None:
        dims = names.of(var) if hasattr(var.aval, "shape") else ()
        return next((d for d, name in enumerate(dims) if name in columns), None)

    with compat.in_shard_maps([eqn]):
        split = Halved(body, column_dim, BatchSplit(1, edit.parts))
    return eqn.replace(params={**eqn.params, "jaxpr": split.jaxpr})


def _columns(body: Any, names: DimNames, parts: int) -> frozenset[Name]:
    """Return the named dims that exchanges leave alone, one of each, and that a matmul has."""
    every = [eqn for eqn, _ in equations(body)]
    sides = (v for e in every if e.primitive.name in MATMULS for v in (*e.invars[:2], *e.outvars))
    of_matmuls = {name for var in sides for name in names.of(var)}
    found = (
        _untouched(eqn, names, of_matmuls, parts)
        for eqn in every
        if eqn.primitive.name in _EXCHANGES
    )
    return frozenset(name for name in found if name is not None)


def _untouched(eqn: Any, names: DimNames, known: set[Name], parts: int) -> Name | None:
    """Return the name of the largest dim that an exchange leaves as it is; None without one."""
    rule = dim_rule(eqn)
    if rule is None:
        return None
    var, shape = eqn.invars[0], eqn.invars[0].aval.shape
    kept = [
        d
        for d, factor in enumerate(rule.operands[0])
        if factor in rule.results[0] and factor not in rule.mixed
    ]
    kept = [d for d in kept if names.of(var)[d] in known and shape[d] % parts == 0]
    return names.of(var)[max(kept, key=lambda d: shape[d])] if kept and math.prod(shape) else None
