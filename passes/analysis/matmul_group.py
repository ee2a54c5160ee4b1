"""A primitive for several matmuls, so that one sharding rule covers all of them.

    q, k, v = matmul_group[outputs=...] x wq wk wv      # and for x's gradient, one sum of three

`jaxoverlap.ops` binds it. It computes what its `dot_general`s would, and the passes inline it to
read them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import Array, lax

from jaxoverlap.passes.analysis.einsum import Einsum, einsum_of

Dim = tuple[str, int, int]  # "operand" or "result", its number, its dim
MATMUL_GROUP = "matmul_group"  # the primitive's name


@dataclass(frozen=True)
class Product:
    """One matmul of a group.

    Attributes:
        lhs, rhs: the numbers of its operands, among the group's.
        dimension_numbers: as in `lax.dot_general`, of tuples only.
        precision: as there.
        dtype: the dtype of the result.
    """

    lhs: int
    rhs: int
    dimension_numbers: tuple[Any, ...]
    precision: Any
    dtype: Any

    def einsum(self, lhs: Any, rhs: Any) -> Einsum:
        """Return the matmul by letters, given the types of its operands."""
        return einsum_of(self.dimension_numbers, lhs.shape, rhs.shape)

    def __call__(self, lhs: Array, rhs: Array) -> Array:
        """Multiply."""
        return lax.dot_general(
            lhs,
            rhs,
            dimension_numbers=self.dimension_numbers,
            precision=self.precision,
            preferred_element_type=self.dtype,
        )


@dataclass(frozen=True)
class MatmulGroup:
    """The matmuls of one operation.

    Attributes:
        outputs: for each result the products whose sum it is, all of one shape and dtype.
    """

    outputs: tuple[tuple[Product, ...], ...]

    @property
    def products(self) -> tuple[Product, ...]:
        """All products, in the order of the outputs."""
        return tuple(product for output in self.outputs for product in output)

    def __call__(self, *operands: Array) -> list[Array]:
        """Compute the group by plain matmuls."""
        return [
            functools.reduce(lax.add, (p(operands[p.lhs], operands[p.rhs]) for p in output))
            for output in self.outputs
        ]

    def factors(
        self, avals: Sequence[Any]
    ) -> tuple[tuple[tuple[str, ...], ...], tuple[tuple[str, ...], ...]]:
        """Name the dims of operands and results; dims that a matmul pairs have one name.

        Args:
            avals: the types of the operands.
        """
        pairs: list[tuple[Dim, Dim]] = []
        for number, output in enumerate(self.outputs):
            for p in output:
                einsum = p.einsum(avals[p.lhs], avals[p.rhs])
                first: dict[str, Dim] = {}
                sides = (("operand", p.lhs), ("operand", p.rhs), ("result", number))
                for side, letters in zip(sides, (einsum.lhs, einsum.rhs, einsum.out), strict=True):
                    for d, letter in enumerate(letters):
                        pairs.append((first.setdefault(letter, (*side, d)), (*side, d)))
        roots = {dim: dim for pair in pairs for dim in pair}
        for one, other in pairs:
            old, new = roots[other], roots[one]
            roots = {dim: new if root == old else root for dim, root in roots.items()}
        known = {root: f"f{i}" for i, root in enumerate(dict.fromkeys(roots.values()))}

        def names_of(kind: str, number: int) -> tuple[str, ...]:
            dims = sorted(d for d in roots if d[:2] == (kind, number))
            return tuple(known[roots[d]] for d in dims)

        operands = tuple(names_of("operand", n) for n in range(len(avals)))
        return operands, tuple(names_of("result", n) for n in range(len(self.outputs)))

    def jaxpr(self, avals: Sequence[Any]) -> Any:
        """Trace the group for operands of these types."""
        structs = tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals)
        return _traced(self, structs)


@functools.lru_cache(maxsize=1024)  # layers are alike
def _traced(group: MatmulGroup, structs: tuple[jax.ShapeDtypeStruct, ...]) -> Any:
    return jax.make_jaxpr(group)(*structs)
