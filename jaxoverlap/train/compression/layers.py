"""Divide a tree of parameters into layers: matrices to compress, and other leaves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

SMALLEST = 1024  # elements of a matrix that is worth compressing (torch_cgx has the same bound)


@dataclass(frozen=True)
class Layer:
    """A matrix, or a stack of matrices that share one setting.

    Attributes:
        name: the leaf's path in the parameters, with the matrix's number where that has its own.
        leaf: the number of the leaf among the leaves of the tree.
        shape: of the leaf.
        dtype: of the leaf, and of what is sent where a compressor sends floats.
        rows, cols: the sizes of a matrix.
        stack: how many matrices of a stacked leaf share the setting; 0 if there is no stack.
        part: which matrix of a stacked leaf this is; None if it is not one of several.
    """

    name: str
    leaf: int
    shape: tuple[int, ...]
    dtype: Any
    rows: int
    cols: int
    stack: int = 0
    part: int | None = None

    @property
    def size(self) -> int:
        """Return the elements of one matrix."""
        return self.rows * self.cols

    @property
    def count(self) -> int:
        """Return the number of matrices."""
        return self.stack or 1

    @property
    def itemsize(self) -> int:
        """Return the bytes of an element."""
        return jnp.dtype(self.dtype).itemsize

    def values(self, leaf: jax.Array) -> jax.Array:
        """Return the part of its leaf that is this layer."""
        return leaf if self.part is None else leaf[self.part]

    def matrices(self, leaf: jax.Array) -> list[jax.Array]:
        """Return this layer's matrices, as slices of its leaf."""
        values = self.values(leaf)
        parts = [values[i] for i in range(self.stack)] if self.stack else [values]
        return [part.reshape(self.rows, self.cols) for part in parts]


def layers_of(
    params: Any, *, stacked: Sequence[str] = (), shared: bool = False, raw: Sequence[str] = ()
) -> tuple[Layer, ...]:
    """Return the layers of parameters that are large enough to compress, in the leaves' order.

    A leaf is seen as a matrix by the split of its dims that has the least rows + columns. Leaves
    with fewer than two dims (besides a stack's) or fewer than 1024 elements a matrix have no layer.

    Args:
        params: arrays, or shapes.
        stacked: keys; leaves below one of them have a first dim of layers, as `lax.scan` takes.
        shared: whether the matrices of a stacked leaf share one setting, or each has its own.
        raw: keys; leaves below one of them have no layer.

    Raises:
        ValueError: if a key of `stacked` or `raw` is nowhere in the tree, or a stacked leaf is a
            scalar.
    """
    found = list[Layer]()
    missing, unknown = set(stacked), set(raw)
    for number, (path, leaf) in enumerate(jax.tree_util.tree_leaves_with_path(params)):
        keys = {jax.tree_util.keystr((entry,), simple=True) for entry in path}
        missing -= keys
        unknown -= keys
        name = jax.tree_util.keystr(path, simple=True, separator=".") or "parameters"
        shape, dtype = tuple(leaf.shape), jnp.dtype(leaf.dtype)
        is_stack = not keys.isdisjoint(stacked)
        if is_stack and not shape:
            raise ValueError(f"{name} is a scalar and stands below a key of stacked={stacked!r}")
        if not keys.isdisjoint(raw):
            continue
        dims = shape[1:] if is_stack else shape
        if len(dims) < 2 or math.prod(dims) < SMALLEST or not jnp.issubdtype(dtype, jnp.floating):
            continue
        rows, cols = _cut(dims)
        if not is_stack:
            found.append(Layer(name, number, shape, dtype, rows, cols))
        elif shared:
            found.append(Layer(name, number, shape, dtype, rows, cols, stack=shape[0]))
        else:
            found += [
                Layer(f"{name}[{i}]", number, shape, dtype, rows, cols, part=i)
                for i in range(shape[0])
            ]
    if unknown:
        raise ValueError(
            f"raw={tuple(raw)!r}: no leaf of the parameters stands below "
            f"{', '.join(sorted(unknown))}; name keys of the tree whose leaves are not compressed"
        )
    if missing:
        raise ValueError(
            f"stacked={tuple(stacked)!r}: no leaf of the parameters stands below "
            f"{', '.join(sorted(missing))}; name keys of the tree whose leaves a scan runs over"
        )
    return tuple(found)


def _cut(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the sizes (m, n) of a leaf seen as a matrix: the split of its dims of least m + n."""
    splits = ((math.prod(shape[:k]), math.prod(shape[k:])) for k in range(1, len(shape)))
    return min(splits, key=sum)
