"""Estimate the memory of a step from its partitioned module, before anything is compiled.

XLA has neither fused nor scheduled it. So only values that end a kernel are counted
(`estimation/kernels.py`), in the order of the module's text, and the arguments, which are there
throughout. Two layouts of one step are compared so; the bytes are not those that XLA will need.
"""

from __future__ import annotations

import functools

from jaxoverlap.passes.estimation.buffers import Buffers, buffers, leaves
from jaxoverlap.passes.estimation.kernels import Kernels
from jaxoverlap.passes.estimation.memory_limits import rooms
from jaxoverlap.simulation import hlo


def estimated_peak_bytes(module: hlo.Module) -> int:
    """Estimate the most bytes that are live at a time, of one device.

    Args:
        module: the partitioned module, from `partitioned.Picture`.
    """
    written = functools.cache(functools.partial(_written, module))
    return argument_bytes(module) + rooms(module, written)[module.entry]


def argument_bytes(module: hlo.Module) -> int:
    """Return the bytes of the arguments of a partitioned module, of one device."""
    parameters = (i for i in module.body(module.entry) if i.opcode == "parameter")
    return sum(hlo.shape_bytes(i.shape) for i in parameters)


def _written(module: hlo.Module, computation: str) -> Buffers:
    """Find the buffers of a computation; what is fused into its reader takes no memory."""
    made = buffers(module, computation)
    kernels = Kernels(module, module.body(computation))
    for instruction in module.body(computation):
        if kernels.is_fused(instruction):
            for buffer in leaves(made.values[instruction.name]):
                made.bytes[buffer] = 0
    return made
