"""Find the convolutions whose batch may not be split, as their windows are sharded."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import NamedSharding

from jaxoverlap._jax import compat
from jaxoverlap.passes.analysis.dims import DimNames, Name
from jaxoverlap.passes.analysis.einsum import Spec
from jaxoverlap.passes.analysis.jaxprs import equations


class ShardedWindows:
    """Returns whether a convolution's window, or a dim that it slides over, is sharded.

    XLA's partitioner multiplies wrong elements of such a convolution where its batch is small
    (docs/upstream.md), as that of a part is.
    """

    def __init__(
        self,
        jaxpr: Any,
        arguments: Sequence[Spec | None],
        dims: DimNames,
        sizes: Mapping[str, int],
    ):
        """Take the facts of a step.

        Args:
            jaxpr: the step.
            arguments: the sharding of each of its arguments; None where that is not known.
            dims: its named dims.
            sizes: devices along each mesh axis.
        """
        self._jaxpr, self._arguments, self._dims, self._sizes = jaxpr, arguments, dims, sizes

    def __call__(self, eqn: Any) -> bool:
        """Return whether an equation is such a convolution."""
        if eqn.primitive.name != "conv_general_dilated":
            return False
        numbers = eqn.params["dimension_numbers"]
        sides = zip(eqn.invars, (numbers.lhs_spec, numbers.rhs_spec), strict=True)
        return any(self._dims.of(var)[d] in self._sharded for var, spec in sides for d in spec[2:])

    @functools.cached_property
    def _sharded(self) -> set[Name]:
        """The names of dims that an argument of the step, or a constraint in it, shards."""
        named = list(zip(self._jaxpr.invars, self._arguments, strict=True))
        for eqn, _ in equations(self._jaxpr):
            sharding = eqn.params.get("sharding")
            if eqn.primitive.name == "sharding_constraint" and isinstance(sharding, NamedSharding):
                value = eqn.outvars[0]
                named.append((value, compat.axes_by_dim(sharding.spec, value.aval.ndim)))
        return {
            name
            for var, spec in named
            for name, axes in zip(self._dims.of(var) if spec else (), spec or (), strict=True)
            if math.prod(self._sizes.get(axis, 1) for axis in axes) > 1
        }
