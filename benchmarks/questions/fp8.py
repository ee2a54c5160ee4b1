"""Matmuls in fp8 by delayed scaling, as flax's `fp8_ops` and Transformer Engine write them.

Operands are scaled by what their largest magnitudes were one step before, so that no matmul waits
for a maximum over all devices (arXiv:2209.05433; e4m3 forwards, e5m2 for gradients).
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

SCALES = 3  # of x, of w, and of the gradient of their product
_FORWARD, _BACKWARD = jnp.float8_e4m3fn, jnp.float8_e5m2


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def fp8_einsum(spec: str, x: jax.Array, w: jax.Array, scales: jax.Array) -> jax.Array:
    """Multiply in fp8: `jnp.einsum(spec, x, w)` of bfloat16 arrays, to fp8's rounding.

    Args:
        spec: of two operands, as in "bsd,df->bsf".
        x, w: the operands.
        scales: [SCALES], the largest magnitudes of the step before over what the dtypes hold. Their
            "gradient" is what they should be in the next step.
    """
    return _forward(spec, x, w, scales)[0]


def _forward(spec: str, x: jax.Array, w: jax.Array, scales: jax.Array) -> tuple[Any, Any]:
    narrow_x, narrow_w = _narrowed(x, scales[0], _FORWARD), _narrowed(w, scales[1], _FORWARD)
    product = _dot(spec, narrow_x, narrow_w, scales[0] * scales[1])
    return product, (narrow_x, narrow_w, scales, _scale(x, _FORWARD), _scale(w, _FORWARD))


def _backward(spec: str, kept: Any, gradient: jax.Array) -> tuple[Any, ...]:
    x, w, scales, new_x, new_w = kept
    inputs, _, out = spec.replace("->", ",>").partition(",>")
    of_x, of_w = inputs.split(",")
    g = _narrowed(gradient, scales[2], _BACKWARD)
    dx = _dot(f"{out},{of_w}->{of_x}", g, w, scales[2] * scales[1])
    dw = _dot(f"{of_x},{out}->{of_w}", x, g, scales[0] * scales[2])
    return dx, dw, jnp.stack([new_x, new_w, _scale(gradient, _BACKWARD)])


fp8_einsum.defvjp(_forward, _backward)


def _dot(spec: str, a: jax.Array, b: jax.Array, scale: jax.Array) -> jax.Array:
    return jnp.einsum(spec, a, b, preferred_element_type=jnp.bfloat16) * scale.astype(jnp.bfloat16)


def _narrowed(x: jax.Array, scale: jax.Array, dtype: Any) -> jax.Array:
    most = float(jnp.finfo(dtype).max)
    return jnp.clip(x.astype(jnp.float32) / scale, -most, most).astype(dtype)


def _scale(x: jax.Array, dtype: Any) -> jax.Array:
    largest = jnp.max(jnp.abs(x)).astype(jnp.float32)
    return jnp.maximum(largest, 1e-12) / float(jnp.finfo(dtype).max)
