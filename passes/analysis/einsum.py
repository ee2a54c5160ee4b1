"""A matmul by letters: an einsum whose letters are batch, contracted, or free of one operand."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Spec = tuple[tuple[str, ...], ...]
"""Mesh axes of every dim, major to minor, as Shardy and `PartitionSpec` order them."""

Side = Literal["lhs", "rhs", "out"]
SIDES: tuple[Side, Side, Side] = ("lhs", "rhs", "out")
LETTERS = string.ascii_letters


@dataclass(frozen=True)
class Einsum:
    """A `dot_general` by letters.

    Attributes:
        lhs, rhs, out: one letter a dim; the result's are batch, left free, right free, in order.
        sizes: the global size of each letter.
    """

    lhs: str
    rhs: str
    out: str
    sizes: Mapping[str, int] = field(hash=False)  # equal ones count, though they have no hash

    def __str__(self) -> str:
        return f"{self.lhs},{self.rhs}->{self.out}"

    def side(self, side: Side) -> str:
        """Return the letters of one operand or of the result."""
        return {"lhs": self.lhs, "rhs": self.rhs, "out": self.out}[side]

    def role(self, letter: str) -> str:
        """Return a letter's role in this matmul: batch, contracted, lhs free or rhs free."""
        if letter not in self.out:
            return "contracted"
        if letter in self.lhs and letter in self.rhs:
            return "batch"
        return "lhs free" if letter in self.lhs else "rhs free"


def einsum_of(
    dimension_numbers: tuple, lhs_shape: Sequence[int], rhs_shape: Sequence[int]
) -> Einsum:
    """Return the einsum of `lax.dot_general`'s dimension numbers.

    Raises:
        ValueError: if the matmul has more dims than the alphabet has letters.
    """
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dimension_numbers
    if len(lhs_shape) + len(rhs_shape) > len(LETTERS):
        raise ValueError(
            f"a dot_general of {len(lhs_shape)} and {len(rhs_shape)} dims has more dims than there "
            f"are letters ({len(LETTERS)}): reshape its operands to fewer dims"
        )
    lhs = LETTERS[: len(lhs_shape)]
    fresh = iter(LETTERS[len(lhs_shape) :])
    shared = dict(zip(rhs_contract, lhs_contract, strict=True))
    shared |= dict(zip(rhs_batch, lhs_batch, strict=True))
    rhs = "".join(lhs[shared[d]] if d in shared else next(fresh) for d in range(len(rhs_shape)))
    out = "".join(lhs[d] for d in lhs_batch)
    out += "".join(c for d, c in enumerate(lhs) if d not in (*lhs_batch, *lhs_contract))
    out += "".join(c for d, c in enumerate(rhs) if d not in shared)
    sizes = dict(zip(lhs, lhs_shape, strict=True)) | dict(zip(rhs, rhs_shape, strict=True))
    return Einsum(lhs, rhs, out, sizes)
