"""Hold the options of `overlap` in the form that the passes need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from jaxoverlap.cost.model import CostModel
from jaxoverlap.hardware.cluster import Cluster
from jaxoverlap.passes.scheduling.scheduler import Scheduler
from jaxoverlap.plan.layouts import Layouts
from jaxoverlap.plan.plan import FSDP, Plan, ScatteredSum, Variant

OnError = Literal["raise", "plain"]
StreamMode = Literal["auto", "one"]
LayoutMode = Literal["repair", "complete", "advise"]
Operations = Literal["take over", "leave"]
HalvesMode = int | Literal["auto"] | None


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `overlap`, and further ones that a search may set.

    Attributes:
        cluster, skip, on_error, granularity, fsdp, schedule: as in `overlap`.
        choices: how the pieces of single rings travel, by the site that a ring is named after;
            "plain" leaves all the matmuls of a ring alone. Other rings go by the rules.
        alone: the sites of matmuls that have no part in any ring.
        layouts: as in `overlap`; "advise" also leaves out all pins that are not needed.
        pins: the results of matmuls to pin; None to search for them, if `layouts` says so.
        halves: as in `overlap`.
        streams: as in `overlap`.
        unroll: how many steps of a cut scan stand in one body of its loop, if `halves` is a number.
        rings: whether matmuls may become rings; if not, weights are gathered ahead all the same.
        layers_ahead: whether all weights of a layer are gathered ahead, as one; if not, only those
            that its first matmul reads. The search tries both.
        lookups: whether the gradients of embedding lookups may be scattered.
        sums: the sums of activations that stay scattered; None to take what leaves less exposed.
        xla_options: compiler options, beyond the user's own and those that a pod needs; None for
            those that rings need.
        plan: the plan that all of these come from.
        operations, agree_within_s, never_slower: as in `overlap`.
        prices: the cost model to decide by; None for the package's of the cluster.
    """

    cluster: Cluster | None = None
    skip: tuple[str, ...] = ()
    on_error: OnError = "raise"
    granularity: Variant | Mapping[str, Variant] | None = None
    fsdp: FSDP = "prefetch"
    schedule: Scheduler | None = None
    choices: Mapping[int, Variant] = field(default_factory=dict)
    alone: frozenset[int] = frozenset()
    layouts: LayoutMode | None = "repair"
    pins: Layouts | None = None
    halves: HalvesMode = "auto"
    streams: StreamMode = "auto"
    unroll: int = 1
    rings: bool = True
    layers_ahead: bool = False
    lookups: bool = True
    sums: tuple[ScatteredSum, ...] | None = None
    xla_options: Mapping[str, str] | None = None
    plan: Plan | None = None
    operations: Operations = "take over"
    agree_within_s: float = 20.0
    never_slower: bool = True
    prices: CostModel | None = None

    @property
    def chooses(self) -> bool:
        """Return whether the rules and the price may choose, as no option names single rings."""
        said = (self.granularity, self.choices, self.alone, self.plan)
        return not any(said) and self.sums is None

    @property
    def falls_back(self) -> bool:
        """Return whether the step runs as it is where XLA refuses the overlapped program.

        A plan, and `never_slower=False`, ask for the overlapped program and nothing else.
        """
        asks = self.plan is not None or not self.never_slower
        return self.on_error == "plain" or not asks

    @classmethod
    def of(cls, plan: Plan, **others: Any) -> Options:
        """Return the options to follow a plan; `others` are those that a plan does not have."""
        at = plan.schedule
        cut = plan.cut
        return cls(
            fsdp=plan.fsdp,
            schedule=at and Scheduler(**msgspec.structs.asdict(at)),
            choices=plan.choices,
            rings=plan.may_ring,
            layers_ahead=plan.joined_bytes > 0,
            lookups=bool(plan.scattered),
            alone=frozenset(skip.site for skip in plan.skips if skip.chosen),
            sums=plan.sums,
            layouts=None,
            pins=plan.layouts,
            halves=cut and cut.parts,
            unroll=cut.unroll if cut else 1,
            xla_options=plan.xla_options,
            plan=plan,
            **others,
        )
