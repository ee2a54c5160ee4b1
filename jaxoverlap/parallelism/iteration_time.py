"""Estimate a step's seconds by term, with ConfigTuner's formula and the terms that it lacks.

T = compute + recompute + model + context + expert + fsdp + pipeline + data + bubble + optimizer
(arXiv 2512.24750 publishes the sum and its term for tensor parallelism, here `model`; the others
are reconstructions, each from how that parallelism works).
"""

from __future__ import annotations

from jaxoverlap.cost.model import CostModel
from jaxoverlap.parallelism import traffic
from jaxoverlap.parallelism.configuration import Configuration
from jaxoverlap.parallelism.kernel_time import KernelTime
from jaxoverlap.parallelism.model import Transformer
from jaxoverlap.parallelism.placement import Placement
from jaxoverlap.parallelism.send_time import SendTime
from jaxoverlap.parallelism.stack import Stack
from jaxoverlap.parallelism.terms import StepTerms
from jaxoverlap.parallelism.traffic import Sent


class IterationTime:
    """Estimates the seconds of a step; caches those of kernels and collectives.

    Args:
        model: the model that is trained.
        cost: gives the seconds of kernels and collectives on one cluster.
        stack: the training software (MaxText, Megatron, ...) as fitted factors and switches.
        global_batch: sequences of a step.
    """

    def __init__(self, model: Transformer, cost: CostModel, stack: Stack, *, global_batch: int):
        self.model, self.cost, self.stack = model, cost, stack
        self.global_batch = global_batch
        self.kernels = KernelTime(model, cost, stack, global_batch=global_batch)
        self.sends = SendTime(self.kernels)

    def terms(self, config: Configuration, placement: Placement) -> StepTerms:
        """Return a configuration's seconds by term.

        The stage that takes longest runs all micro-batches; the others take their one pass while
        the pipeline fills and drains, which interleaving by v divides by v.
        """
        micro_batches = config.micro_batches(self.global_batch)
        kernels, sends = self.kernels, self.sends
        layer = kernels.layer(config) + sends.of_layer(config, placement)
        once = StepTerms(
            compute=kernels.added_s(config),
            offload=config.offload * kernels.offload_s(config),
            fsdp=sends.of_ends_s(config, placement),
            pipeline=sends.between_stages_s(config, placement),
        )
        middle_layers, last_layers = self.stage_layers(config)
        middle = layer * middle_layers + once
        last = layer * last_layers + once + kernels.head(config)
        slowest = max(middle, last, key=lambda stage: stage.step_s)
        bubble_s = (config.pipeline - 1) * middle.step_s / config.interleave
        return slowest * micro_batches + StepTerms(
            bubble=bubble_s,
            data=self._data_s(config, placement, slowest),
            pipeline=self._table_s(config, placement),
            optimizer=kernels.optimizer_s(config),
        )

    def stage_layers(self, config: Configuration) -> tuple[int, int]:
        """Layers of the stage that has most, and of the last; equal in an SPMD pipeline."""
        if self.stack.lockstep:
            most = config.interleave * max(config.chunk_layers(self.model))
            return most, most
        return config.stage_layers(self.model), config.stage_layers(self.model, config.pipeline - 1)

    def _data_s(self, config: Configuration, placement: Placement, slowest: StepTerms) -> float:
        """Seconds that sums of gradients add, if backward passes hide them; at least one layer's.

        The last micro-batch's backward pass hides them; with ZeRO-2, which sums every micro-batch,
        every one's does. The first layer's sum, `seconds / layers`, always follows the kernels.
        """
        sums = [s for s in self._of_step(config) if s.term == "data"]
        seconds = sum(s.count * self.sends.sent_s(s, placement) for s in sums)
        micro_batches = config.micro_batches(self.global_batch)
        layers = config.stage_layers(self.model)
        if not self.stack.hides_data or (self.stack.lockstep and micro_batches > 1):
            return seconds
        passes = micro_batches if config.zero_stage == 2 else 1
        hidden_s = passes * slowest.compute * 2 / 3 * (layers - 1) / layers
        return max(self.sends.paid_s(seconds, hidden_s), seconds / layers)

    def _of_step(self, config: Configuration) -> list[Sent]:
        return traffic.of_step(
            self.model, config, self.stack, config.micro_batches(self.global_batch)
        )

    def _table_s(self, config: Configuration, placement: Placement) -> float:
        sums = [s for s in self._of_step(config) if s.term == "pipeline"]
        return sum(self.sends.sent_s(s, placement) for s in sums)
