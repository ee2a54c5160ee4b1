"""Name the terms of a step's seconds."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class StepTerms:
    """Seconds of a step by term, each as far as nothing hides it; they add up to the step.

    Attributes:
        compute: kernels of the stage that has most, all micro-batches, recompute apart.
        recompute: kernels that its backward passes run again.
        model, context, expert, fsdp: collectives along that axis.
        pipeline: sends between stages, and the sum of a tied table's gradients.
        data: sums of gradients over replicas.
        bubble: what the stage waits while the pipeline fills and drains.
        optimizer: the update.
    """

    compute: float = 0.0
    recompute: float = 0.0
    model: float = 0.0
    context: float = 0.0
    expert: float = 0.0
    fsdp: float = 0.0
    pipeline: float = 0.0
    data: float = 0.0
    bubble: float = 0.0
    optimizer: float = 0.0

    @property
    def step_s(self) -> float:
        """Seconds of the step."""
        return sum(self.by_term.values())

    @property
    def by_term(self) -> dict[str, float]:
        """Return the seconds of each term, by name."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def __add__(self, other: StepTerms) -> StepTerms:
        mine = self.by_term
        return StepTerms(**{name: mine[name] + s for name, s in other.by_term.items()})

    def __mul__(self, times: float) -> StepTerms:
        return StepTerms(**{name: s * times for name, s in self.by_term.items()})
