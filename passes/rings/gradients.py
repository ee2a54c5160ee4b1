"""Rings whose gradients are rings.

For y = x w by any einsum `x,w->y`, with dy the gradient of y:

| function | dx | dw |
| --- | --- | --- |
| gathered | reduce-scatter ring of dy w | gather ring of x, read by dy x |
| scattered | one gather ring of dy, read by dy w ... | ... and by dy x |
| reduced | dy scattered plainly, then as `scattered` | the same ring |
| exchanged | exchanged result of dy w | exchange of x, read by dy x |
| exchanged_result | one exchange of dy, read by dy w ... | ... and by dy x |
| attended | ring attention's own backward ring | |
| projected | one gather ring of dy, read slice by slice: dq, dk, dv and dwo | |

JAX's transpose of a ring is a ring too, but one ring for each operand, with all hops' operands kept
from the forward pass; and it knows nothing of what is tied to what.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxoverlap.passes.analysis.einsum import Einsum, Side
from jaxoverlap.passes.rings import chunks, fused_ring_attention, ring_attention
from jaxoverlap.passes.rings.all_gather_matmul import Reader, all_gather_matmul
from jaxoverlap.passes.rings.all_to_all_matmul import all_to_all_matmul, matmul_all_to_all
from jaxoverlap.passes.rings.chunks import Chunking
from jaxoverlap.passes.rings.matmul_all_reduce import matmul_all_reduce
from jaxoverlap.passes.rings.matmul_reduce_scatter import Term, matmul_reduce_scatter
from jaxoverlap.passes.rings.query_split import attend_and_project, attend_and_project_backward
from jaxoverlap.passes.rings.ring_attention import Attention
from jaxoverlap.plan.plan import Variant

_with_gradients = functools.partial(jax.custom_vjp, nondiff_argnums=(0,))


@dataclass(frozen=True)
class RingMatmul:
    """The settings of a ring matmul, which do not change from call to call.

    Attributes:
        x, w, y: the letters of both operands and the result.
        moved: the letter that is gathered, scattered or split into chunks.
        split: the letter that an exchange shards instead; empty for other collectives.
        axis, axis_size: the mesh axis, and its devices.
        variant: how the pieces travel.
        precision: the precision of every chunk's matmul, as `jax.numpy.einsum` takes it.
        dtype: the dtype of the result.
    """

    x: str
    w: str
    y: str
    moved: str
    split: str
    axis: str
    axis_size: int
    variant: Variant
    precision: Any
    dtype: Any

    def reader(self, other: Array, spec: str, side: Side, dtype: Any) -> Reader:
        """Make the matmul `spec` of what travels, on `side`, and `other`."""
        assert side != "out"
        return Reader(other, _einsum(spec), side, self._dot(spec), dtype)

    def term(self, lhs: Array, rhs: Array, spec: str) -> Term:
        """Make the matmul `spec` as partial sums."""
        return Term(lhs, rhs, _einsum(spec), self._dot(spec))

    def _dot(self, spec: str) -> Any:
        def dot(lhs: Array, rhs: Array, dtype: Any) -> Array:
            return jnp.einsum(
                spec, lhs, rhs, precision=self.precision, preferred_element_type=dtype
            )

        return dot

    @property
    def ring(self) -> dict[str, Any]:
        """The arguments that every pass takes."""
        return {"axis": self.axis, "axis_size": self.axis_size, "variant": self.variant}

    @property
    def forward(self) -> str:
        """The spec of y, from x and w."""
        return f"{self.x},{self.w}->{self.y}"

    @property
    def to_x(self) -> str:
        """The spec of dx, from dy and w."""
        return f"{self.y},{self.w}->{self.x}"

    @property
    def to_w(self) -> str:
        """The spec of dw, from dy and x."""
        return f"{self.y},{self.x}->{self.w}"

    def readers_of_y(self, x: Array, w: Array) -> list[Reader]:
        """Make both gradients, as readers of dy."""
        return [
            self.reader(w, self.to_x, "lhs", x.dtype),
            self.reader(x, self.to_w, "lhs", w.dtype),
        ]


def _einsum(spec: str) -> Einsum:
    operands, out = spec.split("->")
    lhs, rhs = operands.split(",")
    return Einsum(lhs, rhs, out, {})


# -- one operand is gathered ----------------------------------------------------------------------


@_with_gradients
def gathered(how: RingMatmul, x: Array, w: Array) -> Array:
    """Multiply gathered x by w."""
    reader = how.reader(w, how.forward, "lhs", how.dtype)
    (y,), _ = all_gather_matmul(x, [reader], dim=how.x.index(how.moved), **how.ring)
    return y


def _gathered_backward(how: RingMatmul, operands: tuple, dy: Array) -> tuple[Array, Array]:
    x, w = operands
    dim = how.x.index(how.moved)
    dx = matmul_reduce_scatter([how.term(dy, w, how.to_x)], dim=dim, dtype=x.dtype, **how.ring)
    reader = how.reader(dy, how.to_w, "rhs", w.dtype)
    (dw,), _ = all_gather_matmul(x, [reader], dim=dim, **how.ring)
    return dx, dw


# -- partial sums are scattered, or wanted whole --------------------------------------------------


@_with_gradients
def scattered(how: RingMatmul, x: Array, w: Array) -> Array:
    """Sum all devices' x w, and scatter it."""
    terms, dim = [how.term(x, w, how.forward)], how.y.index(how.moved)
    return matmul_reduce_scatter(terms, dim=dim, dtype=how.dtype, **how.ring)


def _scattered_backward(how: RingMatmul, operands: tuple, dy: Array) -> tuple[Array, Array]:
    readers, dim = how.readers_of_y(*operands), how.y.index(how.moved)
    (dx, dw), _ = all_gather_matmul(dy, readers, dim=dim, **how.ring)
    return dx, dw


@_with_gradients
def reduced(how: RingMatmul, x: Array, w: Array) -> Array:
    """Sum all devices' x w."""
    terms, dim = [how.term(x, w, how.forward)], how.y.index(how.moved)
    return matmul_all_reduce(terms, dim=dim, dtype=how.dtype, **how.ring)


def _reduced_backward(how: RingMatmul, operands: tuple, dy: Array) -> tuple[Array, Array]:
    # Each device's result depends on every device's sums: `psum`, too, has `psum` as its transpose.
    mine = chunks.scatter(dy, how.y.index(how.moved), how.axis, Chunking(how.axis_size))
    return _scattered_backward(how, operands, mine)


# -- an operand or the result is exchanged --------------------------------------------------------


@_with_gradients
def exchanged(how: RingMatmul, x: Array, w: Array) -> Array:
    """Multiply x, gathered along one dim and split along another, by w."""
    reader = how.reader(w, how.forward, "lhs", how.dtype)
    (y,), _ = all_to_all_matmul(x, [reader], **_dims(how, how.x), **how.ring)
    return y


def _exchanged_backward(how: RingMatmul, operands: tuple, dy: Array) -> tuple[Array, Array]:
    x, w = operands
    there = _dims(how, how.x)
    back = {"dim": there["wanted"], "wanted": there["dim"]}
    terms = [how.term(dy, w, how.to_x)]
    dx = matmul_all_to_all(terms, dtype=x.dtype, **back, **how.ring)
    reader = how.reader(dy, how.to_w, "rhs", w.dtype)
    (dw,), _ = all_to_all_matmul(x, [reader], **there, **how.ring)
    return dx, dw


@_with_gradients
def exchanged_result(how: RingMatmul, x: Array, w: Array) -> Array:
    """Multiply x by w, gathering the product along one dim and splitting it along another."""
    terms = [how.term(x, w, how.forward)]
    return matmul_all_to_all(terms, dtype=how.dtype, **_dims(how, how.y), **how.ring)


def _exchanged_result_backward(how: RingMatmul, operands: tuple, dy: Array) -> tuple[Array, Array]:
    there = _dims(how, how.y)
    back = {"dim": there["wanted"], "wanted": there["dim"]}
    (dx, dw), _ = all_to_all_matmul(dy, how.readers_of_y(*operands), **back, **how.ring)
    return dx, dw


def _dims(how: RingMatmul, letters: str) -> dict[str, int]:
    """Return the dims of an exchange: the one that is gathered and the one that is split."""
    return {"dim": letters.index(how.moved), "wanted": letters.index(how.split)}


# -- attention ------------------------------------------------------------------------------------


def attend(how: Attention, *operands: Array) -> tuple[Array, Array]:
    """Attend in a ring of matmuls or of fused kernels, as `how` says; see `ring_attention`."""
    return (fused_ring_attention if how.kernel else ring_attention).attend(how, *operands)


def attend_backward(how: Attention, *operands: Array) -> tuple[Array, Array, Array]:
    """Compute the gradients of `attend`; see `ring_attention`."""
    return (fused_ring_attention if how.kernel else ring_attention).attend_backward(how, *operands)


@_with_gradients
def attended(how: Attention, q: Array, k: Array, v: Array) -> Array:
    """Attend in a ring; shapes as in `ring_attention.attend`."""
    return attend(how, q, k, v)[0]


def _attended_forward(how: Attention, q: Array, k: Array, v: Array) -> tuple[Array, tuple]:
    output, log_sums = attend(how, q, k, v)
    return output, (q, k, v, output, log_sums)


def _attended_backward(how: Attention, kept: tuple, dy: Array) -> tuple[Array, Array, Array]:
    q, k, v, output, log_sums = kept
    return attend_backward(how, q, k, v, output, log_sums, dy)


@_with_gradients
def projected(how: Attention, q: Array, k: Array, v: Array, wo: Array) -> Array:
    """Attend query slice by query slice; shapes as in `query_split.attend_and_project`."""
    return attend_and_project(how, q, k, v, wo)


def _projected_backward(
    how: Attention, operands: tuple, dy: Array
) -> tuple[Array, Array, Array, Array]:
    q, k, v, wo = operands
    return attend_and_project_backward(how, q, k, v, wo, dy)


def _keep_operands(rule: Any) -> Any:
    """Make a rule's forward pass, which keeps the operands for the backward pass."""

    def forward(how: Any, *operands: Array) -> tuple[Array, tuple]:
        return rule(how, *operands), operands

    return forward


for _rule, _backward in (
    (gathered, _gathered_backward),
    (scattered, _scattered_backward),
    (reduced, _reduced_backward),
    (exchanged, _exchanged_backward),
    (exchanged_result, _exchanged_result_backward),
    (projected, _projected_backward),
):
    _rule.defvjp(_keep_operands(_rule), _backward)
attended.defvjp(_attended_forward, _attended_backward)
