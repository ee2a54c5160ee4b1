"""Pipeline parallelism in one program: schedules as data, and their execution in JAX."""

from jaxoverlap.parallelism.pipeline.accumulate import accumulated
from jaxoverlap.parallelism.pipeline.execute import value_and_grad
from jaxoverlap.parallelism.pipeline.schedule import PipelineSchedule, stage_order
from jaxoverlap.parallelism.pipeline.timetable import Timetable, one_f_one_b, zb_h1

__all__ = [
    "PipelineSchedule",
    "Timetable",
    "accumulated",
    "one_f_one_b",
    "stage_order",
    "value_and_grad",
    "zb_h1",
]
