"""Ask XLA's partitioner how a step's matmuls are sharded, and which collectives it adds.

The step is lowered with a tag on each matmul, and XLA's partitioner says what it makes of that; a
copy with probes (`partitioner.probe`) says how values lie. A probe is one more reader of a value,
and may change how Shardy resolves a conflict, so answers count where the probed program does what
the other does. Nothing else is compiled: a question about a 7B train step takes 0.4 s.
"""

from __future__ import annotations

import functools
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from jaxoverlap._jax import compat, jits, partitioner
from jaxoverlap.passes.analysis.device_work import TAG, work_of, work_of_sites
from jaxoverlap.passes.analysis.einsum import Spec
from jaxoverlap.passes.analysis.errors import RewriteError
from jaxoverlap.passes.analysis.jaxprs import Body, bodies, map_bodies
from jaxoverlap.simulation import hlo

_ALIAS = re.compile(r"\{([\d, ]*)\}: \((\d+), \{")
_RESHARDS = ("sharding_constraint", "reshard")
_VIEWS = ("transpose", "convert_element_type")


class Shardings(NamedTuple):
    """The shardings of one matmul's sides: for each dim a tuple of mesh axes, major to minor.

    None where mesh axes cannot state it, as where part of an axis shards a dim.

    Attributes:
        lhs, rhs, out: the shardings of the operands and the result.
        lhs_sources, rhs_sources: of the values that the operand is made from by nothing but
            resharding: before the last reshard, before the last two, ...
        out_sinks: of the values that the result becomes by resharding (and transposes), as long as
            nobody else reads it: after the first reshard, after the first two, ...; by the dims of
            the result.
    """

    lhs: Spec | None
    rhs: Spec | None
    out: Spec | None
    lhs_sources: tuple[Spec | None, ...] = ()
    rhs_sources: tuple[Spec | None, ...] = ()
    out_sinks: tuple[Spec | None, ...] = ()


@dataclass(frozen=True)
class Picture:
    """The step that XLA's partitioner makes of the traced one.

    Attributes:
        shardings: of the matmuls, by their number (`jaxprs.dots`); of scatter-adds by the number of
            their body and their place in that, where `rhs` is the updates. In manual code they name
            the axes that are automatic beside the manual ones. What XLA dropped is missing.
        results: how the step's results lie; XLA's own words where mesh axes do not say it.
        text: the text of the partitioned module.
        num_devices: the number of devices that it is for.
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
    """Partition a traced step with XLA, and read its shardings.

    Args:
        traced: the step.
        jaxpr: its jaxpr, flattened or rewritten; the numbers of the answer are of this one.
        mesh: the step's mesh.
        ask: whether to ask for the shardings of its matmuls.

    Raises:
        RewriteError: if XLA does not partition the step.
    """
    if not ask:
        spmd_program = _partition(traced, jaxpr, mesh)
        return Picture({}, spmd_program.results, spmd_program.text, mesh.size)
    asked = {key: (body.index, one) for body in bodies(jaxpr) for key, one in _asked(body)}
    probed = functools.partial(_probed, traced, jaxpr, mesh, asked)
    sites: dict[_Value, set[Any]] = {}
    for key, (body, one) in asked.items():
        for v in _variables(one.variables()):
            sites.setdefault((body, v), set()).add(key)
    spmd_program, _ = probed(frozenset())
    if mesh.devices.flat[0].platform == "cpu":  # its programs come fused, and cannot be compared
        _, answers = probed(frozenset(sites))
    else:
        answers = _answers(sites, spmd_program.text, probed, mesh.size)
    told: dict[int, dict[Any, Spec | None]] = {}
    for (body, v), spec in answers.items():
        told.setdefault(body, {})[v] = spec
    known = {
        key: one.read(told[body])
        for key, (body, one) in asked.items()
        if (body, one.out) in answers
    }
    return Picture(known, spmd_program.results, spmd_program.text, mesh.size)


_Value = tuple[int, Any]  # a body's number, as two bodies may share their variables, and a variable
_Answers = dict[_Value, Spec | None]


def _partition(traced: jax.stages.Traced, jaxpr: Any, mesh: Mesh) -> partitioner.Partitioned:
    """Partition a traced step with another jaxpr in the place of its own."""
    params = jits.with_jaxpr(jits.traced_params(traced), jaxpr, {})
    params["name"] = partitioner.new_name()
    try:
        return partitioner.ask(jits.traced_with(traced, params).lower(), mesh)
    except partitioner.NoAnswerError as error:
        raise RewriteError(
            f"XLA's partitioner gave no answer about {traced.fun_name}: {error}"
        ) from error


def _probed(
    traced: jax.stages.Traced,
    jaxpr: Any,
    mesh: Mesh,
    asked: Mapping[Any, tuple[int, _Asked]],
    wanted: Set[_Value],
) -> tuple[partitioner.Partitioned, _Answers]:
    """Partition a step with its matmuls tagged, and read the shardings of the wanted values."""
    told: dict[int, dict[Any, Spec | None]] = {}

    def visit(body: Body) -> list[Any] | None:
        here = {key for key, (at, _) in asked.items() if at == body.index}
        variables = {v for at, v in wanted if at == body.index}
        answers = told.setdefault(body.index, {})
        return _with_probes(body, here, variables, answers, mesh) if here else None

    spmd_program = _partition(traced, map_bodies(jaxpr, visit), mesh)
    return spmd_program, {
        (at, v): spec for at, answers in told.items() for v, spec in answers.items()
    }


_MOST_QUESTIONS = 24  # about one step


def _answers(
    sites: Mapping[_Value, Set[Any]],
    unasked: str,
    probed: Callable[[Set[_Value]], tuple[partitioner.Partitioned, _Answers]],
    num_devices: int,
) -> _Answers:
    """Read the shardings of values from probed programs that do the same work as the unprobed one.

    A question may change the answer: Shardy resolves conflicts in the order in which it meets them,
    and a probe is one more reader of a value. Then what is said of a matmul counts if that does the
    same in both programs, and the rest is asked about again, in halves. What still has no answer is
    left out.

    Args:
        sites: the wanted values, with the matmuls and scatter-adds that read or give each.
        unasked: the program without any probe.
        probed: gives what XLA makes of the step with probes, and their answers.
        num_devices: the number of devices that it is for.
    """
    answers: _Answers = {}
    work, of_sites = work_of(unasked), functools.cache(work_of_sites)
    groups = deque([[*sites]] if sites else [])
    for _ in range(_MOST_QUESTIONS):
        if not groups:
            break
        group = groups.popleft()
        spmd_program, told = probed(frozenset(group))
        if work_of(spmd_program.text) == work:
            answers |= told
            continue
        now, before = (of_sites(t, num_devices) for t in (spmd_program.text, unasked))
        same = {site for site in now if now[site] == before.get(site)}
        answers |= {v: spec for v, spec in told.items() if sites[v] <= same}
        if len(rest := [v for v in group if not sites[v] <= same]) < len(group):
            groups += [rest] if rest else []
        elif len(group) > 1:
            groups += (group[: len(group) // 2], group[len(group) // 2 :])
    return answers


class _Asked(NamedTuple):
    """The variables whose shardings make up a `Shardings`; literals are whole everywhere.

    Attributes:
        lhs, rhs, out, lhs_sources, rhs_sources: as in `Shardings`.
        sinks: its `out_sinks`, each with the dim of the result that each of its own dims is.
    """

    lhs: Any
    rhs: Any
    out: Any
    lhs_sources: tuple[Any, ...]
    rhs_sources: tuple[Any, ...]
    sinks: tuple[tuple[Any, tuple[int, ...]], ...]

    def variables(self) -> Iterator[Any]:
        """Yield all of these variables."""
        yield from (self.lhs, self.rhs, self.out, *self.lhs_sources, *self.rhs_sources)
        yield from (var for var, _ in self.sinks)

    def read(self, answers: Mapping[Any, Spec | None]) -> Shardings:
        """Build the `Shardings` from the answers."""

        def of(var: Any) -> Spec | None:
            return ((),) * var.aval.ndim if compat.is_literal(var) else answers.get(var)

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
    """Yield the variables to ask about for each matmul and scatter-add of a body."""
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
        """Return the values before each of the reshards that made one, the last reshard first."""
        sources: list[Any] = []
        while not compat.is_literal(var) and (eqn := self.made.get(var)) is not None:
            if eqn.primitive.name not in _RESHARDS:
                break
            var = eqn.invars[0]
            sources.append(var)
        return tuple(sources)

    def _sinks(self, var: Any) -> tuple[tuple[Any, tuple[int, ...]], ...]:
        """Return the values after each reshard of a result, with the result's dim of each dim."""
        dims, sinks = tuple(range(var.aval.ndim)), []
        while len(readers := self.readers.get(var, [])) == 1 and readers[0] is not None:
            eqn = readers[0]
            if eqn.primitive.name == "transpose":
                dims = tuple(dims[d] for d in eqn.params["permutation"])
            elif eqn.primitive.name not in (*_RESHARDS, *_VIEWS):
                break
            var = eqn.outvars[0]
            if eqn.primitive.name in _RESHARDS:
                sinks.append((var, dims))
        return tuple(sinks)


def _live(body: Body) -> set[Any]:
    """Return the variables of a body that its results or effects need."""
    live = set(_variables(body.outvars))
    for eqn in reversed(body.eqns):
        if eqn.effects or not live.isdisjoint(eqn.outvars):
            live.update(_variables(eqn.invars))
            live.update(eqn.outvars)
    return live


def _variables(atoms: Iterable[Any]) -> Iterator[Any]:
    return (a for a in atoms if not compat.is_literal(a))


def _with_probes(
    body: Body,
    asked: Set[Any],
    wanted: Set[Any],
    answers: dict[Any, Spec | None],
    mesh: Mesh,
) -> list[Any]:
    """Add to a body a probe after each wanted value, and tags on the matmuls asked about."""
    tags = {id(dot.eqn): str(dot.index) for dot in body.dots if dot.index in asked}
    made = {v for eqn in body.eqns for v in eqn.outvars}
    manual = body.dots[0].manual if body.dots else None
    axes = manual.automatic if manual else mesh.shape

    def probe(v: Any, like: Any) -> Any:
        return partitioner.probe(v, v, answers, axes, like)

    eqns = [probe(v, body.eqns[0]) for v in wanted if v not in made]
    for eqn in body.eqns:
        tag = tags.get(id(eqn))
        eqns.append(compat.with_tag(eqn, **{TAG: tag}) if tag else eqn)
        eqns += [probe(v, eqn) for v in eqn.outvars if v in wanted]
    return eqns
