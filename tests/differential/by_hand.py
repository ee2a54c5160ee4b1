"""Compare a step written by hand in the same way as the drawn ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from tests.differential.case import Case
from tests.differential.compare import differences
from tests.differential.training import Program


def mesh_of(sizes: dict[str, int], *, alone: bool = False, explicit: bool = False) -> Mesh:
    """Return a mesh of automatic or explicit axes; `alone` has as many axes of one device."""
    shape = [1] * len(sizes) if alone else list(sizes.values())
    devices = np.array(jax.devices()[: math.prod(shape)]).reshape(shape)
    kind = AxisType.Explicit if explicit else AxisType.Auto
    return Mesh(devices, tuple(sizes), axis_types=(kind,) * len(sizes))


def differs(
    sizes: dict[str, int],
    maker: Callable[[Mesh], Program],
    *,
    explicit: bool = False,
    **settings: Any,
) -> list[str]:
    """List what overlap() changes for the step that `maker` builds; `settings` are given to jit."""

    def build(alone: bool) -> Case:
        mesh = mesh_of(sizes, alone=alone, explicit=explicit)
        return Case(maker.__name__, mesh, maker(mesh), settings, build)

    return differences(build(False))
