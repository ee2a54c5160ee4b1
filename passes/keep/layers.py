"""Find the layers of a step that save values for the backward pass.

A layer is what a step of a scan computes, where a later scan slices what it stacks; or, in a body
of layers that are written one after the other, what stands between two places at which hardly more
than one value is in use, at all of them of one type: the residual stream.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxoverlap._jax import compat
from jaxoverlap.passes.analysis.def_use import DefUse
from jaxoverlap.passes.analysis.jaxprs import Body
from jaxoverlap.passes.keep.price import is_cheap

_ALONE = 0.8  # the share of the bytes in use that the residual stream has between layers
_OFTEN = 0.5  # of several types, the smallest that is there at least so often as any is the stream


@dataclass(frozen=True)
class SavingLayer:
    """A layer that saves values.

    Attributes:
        body: the body that it stands in.
        first, last: the indices of its first equation, and of the one behind its last one; of a
            layer that is a step of a scan both are the scan's.
        reader: the index of the first equation that reads its saved values.
        saved: the values that it computes and saves: in the body, or in the body of the scan.
    """

    body: Body
    first: int
    last: int
    reader: int
    saved: tuple[Any, ...]

    @property
    def bytes(self) -> int:
        """The bytes that it saves, not sharded."""
        copies = self.body.eqns[self.first].params["length"] if self.is_scanned else 1
        return copies * sum(map(num_bytes, self.saved))

    @property
    def is_scanned(self) -> bool:
        """Whether it is a step of a scan."""
        return self.first == self.last


def layers_of(body: Body) -> list[SavingLayer]:
    """Find the layers of a body: those of its scans, or its own where its scans save nothing."""
    scans = (n for n, eqn in enumerate(body.eqns) if eqn.primitive.name == "scan")
    scanned = [layer for n in scans if (layer := layer_at(body, n, n)) is not None]
    if scanned:
        return scanned
    written = [
        layer_at(body, first, last)
        for first, last in itertools.pairwise(_cuts(body))
        if all(eqn.primitive.name != "scan" for eqn in body.eqns[first:last])
    ]
    return [layer for layer in written if layer is not None]


def layer_at(body: Body, first: int, last: int) -> SavingLayer | None:
    """Return the layer of some equations; None where it saves nothing."""
    saved = _stacked(body, first) if first == last else _passed(body, first, last)
    readers = [reader for _, reader in saved]
    if not readers:
        return None
    return SavingLayer(body, first, last, min(readers), tuple(value for value, _ in saved))


def joined(layers: Sequence[SavingLayer], count: int) -> list[SavingLayer]:
    """Join so many neighbours to one layer; steps of scans stay as they are."""
    made = list[SavingLayer | None]()
    for some in itertools.batched(layers, count):
        if some[0].is_scanned:
            made += some
        else:
            made.append(layer_at(some[0].body, some[0].first, some[-1].last))
    return [layer for layer in made if layer is not None]


def is_backward(eqn: Any) -> bool:
    """Return whether an equation is part of a backward pass, as JAX's names of scopes say."""
    return "transpose(" in str(eqn.source_info.name_stack)


def _stacked(body: Body, position: int) -> list[tuple[Any, int]]:
    """Return the values that a scan stacks for one later scan, each with that scan's index."""
    scan = body.eqns[position]
    inside, (_, num_carry) = scan.params["jaxpr"], compat.scan_counts(scan)
    made = DefUse(inside.eqns, ()).made
    found = [
        (value, reader)
        for value, stack in zip(inside.outvars[num_carry:], scan.outvars[num_carry:], strict=True)
        if not compat.is_literal(value) and value in made
        if (reader := _slicer(body, scan, stack)) is not None
    ]
    first = min((reader for _, reader in found), default=None)
    return [(value, reader) for value, reader in found if reader == first]


def _slicer(body: Body, scan: Any, stack: Any) -> int | None:
    """Return the later scan that alone reads a stack, step by step; None if there is none."""
    reader = body.uses.only_reader(stack)
    if reader is None or body.eqns[reader].primitive.name != "scan":
        return None
    slicer = body.eqns[reader]
    sliced = any(atom is stack for atom in slicer.invars[sum(compat.scan_counts(slicer)) :])
    same = scan.params["length"] == slicer.params["length"]
    return reader if same and sliced else None


def _passed(body: Body, first: int, last: int) -> list[tuple[Any, int]]:
    """Return the values of equations that the backward pass reads, and no later layer does.

    Each with the index of the first equation of the backward pass that reads it.
    """
    found = list[tuple[Any, int]]()
    for var in (v for eqn in body.eqns[first:last] for v in eqn.outvars):
        readers = [n for n in body.uses.readers(var) if n is not None and n >= last]
        backward = [n for n in readers if is_backward(body.eqns[n])]
        if backward and len(backward) == len(readers) and None not in body.uses.readers(var):
            found.append((var, min(backward)))
    return found


def _cuts(body: Body) -> list[int]:
    """Return the indices of the equations before which the residual stream alone is in use.

    The first equation is one of them. What follows the last one is the loss, whose values are in
    use when most memory is, recomputed or not.
    """
    end = next((n for n, eqn in enumerate(body.eqns) if is_backward(eqn)), None)
    if end is None:
        return []
    last: dict[Any, int] = {}  # the last reader of each value in the forward pass
    free = set[Any]()  # casts and slices of weights
    for position, eqn in enumerate(body.eqns[:end]):
        last |= dict.fromkeys(compat.variables(eqn.invars), position)
        made = (v for v in compat.variables(eqn.invars) if v in body.uses.made)
        if is_cheap(eqn) and free.issuperset(made):
            free |= {*eqn.outvars}
    alone: dict[Any, int] = {}  # a value, and the first equation before which it is alone
    live: dict[Any, int] = {}
    for position, eqn in enumerate(body.eqns[:end]):
        largest = max(live, key=live.__getitem__, default=None)
        if largest is not None and live[largest] >= _ALONE * sum(live.values()):
            alone.setdefault(largest, position)
        live |= {v: num_bytes(v) for v in eqn.outvars if v in last and v not in free}
        for var in [v for v in live if last[v] <= position]:
            del live[var]
    kinds = Counter(compat.type_text(var) for var in alone)
    sizes = {compat.type_text(var): num_bytes(var) for var in alone}
    often = [kind for kind, count in kinds.items() if count >= _OFTEN * max(kinds.values())]
    stream = min(often, key=sizes.__getitem__, default=None)
    inner = [at for var, at in alone.items() if compat.type_text(var) == stream]
    return list(dict.fromkeys([0, *inner]))


def num_bytes(var: Any) -> int:
    """Return the bytes of a value, not sharded."""
    aval = var.aval
    return math.prod(aval.shape) * aval.dtype.itemsize if hasattr(aval, "shape") else 0
