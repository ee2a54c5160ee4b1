"""Compiled programs by their settings: compiled when first needed, or in the background."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jaxoverlap._jax.thread_config import inheriting, trace_context

MOST = 16  # programs: a few settings, with and without sums for a measurement, and what measures


class Programs:
    """Keep the programs that were used last by key; compile some in a thread while others run."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._made: dict[Hashable, Any] = {}  # the one used last is last
        self._on_the_way: dict[Hashable, Future[Any]] = {}

    def get(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return a program; wait for it, or make it, if it is not there."""
        if key in self._on_the_way:
            found = self._on_the_way.pop(key).result()  # raises what the thread did
        elif key in self._made:
            found = self._made.pop(key)
        else:
            found = make()
        self._made[key] = found
        while len(self._made) > self._most:
            del self._made[next(iter(self._made))]
        return found

    def beside(self, key: Hashable, lower: Callable[[], Any]) -> None:
        """Compile a program in a thread, unless it is compiled or being compiled.

        It is traced and lowered here, in the caller's contexts, those of JAX and of other libraries
        (flax's axis rules), and compiled in the thread, where XLA needs no lock of Python's. A run
        that ends meanwhile waits for the thread: a daemon's call into XLA would outlive the
        interpreter, and end the process by a signal. If more than `most` are under way, the oldest
        that nobody has requested is dropped.

        Args:
            key: of the program.
            lower: returns what has a method `compile`, as `jax.jit(...).lower` does.
        """
        if key in self._made or key in self._on_the_way:
            return
        # What `compile` of an overlapped step still traces has the caller's contexts of JAX.
        compiled = inheriting(lower().compile)
        future = self._on_the_way[key] = Future[Any]()
        while len(self._on_the_way) > self._most:
            del self._on_the_way[next(iter(self._on_the_way))]

        def run() -> None:
            try:
                future.set_result(compiled())
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, name="compile beside", daemon=False).start()

    def __len__(self) -> int:
        return len(self._made) + len(self._on_the_way)


def like(leaf: Any) -> jax.ShapeDtypeStruct:
    """Return the ShapeDtypeStruct of an array, with its sharding."""
    return like_at(leaf, leaf.sharding)


def like_at(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    """Return the shape of an array or a shape, with a sharding."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def without_first(leaf: Any) -> jax.ShapeDtypeStruct:
    """Return the shape of an array or a shape without its first dim."""
    return jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)


def batch_like(leaf: Any, default: NamedSharding) -> jax.ShapeDtypeStruct:
    """Return the shape of a batch's leaf, with its sharding; the default one if it has none."""
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        sharding = default
    dtype = getattr(leaf, "dtype", None) or np.asarray(leaf).dtype
    if not jnp.issubdtype(dtype, jax.dtypes.extended):
        dtype = jax.dtypes.canonicalize_dtype(dtype)
    return jax.ShapeDtypeStruct(np.shape(leaf), dtype, sharding=sharding)


def key_of(args: Any) -> Hashable:
    """Return a key of a program's arguments, and of the JAX contexts that it is traced in."""
    leaves, treedef = jax.tree.flatten(args)
    shapes = ((np.shape(x), str(x.dtype), getattr(x, "sharding", None)) for x in leaves)
    return trace_context(), treedef, tuple(shapes)
