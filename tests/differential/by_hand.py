"""A step written by hand, looked at as the drawn ones are."""

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
    """A mesh of automatic or of explicit axes; alone with as many axes, and one device."""
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
    """How overlap() changes the life of a step: its program by mesh, and what jit is given."""

    def build(alone: bool) -> Case:
        mesh = mesh_of(sizes, alone=alone, explicit=explicit)
        return Case(maker.__name__, mesh, maker(mesh), settings, build)

    return differences(build(False))
