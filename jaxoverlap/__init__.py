"""Hide the collectives of a JAX train step behind its matmuls.

step = jaxoverlap.overlap(train_step)
"""

import jaxoverlap._util.passes_link  # noqa: F401 # isort: skip # before all that needs it
from jaxoverlap import ring
from jaxoverlap.api import Overlapped, overlap, tune
from jaxoverlap.hardware.cluster import Chip, Cluster, Link, chips, parse_cluster
from jaxoverlap.hardware.lost import LostError, lost_named
from jaxoverlap.hardware.pods import PodsUnavailableError, pod_mesh
from jaxoverlap.ops import (
    attention,
    compiler_options,
    decisions,
    dot_general,
    einsum,
    matmul,
    softmax_cross_entropy_with_integer_labels,
)
from jaxoverlap.parallelism import pipeline
from jaxoverlap.parallelism.configuration import Configuration
from jaxoverlap.parallelism.configure import Configurations, NothingFitsError, configure
from jaxoverlap.parallelism.model import Transformer
from jaxoverlap.passes.analysis.errors import RewriteError
from jaxoverlap.passes.scheduling.scheduler import Scheduled, Scheduler
from jaxoverlap.plan.plan import (
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
from jaxoverlap.plan.speedup import Speedup
from jaxoverlap.profiling.record import profile
from jaxoverlap.simulation.audit import Audit, Collective, Coverage, audit
from jaxoverlap.simulation.simulation import Simulation, simulate
from jaxoverlap.step.processes import DisagreementError, agreed
from jaxoverlap.step.stages import Compiled, Lowered
from jaxoverlap.tuning.tune import Tuning

__all__ = [
    "Audit",
    "ChannelRow",
    "Chip",
    "Cluster",
    "Collective",
    "Compiled",
    "Configuration",
    "Configurations",
    "Coverage",
    "Decision",
    "DisagreementError",
    "Link",
    "LostError",
    "Lowered",
    "MadeFor",
    "Measured",
    "Nccl",
    "NothingFitsError",
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
    "Transformer",
    "Tuning",
    "Variant",
    "agreed",
    "attention",
    "audit",
    "chips",
    "compiler_options",
    "configure",
    "decisions",
    "dot_general",
    "einsum",
    "lost_named",
    "matmul",
    "overlap",
    "parse_cluster",
    "pipeline",
    "pod_mesh",
    "profile",
    "ring",
    "simulate",
    "softmax_cross_entropy_with_integer_labels",
    "tune",
]
