"""Describe a published train step from outside: how it is called, and what it changes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.drawn.step import lower


@dataclass
class Stranger:
    """A step of someone else's trainer, as that trainer makes it.

    Attributes:
        step: what their loop calls.
        args: what their loop calls it with.
        after: their state after a call, and the loss, from what the call returned.
        context: the context in which their loop calls it.
        carried: the arguments of the next call, from what the call returned.
    """

    step: Any
    args: tuple
    after: Callable[[Any], tuple[Any, Any]]
    context: Callable[[], AbstractContextManager] = contextlib.nullcontext
    carried: Callable[[Any], tuple] | None = None

    def lower(self, step: Any) -> Any:
        """Lower `step` as their loop calls it."""
        with self.context():
            return lower(step, self.args)


@dataclass(frozen=True)
class Case:
    """One stranger, in one set-up.

    Attributes:
        name: shown in the table.
        module: in this folder; has `build(case, mesh, real)`.
        axes: of the mesh.
        packages: what the environment needs.
        options: for the module.
        bare: packages installed without what they ask for, which is more than their step needs.
        takes_dot_general: whether its layers can be given a matmul.
        by_rules: whether they are given `jaxoverlap.dot_general`.
    """

    name: str
    module: str
    axes: dict[str, int]
    packages: tuple[str, ...]
    options: dict[str, Any]
    bare: tuple[str, ...] = ()
    takes_dot_general: bool = False
    by_rules: bool = False


def adamw() -> Any:
    """An optimizer for trainers that are given one.

    Adam's first step has the gradient's sign, so an element whose gradient is rounding error would
    move either way; this epsilon keeps it where it is.
    """
    return optax.adamw(1e-3, eps=1e-6)


def fill(tree: Any, shardings: Any, real: bool) -> Any:
    """Values for the leaves of an abstract train state, or on a pod their ShapeDtypeStructs.

    Random floats, for layers that start at zero pass no gradient on, nor do norms with scales near
    zero; but zeros in an optimizer, which has not seen a gradient yet.
    """
    rng = np.random.default_rng(0)

    def leaf(path: Any, x: Any, sharding: Any) -> Any:
        if real:
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.device_put(jax.random.split(jax.random.key(0), x.shape), sharding)
        name = jax.tree_util.keystr(path)
        values = np.zeros(x.shape)
        if jnp.issubdtype(x.dtype, np.floating) and "opt" not in name:
            values = rng.standard_normal(x.shape) * 0.05 + ("norm" in name)
        return jax.device_put(values.astype(x.dtype), sharding)

    return jax.tree_util.tree_map_with_path(leaf, tree, shardings)


def tokens(shape: tuple[int, ...], vocab: int, sharding: Any, real: bool) -> Any:
    """A batch of token ids."""
    if real:
        return jax.ShapeDtypeStruct(shape, np.int32, sharding=sharding)
    ids = np.random.default_rng(1).integers(1, vocab, shape, dtype=np.int32)
    return jax.device_put(ids, sharding)
