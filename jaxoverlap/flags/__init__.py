"""Flags as data: XLA's options, NCCL's variables, presets of both, and a check for dead flags.

preset("h100-sxm:8x8").options       # what jax.jit(compiler_options=) takes
check("--xla_gpu_graph_level=0")     # what the installed XLA makes of it
"""

from jaxoverlap.flags.check import Finding, check
from jaxoverlap.flags.presets import PRESETS, preset
from jaxoverlap.flags.required import is_gpu, options_for
from jaxoverlap.flags.setting import Conflict, Preset, Setting
from jaxoverlap.flags.variables import VARIABLES, Variable
from jaxoverlap.flags.xla import DEAD, FLAGS, Dead, Flag

__all__ = [
    "DEAD",
    "FLAGS",
    "PRESETS",
    "VARIABLES",
    "Conflict",
    "Dead",
    "Finding",
    "Flag",
    "Preset",
    "Setting",
    "Variable",
    "check",
    "is_gpu",
    "options_for",
    "preset",
]
