"""Lower grouped matmuls for GPUs that are not there to the matmuls that cuDNN would run.

On a GPU with cuDNN 9.22 or newer XLA makes a grouped matmul (`jax.lax.ragged_dot`) one cuDNN
kernel, which computes the rows of each group with that group's weight. Without a GPU it does not
find cuDNN, and multiplies every row with every group's weight: 16 groups take 16 times as long. So
inside a `shard_map`, and for a pod alone, which compiles and never runs, a grouped matmul becomes
a batched one with groups of equal size. It has cuDNN's FLOPs and another value.

A buffer for tokens of other devices mostly has room for more than come. Where a ragged all-to-all
has filled it, as many of its rows are computed as the all-to-all's operand has: what comes where
tokens spread evenly.

Written against jax 0.11.2 and 0.12.0; `tests/_jax/test_grouped_matmuls.py` pins what is used.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax._src.interpreters import mlir
from jax._src.lax import lax as jax_lax
from jax._src.lax import parallel as jax_parallel
from jax._src.sharding_impls import SPMDAxisContext

_SENT_ROWS = "jaxoverlap: rows that an exchange sends, by the rows of its result"


@functools.cache
def install() -> None:
    """Replace JAX's lowering of two primitives for CUDA by one that knows pods, once a process."""
    ragged_dot, exchange = jax_lax.ragged_dot_general_p, jax_parallel.ragged_all_to_all_p
    own_dot = jax_lax._ragged_dot_general_lower
    own_exchange = jax_parallel._ragged_all_to_all_lowering
    mlir.register_lowering(ragged_dot, functools.partial(_dot, own_dot), platform="cuda")
    mlir.register_lowering(exchange, functools.partial(_exchange, own_exchange), platform="cuda")


def _for_pod(context: Any) -> bool:
    """Return whether a module is lowered for devices that compile and cannot run."""
    module = context.module_context
    manual = isinstance(module.axis_context, SPMDAxisContext)
    return manual and type(module.backend).__name__.startswith("CompileOnly")


def _sent_rows(context: Any) -> dict[int, int]:
    """Return how many tokens a module's exchanges send, by the size of their results."""
    return context.module_context.cached_primitive_lowerings.setdefault(_SENT_ROWS, {})


def _exchange(own: Callable[..., Any], context: Any, *operands: Any, **params: Any) -> Any:
    """Lower a ragged all-to-all as JAX does; for a pod, remember how many tokens it sends."""
    if _for_pod(context):
        sent, room = (aval.shape[0] for aval in context.avals_in[:2])
        if sent < room:
            _sent_rows(context)[room] = sent
    return own(context, *operands, **params)


def _dot(own: Callable[..., Any], context: Any, *operands: Any, **params: Any) -> Any:
    """Lower a grouped matmul as JAX does; for a pod, as a batched one."""
    if not _for_pod(context):
        return own(context, *operands, **params)
    made = functools.partial(
        even_groups,
        numbers=params["ragged_dot_dimension_numbers"],
        dtype=params["preferred_element_type"],
        rows=_sent_rows(context),
    )
    return mlir.lower_fun(made, multiple_results=False)(context, *operands)


def even_groups(
    lhs: Array, rhs: Array, group_sizes: Array, *, numbers: Any, dtype: Any, rows: dict[int, int]
) -> Array:
    """Multiply as a grouped matmul would if its groups had equal sizes.

    Args:
        lhs, rhs, group_sizes: as `jax.lax.ragged_dot_general` takes them.
        numbers: its dimension numbers.
        dtype: its `preferred_element_type`.
        rows: how many rows of a ragged dim of some size have tokens; all, if it is not here.

    Returns:
        An array of the shape of the grouped matmul's result. Rows that no group has are 0.
    """
    (contract, batch), groups = numbers.dot_dimension_numbers, group_sizes.shape[-1]
    (ragged,) = numbers.lhs_ragged_dimensions
    if ragged in batch[0]:
        return lax.dot_general(lhs, rhs, (contract, batch), preferred_element_type=dtype)
    size = int(lhs.shape[ragged])
    each = max(min(rows.get(size, size), size) // groups, 1)

    def grouped(x: Array, dim: int) -> Array:
        """Split [..., tokens, ...] into [groups, ..., tokens of a group, ...]."""
        x = lax.slice_in_dim(x, 0, min(each * groups, size), axis=dim)
        short = each * groups - x.shape[dim]
        x = jnp.pad(x, [(0, short if d == dim else 0) for d in range(x.ndim)])
        x = x.reshape(*x.shape[:dim], groups, each, *x.shape[dim + 1 :])
        return jnp.moveaxis(x, dim, 0)

    def moved(dims: tuple[Sequence[int], Sequence[int]]) -> tuple[list[int], list[int]]:
        return [d + 1 for d in dims[0]], [d + (d < of_groups) for d in dims[1]]

    if ragged in contract[0]:
        x, w = grouped(lhs, ragged), grouped(rhs, contract[1][contract[0].index(ragged)])
        of_groups = rhs.ndim  # every dim of rhs moves
    else:
        (of_groups,) = numbers.rhs_group_dimensions
        x, w = grouped(lhs, ragged), jnp.moveaxis(rhs, of_groups, 0)
    left, right = moved(batch)
    by_group = [0, *left], [0, *right]
    made = lax.dot_general(x, w, (moved(contract), by_group), preferred_element_type=dtype)
    if ragged in contract[0]:
        return made
    free = [d for d in range(lhs.ndim) if d not in (*contract[0], *batch[0])]
    at = len(batch[0]) + free.index(ragged)
    made = jnp.moveaxis(made, 0, at)
    made = made.reshape(*made.shape[:at], groups * each, *made.shape[at + 2 :])
    made = lax.slice_in_dim(made, 0, min(groups * each, size), axis=at)
    short = size - made.shape[at]
    return jnp.pad(made, [(0, short if d == at else 0) for d in range(made.ndim)])
