"""Estimate a step's seconds by term, with ConfigTuner's formula and the terms that it lacks.

T = compute + recompute + model + context + expert + fsdp + pipeline + data + bubble + optimizer
(arXiv 2512.24750 publishes the sum and its term for tensor parallelism, here `model`; the others
are reconstructions, each from how that parallelism works).
"""

from __future__ import annotations

from jaxoverlap.cost.model import CostModel
from jaxoverlap.parallelism.configuration import Configuration
from jaxoverlap.parallelism.kernel_time import KernelTime
from jaxoverlap.parallelism.model import Transformer
from jaxoverlap.parallelism.placement import Placement
from jaxoverlap.parallelism.send_time import SendTime
from jaxoverlap.parallelism.stack import Stack
from jaxoverlap.parallelism.sum_time import SumTime
from jaxoverlap.parallelism.terms import StepTerms


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
        self.sums = SumTime(self.sends)

    def terms(self, config: Configuration, placement: Placement) -> StepTerms:
        """Return a configuration's seconds by term.

        The stage that takes longest runs all micro-batches; the others take their one pass while
        the pipeline fills and drains, which interleaving by v divides by v.
        """
        micro_batches = config.micro_batches(self.global_batch)
        kernels, sends = self.kernels, self.sends
        layer = kernels.layer(config) + sends.of_layer(config, placement)
        # A layer takes at least as long as the host launches it; what is sent meanwhile is in that.
        layer += StepTerms(compute=max(kernels.launched_s - layer.step_s, 0.0))
        waited_s, filling_s = sends.between_stages_s(config, placement)
        once = StepTerms(
            compute=kernels.added_s(config),
            offload=config.offload * kernels.offload_s(config),
            fsdp=sends.of_ends_s(config, placement),
            pipeline=config.interleave * waited_s,
        )
        middle_layers, last_layers = self.stage_layers(config)
        middle = layer * middle_layers + once
        last = layer * last_layers + once + kernels.head(config)
        slowest = max(middle, last, key=lambda stage: stage.step_s)
        bubble_s = (config.pipeline - 1) * middle.step_s / config.interleave
        return slowest * micro_batches + StepTerms(
            bubble=bubble_s,
            data=self.sums.data_s(config, placement, slowest),
            pipeline=self.sums.table_s(config, placement)
            + (config.pipeline - 1) * (filling_s - waited_s),
            optimizer=kernels.optimizer_s(config),
        )

    def stage_layers(self, config: Configuration) -> tuple[int, int]:
        """Layers of the stage that has most, and of the last; equal in an SPMD pipeline."""
        if self.stack.lockstep:
            most = config.interleave * max(config.chunk_layers(self.model))
            return most, most
        return config.stage_layers(self.model), config.stage_layers(self.model, config.pipeline - 1)
