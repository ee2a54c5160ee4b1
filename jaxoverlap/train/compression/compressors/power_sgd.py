"""PowerSGD: average gradients as products of two thin matrices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from jaxoverlap._util.limits import AtLeast1, checked
from jaxoverlap.train.compression.compressors.compressor import (
    Averaged,
    OneSetting,
    Setting,
    Worker,
)
from jaxoverlap.train.compression.compressors.orthogonal import Method, orthonormal
from jaxoverlap.train.compression.layers import Layer
from jaxoverlap.train.compression.wire import Average, Kind, WireRequest

_ITERATIONS = 5  # subspace iterations of a measurement, as in L-GreCo's released code


@dataclass(frozen=True)
@checked
class PowerSGD(OneSetting):
    """PowerSGD with error feedback and warm start: average products of two thin matrices.

    P = mean(M_i Q) and Q' = mean(M_iᵀ orthonormal(P)) are sent, rank columns each. The state is Q,
    [columns, largest rank]: a smaller rank uses its first columns, so that the state's shape is the
    same at all settings. Source: Vogels, Karimireddy and Jaggi, PowerSGD (arXiv 1905.13727),
    algorithms 1 and 2.

    Args:
        rank: of the approximation, 1 or more; less where a layer is smaller.
        orthogonalize: "qr", "gram-schmidt", or "auto", the faster one.
        error_feedback: without it, what the rank cannot express is lost.

    Raises:
        ValueError: for a rank below 1, or an unknown method.
    """

    field: ClassVar[str] = "rank"
    memory_passes: ClassVar[int] = 8  # two matmuls and a third read it, and its error is written
    rank: AtLeast1 = 4
    _: KW_ONLY
    orthogonalize: Method = "auto"
    error_feedback: bool = True

    def at(self, setting: Setting, layer: Layer) -> Setting:
        """Return the rank, at most the layer's own."""
        return min(int(setting), layer.rows, layer.cols)

    def candidates(self, layer: Layer) -> tuple[Setting, ...]:
        """Return all ranks from half the default to twice."""
        ranks = range(max(1, self.rank // 2), 2 * self.rank + 1)
        return tuple(sorted({self.at(rank, layer) for rank in ranks}))

    def init(self, layer: Layer, key: jax.Array, settings: Sequence[Setting]) -> jax.Array:
        """Return a random Q, [columns, largest rank]."""
        return jax.random.normal(key, (layer.cols, int(max(settings))), jnp.float32)

    def average(
        self, matrix: jax.Array, state: Any, *, layer: Layer, setting: Setting, at: Worker
    ) -> Average:
        """Average a matrix by its low-rank factors: two means, of [m, rank] and [n, rank]."""
        rank, dtype = int(setting), layer.dtype
        p = yield WireRequest("mean", (matrix @ state[:, :rank]).astype(dtype))
        p = orthonormal(p.astype(jnp.float32), self.orthogonalize)
        q = yield WireRequest("mean", (matrix.T @ p).astype(dtype))
        q = q.astype(jnp.float32)
        mean = p @ q.T
        # A column of zeros would stay one for ever: the old one stays in its place.
        alive = jnp.any(q != 0, axis=0) & jnp.all(jnp.isfinite(q), axis=0)
        state = state.at[:, :rank].set(jnp.where(alive, q, state[:, :rank]))
        return Averaged(mean, matrix - mean if self.error_feedback else None, state)

    def requests(self, layer: Layer, setting: Setting, workers: int) -> list[tuple[Kind, float]]:
        """Return kind and bytes of each value that `average` yields for one matrix, in order."""
        column = int(setting) * layer.itemsize
        return [("mean", layer.rows * column), ("mean", layer.cols * column)]

    def errors(self, matrix: jax.Array, state: Any, settings: Sequence[Setting]) -> jax.Array:
        """Return |M - P Pᵀ M| for the first columns of one P, after five subspace iterations.

        The first k columns of P are what k columns alone would have given, as orthogonalisation
        goes from the first column to the last: so one iteration serves all ranks.
        """
        columns = min(int(max(settings)), *matrix.shape)
        q = state[:, :columns]
        p = orthonormal(matrix @ q, self.orthogonalize)
        for _ in range(_ITERATIONS - 1):
            p = orthonormal(matrix @ (matrix.T @ p), self.orthogonalize)

        def without(residual: jax.Array, column: jax.Array) -> tuple[jax.Array, jax.Array]:
            residual = residual - jnp.outer(column, column @ residual)
            return residual, jnp.linalg.norm(residual)

        _, left = lax.scan(without, matrix, p.T)
        full_rank = [int(rank) >= min(matrix.shape) for rank in settings]
        picked = left[jnp.array([min(int(rank), columns) - 1 for rank in settings])]
        return jnp.where(jnp.array(full_rank), 0.0, picked)


power_sgd = PowerSGD  # the name by which it is made
