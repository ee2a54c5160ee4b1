"""Sort each device's own tokens by expert, where the step sorts the tokens of all devices.

    order: [n] = sort experts ; x = gather tokens order ; y = ragged_dot x w sizes ; ...

->  shard_map over data:  order: [n/data] = sort experts ; x = gather tokens order ; ...

XLA's partitioner has no rule for a sort along a sharded dim, nor for a gather at positions that it
does not know: every device gets all tokens, and computes all of them. What `SortedValues` proves to
be the same of a device's own tokens runs in `shard_map`, as an expert writes it (MaxText's and
Megablocks' sorted routing, Gale et al., arXiv 2211.15841); gradients of weights are added.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jaxoverlap._jax import compat, inlining
from jaxoverlap.passes.analysis.jaxprs import Body, bodies, equations, map_bodies
from jaxoverlap.passes.analysis.known import KnownValues, known_values
from jaxoverlap.passes.analysis.mesh import explicit_axes, is_cpu
from jaxoverlap.passes.edited import EditedStep, check_named, misfit
from jaxoverlap.passes.keep import recompute
from jaxoverlap.passes.keep.opened import opened
from jaxoverlap.passes.layouts.layout import weights_of
from jaxoverlap.passes.layouts.local_equations import (
    LocalEquation,
    NotLocalError,
    Tokens,
    is_made_here,
)
from jaxoverlap.passes.layouts.local_equations import run as run_local
from jaxoverlap.passes.layouts.sorted_values import SortedValues
from jaxoverlap.passes.planning.entries import line_of
from jaxoverlap.plan.edits import Keep, Recompute, SortPerShard

_COMBINE = {"add": lax.psum, "max": lax.pmax, "min": lax.pmin}


def proposals(step: EditedStep) -> Iterator[tuple[Recompute | SortPerShard, ...]]:
    """Yield edits that sort per shard: over all axes of the batch, or those of its first dim."""
    if explicit_axes(step.mesh) or not _has_sort(step.jaxpr):
        return
    jaxpr = opened(step.jaxpr, remats=True)
    for axes in dict.fromkeys(_axes(step)):
        shards = _devices(axes, step.mesh)
        sorts = _Sorts(jaxpr, shards)
        if sorts.source:
            yield (SortPerShard(source=sorts.source, axes=axes),)
        if sorts.saved and not step.has(Recompute, Keep):  # layers save values in a sort's order
            again = recompute.recomputations(step.jaxpr)
            sorts = _Sorts(opened(recompute.run(step, again).jaxpr, remats=True), shards)
            if again and sorts.source:
                yield (*again, SortPerShard(source=sorts.source, axes=axes))


def run(step: EditedStep, edits: Sequence[SortPerShard]) -> EditedStep:
    """Sort per shard what can be."""
    jaxpr = opened(step.jaxpr, remats=True)
    for edit in edits:
        check_named(step.mesh, edit, edit.axes)
        shards = _devices(edit.axes, step.mesh)
        sorts = _Sorts(jaxpr, shards)
        if sorts.source != edit.source:
            raise misfit(edit, "the step has no such sorts, or other values depend on their order")

        def visit(
            body: Body, sorts: Any = sorts, shards: int = shards, axes: tuple[str, ...] = edit.axes
        ) -> Any:
            found = sorts.found[body.index]
            return _Emitted(body, found, shards, axes, step.mesh).eqns if found else None

        jaxpr = map_bodies(jaxpr, visit)
    return step.to(jaxpr)


def _axes(step: EditedStep) -> Iterator[tuple[str, ...]]:
    """Yield the mesh axes that shard the batch: all, and those of its first dim."""
    weights = weights_of(step.jaxpr)
    pairs = zip(step.jaxpr.invars, step.arguments, strict=True)
    specs = [spec for var, spec in pairs if var not in weights and spec]
    for chosen in ([axes for spec in specs for axes in spec], [spec[0] for spec in specs]):
        used = {axis for axes in chosen for axis in axes}
        if found := tuple(a for a, n in step.mesh.shape.items() if a in used and n > 1):
            yield found


def _devices(axes: Sequence[str], mesh: Mesh) -> int:
    return math.prod(mesh.shape[axis] for axis in axes)


def _has_sort(jaxpr: Any) -> bool:
    return any(eqn.primitive.name == "sort" for eqn, _ in equations(jaxpr))


class _Sorts:
    """The sorts of a step.

    Attributes:
        found: what depends on each sort that devices can do alone, by the number of its body.
        source: the lines of these sorts.
        saved: whether a loop has a sort, and none that devices can do alone.
    """

    def __init__(self, jaxpr: Any, shards: int):
        every = bodies(jaxpr)
        known = known_values(every)
        self.found = {body.index: _sorted(body, known[body.index], shards) for body in every}
        self.source = ", ".join(
            dict.fromkeys(
                line_of(body.eqns[min(one.local)], body.around)
                for body in every
                for one in self.found[body.index]
            )
        )
        self.saved = any(
            not body.opaque
            and not self.found[body.index]
            and any(eqn.primitive.name == "scan" for eqn in body.around)
            and any(eqn.primitive.name == "sort" for eqn in body.eqns)
            for body in every
        )


def _sorted(body: Body, known: KnownValues, shards: int) -> list[SortedValues]:
    """Return what depends on the order of each sort of a body that devices can do alone."""
    found, seen = list[SortedValues](), set[int]()
    if body.opaque:
        return found
    for position, eqn in enumerate(body.eqns):
        if eqn.primitive.name != "sort" or position in seen or eqn.invars[0].aval.ndim != 1:
            continue
        try:
            one = SortedValues(body, known, position, shards)
        except NotLocalError:
            continue
        if seen.isdisjoint(one.local):
            found.append(one)
            seen |= {*one.local}
    return found


class _Emitted:
    """The equations of a body whose sorts are per shard: in runs, each in a `shard_map`.

    A run takes the equations of one sort that follow each other, but for others that need none of
    its results.
    """

    def __init__(
        self,
        body: Body,
        found: Sequence[SortedValues],
        shards: int,
        axes: tuple[str, ...],
        mesh: Mesh,
    ):
        self.eqns: list[Any] = []
        self._uses, self._shards = body.uses, shards
        self._mesh, self._axes = mesh, axes
        self._run: list[int] = []
        self._of: SortedValues | None = None
        self._how: dict[Any, Tokens | str] = {}  # of results of the run
        self._counted = {
            v
            for one in found
            for local in one.local.values()
            for size in local.sizes
            for v, _ in _reads(size)
        }
        by_position = {position: one for one in found for position in one.local}
        for position, eqn in enumerate(body.eqns):
            one = by_position.get(position)
            if one is None:
                if self._reads_run(eqn):
                    self._end()
                self.eqns.append(eqn)
                continue
            if self._run and (one is not self._of or self._needs_others(one.local[position])):
                self._end()
            self._of = one
            self._run.append(position)
            self._how |= zip(eqn.outvars, one.local[position].results, strict=True)
        self._end()

    def _reads_run(self, eqn: Any) -> bool:
        return any(v in self._how for v in compat.variables(eqn.invars))

    def _needs_others(self, local: LocalEquation) -> bool:
        """Return whether an equation reads a result of the run other than as a device has it."""
        return any(
            v in self._how and not (isinstance(how := self._how[v], Tokens) and how.dim == dim)
            for v, dim in _reads(local)
        )

    def _end(self) -> None:
        """Emit the run."""
        if not self._run:
            return
        one, inside = self._of, {*self._run}
        assert one is not None
        equations = [one.local[position] for position in self._run]
        own = [v for local in equations for v in local.eqn.outvars]
        given = dict.fromkeys(
            (v, dim)
            for local in equations
            for v, dim in _needs(local)
            if v not in self._how and not is_made_here(one.known.of(v))
        )
        results = [v for v in own if v in self._counted or not {*self._uses.readers(v)} <= inside]
        hows = [self._how[v] for v in results]

        def compute(*operands: Any) -> list[Any]:
            values = {v: x for (v, _), x in zip(given, operands, strict=True)}
            run_local(equations, values, one.known, self._shards)
            return [self._combined(values[v], how) for v, how in zip(results, hows, strict=True)]

        fn = jax.shard_map(
            compute,
            mesh=self._mesh,
            in_specs=tuple(self._spec(dim) for _, dim in given),
            out_specs=[self._spec(how.dim if isinstance(how, Tokens) else None) for how in hows],
            axis_names={*self._axes},
            check_vma=False,
        )
        like = self._uses.eqns[self._run[0]]
        self.eqns += inlining.inline(fn, [v for v, _ in given], results, like)
        self._run, self._how = [], {}

    def _spec(self, dim: int | None) -> PartitionSpec:
        return PartitionSpec() if dim is None else PartitionSpec(*[None] * dim, self._axes)

    def _combined(self, value: Any, how: Tokens | str) -> Any:
        if not isinstance(how, str):
            return value
        # XLA:CPU ends the process at a sum of 16 bits where other axes are automatic.
        wide = value.dtype.itemsize == 2 and is_cpu(self._mesh)
        given = value.astype(jnp.float32) if wide else value
        return _COMBINE[how](given, self._axes).astype(value.dtype)


def _reads(local: LocalEquation) -> Iterator[tuple[Any, int | None]]:
    """Yield the variables that an equation reads, each with its dim of tokens."""
    for atom, dim in zip(local.eqn.invars, local.operands, strict=True):
        if not compat.is_literal(atom):
            yield atom, dim


def _needs(local: LocalEquation) -> Iterator[tuple[Any, int | None]]:
    """Yield what an equation reads, or what the sizes of its groups are counted from."""
    counted = {v for size in local.sizes for v in size.eqn.outvars}
    for each in (*local.sizes, local):
        yield from ((v, dim) for v, dim in _reads(each) if v not in counted)
