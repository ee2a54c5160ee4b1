"""An operation from its lowering to its partitioning, and what it shares with others.

Written against jax 0.11.2 and 0.12.0.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax._src import core
from jax.sharding import Mesh
from jaxlib.mlir import ir

from jaxoverlap._jax.operations.question import Operation, Partition, Wish
from jaxoverlap._jax.operations.specs import Spec, sharding_of, spec_of

_numbers = itertools.count()  # of operations, in the order in which they are lowered


@dataclasses.dataclass(frozen=True)
class Before:
    """An operand that an earlier operation may have gathered along one dim.

    Attributes:
        position: its index among this operation's operands.
        dim: the dim.
        by: the operation before.
        number: the number that the operand has there.
    """

    position: int
    dim: int
    by: Partitioning
    number: int


class Partitioning:
    """An operation, from its lowering to its partitioning; XLA calls it back."""

    def __init__(
        self,
        mesh: Mesh,
        at: list[int],
        avals: tuple[Any, ...],
        results: int,
        before: list[Before],
        answer: Partition,
        source: tuple[str, int],
        gathered: Gathered,
        shares: bool,
    ):
        self.mesh, self.at, self.avals, self.results = mesh, at, avals, results
        self.before, self.answer, self.source, self.gathered = before, answer, source, gathered
        self.number = next(_numbers)
        again = sorted({*at}) if shares else []
        self.again = [(n, d) for n in again for d in range(avals[at.index(n)].ndim)]
        self.wanted: set[tuple[int, int]] = set()  # of `again`, what a later operation may read
        self.given: dict[tuple[int, int], Spec] = {}  # of `again`, how it is given, as told

    def with_gathered(self, text: str, reduced: Collection[str]) -> str:
        """Return a rule with the operands that were gathered before, and those that may be here.

        Args:
            text: the rule of the operation alone.
            reduced: its reduced factors, which Shardy allows in no result.
        """
        operands, results = (side.split(", ") for side in text.split(" -> "))
        own = list(operands)

        def free(position: int, dim: int, name: str) -> str:
            factors = own[position].split(" ")
            return " ".join([*factors[:dim], name, *factors[dim + 1 :]])

        operands += [free(b.position, b.dim, f"before{i}") for i, b in enumerate(self.before)]
        for i, (n, dim) in enumerate(self.again):
            factors = free(self.at.index(n), dim, f"again{i}").split(" ")
            results.append(" ".join(f"of{i}{f}" if f in reduced else f for f in factors))
        return f"{', '.join(operands)} -> {', '.join(results)}"

    def __call__(self, _: Any, given: Any, result: Any) -> tuple[Any, ...]:
        """Partition the operation; XLA's partitioner calls this with its shardings."""
        self.gathered.clear()  # the lowering is over
        told = [spec_of(o.sharding, self.mesh, len(o.shape)) for o in given[0]]
        ends = [spec_of(r.sharding, self.mesh, len(r.shape)) for r in result]
        results, positions = (
            self.results,
            list(range(len(self.at))),
        )  # of operands among those given
        for i, b in enumerate(self.before, len(self.at)):
            if told[i] is not None and b.by.given.get((b.number, b.dim)) == told[i]:
                positions[b.position] = i
        wishes = [
            Wish(self.at.index(n), dim, spec)
            for (n, dim), spec in zip(self.again, ends[results:], strict=True)
            if (n, dim) in self.wanted and spec not in (None, told[self.at.index(n)])
        ]
        done = self.answer(
            Operation(
                self.mesh,
                self.avals,
                tuple(told[p] for p in positions),
                tuple(ends[:results]),
                tuple(wishes),
                self.source,
                self.number,
            )
        )
        whole = [((),) * len(o.shape) for o in given[0]]
        at = [all_of if t is None else t for t, all_of in zip(told, whole, strict=True)]
        for p, spec in zip(positions, done.operands, strict=True):
            at[p] = spec
        number = {(self.at[w.operand], w.dim): i for i, w in enumerate(done.fulfilled)}
        self.given = {key: done.fulfilled[i].spec for key, i in number.items()}

        def local(operands: Sequence[Any]) -> list[Any]:
            mine = [operands[p] for p in positions]
            out = core.eval_jaxpr(done.jaxpr, done.jaxpr.consts, *mine)
            # Nobody reads what is not in `given`.
            again = [
                out[results + number[key]] if key in number else jnp.zeros(shape, r.dtype)
                for key, shape, r in zip(self.again, shapes, result[results:], strict=True)
            ]
            return [*out[:results], *again]

        free = [
            ((),) * len(r.shape) if spec is None else spec
            for spec, r in zip(ends[results:], result[results:], strict=True)
        ]
        shapes = [
            sharding_of(self.mesh, spec).shard_shape(r.shape)
            for spec, r in zip(free, result[results:], strict=True)
        ]
        back = [sharding_of(self.mesh, spec) for spec in (*done.results, *free)]
        return self.mesh, local, back, ([sharding_of(self.mesh, spec) for spec in at],)


class FirstReader(NamedTuple):
    """The first operation of a block that read a value.

    Attributes:
        by: the operation.
        number: the number of the value among its equation's operands.
        again: the value, as the operation gives it again, by dim.
    """

    by: Partitioning
    number: int
    again: list[Any]


class Gathered:
    """The values that operations of a module have read, and may have gathered."""

    def __init__(self) -> None:
        self._first: dict[Any, FirstReader] = {}

    def of(self, value: Any) -> FirstReader | None:
        """Return the first operation of this block that read a value."""
        seen, here = self._first.get(value), ir.InsertionPoint.current.block
        return seen if seen and all(v.owner.operation.block == here for v in seen.again) else None

    def put(self, value: Any, seen: FirstReader) -> None:
        """Note the operation that reads a value first."""
        self._first[value] = seen

    def clear(self) -> None:
        """Forget all, and let the module go."""
        self._first.clear()


def gathered_of(ctx: Any) -> Gathered:
    """Return a module's own; it lives as long as the module's lowering."""
    kept = ctx.module_context.keepalives
    found = next((k for k in kept if isinstance(k, Gathered)), None)
    if found is None:
        found = Gathered()
        ctx.module_context.add_keepalive(found)
    return found
