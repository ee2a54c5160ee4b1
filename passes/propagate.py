"""The sharding of every operand and result of every matmul, from Shardy's own propagation.

Each `dot_general` is given a tag (a frontend attribute) in a copy of the step; the copy is lowered
to StableHLO, Shardy's propagation runs on it, and the tagged ops are read. Nothing is compiled.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from jaxoverlap import _compat, _shardy
from jaxoverlap.passes.errors import RewriteError
from jaxoverlap.passes.jaxprs import Body, map_bodies

_TAG = "jaxoverlap_site"

Shardings = _shardy.Read


def propagate(traced: jax.stages.Traced, jaxpr: Any) -> Mapping[Any, Shardings]:
    """Shardings of the matmuls of a traced step, by their number in it (`jaxprs.dots`).

    Those of its scatter-adds too, by the number of their body and their place in that: there `rhs`
    is the updates.

    Args:
        traced: the step.
        jaxpr: its jaxpr, flattened; the numbers are of this one.

    In manual code the specs name the axes that are automatic beside the manual ones.
    A matmul that is missing from the answer did not reach StableHLO as a dot.

    Raises:
        RewriteError: if Shardy fails on the step.
    """
    params = _compat.with_jaxpr(_compat.traced_params(traced), map_bodies(jaxpr, _tagged), {})
    lowered = _compat.traced_with(traced, params).lower()
    try:
        found = _shardy.propagate(lowered, _TAG)
    except Exception as error:
        raise unreadable(traced, error) from error
    return {_key(name): specs for name, specs in found.items()}


def unreadable(traced: jax.stages.Traced, error: Exception) -> RewriteError:
    """What to raise where Shardy fails on a step."""
    return RewriteError(
        f"could not read the shardings of {traced.fun_name}: {type(error).__name__}: {error}"
    )


def _tagged(body: Body) -> list[Any] | None:
    """A body's equations, with a tag on each that is to be read."""
    if body.opaque:
        return None
    adds = (p for p, eqn in enumerate(body.eqns) if eqn.primitive.name == "scatter-add")
    tags = {place: f"{body.index}.{place}" for place in adds}
    for dot in body.dots:
        opaque = dot.inside and not (dot.manual and dot.manual.automatic)
        if not opaque and dot.eqn.primitive.name == "dot_general":
            tags[dot.place] = str(dot.index)
    if not tags:
        return None
    return [
        _compat.with_tag(eqn, **{_TAG: tags[place]}) if place in tags else eqn
        for place, eqn in enumerate(body.eqns)
    ]


def _key(name: str) -> int | tuple[int, int]:
    if "." not in name:
        return int(name)
    body, place = map(int, name.split("."))
    return body, place
