"""Keep asynchronous collectives out of CUDA graphs, where a user's XLA_FLAGS put them in.

XLA:GPU captures stretches of a step in CUDA graphs ("command buffers"). By default it captures
kernels and matmuls between a collective's start and its done, which keeps the overlap. Where
`--xla_gpu_enable_command_buffer` has COLLECTIVES too, starts and dones are captured with them, and
XLA makes one chain of all that a graph has: 27% of overlap became none in a step of Transformer
Engine on four B200s (openxla/xla pull 48900, open in September 2026; 49155 and 49158 belong to it).
Tried on jax 0.11.2 and 0.12.0 with tests/simulation/test_streams.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from jaxoverlap.flags.extract import flags_in

OPTION = "xla_gpu_enable_command_buffer"
# XLA's defaults in jaxlib 0.11.2 and 0.12.0.1, but for COLLECTIVES_KERNEL.
_DEFAULT = (
    *("FUSION", "CUBLAS", "CUBLASLT", "CUDNN", "CUSTOM_CALL", "CONDITIONAL"),
    "DYNAMIC_SLICE_FUSION",
)
_COLLECTIVES = "COLLECTIVES"


def without_collectives() -> dict[str, str]:
    """Return the option that keeps collectives out of CUDA graphs; empty if they already are."""
    flags = flags_in(os.environ.get("XLA_FLAGS", ""))
    values = [flag.value or "" for flag in flags if flag.name == OPTION]
    if not values:
        return {}
    captured = list(_captured(values[-1]))
    if _COLLECTIVES not in captured:
        return {}
    return {OPTION: ",".join(name for name in captured if not name.startswith(_COLLECTIVES))}


def _captured(value: str) -> Iterator[str]:
    """Yield the command types that XLA captures in CUDA graphs with a flag's value."""
    names = [name.strip().upper() for name in value.split(",") if name.strip()]
    if all(name[0] not in "+-" for name in names):
        yield from names
        return
    yield from (name for name in _DEFAULT if f"-{name}" not in names)
    yield from (name[1:] for name in names if name[0] == "+" and name[1:] not in _DEFAULT)
