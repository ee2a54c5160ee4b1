"""Sums over the batch that a scan stacks, and nothing in it reads: added up once, behind the scan.

    scan over layers:  body:  g: [d] = reduce_sum dy: [b@data, s, d]        # one all-reduce a layer
    ->  grads: [L, d]

->  scan over layers:  body:  p: [n@data, d] = reduce_sum (reshape dy: [n@data, b / n, s, d])
    ->  parts: [L, n@data, d] ;  grads: [L, d] = reduce_sum parts           # one all-reduce

Such are the gradients of norms' scales and of biases: a few kB a layer, whose all-reduce takes its
launch and a round trip, in each iteration, with little to hide behind at the end of a body. What
only scales, converts or adds such sums goes behind the scan with them.

Summing gradients once for many layers is what data parallelism does with buckets (Li et al.,
PyTorch Distributed, VLDB 2020); that a partial sum leaves a scan is ours.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxoverlap._jax import compat, inlining
from jaxoverlap.passes.analysis.def_use import DefUse
from jaxoverlap.passes.analysis.dims import DimNames
from jaxoverlap.passes.analysis.jaxprs import REMATS
from jaxoverlap.passes.analysis.mesh import explicit_axes
from jaxoverlap.passes.analysis.partitioned import Shardings
from jaxoverlap.passes.edited import EditedStep, misfit
from jaxoverlap.passes.evaluated import Evaluated, Proposal
from jaxoverlap.passes.rewriting.scans import scans_of
from jaxoverlap.plan.edits import SumLate

_ADDS = ("add", "add_any")
_VIEWS = ("reshape", "transpose", "squeeze", "neg", "sharding_constraint")
_Cut = tuple[tuple[int, tuple[str, ...]], ...]  # dims of an operand, and the mesh axes on each


def run(step: EditedStep, edits: Sequence[SumLate]) -> EditedStep:
    """Add up behind their scans the sums that edits name."""
    wanted: dict[int, dict[int, SumLate]] = {}
    for edit in edits:
        wanted.setdefault(edit.scan, {})[edit.output] = edit
    late = _Late(wanted, step.mesh)
    jaxpr = late.jaxpr(step.jaxpr)
    for number in wanted.keys() - late.done:
        edit = next(iter(wanted[number].values()))
        raise misfit(edit, f"the step has {late.count} scans, counted from 0")
    return step.to(jaxpr)


def propose(step: Evaluated) -> Iterator[Proposal]:
    """Propose to add up behind their scans all sums that can be."""
    if explicit_axes(step.step.mesh):  # there types say how values lie
        return
    if edits := tuple(late_sums(step.step, DimNames(step.step.numbered.jaxpr), step.shardings)):
        yield Proposal(edits)


def late_sums(
    step: EditedStep, names: DimNames, shardings: Mapping[Any, Shardings]
) -> Iterator[SumLate]:
    """Yield edits for all sums of a step that could leave their scan.

    Args:
        step: the step.
        names: the named dims (`DimNames`) of the step whose matmuls `shardings` are of.
        shardings: how the operands and results of its matmuls lie, by their number.
    """
    axes = axes_by_name(step, names, shardings)
    for number, scan in enumerate(scans_of(step.jaxpr)):
        body = scan.params["jaxpr"]
        _, num_carry = compat.scan_counts(scan)
        for output, var in enumerate(body.outvars[num_carry:]):
            tail = _tail(body, var)
            cuts = [_cut(summed, names, axes, step.mesh) for summed in tail.sums] if tail else []
            if cuts and all(cuts):
                yield SumLate(scan=number, output=output, cuts=tuple(cuts))


def axes_by_name(
    step: EditedStep, names: DimNames, shardings: Mapping[Any, Shardings]
) -> dict[int, tuple[str, ...]]:
    """Return the mesh axes that shard most values with a named dim."""
    counted: dict[int, Counter[tuple[str, ...]]] = {}
    for dot in step.matmuls:
        lies = shardings.get(dot.index)
        sides = zip((*dot.eqn.invars[:2], *dot.eqn.outvars), lies[:3] if lies else (), strict=False)
        for var, spec in sides:
            for name, axes in zip(names.of(var), spec or (), strict=False):
                counted.setdefault(name, Counter())[axes] += 1
    return {name: of.most_common(1)[0][0] for name, of in counted.items()}


def _cut(eqn: Any, names: DimNames, axes: Mapping[int, tuple[str, ...]], mesh: Mesh) -> _Cut:
    """Return the dims over which devices add up, and the mesh axes on each."""
    (var,) = eqn.invars
    found = []
    for dim, name in enumerate(names.of(var)):
        on = tuple(a for a in axes.get(name, ()) if mesh.shape[a] > 1)
        if dim in eqn.params["axes"] and on:
            if var.aval.shape[dim] % math.prod(mesh.shape[a] for a in on):
                return ()
            found.append((dim, on))
    return tuple(found)


# -- what leaves a body ---------------------------------------------------------------------------


@dataclass(frozen=True)
class _Tail:
    """What is done to sums before they leave a body.

    Attributes:
        body: the jaxpr that it is in.
        result: its last value.
        sums: the sums that it starts from.
        eqns: its equations, in order.
        places: their places in the body.
        remat: the remat that the body is of; None for a scan's own.
    """

    body: Any
    result: Any
    sums: list[Any] = field(default_factory=list)
    eqns: list[Any] = field(default_factory=list)
    places: set[int] = field(default_factory=set)
    remat: Any = None

    def __call__(self, *sums: Array) -> list[Array]:
        """Compute its result from the sums."""
        jaxpr = compat.with_binders(self.body, [s.outvars[0] for s in self.sums], [self.result])
        return compat.evaluate(jaxpr.replace(eqns=self.eqns), sums)


def _tail(body: Any, var: Any) -> _Tail | None:
    """Find the sums that one result of a body is made from; None if it is not that of sums."""
    uses = DefUse(body.eqns, body.outvars)
    if compat.is_literal(var) or list(uses.readers(var)) != [None]:
        return None
    maker = uses.maker(var)
    if maker is not None and maker.primitive.name in REMATS:
        inner = maker.params["jaxpr"]
        inside = _tail(inner, inner.outvars[maker.outvars.index(var)])
        return None if inside is None or inside.remat is not None else replace(inside, remat=maker)
    tail = _Tail(body, var)

    def follow(value: Any) -> bool:
        eqn = uses.maker(value)
        if eqn is None or len(uses.readers(value)) != 1:
            return False
        if eqn.primitive.name == "reduce_sum" and not _is_linear(eqn):
            tail.sums.append(eqn)
            return True
        if not (_is_linear(eqn) and all(map(follow, compat.variables(eqn.invars)))):
            return False
        if eqn.primitive.name != "sharding_constraint":
            # Types have no shardings here, and behind the scan there is a dim more.
            own = {name: None for name in ("sharding", "out_sharding") if name in eqn.params}
            eqn = eqn.replace(params={**eqn.params, **own})
        tail.eqns.append(eqn)
        tail.places.add(uses.made[value])
        return True

    return tail if follow(var) else None


def _is_linear(eqn: Any) -> bool:
    """Return whether an equation may as well be done behind a sum, as before it."""
    name, literals = eqn.primitive.name, sum(map(compat.is_literal, eqn.invars))
    if name == "convert_element_type":
        return jnp.issubdtype(eqn.params["new_dtype"], jnp.floating)
    if name == "reduce_sum":  # of dims of size 1, as a broadcast leaves behind
        return all(eqn.invars[0].aval.shape[d] == 1 for d in eqn.params["axes"])
    if name in _ADDS:
        return literals == 0
    return name in _VIEWS or (name == "mul" and literals == 1)


class _Late:
    """One walk over a step: it counts the scans as `scans_of` does."""

    def __init__(self, wanted: Mapping[int, Mapping[int, SumLate]], mesh: Mesh):
        self.wanted, self.mesh = wanted, mesh
        self.count, self.done = 0, set[int]()

    def jaxpr(self, jaxpr: Any) -> Any:
        eqns: list[Any] = []
        for given in jaxpr.eqns:
            eqn = compat.map_jaxprs(self.jaxpr, given)
            if eqn.primitive.name != "scan":
                eqns.append(eqn)
                continue
            number, self.count = self.count, self.count + 1
            if number in self.wanted:
                self.done.add(number)
                eqns += self.scan(eqn, self.wanted[number])
            else:
                eqns.append(eqn)
        return jaxpr.replace(eqns=eqns)

    def scan(self, scan: Any, edits: Mapping[int, SumLate]) -> list[Any]:
        """Return the scan that stacks partial sums, and what adds them up behind it."""
        body, (_, num_carry) = scan.params["jaxpr"], compat.scan_counts(scan)
        results, tails = body.outvars[num_carry:], dict[int, _Tail]()
        for output, edit in edits.items():
            tail = _tail(body, results[output]) if 0 <= output < len(results) else None
            if tail is None or len(tail.sums) != len(edit.cuts):
                raise misfit(edit, "no such sum leaves that scan")
            tails[num_carry + output] = tail
        cuts = {num_carry + output: edit.cuts for output, edit in edits.items()}
        new_body, parts = self.body(body, tails, cuts)
        outvars, behind = list[Any](), list[Any]()
        for place, var in enumerate(scan.outvars):
            if place not in tails:
                outvars.append(var)
                continue
            stacks = [compat.stacked_var(p, scan.params["length"]) for p in parts[place]]
            outvars += stacks
            together = functools.partial(_together, tails[place], cuts[place])
            behind += inlining.inline(together, stacks, [var], tails[place].sums[0])
        counts = compat.scan_counts(scan)
        return [compat.new_scan(scan, new_body, counts, scan.invars, outvars), *behind]

    def body(
        self, body: Any, tails: Mapping[int, _Tail], cuts: Mapping[int, Sequence[_Cut]]
    ) -> tuple[Any, dict[int, list[Any]]]:
        """Return a body that gives partial sums instead of some results, and these."""
        gone, partial = set[int](), dict[Any, tuple[Any, _Cut]]()
        remats, parts = dict[int, list[int]](), dict[int, list[Any]]()
        for place, tail in tails.items():
            parts[place] = []
            if tail.remat is not None:
                remats.setdefault(id(tail.remat), []).append(place)
                continue
            gone |= tail.places
            for eqn, cut in zip(tail.sums, cuts[place], strict=True):
                part = compat.shaped_var(eqn.outvars[0], self.shape(eqn, cut))
                partial[eqn.outvars[0]] = part, cut
                parts[place].append(part)
        eqns: list[Any] = []
        for position, eqn in enumerate(body.eqns):
            if eqn.outvars and eqn.outvars[0] in partial:
                part, cut = partial[eqn.outvars[0]]
                fn = functools.partial(_partial, eqn.params["axes"], cut, self.mesh)
                eqns += inlining.inline(fn, eqn.invars, [part], eqn)
            elif id(eqn) in remats:
                inside = {eqn.outvars.index(body.outvars[p]): p for p in remats[id(eqn)]}
                eqns.append(self.remat(eqn, inside, tails, cuts, parts))
            elif position not in gone:
                eqns.append(eqn)
        outvars = [v for place, var in enumerate(body.outvars) for v in parts.get(place, [var])]
        return compat.with_binders(body, body.invars, outvars).replace(eqns=eqns), parts

    def remat(
        self,
        remat: Any,
        inside: Mapping[int, int],
        tails: Mapping[int, _Tail],
        cuts: Mapping[int, Sequence[_Cut]],
        parts: dict[int, list[Any]],
    ) -> Any:
        """Return a remat that gives partial sums, and note them as parts of the body's results.

        Args:
            remat: the remat.
            inside: the place of each such result among the body's, by its place among the remat's.
            tails, cuts: by the place among the body's.
            parts: the partial sums, likewise.
        """
        own = {at: replace(tails[place], remat=None) for at, place in inside.items()}
        own_cuts = {at: cuts[place] for at, place in inside.items()}
        inner, found = self.body(remat.params["jaxpr"], own, own_cuts)
        outvars: list[Any] = []
        for at, var in enumerate(remat.outvars):
            if at in inside:
                parts[inside[at]] = list(map(compat.like_var, found[at]))
                outvars += parts[inside[at]]
            else:
                outvars.append(var)
        return remat.replace(outvars=outvars, params={**remat.params, "jaxpr": inner})

    def shape(self, eqn: Any, cut: _Cut) -> tuple[int, ...]:
        """Return the shape of a partial sum: the devices of each split dim, then other dims."""
        whole = eqn.invars[0].aval.shape
        kept = (n for d, n in enumerate(whole) if d not in eqn.params["axes"])
        return (*(math.prod(self.mesh.shape[a] for a in on) for _, on in cut), *kept)


def _partial(axes: Sequence[int], cut: _Cut, mesh: Mesh, x: Array) -> list[Array]:
    """Add up each device's own part: the devices along each split dim are the first dims."""
    on = dict(cut)
    shape, spec, summed, devices = list[int](), list[Any](), list[int](), list[int]()
    for dim, size in enumerate(x.shape):
        n = math.prod(mesh.shape[a] for a in on.get(dim, ()))
        if dim in on:
            devices.append(len(shape))
            shape, spec = [*shape, n], [*spec, on[dim]]
        if dim in axes:
            summed.append(len(shape))
        shape, spec = [*shape, size // n], [*spec, PartitionSpec.UNCONSTRAINED]
    at = NamedSharding(mesh, PartitionSpec(*spec))
    apart = lax.with_sharding_constraint(lax.reshape(x, shape), at)
    total = lax.reduce_sum_p.bind(apart, axes=tuple(summed), out_sharding=None)
    places = [d - sum(s < d for s in summed) for d in devices]
    total = jnp.moveaxis(total, places, range(len(places)))
    rest = [PartitionSpec.UNCONSTRAINED] * (total.ndim - len(places))
    at = NamedSharding(mesh, PartitionSpec(*(axes for _, axes in cut), *rest))
    return [lax.with_sharding_constraint(total, at)]


def _together(tail: _Tail, cuts: Sequence[_Cut], *stacks: Array) -> list[Array]:
    """Add up the stacked partial sums of all devices, and do what is done to sums."""
    sums = [
        lax.reduce_sum_p.bind(stack, axes=tuple(range(1, len(cut) + 1)), out_sharding=None)
        for stack, cut in zip(stacks, cuts, strict=True)
    ]
    return jax.vmap(tail)(*sums)
