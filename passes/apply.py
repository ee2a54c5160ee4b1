"""Apply edits to a step, one kind after the other: `overlap(plan=)` is this and nothing else.

    step --[DropTypes]--> --[Recompute]--> --[Keep]--> --[Offload]--> --[SortPerShard]-->
         --[StackMatrices]--> --[PinArgument, PinValue]-->
         --[GatherTable, Pin, PinResults]--> --[InterleaveColumns]--> --[MoveFirst]-->
         --[UpdateAtBoundary]--> --[SumCarried]--> --[SplitBatch, Pin]--> --[ScatterLookup]-->
         --[MakeRing, ReadGathered]--> --[GatherAhead]--> --[TransformPerShard]--> --[SumLate]-->
         --[SplitExchange]--> --[ShareViews]-->

Edits that follow each other and are of one pass are applied together (`registry.PASSES`). Matmuls
count as the edits before have left them. Nothing is asked of XLA: an edit carries the shardings
that it needs. A pass refuses an edit that does not fit the step, and says why; who proposes edits
need not know what fits.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace

from jaxoverlap.passes.edited import EditedStep, check_axes, misfit
from jaxoverlap.passes.registry import PASS_OF
from jaxoverlap.plan.edits import ORDER, Edit


def apply(step: EditedStep, edits: Iterable[Edit]) -> EditedStep:
    """Apply edits to a step.

    Args:
        step: the step, as earlier edits left it.
        edits: the edits, in order.

    Raises:
        UserError: if an edit does not fit the step.
        HostMemoryError: if a batch is to be split that is partly in the host's memory.
        RewriteError: if a pass fails on it.
    """
    edits = list(edits)
    _check_order([*step.edits, *edits])
    check_axes(step.mesh, edits)
    for of_them, group in itertools.groupby(edits, key=lambda edit: PASS_OF[type(edit)]):
        some = tuple(group)
        step = replace(of_them.run(step, some), edits=(*step.edits, *some), before=step)
    return step


def _check_order(edits: Sequence[Edit]) -> None:
    """Refuse an edit that comes after one that needs it to be done."""
    place = 0
    for number, edit in enumerate(edits):
        places = (p for p in range(place, len(ORDER)) if isinstance(edit, ORDER[p]))
        if (now := next(places, None)) is None:
            raise misfit(edit, f"it has to come before '{edits[number - 1]}'")
        place = now
