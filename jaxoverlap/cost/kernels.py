"""Kernels as the cost model prices them: matmuls, fused attention, bytes of memory."""

from __future__ import annotations

import re
from dataclasses import dataclass

_BITS_IN_NAME = re.compile(r"[a-z]+(\d+)")


def array_bytes(dtype: str, elements: int) -> int:
    """Bytes of an array, by its dtype's name in HLO; a token has none."""
    named = _BITS_IN_NAME.match(dtype)
    bits = 8 if dtype == "pred" else int(named.group(1)) if named else 0
    return elements * bits // 8


@dataclass(frozen=True)
class MatmulKernel:
    """A matmul of [batch, m, k] by [batch, k, n]; `dtype` is the operands', as HLO writes it."""

    m: int
    n: int
    k: int
    batch: int = 1
    dtype: str = "bf16"

    @property
    def flops(self) -> int:
        """Floating-point operations, a multiply-add counted as two."""
        return 2 * self.batch * self.m * self.n * self.k

    @property
    def memory_bytes(self) -> int:
        """Count the bytes of operands and result, each once; the result in the operands' dtype."""
        m, n, k = self.m, self.n, self.k
        return self.batch * array_bytes(self.dtype, m * k + k * n + m * n)

    def __str__(self) -> str:
        batch = f"{self.batch} x " if self.batch > 1 else ""
        return f"{batch}[{self.m}, {self.k}] [{self.k}, {self.n}] {self.dtype}"


@dataclass(frozen=True)
class AttentionKernel:
    """One kernel of fused attention; `dtype` is the queries', as HLO writes it.

    Attributes:
        queries, keys: lengths of the two sequences.
        heads: number of heads in all the batch.
        head_size: length of a query's vector.
        causal: whether half of the scores are masked, and not computed.
        backward: whether it is the gradient's.
    """

    queries: int
    keys: int
    heads: int
    head_size: int
    causal: bool = False
    backward: bool = False
    dtype: str = "bf16"

    @property
    def flops(self) -> int:
        """Count two matmuls of the scores' size forward, five backward; half under a causal mask.

        FlashAttention-2 (Dao 2023), section 4.1, counts so.
        """
        matmuls = 5 if self.backward else 2
        flops = 2 * matmuls * self.heads * self.queries * self.keys * self.head_size
        return flops // 2 if self.causal else flops

    def __str__(self) -> str:
        mask, way = ("causal " if self.causal else ""), (" backward" if self.backward else "")
        sizes = f"{self.heads} heads of {self.head_size}, {self.queries} x {self.keys}"
        return f"{mask}attention{way}, {sizes} {self.dtype}"


@dataclass(frozen=True)
class KernelWork:
    """The work of one kernel; all zero where none runs.

    Attributes:
        matmuls: in the order in which they run.
        memory_bytes: bytes read and written; without operands and results of a kernel that is a
            matmul and nothing else.
        unknown: the opcode or the custom call's target, if it is not known here. Its bytes are
            those of its operands and results, the least that it can cost.
        transcendentals: exponentials, tangents, roots and the like, one for each element. They hide
            behind the bytes on a GPU, and do not on a CPU.
        attention: the fused attention, if the kernel is one.
        transposed_bytes: bytes read along one dim and written along another. A GPU turns them in
            tiles, at its memory's rate; a CPU does not.
    """

    matmuls: tuple[MatmulKernel, ...] = ()
    memory_bytes: int = 0
    unknown: str = ""
    transcendentals: int = 0
    attention: AttentionKernel | None = None
    transposed_bytes: int = 0


FREE = KernelWork()
