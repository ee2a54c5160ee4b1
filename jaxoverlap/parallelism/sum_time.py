"""Estimate the seconds that sums of gradients over replicas add to a step.

A sum runs under the kernels that follow it: those that come once, under the last micro-batch's
backward pass; those of every micro-batch, under all the later ones too. What FSDP sends meanwhile
over the same links is not hidden twice.
"""

from __future__ import annotations

from jaxoverlap.parallelism import traffic
from jaxoverlap.parallelism.configuration import Configuration
from jaxoverlap.parallelism.placement import Placement
from jaxoverlap.parallelism.send_time import SendTime, exposed_s
from jaxoverlap.parallelism.terms import StepTerms
from jaxoverlap.parallelism.traffic import Sent


class SumTime:
    """Estimates the seconds of sums of gradients.

    Args:
        sends: of the same model, stack and cluster.
    """

    def __init__(self, sends: SendTime):
        self.sends, self.kernels = sends, sends.kernels
        self.model, self.stack = sends.model, sends.stack
        self.global_batch = sends.global_batch

    def data_s(self, config: Configuration, placement: Placement, slowest: StepTerms) -> float:
        """Seconds of sums over data that kernels do not hide; at least those of one layer.

        The first layer's sum, `seconds / layers`, always follows the kernels.

        Args:
            slowest: seconds of a micro-batch on the slowest stage.
        """
        sums = [s for s in self._of_step(config) if s.term == "data"]
        seconds = [s.count * self.sends.sent_s(s, placement) for s in sums]
        if not any(seconds):
            return 0.0
        micro_batches = config.micro_batches(self.global_batch)
        layers = config.stage_layers(self.model)
        if not self.stack.hides_data or (self.stack.lockstep and micro_batches > 1):
            return sum(seconds)
        kernels_s = self.kernels.backward_s(config) - self._taken_s(config, placement, sums)
        hidden_s = max(kernels_s, 0.0) * (layers - 1)
        if config.zero_stage == 2:
            hidden_s += (micro_batches - 1) * (slowest.compute + slowest.recompute)
        crowding_s = sum(
            s * self.sends.crowding(sent, placement) for s, sent in zip(seconds, sums, strict=True)
        )
        cost = self.stack.hidden_cost * crowding_s / sum(seconds)
        cost += self.stack.unhidden if self.stack.gathers_matrices else 0.0  # a schedule of XLA's
        return max(exposed_s(sum(seconds), hidden_s, cost), sum(seconds) / layers)

    def table_s(self, config: Configuration, placement: Placement) -> float:
        """Seconds of sums, gathers and scatters of the tables of a pipeline's stages."""
        sums = [s for s in self._of_step(config) if s.term == "pipeline"]
        return sum(self.sends.sent_s(s, placement) for s in sums)

    def _taken_s(self, config: Configuration, placement: Placement, sums: list[Sent]) -> float:
        """Seconds of a layer's backward pass under which FSDP's collectives have the link.

        XLA runs one collective at a time; elsewhere those over NVLink and over the network run at
        once.
        """
        far = [placement.group(*s.axes).domains > 1 for s in sums]
        shared = self.stack.gathers_matrices or (placement.group("fsdp").domains > 1 and any(far))
        if config.fsdp == 1 or not shared or (config.pipeline > 1 and self.stack.keeps_gathered):
            return 0.0
        return self.sends.fsdp_backward_s(config, placement)

    def _of_step(self, config: Configuration) -> list[Sent]:
        return traffic.of_step(
            self.model, config, self.stack, config.micro_batches(self.global_batch)
        )
