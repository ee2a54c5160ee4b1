"""Correct a cost model's tables by a profile: each class of kernels by measured / predicted."""

from __future__ import annotations

import math
from collections.abc import Mapping

from msgspec.structs import replace

from jaxoverlap.cost.model import CostModel
from jaxoverlap.cost.tables import ChipTables
from jaxoverlap.plan.collectives import PERMUTE
from jaxoverlap.profiling.profile import Profile


def corrected(profile: Profile, cost: CostModel) -> ChipTables:
    """Return the tables of a cost model, corrected so that it predicts what a profile measured.

    A class that the profile has no instruction of keeps its seconds, as do collectives between
    NVLink domains and copies by copy engines, which no table has. Where the tables say how long
    collectives wait for the last device (CPUs), all kinds of collectives are corrected by one
    ratio, that wait too.

    Args:
        profile: a profile with a simulation by that cost model.
        cost: the cost model.

    Raises:
        ValueError: if the profile has no ratio that a table can take.
    """
    ratios = {r.kind: r.ratio for r in profile.ratios}
    tables = cost.tables
    if tables.skew:
        ratios |= _one_for_all(profile, tables)
    taken = {"matmul", "attention", "memory", PERMUTE, *tables.collectives.curves}
    used = {kind: ratio for kind, ratio in ratios.items() if kind in taken}
    if not used:
        raise ValueError(
            f"{profile.source} shows no kernel that was predicted: nothing to correct by. Profile "
            "a step with matmuls or collectives"
        )
    return replace(
        tables.scaled(used),
        chip=tables.chip if tables.here else cost.cluster.chip.name,
        profiled=(str(cost.cluster), used),
    )


def _one_for_all(profile: Profile, tables: ChipTables) -> Mapping[str, float]:
    """Return one ratio for all kinds of collectives; none if the profile has no collective."""
    kinds = (PERMUTE, *tables.collectives.curves)
    seen = [r for r in profile.ratios if r.kind in kinds]
    if not seen:
        return {}
    measured_s = math.fsum(r.measured_s for r in seen)
    return dict.fromkeys(kinds, measured_s / math.fsum(r.predicted_s for r in seen))
