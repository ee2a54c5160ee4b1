"""An evaluated step for the tests of what passes propose: as much of one as a test needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxoverlap.passes.analysis.partitioned import Shardings, SpmdProgram
from jaxoverlap.passes.edited import EditedStep
from jaxoverlap.passes.evaluated import Evaluated
from tests.support.terms import terms_of


def evaluated_of(
    step: EditedStep,
    *,
    chosen: Mapping[int, Any] | None = None,
    shardings: Mapping[Any, Shardings] | None = None,
    program: SpmdProgram | None = None,
    notes: Mapping[type, Any] | None = None,
    outermost: bool = True,
) -> Evaluated:
    """Return a step as a pass gets it.

    Args:
        step: the step.
        chosen: the sharding that XLA chooses for the result of each matmul without pins.
        shardings: of its matmuls.
        program: its partitioned program; an empty one by default.
        notes: those of its proposals.
        outermost: whether it is called by itself.
    """
    own = {site: Shardings(None, None, spec) for site, spec in (chosen or {}).items()}
    plain = SpmdProgram(own, (), "HloModule step\n", step.mesh.size)

    def unasked(*_: Any) -> Any:
        raise AssertionError("the test partitions nothing")

    return Evaluated(
        step=step,
        program=program or plain,
        shardings=shardings or {},
        estimate=None,
        terms=terms_of(dict(step.mesh.shape)),
        plain=plain,
        partition=unasked,
        estimated=unasked,
        notes=notes or {},
        outermost=outermost,
    )
