"""Split a step's seconds by what they are spent on."""

from __future__ import annotations

from dataclasses import dataclass

from jaxoverlap.parallelism.parts import Parts


@dataclass(frozen=True)
class StepTerms(Parts):
    """Seconds of a step by term: exposed, plus what hidden FSDP and data collectives cost it.

    They add up to the step. The cost of hidden collectives is contention (`Stack.hidden_cost`).

    Attributes:
        compute: kernels of the slowest stage, all micro-batches, with the additions of their
            gradients (`Stack.lockstep`), without recompute.
        recompute: kernels that its backward passes run again.
        offload: copies of activations to the host's memory and back, as far as no layer hides them.
        model, context, expert, fsdp: collectives along that axis; for embedding and head `fsdp`
            may run over `model` too (`Stack.gathers_tables`).
        pipeline: sends between stages, and the sum of a tied table's gradients; with `lockstep`
            the gather of all tables and the scatter of their gradients.
        data: sums of gradients over replicas, and all-reduces of fp8 scales.
        bubble: what the stage waits while the pipeline fills and drains.
        optimizer: the update.
    """

    compute: float = 0.0
    recompute: float = 0.0
    offload: float = 0.0
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
