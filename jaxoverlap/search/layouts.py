"""Record the shardings pinned to results of matmuls that the user left to XLA."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Literal

import msgspec

from jaxoverlap._util.text import human_bytes
from jaxoverlap.plan.speedup import milliseconds


class PinnedResult(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A value that is constrained to a sharding: mostly a matmul's result.

    Attributes:
        site: the matmul's id in the step; None for a value that is no matmul's result.
        source: its source line; the name of an argument.
        type: the type of the value.
        part: which value of that line has this type in the forward pass, where a user can reach it:
            the matmul's result, or an operand, whose cotangent the pinned result then is; or an
            argument of the step, or another value of the line.
        spec: the mesh axes on each of its dims, major to minor.
        gain_s: estimated seconds that this pin saves if all others stay; None if not estimated.
    """

    site: int | None
    source: str
    type: str
    part: Literal["result", "operand", "value", "argument"] = "result"
    spec: tuple[tuple[str, ...], ...]
    gain_s: float | None = None

    @property
    def layout(self) -> str:
        """The mesh axes on each dim, as a `PartitionSpec` has them."""
        return f"({spec_text(self.spec)})"

    @property
    def gain(self) -> str:
        """The gain of this pin, in words; empty if it was not estimated."""
        return f": {milliseconds(self.gain_s)} less (estimated)" if self.gain_s is not None else ""


class KeptEdit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An edit that a pass proposed, and that made the step faster.

    Attributes:
        edit: the edit, in words.
        gain_s: estimated seconds that it saves.
    """

    edit: str
    gain_s: float

    def __str__(self) -> str:
        return f"{self.edit}: {milliseconds(self.gain_s)} less (estimated)"


def spec_text(spec: tuple[tuple[str, ...], ...], quote: str = "") -> str:
    """Write the arguments of a `PartitionSpec`, the names of axes in quotes or not."""
    dims = [", ".join(f"{quote}{axis}{quote}" for axis in axes) or "None" for axes in spec]
    return ", ".join(
        f"({dim})" if len(axes) > 1 else dim for dim, axes in zip(dims, spec, strict=True)
    )


class Layouts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The results that are pinned, and the estimated gain.

    The estimates are of XLA's partitioned programs, before any ring, so the gain is that of the
    layouts alone.

    Attributes:
        pins: the pinned values: arguments, others that are no matmul's results, and results in the
            order of their matmuls.
        lost: what the user wrote so that the batch lost its sharding, in words; empty if nothing.
        kept: further edits of the layout that were proposed and accepted.
        plain_s, step_s: seconds of a step without these, and with them.
        plain_peak_bytes, peak_bytes: the estimated memory of a device.
        memory_bytes: the memory that a device has.
        questions: how many layouts XLA's partitioner was run on.
        axes: for each mesh axis the dims that it shards, by preference; each named as a dim of an
            argument.
        replicated_bytes: bytes of weights and optimizer state that every device has, as they are
            sharded over no axis; 0 if they are few.
        batch_axes: the mesh axes that shard the batch, with their devices.
        unnamed: the equations through which no dim could be followed, with their source lines.
        aborting: the equations for which XLA's partitioner may end the process, with their source
            lines; if there are any, no layout was tried.
    """

    pins: tuple[PinnedResult, ...]
    lost: tuple[str, ...] = ()
    kept: tuple[KeptEdit, ...] = ()
    plain_s: float
    step_s: float
    plain_peak_bytes: int
    peak_bytes: int
    memory_bytes: int
    questions: int
    axes: Mapping[str, tuple[str, ...]] = {}
    replicated_bytes: int = 0
    batch_axes: Mapping[str, int] = {}
    unnamed: tuple[str, ...] = ()
    aborting: tuple[str, ...] = ()

    @property
    def changes(self) -> tuple[PinnedResult | KeptEdit, ...]:
        """The pinned results and further edits."""
        return (*self.pins, *self.kept)

    @property
    def lines(self) -> list[str]:
        """The lines of a plan's notes."""
        pins = Counter(f"{p.type} at {p.source} to {p.layout}{p.gain}" for p in self.pins)
        equal = (f"{pin}, {n} times" if n > 1 else pin for pin, n in pins.items())
        return [*self.repairs, self.gain, *(f"  {x}" for x in (*equal, *self.kept, *self.remarks))]

    @property
    def repairs(self) -> list[str]:
        """What was lost by how the step is written, and what its repair gains, in words."""
        seconds = f"{milliseconds(self.plain_s)} as written, {milliseconds(self.step_s)} repaired"
        return [f"{why[:1].upper()}{why[1:]} ({seconds}, estimated)." for why in self.lost]

    @property
    def remarks(self) -> list[str]:
        """The limits of the search, in words: memory, dims, layouts that were not tried."""
        remarks = []
        if self.peak_bytes > self.memory_bytes:
            needed, there = human_bytes(self.peak_bytes), human_bytes(self.memory_bytes)
            remarks.append(f"It may not fit: about {needed} of a device's {there}.")
        if self.replicated_bytes and self.batch_axes:
            axes, devices = ", ".join(self.batch_axes), math.prod(self.batch_axes.values())
            stored, less = self.replicated_bytes, self.replicated_bytes // devices
            remarks.append(
                f"Every device stores {human_bytes(stored)} of weights and optimizer state, "
                f"sharded over no axis; over {axes} it would be {human_bytes(less)}. That changes "
                "what is stored outside of the step, so it is yours to do: device_put them with "
                f"a PartitionSpec that has {axes} (FSDP)."
            )
        if self.unnamed:
            remarks.append(f"No dim was followed through {', '.join(self.unnamed)}.")
        if self.aborting:
            remarks.append(
                "XLA's partitioner ends the process for some shardings of "
                f"{', '.join(self.aborting)}, so no layout was tried (docs/upstream.md)."
            )
        return remarks

    @property
    def gain(self) -> str:
        """The estimated gain of all pins together, in words."""
        tried = f"{self.questions} layout{'s' * (self.questions != 1)} tried"
        if not self.changes:
            return f"XLA's layout stays: no other has a lower estimated time ({tried})."
        what = "result" if all(pin.site is not None for pin in self.pins) else "value"
        pinned = f"{len(self.pins)} {what}{' is' if len(self.pins) == 1 else 's are'} pinned"
        return (
            f"{pinned if self.pins else 'The layout is edited'}: "
            f"{milliseconds(self.plain_s)} -> {milliseconds(self.step_s)} (estimated, before any "
            f"ring); memory {human_bytes(self.plain_peak_bytes)} -> "
            f"{human_bytes(self.peak_bytes)} ({tried})."
        )
