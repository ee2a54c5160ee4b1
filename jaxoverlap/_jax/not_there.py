"""Say that nothing runs on devices that are only described; JAX's errors do not say why.

For arrays it says "MakeArraysFromHostBufferShards not available with compile-only client", for a
compiled program that an `Executable` has no attribute 'local_devices'. Written against jax 0.11.2
and 0.12.0.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
from jax._src.interpreters import pxla

_TEXT = (
    "nothing can be put or run on a pod_mesh: its GPUs are described, and not there. It compiles: "
    "give the step jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) in place of arrays, as "
    "jax.eval_shape(init) makes them, and lower(...).compile() it"
)


@functools.cache
def install() -> None:
    """Have JAX raise a ValueError in words, once and for all devices that are only described."""
    put, begin = pxla.batched_device_put, pxla.ExecuteReplicated.__init__

    @functools.wraps(put)
    def put_or_say(*args: Any, **kwargs: Any) -> Any:
        try:
            return put(*args, **kwargs)
        except jax.errors.JaxRuntimeError as error:
            if "compile-only client" not in str(error):
                raise
            raise ValueError(_TEXT) from error

    @functools.wraps(begin)
    def begin_or_say(self: Any, executable: Any, *args: Any, **kwargs: Any) -> None:
        if not hasattr(executable, "local_devices"):
            raise ValueError(_TEXT)
        begin(self, executable, *args, **kwargs)

    pxla.batched_device_put = put_or_say
    pxla.ExecuteReplicated.__init__ = begin_or_say  # type: ignore[method-assign]
