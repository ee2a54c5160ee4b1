"""Run XLA's partitioner to learn how a step's matmuls are sharded, and which collectives it adds.

The step is lowered with a tag on each matmul. XLA's partitioner returns its module, and the
shardings of each tagged matmul's operands and result (`propagated.py`). Nothing else is compiled:
partitioning a 7B train step takes 0.4 s.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from jaxoverlap._jax import compat, explicit, jits, partitioner
from jaxoverlap._jax.propagated import Side, Tagged
from jaxoverlap.passes.analysis.def_use import DefUse
from jaxoverlap.passes.analysis.einsum import Spec
from jaxoverlap.passes.analysis.errors import RewriteError
from jaxoverlap.passes.analysis.jaxprs import Body, map_bodies
from jaxoverlap.passes.analysis.matmul_collectives import TAG, TURNED
from jaxoverlap.simulation import hlo
from jaxoverlap.simulation.host_memory import with_host_memory

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
class SpmdProgram:
    """The step that XLA's partitioner makes of the traced one.

    Attributes:
        shardings: of the matmuls, by their number (`jaxprs.dots`); of scatter-adds by the number of
            their body and their place in that, where `rhs` is the updates. In manual code they name
            the axes that are automatic beside the manual ones. What XLA dropped is missing.
        results: the shardings of the step's results; XLA's text where mesh axes cannot state them.
        text: the text of the partitioned module.
        num_devices: the number of devices that it is for.
        joined_bytes: bytes that XLA may gather with one all-gather of it; 0 for each by itself.
    """

    shardings: Mapping[Any, Shardings]
    results: tuple[Spec | str, ...]
    text: str
    num_devices: int
    joined_bytes: int = 0

    @property
    def donated(self) -> frozenset[tuple[str, str]]:
        """The results that alias a donated argument's memory, each with the argument, by number."""
        return frozenset(_ALIAS.findall(self.text.partition("\n")[0]))

    @functools.cached_property
    def module(self) -> hlo.Module:
        """The partitioned module, in the order of its text: it is not scheduled yet."""
        return with_host_memory(hlo.parse_partitioned(self.text, self.num_devices))

    def forget(self) -> None:
        """Drop the parsed module, which takes many times the text's memory, until it is read."""
        self.__dict__.pop("module", None)


def partitioned(
    traced: jax.stages.Traced,
    jaxpr: Any,
    mesh: Mesh,
    *,
    ask: bool = True,
    options: Mapping[str, str] | None = None,
) -> SpmdProgram:
    """Partition a traced step with XLA, and read its shardings.

    Args:
        traced: the step.
        jaxpr: its jaxpr, flattened or rewritten; the numbers of the answer are of this one.
        mesh: the step's mesh.
        ask: whether to ask for the shardings of its matmuls.
        options: compiler options; None for those that an overlapped step has.

    Raises:
        RewriteError: if XLA does not partition the step.
    """
    # XLA removes results that depend on nothing, or folds them, before Shardy runs.
    if not ask or not compat.depends(jaxpr):
        spmd_program = _partition(traced, jaxpr, mesh, options=options)
        return SpmdProgram({}, spmd_program.results, spmd_program.text, mesh.size)
    asked: dict[Any, _Asked] = {}

    def with_tags(body: Body) -> list[Any] | None:
        in_body = dict(_asked(body))
        asked.update(in_body)
        return _with_tags(body, in_body)

    spmd_program = _partition(traced, map_bodies(jaxpr, with_tags), mesh, tag=TAG)
    found: dict[str, set[Tagged]] = {}
    for tag, operation in spmd_program.tagged:
        found.setdefault(tag, set()).add(operation)
    known = {}
    for key, one in asked.items():
        read = {one.read(o, transposed=False) for o in found.get(_tag(key), ())}
        read |= {one.read(o, transposed=True) for o in found.get(_transposed(key), ())}
        if len(read) == 1 and (shardings := read.pop()):  # one body may stand in several places
            known[key] = shardings
    return SpmdProgram(known, spmd_program.results, spmd_program.text, mesh.size)


def _partition(
    traced: jax.stages.Traced,
    jaxpr: Any,
    mesh: Mesh,
    *,
    tag: str = "",
    options: Mapping[str, str] | None = None,
) -> partitioner.Partitioned:
    """Partition a traced step with its jaxpr replaced by another."""
    params = jits.traced_params(traced)
    params = jits.with_jaxpr(params, explicit.typed_as(jaxpr, params["jaxpr"]), {})
    params["name"] = partitioner.new_name()
    try:
        return partitioner.ask(jits.traced_with(traced, params).lower(), mesh, tag, options)
    except partitioner.NoAnswerError as error:
        raise RewriteError(
            f"XLA's partitioner gave no answer about {traced.fun_name}: {error}"
        ) from error


class _Asked(NamedTuple):
    """A matmul or a scatter-add whose shardings are read from the partitioned module.

    Attributes:
        eqn: the equation.
        lhs, rhs, out: its sides; of a scatter-add the array, the updates and the result.
        lhs_sources, rhs_sources, out_sinks: how many entries those of its `Shardings` have.
    """

    eqn: Any
    lhs: Any
    rhs: Any
    out: Any
    lhs_sources: int
    rhs_sources: int
    out_sinks: int

    def read(self, found: Tagged, *, transposed: bool) -> Shardings | None:
        """Read the `Shardings` from what XLA has of it; None if that is something else.

        XLA folds a transpose into the matmul that reads it, computes the transpose of a product as
        the transposed product of the operands, and leaves out dims of size 1.

        Args:
            found: the operation.
            transposed: whether its result is the transpose of this one.
        """
        if (sides := self._sides(found, transposed=transposed)) is None:
            return None
        lhs, rhs, out = sides
        own = (self.lhs, self.rhs, self.out)
        if any(s.shape != v.aval.shape for s, v in zip(sides, own, strict=True)):
            return None

        def spec(side: Side, var: Any) -> Spec | None:
            return ((),) * var.aval.ndim if compat.is_literal(var) else side.spec

        def beyond(side: Side, count: int) -> tuple[Spec | None, ...]:
            return (*side.beyond, *[None] * count)[:count]

        return Shardings(
            spec(lhs, self.lhs),
            spec(rhs, self.rhs),
            out.spec,
            beyond(lhs, self.lhs_sources),
            beyond(rhs, self.rhs_sources),
            beyond(out, self.out_sinks),
        )

    def _sides(self, found: Tagged, *, transposed: bool) -> tuple[Side, Side, Side] | None:
        """Return the three sides, each with its dims in the order of the equation's."""
        if self.eqn.primitive.name != "dot_general":
            return found.lhs, found.rhs, found.out
        pairs = (tuple(zip(*p, strict=True)) for p in self.eqn.params["dimension_numbers"])
        own = _names(self.lhs.aval.shape, self.rhs.aval.shape, *pairs)
        shapes, sides = (found.lhs.shape, found.rhs.shape), (found.lhs, found.rhs, found.out)
        theirs = _names(*shapes, found.contracted, found.batched, transposed=transposed)
        if transposed:
            theirs, sides = (theirs[1], theirs[0], theirs[2]), (found.rhs, found.lhs, found.out)
        if any({*a} - {""} != {*b} - {""} for a, b in zip(own, theirs, strict=True)):
            return None
        lhs, rhs, out = (
            side.transposed(tuple(names.index(name) if name else None for name in wanted))
            for side, names, wanted in zip(sides, theirs, own, strict=True)
        )
        return lhs, rhs, out


_Pairs = tuple[tuple[int, int], ...]
_Names = tuple[list[str], list[str], list[str]]


def _names(
    lhs: Sequence[int],
    rhs: Sequence[int],
    contracted: _Pairs,
    batched: _Pairs,
    *,
    transposed: bool = False,
) -> _Names:
    """Name the dims of a matmul's operands and of its result by what becomes of them.

    Dims of size 1 have no name: XLA leaves them out.

    Args:
        lhs, rhs: the shapes of the operands.
        contracted, batched: pairs of their dims.
        transposed: whether its left operand is called the right one, and the other way round.
    """
    names: tuple[dict[int, str], dict[int, str]] = {}, {}
    out: list[str] = []
    for role, pairs in (("contracted", contracted), ("batched", batched)):
        numbers = itertools.count()
        for left, right in pairs:
            name = "" if lhs[left] == 1 else f"{role} {next(numbers)}"
            names[0][left] = names[1][right] = name
            out += [name] if role == "batched" else []
    for side, sizes in enumerate((lhs, rhs)):
        role, numbers = "right" if (side == 1) != transposed else "left", itertools.count()
        for dim in [d for d in range(len(sizes)) if d not in names[side]]:
            names[side][dim] = "" if sizes[dim] == 1 else f"{role} {next(numbers)}"
            out.append(names[side][dim])
    by_dim = ([side[dim] for dim in range(len(side))] for side in names)
    return next(by_dim), next(by_dim), out


def _asked(body: Body) -> Iterator[tuple[Any, _Asked]]:
    """Yield what to ask about each matmul and scatter-add of a body, by its number."""
    if body.opaque:
        return
    live = _live(body)
    for position, eqn in enumerate(body.eqns):
        if eqn.primitive.name == "scatter-add" and eqn.outvars[0] in live:
            yield (body.index, position), _asked_of(body.uses, eqn, eqn.invars[0], eqn.invars[2])
    for dot in body.dots:
        readable = not dot.inside or (dot.manual and dot.manual.automatic)
        is_live = dot.eqn.outvars[0] in live
        if readable and dot.eqn.primitive.name == "dot_general" and is_live:
            yield dot.index, _asked_of(body.uses, dot.eqn, *dot.eqn.invars)


def _asked_of(uses: DefUse, eqn: Any, lhs: Any, rhs: Any) -> _Asked:
    out = eqn.outvars[0]
    return _Asked(eqn, lhs, rhs, out, _sources(uses, lhs), _sources(uses, rhs), _sinks(uses, out))


def _sources(uses: DefUse, var: Any) -> int:
    """Count the reshards that made a value, one after the other."""
    count = 0
    while (eqn := uses.maker(var)) is not None and eqn.primitive.name in _RESHARDS:
        var, count = eqn.invars[0], count + 1
    return count


def _sinks(uses: DefUse, var: Any) -> int:
    """Count the reshards of a result, as long as nobody else reads it."""
    count = 0
    while (position := uses.only_reader(var)) is not None:
        eqn = uses.eqns[position]
        if eqn.primitive.name not in (*_RESHARDS, *_VIEWS):
            break
        var = eqn.outvars[0]
        count += eqn.primitive.name in _RESHARDS
    return count


def _live(body: Body) -> set[Any]:
    """Return the variables of a body that its results or effects need."""
    live = set(compat.variables(body.outvars))
    for eqn in reversed(body.eqns):
        if eqn.effects or not live.isdisjoint(eqn.outvars):
            live.update(compat.variables(eqn.invars))
            live.update(eqn.outvars)
    return live


def _tag(key: Any) -> str:
    """The tag of a matmul or a scatter-add, by its number."""
    return str(key) if isinstance(key, int) else ".".join(map(str, key))


def _transposed(key: Any) -> str:
    """The tag of the transpose of a matmul's result."""
    return _tag(key) + TURNED


def _with_tags(body: Body, asked: Mapping[Any, _Asked]) -> list[Any] | None:
    """Tag a body's matmuls, the transposes of their results, and scatter-adds."""
    tags = {id(one.eqn): _tag(key) for key, one in asked.items()}
    made = {one.out: key for key, one in asked.items()}
    tags |= {
        id(eqn): _transposed(made[eqn.invars[0]])
        for eqn in body.eqns
        if eqn.primitive.name == "transpose" and eqn.invars[0] in made
    }
    if not tags:
        return None
    return [
        compat.with_tag(eqn, **{TAG: tags[id(eqn)]}) if id(eqn) in tags else eqn
        for eqn in body.eqns
    ]
