"""Walk XLA's schedule: how often computations run, and the matmuls each start overlaps with."""

from __future__ import annotations

import functools
import re
from bisect import bisect
from collections.abc import Iterator
from dataclasses import dataclass

from jaxoverlap.simulation import hlo

_MATMUL_TARGET = re.compile(
    r'custom_call_target="(?:__cublas\$(?!triangular)|__cudnn\$(?:fmha|conv)|[^"]*(?:matmul|gemm|Dot))',
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Collective:
    """A collective of a scheduled module.

    Attributes:
        name: the instruction; computation: the one that it is in.
        kind: as HLO writes it, as in "all-gather".
        bytes_moved: bytes that each device sends when it runs once, by a ring.
        group_size: devices that take part together.
        runs: how often a step runs it; a loop whose trips XLA does not know counts once.
        source: the "folder/file.py:line" it came from; empty if the module does not say.
        ring: the ring that it is a hop of, as in "all_gather_matmul.7", or None.
        asynchronous: whether anything can run concurrently.
        matmuls: the matmuls scheduled between its start and its done.
        groups: which devices take part together, as HLO writes it; empty: all.
        op_name: the path of names above the JAX operation it came from.
        by_copy: whether it is a permute that is to be a copy, where its devices are one process's.
        scale_up: whether XLA has it marked that each of its groups is within one NVLink domain.
        stream: XLA's number of the communication stream that it runs on (`streams.py`); None: the
            stream of the kernels, as of all that are synchronous, or not known.
    """

    name: str
    computation: str
    kind: str
    bytes_moved: int
    group_size: int
    runs: int
    source: str
    ring: str | None
    asynchronous: bool
    matmuls: tuple[str, ...]
    groups: str = ""
    op_name: str = ""
    by_copy: bool = False
    scale_up: bool = False
    stream: int | None = None

    @property
    def covered(self) -> bool:
        """Return whether a matmul is scheduled while the collective is in flight."""
        return self.asynchronous and bool(self.matmuls)


def running(module: hlo.Module, computation: str, runs: int) -> Iterator[tuple[str, int]]:
    """Yield the computations that a step runs in sequence, and how often each runs."""
    yield computation, runs
    for instruction in module.body(computation):
        if instruction.opcode in hlo.CONTROL_FLOW:
            inner = runs * (instruction.trip_count or 1 if instruction.opcode == "while" else 1)
            if instruction.share is not None:
                inner = round(runs * instruction.share)
            if not inner:
                continue
            for called in instruction.called:
                yield from running(module, called, inner)


class Matmuls:
    """A predicate: whether an instruction is a matmul, or runs one."""

    def __init__(self, module: hlo.Module):
        self._module = module
        self._inside = functools.cache(self._computation)

    def __call__(self, instruction: hlo.Instruction) -> bool:
        """Return whether an instruction is a matmul, or runs one."""
        if instruction.opcode in ("dot", "convolution"):
            return True
        if instruction.opcode == "custom-call":
            return bool(_MATMUL_TARGET.search(instruction.line))
        return any(map(self._inside, instruction.called))

    def _computation(self, name: str) -> bool:
        return any(map(self, self._module.computations.get(name, ())))


class Starts:
    """The asynchronous starts of one computation, with their dones and the matmuls in between."""

    def __init__(self, body: tuple[hlo.Instruction, ...], matmuls: Matmuls):
        self._body = body
        self._products = [position for position, i in enumerate(body) if matmuls(i)]
        self._waiters = {  # the update or done that waits for an instruction, by its name
            i.operands[0]: position
            for position, i in enumerate(body)
            if i.operands and i.opcode.endswith(("-update", "-done"))
        }

    def done(self, position: int) -> int:
        """Return the index of the done that belongs to the start at an index, through its updates.

        Raises:
            ValueError: if nothing does.
        """
        while (name := self._body[position].name) in self._waiters:
            position = self._waiters[name]
        if not self._body[position].opcode.endswith("-done"):
            raise ValueError(
                f"the module never waits for {name}: the text is truncated; give the complete "
                "module"
            )
        return position

    def matmuls(self, position: int, done: int) -> tuple[str, ...]:
        """Return the names of the matmuls between two indices."""
        under = self._products[bisect(self._products, position) : bisect(self._products, done)]
        return tuple(self._body[i].name for i in under)


def bodies(module: hlo.Module) -> Iterator[tuple[str, int, tuple[hlo.Instruction, ...], Starts]]:
    """Yield the computations that a step runs: name, how often, instructions, starts.

    Raises:
        ValueError: if the module lacks a computation that it calls.
    """
    matmuls = Matmuls(module)
    for computation, runs in running(module, module.entry, 1):
        body = module.body(computation)
        yield computation, runs, body, Starts(body, matmuls)
