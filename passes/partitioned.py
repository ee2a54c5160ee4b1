"""What XLA makes of a step: how every operand and result of every matmul lies, and what moves.

A copy of the step asks for its values' shardings (`_partitioner.probe`); it is lowered, and XLA's
partitioner answers. Nothing else is compiled: a 7B train step for 64 GPUs takes 0.4 s.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from jaxoverlap import _compat, _partitioner
from jaxoverlap.passes import hlo
from jaxoverlap.passes.errors import RewriteError
from jaxoverlap.passes.jaxprs import Body, map_bodies
from jaxoverlap.passes.sites import Spec
from jaxoverlap.passes.work import work

TAG = "jaxoverlap_site"
_ALIAS = re.compile(r"\{([\d, ]*)\}: \((\d+), \{")
_RESHARDS = ("sharding_constraint", "reshard")
_VIEWS = ("transpose", "convert_element_type")


class Shardings(NamedTuple):
    """How the sides of one matmul lie: a tuple of mesh axes a dim, major to minor.

    None where mesh axes do not say it, as where part of an axis shards a dim.

    Attributes:
        lhs, rhs, out: of the operands and the result.
        lhs_sources, rhs_sources: of the values that the operand is made from by nothing but
            resharding: before the last reshard, before the last two, ...
        out_sinks: of the values that the result becomes by resharding (and transposes), as long as
            nobody else reads it: after the first reshard, after the first two, ...; by the dims of
            the result.
        products: multiply-adds that one device does for it, in the partitioned program; None where
            XLA has joined it with another.
    """

    lhs: Spec | None
    rhs: Spec | None
    out: Spec | None
    lhs_sources: tuple[Spec | None, ...] = ()
    rhs_sources: tuple[Spec | None, ...] = ()
    out_sinks: tuple[Spec | None, ...] = ()
    products: int | None = None


@dataclass(frozen=True)
class Picture:
    """What XLA's partitioner makes of a step.

    Attributes:
        shardings: of the matmuls, by their number (`jaxprs.dots`); of scatter-adds by the number of
            their body and their place in that, where `rhs` is the updates. In manual code they name
            the axes that are automatic beside the manual ones. What XLA dropped is missing.
        results: how the step's results lie; XLA's own words where mesh axes do not say it.
        text: the partitioned module's.
        num_devices: that it is for.
    """

    shardings: Mapping[Any, Shardings]
    results: tuple[Spec | str, ...]
    text: str
    num_devices: int

    @property
    def donated(self) -> frozenset[tuple[str, str]]:
        """The results that lie in an argument's memory, each with the argument, by number."""
        return frozenset(_ALIAS.findall(self.text.partition("\n")[0]))

    @functools.cached_property
    def module(self) -> hlo.Module:
        """The partitioned module, in the order of its text: it is not scheduled yet."""
        return hlo.parse_partitioned(self.text, self.num_devices)


def partitioned(traced: jax.stages.Traced, jaxpr: Any, mesh: Mesh, *, ask: bool = True) -> Picture:
    """What XLA makes of a traced step.

    Args:
        traced: the step.
        jaxpr: its jaxpr, flattened or rewritten; the numbers of the answer are of this one.
        mesh: the step's mesh.
        ask: whether to ask for the shardings of its matmuls.

    Raises:
        RewriteError: if XLA does not partition the step.
    """
    answers: dict[int, dict[Any, Spec | None]] = {}  # by body: two may share their variables
    asked: dict[Any, tuple[_Asked, dict[Any, Spec | None]]] = {}

    def visit(body: Body) -> list[Any] | None:
        found, told = dict(_asked(body)), answers.setdefault(body.index, {})
        asked.update((key, (one, told)) for key, one in found.items())
        return _with_probes(body, found, told, mesh) if found else None

    probed = map_bodies(jaxpr, visit) if ask else jaxpr
    params = _compat.with_jaxpr(_compat.traced_params(traced), probed, {})
    params["name"] = _partitioner.new_name()
    try:
        found = _partitioner.ask(_compat.traced_with(traced, params).lower(), mesh)
    except _partitioner.NoAnswerError as error:
        raise RewriteError(
            f"XLA's partitioner gave no answer about {traced.fun_name}: {error}"
        ) from error
    known = {key: one.read(told) for key, (one, told) in asked.items() if one.out in told}
    picture = Picture(known, found.results, found.text, mesh.size)
    for number, products in products_of_sites(picture.module).items() if ask else ():
        known[number] = known[number]._replace(products=products)
    return picture


class _Asked(NamedTuple):
    """The variables whose shardings make up a `Shardings`; literals are whole everywhere.

    Attributes:
        lhs, rhs, out, lhs_sources, rhs_sources: as there.
        sinks: as there, each with which dims of the result its own are.
    """

    lhs: Any
    rhs: Any
    out: Any
    lhs_sources: tuple[Any, ...]
    rhs_sources: tuple[Any, ...]
    sinks: tuple[tuple[Any, tuple[int, ...]], ...]

    def variables(self) -> Iterator[Any]:
        """All of them."""
        yield from (self.lhs, self.rhs, self.out, *self.lhs_sources, *self.rhs_sources)
        yield from (var for var, _ in self.sinks)

    def read(self, answers: Mapping[Any, Spec | None]) -> Shardings:
        """What was answered."""

        def of(var: Any) -> Spec | None:
            return ((),) * var.aval.ndim if _compat.is_literal(var) else answers.get(var)

        def turned(spec: Spec | None, dims: tuple[int, ...]) -> Spec | None:
            return spec and tuple(spec[dims.index(d)] for d in range(len(dims)))

        return Shardings(
            of(self.lhs),
            of(self.rhs),
            of(self.out),
            tuple(map(of, self.lhs_sources)),
            tuple(map(of, self.rhs_sources)),
            tuple(turned(of(var), dims) for var, dims in self.sinks),
        )


def _asked(body: Body) -> Iterator[tuple[Any, _Asked]]:
    """What is to be asked about a body's matmuls and scatter-adds."""
    if body.opaque:
        return
    around = _Around(body)
    for place, eqn in enumerate(body.eqns):
        if eqn.primitive.name == "scatter-add" and eqn.outvars[0] in around.live:
            yield (body.index, place), around.asked(eqn.invars[0], eqn.invars[2], eqn.outvars[0])
    for dot in body.dots:
        readable = not dot.inside or (dot.manual and dot.manual.automatic)
        out = dot.eqn.outvars[0]
        if readable and dot.eqn.primitive.name == "dot_general" and out in around.live:
            lhs, rhs = dot.eqn.invars
            yield dot.index, around.asked(lhs, rhs, out)


class _Around:
    """The reshards around the values of a body."""

    def __init__(self, body: Body):
        self.made = {v: eqn for eqn in body.eqns for v in eqn.outvars}
        self.readers: dict[Any, list[Any]] = {}
        for eqn in body.eqns:
            for v in _variables(eqn.invars):
                self.readers.setdefault(v, []).append(eqn)
        for v in _variables(body.outvars):
            self.readers.setdefault(v, []).append(None)
        self.live = _live(body)

    def asked(self, lhs: Any, rhs: Any, out: Any) -> _Asked:
        return _Asked(lhs, rhs, out, self._sources(lhs), self._sources(rhs), self._sinks(out))

    def _sources(self, var: Any) -> tuple[Any, ...]:
        """The values before each of the reshards that made one, the last reshard first."""
        found: list[Any] = []
        while not _compat.is_literal(var) and (eqn := self.made.get(var)) is not None:
            if eqn.primitive.name not in _RESHARDS:
                break
            var = eqn.invars[0]
            found.append(var)
        return tuple(found)

    def _sinks(self, var: Any) -> tuple[tuple[Any, tuple[int, ...]], ...]:
        """The values after each of the reshards that one meets, and which dims theirs are."""
        dims, found = tuple(range(var.aval.ndim)), []
        while len(readers := self.readers.get(var, [])) == 1 and readers[0] is not None:
            eqn = readers[0]
            if eqn.primitive.name == "transpose":
                dims = tuple(dims[d] for d in eqn.params["permutation"])
            elif eqn.primitive.name not in (*_RESHARDS, *_VIEWS):
                break
            var = eqn.outvars[0]
            if eqn.primitive.name in _RESHARDS:
                found.append((var, dims))
        return tuple(found)


def _live(body: Body) -> set[Any]:
    """The variables of a body that its results or effects need."""
    live = set(_variables(body.outvars))
    for eqn in reversed(body.eqns):
        if eqn.effects or not live.isdisjoint(eqn.outvars):
            live.update(_variables(eqn.invars))
            live.update(eqn.outvars)
    return live


def _variables(atoms: Iterable[Any]) -> Iterator[Any]:
    return (a for a in atoms if not _compat.is_literal(a))


def _with_probes(
    body: Body, asked: Mapping[Any, _Asked], answers: dict[Any, Spec | None], mesh: Mesh
) -> list[Any]:
    """A body's equations, with a probe after each value that is asked about, and tagged matmuls."""
    wanted = dict.fromkeys(v for one in asked.values() for v in _variables(one.variables()))
    tags = {id(dot.eqn): str(dot.index) for dot in body.dots if dot.index in asked}
    made = {v for eqn in body.eqns for v in eqn.outvars}
    manual = body.dots[0].manual if body.dots else None
    axes = manual.automatic if manual else mesh.shape

    def probe(v: Any, like: Any) -> Any:
        return _partitioner.probe(v, v, answers, axes, like)

    eqns = [probe(v, body.eqns[0]) for v in wanted if v not in made]
    for eqn in body.eqns:
        tag = tags.get(id(eqn))
        eqns.append(_compat.with_tag(eqn, **{TAG: tag}) if tag else eqn)
        eqns += [probe(v, eqn) for v in eqn.outvars if v in wanted]
    return eqns


# -- the collectives beside a matmul --------------------------------------------------------------

_TAGGED = re.compile(TAG + r'="(\d+)"')
_ON_THE_WAY = ("reshape", "bitcast", "transpose", "convert", "copy", "add", "add-any")
_COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")

Place = tuple[str, str]
"""A computation and an instruction in it."""


def products_of_sites(module: hlo.Module) -> dict[int, int]:
    """The multiply-adds that one device does for each matmul of a step, by its number.

    A matmul that XLA does twice has those of both. One that XLA has joined with another is missing.
    """
    found: dict[int, int] = {}
    for body in module.computations.values():
        shapes = {i.name: i.shape for i in body}
        for i in body:
            if i.opcode == "dot" and (tag := _TAGGED.search(i.line)):
                (matmul,) = work(module, i, shapes).matmuls
                number = int(tag.group(1))
                found[number] = found.get(number, 0) + matmul.flops // 2
    return found


def collectives_of_sites(module: hlo.Module) -> dict[int, set[Place]]:
    """The collectives that stand beside each matmul of a step, by its number.

    Between the two there is nothing but views, converts and sums. A matmul that XLA has joined with
    another is missing.
    """
    found: dict[int, set[Place]] = {}
    for name, body in module.computations.items():
        made = {i.name: i for i in body}
        users: dict[str, list[hlo.Instruction]] = {}
        for i in body:
            for operand in i.operands:
                users.setdefault(operand.partition("#")[0], []).append(i)
        read = {at.name: [made[o.partition("#")[0]] for o in at.operands] for at in body}
        for i in body:
            tag = _TAGGED.search(i.line) if i.opcode == "dot" else None
            if tag is None:
                continue
            beside = {(name, c.name) for way in (read, users) for c in _beside(i, way)}
            found.setdefault(int(tag.group(1)), set()).update(beside)
    return found


def _beside(
    dot: hlo.Instruction, way: Mapping[str, list[hlo.Instruction]]
) -> Iterator[hlo.Instruction]:
    """The collectives on the way from a matmul in one direction, up to what computes."""
    seen, stack = set[str](), list(way.get(dot.name, ()))
    while stack:
        at = stack.pop()
        if at.name in seen:
            continue
        seen.add(at.name)
        if at.opcode in _COLLECTIVES:
            yield at
        elif at.opcode in _ON_THE_WAY:
            stack += way.get(at.name, ())
