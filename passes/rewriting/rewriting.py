"""The passes hand on one value: the decisions for a step, and the jaxpr that it has become."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jaxoverlap.passes.analysis.partitioned import Shardings
from jaxoverlap.passes.planning.ring_plan import Sharing
from jaxoverlap.passes.rewriting.embedding_gradients import Lookup
from jaxoverlap.plan.decisions import Decision, Skip


class Point(NamedTuple):
    """The dim and mesh axes along which a sum could stay scattered.

    Attributes:
        dim: the dim of the matmul's result.
        axes: the mesh axes on that dim then, major to minor; the last is the one summed over.
    """

    dim: int
    axes: tuple[str, ...]


@dataclass(frozen=True)
class Rewriting:
    """The decisions for a step, and the jaxpr that they make of it.

    Attributes:
        jaxpr: the step that was decided on.
        shardings: the shardings of its matmuls.
        entries: the decision on each matmul.
        sharings: the rings of each body, by its number.
        known: the lookups whose gradients are to be scattered; `rewritten` still has them whole.
        rewritten: the jaxpr with rings.
        gathered: the variables of values that are gathered before rings.
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
