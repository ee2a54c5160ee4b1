"""What a pass proposes from, and what it proposes: the search's side of a pass.

    def propose(step: Evaluated) -> Iterator[Proposal]:
        yield Proposal((GatherTable(...),))

A proposal need neither fit the step nor pay: what a pass's `run` refuses is dropped, and the search
(`jaxoverlap/search`) keeps what is faster by its estimate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxoverlap.passes.analysis.partitioned import Shardings, SpmdProgram
from jaxoverlap.passes.edited import EditedStep
from jaxoverlap.passes.estimation.estimate import Estimate
from jaxoverlap.passes.planning.terms import Terms
from jaxoverlap.plan.edits import Edit


@dataclass(frozen=True)
class Proposal:
    """Edits that may make a step faster.

    Attributes:
        edits: the edits, which are added to those of the step.
        without: returns whether an edit of the step goes; None: all stay.
        notes: what the pass wants to know again of a step with these edits, by the kind of edit.
        why_not: why there are no edits to propose, in words; empty if there are.
    """

    edits: tuple[Edit, ...] = ()
    without: Callable[[Edit], bool] | None = None
    notes: Mapping[type, Any] = field(default_factory=dict)
    why_not: str = ""


@dataclass(frozen=True)
class Evaluated:
    """A step after edits, partitioned by XLA and estimated.

    Attributes:
        step: the step after its edits, but for the last one, `ShareViews`.
        program: its partitioned program, with that.
        shardings: of the matmuls and scatter-adds of `step.numbered`, as XLA's partitioner or an
            edit has them; what XLA dropped is missing.
        estimate: of the program; None where the cluster has no prices.
        terms: the facts and requests to go by.
        plain: the partitioned program of the step without edits.
        partition: partitions another jaxpr of the step, and finds the shardings of its matmuls.
        estimated: estimates another program of it; there are prices.
        notes: those of its proposals, by the kind of edit.
        outermost: whether the step is called by itself, and not under `jax.grad`, `vmap` or `jit`.
    """

    step: EditedStep
    program: SpmdProgram
    shardings: Mapping[Any, Shardings]
    estimate: Estimate | None
    terms: Terms
    plain: SpmdProgram
    partition: Callable[[Any], SpmdProgram]
    estimated: Callable[[SpmdProgram], Estimate]
    notes: Mapping[type, Any] = field(default_factory=dict)
    outermost: bool = True
