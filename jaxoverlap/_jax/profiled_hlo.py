"""Turn the modules that a profile carries into text: `HloProto` bytes, as XLA's profiler writes.

Written against jax 0.11.2 and 0.12.0; `tests/profiling/test_xplane.py` pins what is used.
"""

from __future__ import annotations

from jax._src.lib import hlo


def module_text(serialized: bytes) -> str:
    """Return the text of a serialized HloModuleProto, in its schedule's order if it has one."""
    return hlo.HloModule.from_serialized_hlo_module_proto(serialized).to_string()
