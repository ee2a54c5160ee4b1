"""The value that the passes hand on: what was decided for a step, and what the step has become."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jaxoverlap.passes.analysis.partitioned import Shardings
from jaxoverlap.passes.planning.ring_plan import Sharing
from jaxoverlap.passes.rewriting.embedding_gradients import Lookup
from jaxoverlap.plan.decisions import Decision, Skip


class Point(NamedTuple):
    """Where a sum could stay scattered.

    Attributes:
        dim: the dim of the matmul's result.
        axes: the mesh axes on that dim then, major to minor; the last is the one summed over.
    """

    dim: int
    axes: tuple[str, ...]


@dataclass(frozen=True)
class Rewriting:
    """What is decided for a step, and what it becomes.

    Attributes:
        jaxpr: the step that was decided on.
        shardings: of its matmuls.
        entries: what is done with each.
        sharings: what becomes of each body.
        known: the lookups whose gradients are scattered, in `rewritten` not yet.
        rewritten: the jaxpr with rings.
        gathered: the variables of what is gathered before rings.
        sums: the sums of activations that stay scattered, by the number of the matmul.
    """

    jaxpr: Any
    shardings: Mapping[Any, Shardings]
    entries: tuple[Decision | Skip, ...]
    sharings: Mapping[int, Sharing]
    known: Sequence[Lookup]
    rewritten: Any
    gathered: set[Any]
    sums: Mapping[int, Point] = field(default_factory=dict)
