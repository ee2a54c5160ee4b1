"""Tell which kernels the instructions of a partitioned module will have, once XLA has fused it.

Element-wise operations are one kernel with what reads them, up to a matmul, a collective or the end
of a loop's body.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from jaxoverlap.cost.kernels import KernelWork
from jaxoverlap.plan.collectives import OPCODES
from jaxoverlap.simulation import hlo
from jaxoverlap.simulation.hlo_work import HOST_SPACE, work

_FREE = (
    *("parameter", "constant", "get-tuple-element", "tuple", "bitcast", "reshape", "opt-barrier"),
    *("partition-id", "replica-id", "after-all", "iota", "add-dependency"),
)
_OWN_KERNELS = (
    "dot",
    "convolution",
    "custom-call",
    "scatter",
    "sort",
    "fusion",
    "rng-bit-generator",
)
_LAYOUT = 'custom_call_target="LayoutConstraint"'
_VIEWS = ("bitcast", "reshape")
_RENAMES = (*_VIEWS, "opt-barrier")
_SLICES = ("dynamic-slice", "slice", "gather")


class Kernels:
    """The kernels that a computation will have, once XLA has fused it."""

    def __init__(self, module: hlo.Module, body: Sequence[hlo.Instruction]):
        self._module, self._body = module, body
        self._by_name = {i.name: i for i in body}
        self._shapes = {i.name: i.shape for i in body}
        self._users = hlo.users(body)

    def work(self, i: hlo.Instruction) -> KernelWork:
        """Return the work of an instruction's kernel; none where it is part of another's."""
        if i.opcode in _FREE or _LAYOUT in i.line or HOST_SPACE in i.shape:
            return KernelWork()
        if self.transposed_by_matmul(i):
            return KernelWork()
        if i.opcode in _OWN_KERNELS:
            return work(self._module, i, self._shapes)
        if not self._ends(i) or self._adds_to_matmul(i):
            return KernelWork()
        return KernelWork(memory_bytes=self._written(i) + sum(self._read(i)))

    def _adds_to_matmul(self, i: hlo.Instruction) -> bool:
        """Return whether an instruction adds to a matmul that only it reads, as cuBLAS can."""
        if i.opcode != "add":
            return False
        for operand in i.operands:
            made = self._maker(operand, _VIEWS)
            if made is not None and made.opcode == "dot" and len(self._users[made.name]) == 1:
                return True
        return False

    def part_of(self, i: hlo.Instruction) -> hlo.Instruction | None:
        """Return the one slice of a value that anybody reads; None where more is read."""
        readers = list(self._readers(i))
        slices = [user for user in readers if user.opcode == "dynamic-slice"]
        return slices[0] if slices and len(slices) == len(readers) else None

    def is_fused(self, i: hlo.Instruction) -> bool:
        """Return whether an instruction's value never comes to memory: its reader computes it."""
        return self._fuses(i) and not self._ends(i)

    def transposed_by_matmul(self, i: hlo.Instruction) -> bool:
        """Return whether a transpose moves nothing, as matmuls alone read what it turns.

        cuBLAS takes either operand transposed, if the full matrix is transposed.
        """
        if i.opcode != "transpose":
            return False
        order = [int(d) for d in i.attribute("dimensions").strip("{}").split(",")]
        transposed = [*range(order[0], len(order)), *range(order[0])]
        return order == transposed and self.only_matmuls_read(i)

    def only_matmuls_read(self, i: hlo.Instruction) -> bool:
        """Return whether every reader of a value is a matmul, through what renames or turns it."""
        return all(
            user.opcode == "dot" or self.transposed_by_matmul(user) for user in self._readers(i)
        )

    def made_by_matmul(self, i: hlo.Instruction) -> bool:
        """Return whether a matmul made the first operand of an instruction."""
        made = self._maker(i.operands[0], _RENAMES)
        return made is not None and made.opcode == "dot"

    def _fuses(self, i: hlo.Instruction) -> bool:
        return (
            i.opcode not in (*_FREE, *_OWN_KERNELS, *hlo.CONTROL_FLOW) and i.opcode not in OPCODES
        )

    def _ends(self, i: hlo.Instruction) -> bool:
        """Return whether a kernel ends at an instruction: somebody reads its value from memory."""
        if not self._fuses(i):
            return False
        if i.is_root or (i.opcode == "reduce" and not self._normalizes(i)) or self._is_named(i):
            return True
        return any(not self._fuses(user) or self._is_updated(i, user) for user in self._readers(i))

    def _is_named(self, i: hlo.Instruction) -> bool:
        """Return whether a value gets a name of its own, by a barrier that ties it to no other.

        Nothing is fused across it. One with more operands orders what was made anyway.
        """
        return any(
            user.opcode == "opt-barrier" or (user.opcode in _VIEWS and self._is_named(user))
            for user in self._users[i.name]
        )

    def _normalizes(self, i: hlo.Instruction) -> bool:
        """Return whether a reduction is one kernel with what reads it, as in a softmax or a norm.

        It reduces rows that lie in memory one after the other, and what is made of the result is
        repeated along them. XLA:GPU keeps a row in a block of the kernel (SoftmaxRewriterTriton).
        """
        made = self._by_name.get(i.operands[0].partition("#")[0])
        if i.shape.startswith("(") or made is None:
            return False
        rows = hlo.dims(hlo.array_shapes(made.shape)[0])
        if i.attribute("dimensions") != f"{{{len(rows) - 1}}}":
            return False
        stack, repeated = list(self._readers(i)), False
        while stack:
            user = stack.pop()
            if not self._fuses(user):
                return False
            if user.opcode != "broadcast":
                stack += [] if user.is_root else self._readers(user)
            else:
                repeated |= hlo.dims(hlo.array_shapes(user.shape)[0]) == rows
        return repeated

    def _is_updated(self, i: hlo.Instruction, user: hlo.Instruction) -> bool:
        """Return whether a user writes into a value that some kernel must have written before."""
        if user.opcode != "dynamic-update-slice" or i.opcode == "dynamic-update-slice":
            return False
        return self._maker(user.operands[0], _RENAMES) is i

    def _maker(self, operand: str, renames: Sequence[str]) -> hlo.Instruction | None:
        """Return the instruction that makes an operand's value, through those that rename it."""
        made = self._by_name.get(operand.partition("#")[0])
        while made is not None and made.opcode in renames:
            made = self._by_name.get(made.operands[0].partition("#")[0])
        return made

    def _readers(self, i: hlo.Instruction) -> Iterator[hlo.Instruction]:
        """Yield the readers of a value, through what only renames it."""
        for user in self._users[i.name]:
            if user.opcode in _RENAMES:
                yield from self._readers(user) if not user.is_root else iter((user,))
            else:
                yield user

    def _written(self, i: hlo.Instruction) -> int:
        if i.opcode == "dynamic-update-slice":
            return hlo.shape_bytes(self._shapes[i.operands[1]])
        return hlo.shape_bytes(i.shape)

    def _read(self, i: hlo.Instruction) -> Iterator[int]:
        """Yield the bytes of what a kernel reads, from the instruction at which it ends."""
        seen, stack = {i.name}, [i]
        while stack:
            at = stack.pop()
            if at.opcode in _SLICES:
                yield hlo.shape_bytes(at.shape)
                continue
            skipped = 1 if at.opcode == "dynamic-update-slice" else 0
            for operand in at.operands[skipped:]:
                made = self._by_name.get(operand.partition("#")[0])
                if made is None or made.name in seen:
                    continue
                seen.add(made.name)
                if made.opcode in _VIEWS or self.is_fused(made):
                    stack.append(made)
                elif made.opcode not in ("constant", "iota", "partition-id"):
                    yield hlo.shape_bytes(made.shape)


def transposed_bytes(i: hlo.Instruction, kernels: Kernels) -> int:
    """Return the bytes of the copy that a collective with non-contiguous blocks needs.

    NCCL's are contiguous. Along another dim than the first XLA:GPU transposes after a gather, and
    before a scatter, except along the last dim of a matmul's operand or result, which the matmul
    itself reads or writes transposed.
    """
    sizes = hlo.dims(hlo.array_shapes(i.shape)[0]) if not i.shape.startswith("(") else ()
    dim, beside_matmul = 0, False
    if i.opcode == "all-gather":
        dim = int(i.attribute("dimensions").strip("{}"))
        beside_matmul = kernels.only_matmuls_read(i)
    elif i.opcode == "all-reduce" and (part := kernels.part_of(i)) is not None:
        pairs = zip(sizes, hlo.dims(hlo.array_shapes(part.shape)[0]), strict=False)
        dim = next((d for d, (whole, cut) in enumerate(pairs) if whole != cut), 0)
        beside_matmul = kernels.made_by_matmul(i)
    if dim == len(sizes) - 1 and beside_matmul:
        return 0
    return 2 * hlo.shape_bytes(i.shape) if math.prod(sizes[:dim]) > 1 else 0
