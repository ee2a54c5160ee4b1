"""Hide the collectives of a JAX train step behind its matmuls.

step = jaxoverlap.overlap(train_step)
"""

from jaxoverlap import ring
from jaxoverlap.agreement import DisagreementError, agreed
from jaxoverlap.api import Overlapped, overlap, tune
from jaxoverlap.cluster import Chip, Cluster, Link, chips, parse_cluster
from jaxoverlap.passes.audit import Audit, Collective, Coverage, audit
from jaxoverlap.passes.errors import RewriteError
from jaxoverlap.plan import (
    ChannelRow,
    Decision,
    MadeFor,
    Measured,
    Nccl,
    Plan,
    Predictions,
    Schedule,
    Skip,
    Variant,
)
from jaxoverlap.pods import PodsUnavailableError, pod_mesh
from jaxoverlap.scheduler import Scheduled, Scheduler
from jaxoverlap.simulate import Simulation, simulate
from jaxoverlap.speedup import Speedup
from jaxoverlap.stages import Compiled, Lowered
from jaxoverlap.tune import Tuning

__all__ = [
    "Audit",
    "ChannelRow",
    "Chip",
    "Cluster",
    "Collective",
    "Compiled",
    "Coverage",
    "Decision",
    "DisagreementError",
    "Link",
    "Lowered",
    "MadeFor",
    "Measured",
    "Nccl",
    "Overlapped",
    "Plan",
    "PodsUnavailableError",
    "Predictions",
    "RewriteError",
    "Schedule",
    "Scheduled",
    "Scheduler",
    "Simulation",
    "Skip",
    "Speedup",
    "Tuning",
    "Variant",
    "agreed",
    "audit",
    "chips",
    "overlap",
    "parse_cluster",
    "pod_mesh",
    "ring",
    "simulate",
    "tune",
]
