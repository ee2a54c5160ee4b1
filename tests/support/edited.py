"""Steps as passes get them, on meshes of this machine's eight CPU devices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jaxoverlap._jax import compat
from jaxoverlap.passes.analysis.flatten import flatten
from jaxoverlap.passes.edited import EditedStep


def mesh_of(axes: Mapping[str, int]) -> Mesh:
    """Return an automatic mesh of eight devices with these axes."""
    devices = np.asarray(jax.devices()[:8]).reshape(tuple(axes.values()))
    return Mesh(devices, tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def edited_of(step: Any, args: tuple[Any, ...], mesh: Mesh) -> EditedStep:
    """Return a step before any edit, with the shardings of its arguments."""
    jaxpr = flatten(jax.make_jaxpr(step)(*args).jaxpr)
    specs = (compat.axes_by_dim(x.sharding.spec, x.ndim) for x in jax.tree.leaves(args))
    return EditedStep(jaxpr, mesh, tuple(specs))


def evaluated(jaxpr: Any, args: tuple[Any, ...]) -> list[Any]:
    """Return the results of a jaxpr on arguments that are sharded."""
    return jax.jit(lambda *xs: jax.core.eval_jaxpr(jaxpr, (), *xs))(*jax.tree.leaves(args))
