"""List the values that a step computes again, equal layers together, each with its names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from jaxoverlap.passes.analysis.errors import UserError
from jaxoverlap.passes.keep.price import Place, is_cheap
from jaxoverlap.passes.keep.remats import Remat
from jaxoverlap.passes.planning.entries import line_of, type_of
from jaxoverlap.plan.edits import Keep


@dataclass(frozen=True)
class Recomputed:
    """A value that remats compute again: one decision for all equal layers.

    Attributes:
        source, name: the line that computes it, and its checkpoint name; "" without one.
        value: its type.
        places: of each remat one place.
        alike: all places that have it.
        cheap: whether it is computed in passing.
    """

    source: str
    name: str
    value: str
    places: tuple[Place, ...]
    alike: tuple[Place, ...]
    cheap: bool

    def edit(self, bytes_kept: int = 0) -> Keep:
        """Return the edit that keeps it."""
        return Keep(
            source=self.source,
            name=self.name,
            value=self.value,
            places=self.places,
            bytes_kept=bytes_kept,
        )


def recomputed(remats: Sequence[Remat]) -> list[Recomputed]:
    """List the values that remats compute again, in the order in which they do.

    Layers are equal if they compute values of the same lines, names and types again.
    """
    found = dict[Any, Recomputed]()
    for remat in remats:
        own = list(_of(remat))
        layer = tuple((one.source, one.name, one.value) for one in own)
        for number, one in enumerate(own):
            key = layer, number
            if (before := found.get(key)) is not None:
                places, alike = before.places + one.places, before.alike + one.alike
                one = replace(before, places=places, alike=alike)
            found[key] = one
    return list(found.values())


def _of(remat: Remat) -> Iterator[Recomputed]:
    """Yield the values that one remat computes again."""
    classes: dict[int, list[tuple[int, int]]] = {}
    names: dict[int, str] = {}
    for position, eqn in enumerate(remat.body.eqns):
        for output, var in enumerate(eqn.outvars):
            if var in remat.sources:
                number = remat.inside.numbers[var]
                classes.setdefault(number, []).append((position, output))
                if eqn.primitive.name == "name":
                    names[number] = eqn.params["name"]
    for number, places in classes.items():
        eqn = remat.body.eqns[places[0][0]]
        alike = tuple((remat.number, *place) for place in places)
        yield Recomputed(
            source=line_of(eqn, (remat.eqn,)),
            name=names.get(number, ""),
            value=type_of(eqn.outvars[places[0][1]]),
            places=alike[:1],
            alike=alike,
            cheap=is_cheap(eqn),
        )


def named(option: str, patterns: Sequence[str], values: Sequence[Recomputed]) -> list[int]:
    """Return the indices of the values that a user names by checkpoint name or source line.

    A line names those of its values that cost something to compute again, or else its last one.

    Args:
        option: the option's name.
        patterns: the names and lines; the front of a path may be left out, `*` and `?` match.
        values: what the step computes again.

    Raises:
        UserError: if one names nothing.
    """
    found = list[int]()
    for pattern in patterns:
        own = [n for n, one in enumerate(values) if fnmatchcase(one.name, pattern)]
        if not own:
            on_line = [n for n, one in enumerate(values) if _is_at(one.source, pattern)]
            own = [n for n in on_line if not values[n].cheap] or on_line[-1:]
        if not own:
            known = dict.fromkeys(one.name or one.source for one in values)
            raise UserError(
                f"{option}={pattern!r} names nothing that the step computes again; it computes "
                f"again: {', '.join(known) or 'nothing'}. Give a name of "
                "jax.ad_checkpoint.checkpoint_name, or a line, of a value inside jax.checkpoint"
            )
        found += own
    return list(dict.fromkeys(found))


def _is_at(source: str, pattern: str) -> bool:
    return (
        fnmatchcase(source, pattern)
        or fnmatchcase(source, f"*/{pattern}")
        or pattern.endswith(f"/{source}")
    )
