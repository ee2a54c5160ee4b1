"""Find NCCL's most channels under which a compiled step is fastest, as its kernels lose less.

A channel of NCCL takes an SM. A collective that has time loses nothing with fewer of them, and the
kernels that run meanwhile get the SMs back, as in Lagom (arXiv 2602.20656), which chooses for each
collective. One number for all needs no plugin: it is the environment's NCCL_MAX_CTAS.

It is the process's and no program's: XLA has an option for a program
(`xla_gpu_nccl_collective_max_nchannels`), but makes the communicator of a group of devices once in
a process, with the options of the program that needs it first. So this is no candidate of
`overlap()`'s search, nor of trial steps: what ran before would decide it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax

from jaxoverlap._util.expect import hlo_text
from jaxoverlap.cost.find import cost_of
from jaxoverlap.cost.model import CostModel
from jaxoverlap.hardware.cluster import Cluster
from jaxoverlap.plan.limits import GAIN
from jaxoverlap.plan.speedup import milliseconds
from jaxoverlap.simulation.replay import replay
from jaxoverlap.simulation.streams import scheduled_module
from jaxoverlap.simulation.timeline import Timeline

_TRIED = (16, 12, 8, 6, 4, 2)


@dataclass(frozen=True)
class FewerChannels:
    """A number of channels for all collectives, and the step with it.

    Attributes:
        max_ctas: for NCCL_MAX_CTAS.
        step: the step's timeline with so many.
        before: that with NCCL's own most.
    """

    max_ctas: int
    step: Timeline
    before: Timeline

    def __str__(self) -> str:
        parts = (
            f"{name} {milliseconds(old)} -> {milliseconds(new)}"
            for name, old, new in (
                ("", self.before.step_s, self.step.step_s),
                ("slowed by collectives", self.before.slowdown_s, self.step.slowdown_s),
                ("exposed", self.before.exposed_s, self.step.exposed_s),
            )
        )
        said = ", ".join(parts).strip()
        return f"with NCCL_MAX_CTAS={self.max_ctas} in the environment of all processes: {said}"


def fewer_channels(
    compiled: jax.stages.Compiled | str, cluster: str | Cluster | CostModel
) -> FewerChannels | None:
    """Find the most channels under which a step is fastest; None if none gains a hundredth.

    Args:
        compiled, cluster: as for `jaxoverlap.simulate`.

    Raises:
        ValueError: as `jaxoverlap.simulate`.
    """
    cost = cost_of(cluster)
    module = scheduled_module(hlo_text("compiled", compiled))
    before = replay(module, cost)
    steps = {most: replay(module, replace(cost, most_channels=most)) for most in _TRIED}
    most = min(steps, key=lambda most: steps[most].step_s)
    if before.step_s < steps[most].step_s * (1 + GAIN):
        return None
    return FewerChannels(most, steps[most], before)
