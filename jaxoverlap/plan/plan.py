"""A plan: the edits that make a step overlap, and the step that they are for; as data and in files.

What is followed are the edits, and the settings of compiler, scheduler and NCCL. All else is
evidence: what was decided on each matmul and why, estimates, measurements. It is printed, and never
read back.

The file is JSON with a checksum, so that a truncated or edited file is recognised.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from jaxoverlap._util.files import opened, sealed, write_atomically
from jaxoverlap.plan.channel_row import ChannelRow
from jaxoverlap.plan.decisions import (
    Decision,
    Reason,
    Remaining,
    Skip,
    Style,
    Variant,
    without_rings,
)
from jaxoverlap.plan.edits import (
    DropTypes,
    Edit,
    Keep,
    MakeRing,
    Offload,
    Pin,
    PinResults,
    Recompute,
    SplitBatch,
    SplitExchange,
    SumLate,
    in_order,
)
from jaxoverlap.plan.price import Price
from jaxoverlap.plan.speedup import milliseconds
from jaxoverlap.plan.table import (
    cluster_lines,
    count_line,
    idle_lines,
    late_sums_lines,
    mesh_text,
    partitioning_lines,
    remaining_lines,
    ring_table,
    skipped_table,
    split_exchange_lines,
)
from jaxoverlap.plan.trail import Proposed, trail_table
from jaxoverlap.plan.tuned import Measured, Predictions

__all__ = [
    "FSDP",
    "SCHEMA",
    "ChannelRow",
    "Decision",
    "MadeFor",
    "Measured",
    "Nccl",
    "Plan",
    "Predictions",
    "Reason",
    "Remaining",
    "Schedule",
    "Skip",
    "Style",
    "Variant",
]

FSDP = Literal["prefetch", "ring"]
_FORMAT = "jaxoverlap plan"
SCHEMA = 15  # of a plan's JSON: counts up with every change that another version cannot read


class Schedule(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """The settings of the scheduler pass, as in `jaxoverlap.Scheduler`."""

    slack: float
    in_flight: int
    extra_bytes: int = 0
    ahead_bytes: int = 0


class Nccl(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of NCCL, which it reads when a process starts: `overlap` cannot make them.

    Attributes:
        env: environment variables.
        channels: rows by collective and size.
    """

    env: Mapping[str, str] = {}
    channels: tuple[ChannelRow, ...] = ()


class MadeFor(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The one step, mesh and versions that a plan is for.

    Attributes:
        step: a hash of the traced step, with its arguments, results and donations. The same in
            every process: it covers no device and no path.
        arguments: the type and sharding of each argument.
        results: the sharding of each result, where the step states it.
        axis_types: the type of each mesh axis: Auto, Explicit or Manual.
        domains: over how many NVLink domains the devices along each mesh axis spread; empty where
            the cluster is not known.
        devices: what the devices call themselves.
        cluster: as named, or as the devices say; None if it is not known.
        versions: the versions of jaxoverlap, jax and jaxlib.
    """

    step: str
    arguments: tuple[str, ...]
    results: tuple[str, ...]
    axis_types: Mapping[str, str]
    domains: Mapping[str, int]
    devices: str
    cluster: str | None
    versions: Mapping[str, str]


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The edits of a step, its settings, and a `Decision` or a `Skip` for each `dot_general`.

    Attributes:
        schema: the schema of its JSON.
        step: the step's name.
        mesh: devices along each mesh axis.
        edits: what is done to the step, in order; none if it stays as it is.
        entries: what that means for each matmul, or why nothing is done with it; by its number
            before any ring, those of a split batch part by part.
        applied: what the edits gather ahead and scatter, in words.
        notes: what the search found out about layouts, the batch split and streams, in words.
        trail: the candidates that the search estimated, or that the tuning tried, in order; empty
            if there was neither.
        price: its estimated time and gain; None if nothing was estimated.
        partitioning: the operations that partition themselves, with their source lines; they are
            not rewritten.
        schedule: the scheduler pass; None where there is none.
        xla_options: compiler options, beyond the user's own and those that a pod needs.
        nccl: settings that the process has to be started with.
        predictions: what the simulation gave; None if there was none.
        measured: times on the hardware; None if none were taken.
        plain: whether it is the original step, as nothing else was faster. The scheduler pass may
            still reorder it.
        made_for: the step that it is for; None if it was not made from a step.
        remaining: the collectives that stay XLA's; only `explain()` lists them.
    """

    schema: int = SCHEMA
    step: str
    mesh: Mapping[str, int]
    edits: tuple[Edit, ...] = ()
    entries: tuple[Decision | Skip, ...]
    applied: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    trail: tuple[Proposed, ...] = ()
    price: Price | None = None
    partitioning: tuple[str, ...] = ()
    schedule: Schedule | None = None
    xla_options: Mapping[str, str] = {}
    nccl: Nccl = Nccl()
    predictions: Predictions | None = None
    measured: Measured | None = None
    plain: bool = False
    made_for: MadeFor | None = None
    remaining: tuple[Remaining, ...] = ()

    @property
    def tried(self) -> tuple[Proposed, ...]:
        """The candidates of a tuning, in order; empty for a plan that was not tuned."""
        return self.trail if self.predictions or self.measured else ()

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """The matmuls that become rings."""
        return tuple(e for e in self.entries if isinstance(e, Decision))

    @property
    def rings(self) -> tuple[MakeRing, ...]:
        """The edits that make rings."""
        return tuple(edit for edit in self.edits if isinstance(edit, MakeRing))

    @property
    def pins(self) -> tuple[Pin, ...]:
        """The edits that pin results of matmuls to a sharding; not those of a batch's parts."""
        whole = itertools.takewhile(lambda edit: not isinstance(edit, SplitBatch), self.edits)
        return tuple(edit for edit in whole if isinstance(edit, Pin))

    @property
    def split(self) -> SplitBatch | None:
        """The batch split; None if the batch is not split."""
        return next((edit for edit in self.edits if isinstance(edit, SplitBatch)), None)

    @property
    def skips(self) -> tuple[Skip, ...]:
        """The matmuls that are not rewritten."""
        return tuple(e for e in self.entries if isinstance(e, Skip))

    def left_alone(
        self,
        schedule: Schedule | None = None,
        xla_options: Mapping[str, str] | None = None,
        *,
        keeps: bool = False,
    ) -> Plan:
        """The plan that leaves the same step as it is, but for what it keeps.

        Args:
            schedule: the scheduler pass that it is compiled with all the same.
            xla_options: compiler options that it is compiled with.
            keeps: whether it keeps what this one keeps.
        """
        why = Reason("skipped", "the original step is faster")
        of_memory = (edit for edit in self.edits if isinstance(edit, Recompute | Keep | Offload))
        kept = tuple(of_memory) if keeps else ()
        before = (edit for edit in self.edits if isinstance(edit, DropTypes | PinResults))
        return msgspec.structs.replace(
            self,
            edits=tuple(in_order([*before, *kept])) if kept else (),
            entries=without_rings(self.entries, why),
            applied=(),
            notes=(),
            plain=not kept,
            price=None,
            schedule=schedule,
            xla_options=xla_options or {},
        )

    def checked(self) -> Plan:
        """The plan, if each of its fields holds what it may; one changed by hand may not.

        Raises:
            ValueError: if one does not; it says where.
        """
        try:
            return msgspec.convert(msgspec.to_builtins(self), Plan)
        except (msgspec.ValidationError, TypeError) as error:
            where = re.search(r"\$\.edits\[(\d+)\]", str(error))
            edit = f"{self.edits[int(where[1])]!r} does not fit: " if where else ""
            raise ValueError(
                f"plan={self.step!r} does not hold what a plan does: {edit}{error}. Take the plan "
                "that explain() or tune() gives, and leave out edits or change their variants"
            ) from error

    def to_json(self) -> str:
        """The plan as JSON."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> Plan:
        """The plan that `to_json` wrote.

        Raises:
            ValueError: if `text` is not such a plan; it says where.
        """
        try:
            _check_schema(msgspec.json.decode(text, type=_Schema).schema)
            return msgspec.json.decode(text, type=cls)
        except msgspec.MsgspecError as error:
            raise ValueError(
                f"not a plan: {error}; expected the JSON that Plan.to_json() writes"
            ) from error

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a file: a kill at any moment leaves the old file or the new one.

        Raises:
            OSError: if it cannot be written.
        """
        write_atomically(path, sealed(_FORMAT, msgspec.json.encode(self)))

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Plan:
        """The plan that `write` wrote.

        Raises:
            ValueError: if the file is truncated, edited, of another schema, or no plan at all.
            OSError: if it cannot be read.
        """
        try:
            return cls.from_json(opened(_FORMAT, Path(path).read_bytes()))
        except ValueError as error:
            raise ValueError(
                f"{os.fspath(path)}: {error}. Tune again, or write what explain() gives"
            ) from error

    @property
    def summary(self) -> str:
        """The lines that are printed above the tables: what was done, and with which settings."""
        settings = (self._compiled(), self._nccl())
        tuned = (f"  {one}" for one in (self.predictions, self.measured) if one is not None)
        origin = self.made_for
        return "\n".join(
            (
                count_line(self.entries),
                *(f"  {line}" for line in self.applied),
                *late_sums_lines(sum(isinstance(edit, SumLate) for edit in self.edits)),
                *split_exchange_lines(
                    [edit.parts for edit in self.edits if isinstance(edit, SplitExchange)]
                ),
                *(f"  {line}" for line in self.notes),
                *partitioning_lines(self.partitioning),
                *(cluster_lines(origin.cluster, origin.domains) if origin else ()),
                *filter(None, settings),
                *tuned,
            )
        )

    @property
    def verdict(self) -> str:
        """One line: the estimated gain; if nothing was estimated, how many matmuls become rings."""
        if self.price is not None:
            return self.price.verdict
        if self.plain:
            return "the original step"
        rings = sum(d.num_chunks > 1 for d in self.decisions)
        become = f"{rings} of {len(self.entries)} matmuls become rings by rule"
        return f"{become}; without prices the gain is not known, and may be a loss"

    def text(self, *, verbose: bool = False) -> str:
        """Write the plan as `print` shows it: the verdict, what was done, what was skipped.

        Args:
            verbose: whether each matmul and each collective gets a row of its own, and each
                candidate of the search. Otherwise equal rows are merged, and the smaller of XLA's
                collectives are summed up.
        """
        parts = [
            f"{self.step} on {mesh_text(self.mesh)}: {self.verdict}",
            self.summary,
            *ring_table(self.entries, verbose=verbose),
            *skipped_table(self.entries, verbose=verbose, without_rings=self._without_rings),
            *(idle_lines(self.entries) if verbose else ()),
            *(trail_table(self.trail) if verbose and not self.tried else ()),
            *remaining_lines(self.remaining, verbose=verbose),
        ]
        return "\n".join(parts)

    def __str__(self) -> str:
        return self.text()

    @property
    def _without_rings(self) -> str:
        """Why it has no rings, by the estimates of the search; empty if it says nothing of them."""
        tried = (row.evaluation for row in self.trail if MakeRing.__name__ in row.edits)
        ringed_s = [one.step_s for one in tried if one.step_s is not None and not one.refusal]
        if self.price is None or not ringed_s:
            return ""
        rings, none = milliseconds(min(ringed_s)), milliseconds(self.price.step_s)
        so = "so none" if min(ringed_s) >= self.price.step_s else "too little to gain"
        return f"not ringed: rings: {rings}, none: {none} (estimated), {so}"

    def _compiled(self) -> str:
        options = len(self.xla_options)
        used = [f"{options} XLA option{'s' * (options > 1)}"] if options else []
        if at := self.schedule:
            used.append(f"the scheduler pass (slack {at.slack:g}, {at.in_flight} in flight)")
        compiled = f"  Compiled with {' and '.join(used)}." if used else ""
        if not self.plain:
            return compiled
        return f"  The original step is taken: nothing else was faster.{compiled[1:]}"

    def _nccl(self) -> str:
        settings = [f"{name}={value}" for name, value in self.nccl.env.items()]
        if rows := len(self.nccl.channels):
            settings.append(f"{rows} row{'s' * (rows > 1)} of channels by collective and size")
        return f"  NCCL is to be started with {', '.join(settings)}." if settings else ""


class _Schema(msgspec.Struct):
    """The part of a plan that has to be read before the rest: its schema."""

    schema: Any = SCHEMA


def _check_schema(schema: Any) -> None:
    """Refuse a plan of another schema, whose fields may mean something else."""
    if schema == SCHEMA:
        return
    age = "a newer" if isinstance(schema, int) and schema > SCHEMA else "an older or no"
    raise ValueError(
        f"schema {schema!r}, written by {age} jaxoverlap; this one reads schema {SCHEMA}"
    )
