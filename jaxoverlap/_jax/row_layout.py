"""Constrain a value's memory layout to row-major, except where a step is exported.

`with_layout_constraint` is a custom call for which JAX gives no guarantee of compatibility, so that
`jax.export` refuses a module with one. The value is the same without, and so the primitive here is
lowered to nothing where a module is exported.

Written against jax 0.11.2 and 0.12.0; `tests/_jax/test_row_layout.py` pins what is used.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array
from jax._src import core, pjit
from jax._src.interpreters import ad, batching, mlir
from jax.experimental.layout import Layout

_in_rows_p = core.Primitive("layout_constraint")  # named as the one that it stands for


def in_rows(value: Array) -> Array:
    """Lay a value out in memory row by row: its last dim is the fastest."""
    return _in_rows_p.bind(value)


def _batched(values: tuple[Any], dims: tuple[Any]) -> tuple[Any, int]:
    return in_rows(jnp.moveaxis(values[0], dims[0], 0)), 0


def _lowered(ctx: mlir.LoweringRuleContext, value: Any) -> Any:
    if ctx.module_context.lowering_parameters.for_export:
        return [value]
    layout: Any = Layout(tuple(range(ctx.avals_in[0].ndim)))  # type: ignore[attr-defined]
    return pjit._layout_constraint_hlo_lowering(ctx, value, layout=layout)


_in_rows_p.def_abstract_eval(lambda value: value)
_in_rows_p.def_impl(lambda value: value)  # outside of jit nothing else reads it
ad.deflinear2(_in_rows_p, lambda cotangent, _: (in_rows(cotangent),))
batching.primitive_batchers[_in_rows_p] = _batched
mlir.register_lowering(_in_rows_p, _lowered)
