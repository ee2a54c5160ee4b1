"""Hold the options of `overlap` in the form that the passes need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from jaxoverlap._util.text import human_bytes
from jaxoverlap.cost.model import CostModel
from jaxoverlap.hardware.cluster import Cluster
from jaxoverlap.passes.scheduling.scheduler import Scheduler
from jaxoverlap.plan.edits import Edit
from jaxoverlap.plan.plan import FSDP, Plan, Variant

OnError = Literal["raise", "plain"]
StreamMode = Literal["auto", "one"]
LayoutMode = Literal["repair", "complete", "advise"]
Operations = Literal["take over", "leave"]
HalvesMode = int | Literal["auto"] | None


def memory_text(memory: float) -> str:
    """Write the memory that a device may need as the user does: 0.9, or '70.0 GB'."""
    return f"{memory:g}" if memory <= 1 else f"'{human_bytes(memory)}'"


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `overlap`, and further ones that a search may set.

    Attributes:
        cluster, skip, on_error, granularity, fsdp, schedule: as in `overlap`.
        layouts: as in `overlap`; "advise" also leaves out all pins that are not needed.
        pins: edits of the layout to take instead of a search; None to search as `layouts` says.
        halves: as in `overlap`.
        streams: as in `overlap`.
        unroll: how many steps of a split scan are in one body of its loop, if `halves` is a number.
        rings: whether matmuls may become rings; if not, weights are gathered ahead all the same.
        layers_ahead: whether all weights of a layer are gathered ahead, as one, whatever it costs;
            if not, the search tries it.
        late_sums: the same for sums over the batch that leave their scans.
        plan: the plan to follow; it says all that the options above say.
        memory: the memory that a device may need, as a share of its own up to 1, or in bytes; None
            to keep what the user's program keeps.
        keep, recompute: as in `overlap`.
        room: the bytes that may be kept more than the user's program keeps, below 0 for bytes
            that it has to keep less; None: as many as `memory` leaves.
        operations, agree_within_s, never_slower: as in `overlap`.
        prices: the cost model to decide by; None for the package's of the cluster.
        by_rule: whether rings are made by rule on GPUs without prices, where they may cost time: as
            an option asks for them, or as a clock chooses.
    """

    cluster: Cluster | None = None
    skip: tuple[str, ...] = ()
    on_error: OnError = "raise"
    granularity: Variant | Mapping[str, Variant] | None = None
    fsdp: FSDP = "prefetch"
    schedule: Scheduler | None = None
    layouts: LayoutMode | None = "repair"
    pins: tuple[Edit, ...] | None = None
    halves: HalvesMode = "auto"
    streams: StreamMode = "auto"
    unroll: int = 1
    rings: bool = True
    layers_ahead: bool = False
    late_sums: bool = False
    plan: Plan | None = None
    operations: Operations = "take over"
    agree_within_s: float = 20.0
    never_slower: bool = True
    prices: CostModel | None = None
    by_rule: bool = False
    memory: float | None = None
    keep: tuple[str, ...] = ()
    recompute: tuple[str, ...] = ()
    room: int | None = None

    @property
    def keeps(self) -> bool:
        """Return whether other residuals may be saved than the user's program saves."""
        return self.memory is not None or bool(self.keep or self.recompute)

    @property
    def chooses(self) -> bool:
        """Return whether rules and prices may choose, as no option says what to do."""
        return self.granularity is None and not self.layers_ahead

    @property
    def falls_back(self) -> bool:
        """Return whether the step runs as it is where XLA refuses the overlapped program.

        A plan, and `never_slower=False`, ask for the overlapped program and nothing else.
        """
        asks = self.plan is not None or not self.never_slower
        return self.on_error == "plain" or not asks
