"""Pipeline parallelism in one program: schedules as data, and their execution in JAX."""

from jaxoverlap.parallelism.pipeline.accumulate import accumulated
from jaxoverlap.parallelism.pipeline.execute import value_and_grad
from jaxoverlap.parallelism.pipeline.schedule import Schedule, stage_order

__all__ = ["Schedule", "accumulated", "stage_order", "value_and_grad"]
