"""Einsums on meshes, drawn and carried out in numpy."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import product

import numpy as np
from hypothesis import strategies as st

from jaxoverlap.passes.analysis.einsum import Einsum, Spec
from jaxoverlap.passes.planning.splits import ShardedMatmul

Device = Mapping[str, int]
"""Its place along each mesh axis."""


def devices(axis_sizes: Mapping[str, int]) -> Iterator[Device]:
    for position in product(*map(range, axis_sizes.values())):
        yield dict(zip(axis_sizes, position, strict=True))


def block(shape: tuple[int, ...], spec: Spec, device: Device, axis_sizes: Mapping[str, int]):
    """Return the slices of one device's block; a dim's axes are major to minor."""
    slices = []
    for size, axes in zip(shape, spec, strict=True):
        index = 0
        for axis in axes:
            index = index * axis_sizes[axis] + device[axis]
        parts = math.prod(axis_sizes[a] for a in axes)
        assert size % parts == 0, "an uneven block"
        slices.append(slice(index * size // parts, (index + 1) * size // parts))
    return tuple(slices)


def along(axis: str, device: Device, size: int) -> list[tuple[tuple[str, int], ...]]:
    """Return the devices of one group along an axis, in order, as keys (see `key`)."""
    return [key({**device, axis: rank}) for rank in range(size)]


def key(device: Device) -> tuple[tuple[str, int], ...]:
    return tuple(device.items())


def operands(einsum: Einsum, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return integer operands, so that sums are exact in any order, and their product."""
    rng = np.random.default_rng(seed)
    lhs, rhs = (
        rng.integers(-9, 10, [einsum.sizes[c] for c in letters])
        for letters in (einsum.lhs, einsum.rhs)
    )
    return lhs, rhs, np.einsum(str(einsum), lhs, rhs)


@st.composite
def einsums(draw, *, most: int = 2, sizes: tuple[int, ...] = (4, 8)) -> Einsum:
    """Draw up to `most` letters of each role, the operands' dims in any order."""
    letters = iter("abcdefgh")

    def some() -> list[str]:
        return [next(letters) for _ in range(draw(st.integers(0, most)))]

    batch, contracted, left, right = some(), some(), some(), some()
    lhs = draw(st.permutations(batch + contracted + left))
    rhs = draw(st.permutations(batch + contracted + right))
    # The result: batch in an order of its own, then what is free in the operands' order.
    batch = draw(st.permutations(batch))
    out = [*batch, *(c for c in lhs if c in left), *(c for c in rhs if c in right)]
    size = {c: draw(st.sampled_from(sizes)) for c in sorted({*lhs, *rhs})}
    return Einsum("".join(lhs), "".join(rhs), "".join(out), size)


def spec_of(letters: str, held: str | None, axis: str = "x") -> Spec:
    return tuple((axis,) if c == held else () for c in letters)


def one_axis(
    einsum: Einsum,
    lhs: str | None,
    rhs: str | None,
    out: str | None,
    n: int,
    itemsize: tuple[int, int, int] = (2, 2, 2),
) -> ShardedMatmul:
    """Return a matmul whose sides hold the axis x of n devices on one letter, or None."""
    return ShardedMatmul(
        einsum=einsum,
        lhs=spec_of(einsum.lhs, lhs),
        rhs=spec_of(einsum.rhs, rhs),
        out=spec_of(einsum.out, out),
        itemsize=itemsize,
        axis_sizes={"x": n},
    )
