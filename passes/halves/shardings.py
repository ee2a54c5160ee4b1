"""Derive the shardings of a step with a split batch from those of the undivided step.

A part has the same share of each device's shard, so every mesh axis shards the same dims. Running
XLA's partitioner again would give the same shardings, at the cost of the longest partitioning.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from jaxoverlap.passes.analysis.jaxprs import Dot, bodies, dots
from jaxoverlap.passes.analysis.partitioned import Shardings
from jaxoverlap.passes.analysis.sequence_call import SEQUENCE_CALL


def shardings_of_parts(
    jaxpr: Any, cut: Any, shardings: Mapping[Any, Shardings], parts: int
) -> dict[Any, Shardings]:
    """Return the shardings of a step with a split batch, from those of the undivided step.

    Args:
        jaxpr: the step.
        cut: the same in parts (`Halved.jaxpr`): its matmuls have the order of the step's, and those
            of the parts of one are adjacent.
        shardings: of the step's matmuls and scatter-adds; of those only what mixes the batch keeps
            its own.
        parts: the number of parts.
    """
    lies: dict[Any, Shardings] = {}
    for dot, of_it in matmuls_of_parts(jaxpr, cut, parts):
        if dot.index in shardings:
            lies.update((part.index, shardings[dot.index]) for part in of_it)
    sums = list(_scatter_adds(cut))  # inner jits are opened around them: the order may be another
    for key, shapes in _scatter_adds(jaxpr):
        whole = next((at for at, its in sums if its == shapes and at not in lies), None)
        if whole and key in shardings:
            lies[whole] = shardings[key]
    return lies


def matmuls_of_parts(jaxpr: Any, cut: Any, parts: int) -> Iterator[tuple[Dot, list[Dot]]]:
    """Yield each matmul of a step with those that the step in parts has for it: one, or one a part.

    Args:
        jaxpr, cut, parts: as for `shardings_of_parts`.
    """
    made = iter(dots(cut))
    for _, same in itertools.groupby(dots(jaxpr), key=_run_together):
        group = list(same)
        copies = [[next(made) for _ in group]]
        if _shapes(_call(copies[0][0])) != _shapes(_call(group[0])):
            copies += [[next(made) for _ in group] for _ in range(parts - 1)]
        yield from zip(group, map(list, zip(*copies, strict=True)), strict=True)
    assert next(made, None) is None, "the parts have matmuls that the step has not"


def _call(dot: Dot) -> Any:
    """Return the equation that is copied for each part: the matmul, or a `per_sequence` around."""
    calls = (eqn for eqn in dot.around if eqn.primitive.name == SEQUENCE_CALL)
    return next(calls, dot.eqn)


def _run_together(dot: Dot) -> int:
    return id(_call(dot))


def _scatter_adds(jaxpr: Any) -> Iterator[tuple[Any, list[tuple[int, ...]]]]:
    """Yield the shapes of each scatter-add, with the index of its body and its own index there."""
    for body in bodies(jaxpr):
        for position, eqn in enumerate(body.eqns):
            if eqn.primitive.name == "scatter-add":
                yield (body.index, position), _shapes(eqn)


def _shapes(eqn: Any) -> list[tuple[int, ...]]:
    return [v.aval.shape for v in (*eqn.invars, *eqn.outvars)]
