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
    from jaxoverlap import ring as ring
    from jaxoverlap.api import Overlapped as Overlapped
    from jaxoverlap.api import overlap as overlap
    from jaxoverlap.api import tune as tune
    from jaxoverlap.hardware.cluster import Chip as Chip
    from jaxoverlap.hardware.cluster import Cluster as Cluster
    from jaxoverlap.hardware.cluster import Link as Link
    from jaxoverlap.hardware.cluster import chips as chips
    from jaxoverlap.hardware.cluster import parse_cluster as parse_cluster
    from jaxoverlap.hardware.lost import LostError as LostError
    from jaxoverlap.hardware.lost import lost_named as lost_named
    from jaxoverlap.hardware.pods import PodsUnavailableError as PodsUnavailableError
    from jaxoverlap.hardware.pods import pod_mesh as pod_mesh
    from jaxoverlap.ops import attention as attention
    from jaxoverlap.ops import compiler_options as compiler_options
    from jaxoverlap.ops import decisions as decisions
    from jaxoverlap.ops import dot_general as dot_general
    from jaxoverlap.ops import einsum as einsum
    from jaxoverlap.ops import matmul as matmul
    from jaxoverlap.ops import per_sequence as per_sequence
    from jaxoverlap.ops import (
        softmax_cross_entropy_with_integer_labels as softmax_cross_entropy_with_integer_labels,
    )
    from jaxoverlap.parallelism import pipeline as pipeline
    from jaxoverlap.parallelism.configuration import Configuration as Configuration
    from jaxoverlap.parallelism.configure import Configurations as Configurations
    from jaxoverlap.parallelism.configure import NothingFitsError as NothingFitsError
    from jaxoverlap.parallelism.configure import configure as configure
    from jaxoverlap.parallelism.model import Transformer as Transformer
    from jaxoverlap.passes.analysis.errors import RewriteError as RewriteError
    from jaxoverlap.passes.scheduling.scheduler import Scheduled as Scheduled
    from jaxoverlap.passes.scheduling.scheduler import Scheduler as Scheduler
    from jaxoverlap.plan.plan import ChannelRow as ChannelRow
    from jaxoverlap.plan.plan import Decision as Decision
    from jaxoverlap.plan.plan import MadeFor as MadeFor
    from jaxoverlap.plan.plan import Measured as Measured
    from jaxoverlap.plan.plan import Nccl as Nccl
    from jaxoverlap.plan.plan import Plan as Plan
    from jaxoverlap.plan.plan import Predictions as Predictions
    from jaxoverlap.plan.plan import Reason as Reason
    from jaxoverlap.plan.plan import Schedule as Schedule
    from jaxoverlap.plan.plan import Skip as Skip
    from jaxoverlap.plan.plan import Variant as Variant
    from jaxoverlap.plan.speedup import Speedup as Speedup
    from jaxoverlap.profiling.record import profile as profile
    from jaxoverlap.simulation.audit import Audit as Audit
    from jaxoverlap.simulation.audit import Collective as Collective
    from jaxoverlap.simulation.audit import Coverage as Coverage
    from jaxoverlap.simulation.audit import audit as audit
    from jaxoverlap.simulation.simulation import Simulation as Simulation
    from jaxoverlap.simulation.simulation import simulate as simulate
    from jaxoverlap.start.record import Trials as Trials
    from jaxoverlap.step.processes import DisagreementError as DisagreementError
    from jaxoverlap.step.processes import agreed as agreed
    from jaxoverlap.step.programs import Program as Program
    from jaxoverlap.step.stages import Compiled as Compiled
    from jaxoverlap.step.stages import Lowered as Lowered
    from jaxoverlap.tuning.tune import Tuning as Tuning

try:
    __version__ = version("jaxoverlap")
except PackageNotFoundError:  # run from a checkout, by PYTHONPATH
    __version__ = "not installed"

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
    "jaxoverlap.start.record": "Trials",
    "jaxoverlap.step.processes": "DisagreementError agreed",
    "jaxoverlap.step.programs": "Program",
    "jaxoverlap.step.stages": "Compiled Lowered",
    "jaxoverlap.tuning.tune": "Tuning",
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}
_MODULES = {"pipeline": "jaxoverlap.parallelism.pipeline", "ring": "jaxoverlap.ring"}
__all__ = ["__version__", *_MODULE_OF, *_MODULES]  # pyright: ignore[reportUnsupportedDunderAll]


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
