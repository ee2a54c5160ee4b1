"""Hide the collectives of a JAX train step behind its matmuls.

step = jaxoverlap.overlap(train_step)

Names are imported when they are first used: `jaxoverlap --version` needs no JAX.
"""

import importlib
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import jaxoverlap._util.passes_link  # noqa: F401 # before all that needs it

if TYPE_CHECKING:
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
        per_sequence,
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
        Reason,
        Schedule,
        Skip,
        Variant,
    )
    from jaxoverlap.plan.speedup import Speedup
    from jaxoverlap.profiling.record import profile
    from jaxoverlap.simulation.audit import Audit, Collective, Coverage, audit
    from jaxoverlap.simulation.simulation import Simulation, simulate
    from jaxoverlap.step.processes import DisagreementError, agreed
    from jaxoverlap.step.programs import Program
    from jaxoverlap.step.stages import Compiled, Lowered
    from jaxoverlap.tuning.tune import Tuning

try:
    __version__ = version("jaxoverlap")
except PackageNotFoundError:  # run from a checkout, by PYTHONPATH
    __version__ = "not installed"

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
    "Program",
    "Reason",
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
    "__version__",
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
    "per_sequence",
    "pipeline",
    "pod_mesh",
    "profile",
    "ring",
    "simulate",
    "softmax_cross_entropy_with_integer_labels",
    "tune",
]

# The module of each name that is not a module itself; the block above tells type checkers the same.
_NAMES = {
    "jaxoverlap.api": "Overlapped overlap tune",
    "jaxoverlap.hardware.cluster": "Chip Cluster Link chips parse_cluster",
    "jaxoverlap.hardware.lost": "LostError lost_named",
    "jaxoverlap.hardware.pods": "PodsUnavailableError pod_mesh",
    "jaxoverlap.ops": "attention compiler_options decisions "
    "dot_general einsum matmul per_sequence softmax_cross_entropy_with_integer_labels",
    "jaxoverlap.parallelism.configuration": "Configuration",
    "jaxoverlap.parallelism.configure": "Configurations NothingFitsError configure",
    "jaxoverlap.parallelism.model": "Transformer",
    "jaxoverlap.passes.analysis.errors": "RewriteError",
    "jaxoverlap.passes.scheduling.scheduler": "Scheduled Scheduler",
    "jaxoverlap.plan.plan": "ChannelRow Decision MadeFor Measured Nccl "
    "Plan Predictions Reason Schedule Skip Variant",
    "jaxoverlap.plan.speedup": "Speedup",
    "jaxoverlap.profiling.record": "profile",
    "jaxoverlap.simulation.audit": "Audit Collective Coverage audit",
    "jaxoverlap.simulation.simulation": "Simulation simulate",
    "jaxoverlap.step.processes": "DisagreementError agreed",
    "jaxoverlap.step.programs": "Program",
    "jaxoverlap.step.stages": "Compiled Lowered",
    "jaxoverlap.tuning.tune": "Tuning",
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}
_MODULES = {"pipeline": "jaxoverlap.parallelism.pipeline", "ring": "jaxoverlap.ring"}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        value = importlib.import_module(_MODULES[name])
    elif name in _MODULE_OF:
        value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    elif not name.startswith("_") and find_spec(f"jaxoverlap.{name}"):
        value = importlib.import_module(f"jaxoverlap.{name}")  # a folder, as jaxoverlap.flags
    else:
        raise AttributeError(f"module 'jaxoverlap' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
