"""The edits that make a step overlap: a plan is a list of them, applied in their order.

An edit names matmuls by their number among the step's `dot_general`s, as the edits before it have
left the step, and says how values lie after it; so it is applied without asking XLA anything.
`passes/apply.py` applies edits, each kind by its pass (`passes/registry.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal

import msgspec

from jaxoverlap._util.text import human_bytes
from jaxoverlap.plan.collectives import Kind
from jaxoverlap.plan.decisions import Variant

Spec = tuple[tuple[str, ...], ...]
"""The mesh axes on each dim of a value, major to minor."""
_SHOWN = 6  # matmuls that an edit's line lists
_Count = Annotated[int, msgspec.Meta(ge=1)]
_Parts = Annotated[int, msgspec.Meta(ge=2)]


class _Edit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """An edit; each kind prints itself in one line."""


class DropTypes(_Edit, frozen=True, kw_only=True):
    """The shardings in the types of a step on an explicit mesh become constraints.

    The types of its arguments and results are put back after the last edit.

    Attributes:
        inferred: whether the types that JAX inferred are left to XLA's partitioner; what the user
            states is kept in any case.
    """

    inferred: bool = False

    def __str__(self) -> str:
        free = ", those that JAX inferred left to XLA" if self.inferred else ""
        return f"make the shardings in types constraints{free}"


class Recompute(_Edit, frozen=True, kw_only=True):
    """The backward pass computes a layer's saved values again, from the layer's inputs.

    Attributes:
        source: the line of the layer's first equation.
        values: how many values it would save.
        places: the number of the jaxpr that the layer stands in, outer ones first in the step with
            its jits opened, the index of its first equation there, and of the one behind its last
            one; for what each step of a scan computes twice the scan's; one for each equal layer.
        bytes_freed: what a device keeps less by it, in all, as estimated; 0 where not known.
    """

    source: str
    values: int
    places: Annotated[tuple[tuple[int, int, int], ...], msgspec.Meta(min_length=1)]
    bytes_freed: int = 0

    def __str__(self) -> str:
        layers = f" in {len(self.places)} layers" if len(self.places) > 1 else ""
        size = f", {human_bytes(self.bytes_freed)} less" if self.bytes_freed else ""
        return f"recompute {self.values} values of the layer at {self.source}{layers}{size}"


class Keep(_Edit, frozen=True, kw_only=True):
    """A value of the forward pass is saved for the backward pass, and not recomputed.

    Attributes:
        source, name: the line that computes it, and its checkpoint name, if it has one.
        value: its type.
        places: where it is computed again: the number of the remat, counted through the step with
            its jits opened, and of the equation and the result in that; one for each equal layer.
        bytes_kept: what a device keeps of it, in all; 0 where that is not known.
    """

    source: str
    name: str = ""
    value: str
    places: Annotated[tuple[tuple[int, int, int], ...], msgspec.Meta(min_length=1)]
    bytes_kept: int = 0

    def __str__(self) -> str:
        named = f" ({self.name})" if self.name else ""
        size = f", {human_bytes(self.bytes_kept)}" if self.bytes_kept else ""
        layers = f" of {len(self.places)} remats" if len(self.places) > 1 else ""
        return f"keep {self.value} of {self.source}{named}{layers}{size}"


class Offload(_Edit, frozen=True, kw_only=True):
    """A value that the forward pass saves waits in the host's memory for the backward pass.

    Attributes:
        source, name: the line that computes it, and its checkpoint name, if it has one.
        value: its type.
        places: what stacks it, or computes it where no scan does: the number of the jaxpr, outer
            ones first in the step with its jits opened, the index of a scan or another equation
            there, and of a result of that; one for each equal loop or layer.
        bytes_offloaded: what a device copies to its host's memory, in all; 0 where not known.
    """

    source: str
    name: str = ""
    value: str
    places: Annotated[tuple[tuple[int, int, int], ...], msgspec.Meta(min_length=1)]
    bytes_offloaded: int = 0

    def __str__(self) -> str:
        named = f" ({self.name})" if self.name else ""
        size = f", {human_bytes(self.bytes_offloaded)}" if self.bytes_offloaded else ""
        places = f" in {len(self.places)} places" if len(self.places) > 1 else ""
        return f"offload {self.value} of {self.source}{named}{places}{size} to the host"


class StackMatrices(_Edit, frozen=True, kw_only=True):
    """Devices compute unsharded matrices of an optimizer in turn: these are stacked.

    Attributes:
        source: the line of the first matmul.
        first: the index of the first equation of each matrix.
        axes: the mesh axes that shard the stack.
    """

    source: str
    first: Annotated[tuple[int, ...], msgspec.Meta(min_length=2)]
    axes: tuple[str, ...]

    @property
    def why(self) -> str:
        """Say what the step does as it is written."""
        return (
            f"the matmuls at {self.source} multiply matrices of the optimizer that are sharded: "
            "each product gathers them"
        )

    def __str__(self) -> str:
        axes = ", ".join(self.axes)
        return f"give devices along {axes} unsharded matrices, {len(self.first)} at {self.source}"


class SortPerShard(_Edit, frozen=True, kw_only=True):
    """Devices sort their own tokens by expert, and not all tokens.

    Attributes:
        source: the lines of the sorts.
        axes: the mesh axes among whose devices the tokens are divided.
    """

    source: str
    axes: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]

    @property
    def why(self) -> str:
        """Say what the step does as it is written."""
        return (
            f"the sort at {self.source} is of the tokens of all devices: each gathers "
            "and computes all of them"
        )

    def __str__(self) -> str:
        return f"devices along {', '.join(self.axes)} sort their own tokens at {self.source}"


class GatherTable(_Edit, frozen=True, kw_only=True):
    """A tied embedding table is gathered once, for its lookup and its matmul.

    Attributes:
        argument, name: the number of the step's argument, and its name.
        dtype: the type in which both read it.
        spec: the mesh axes that stay on each of its dims.
    """

    argument: int
    name: str
    dtype: str
    spec: Spec

    def __str__(self) -> str:
        where = f"as {self.dtype}, to {_text(self.spec)}, for its lookup and its matmul"
        return f"gather {self.name} once {where}"


class PinArgument(_Edit, frozen=True, kw_only=True):
    """An argument of the step is constrained to a sharding, for all that reads it.

    Attributes:
        argument, name: the number of the step's argument, and its name.
        value: its type.
        spec: the sharding.
    """

    argument: int
    name: str
    value: str
    spec: Spec

    def __str__(self) -> str:
        return f"pin argument {self.name} to {_text(self.spec)}"


class PinValue(_Edit, frozen=True, kw_only=True):
    """The first result of an equation that is no matmul is constrained to a sharding.

    Attributes:
        body, position: the number of the jaxpr (the step, or what a loop or remat runs) that makes
            the value, and of the equation in it.
        source, value: the line that makes it, and its type.
        spec: the sharding.
    """

    body: int
    position: int
    source: str
    value: str
    spec: Spec

    def __str__(self) -> str:
        return f"pin {self.value} at {self.source} to {_text(self.spec)}"


class Pin(_Edit, frozen=True, kw_only=True):
    """A matmul's result is constrained to a sharding.

    Attributes:
        site: the matmul's number.
        spec: the sharding.
    """

    site: int
    spec: Spec

    def __str__(self) -> str:
        return f"pin the result of matmul {self.site} to {_text(self.spec)}"


class PinResults(_Edit, frozen=True, kw_only=True):
    """Results of the step are constrained to the shardings that XLA gives them in the plain step.

    Attributes:
        specs: the number of each result, and its sharding.
    """

    specs: tuple[tuple[int, Spec], ...]

    def __str__(self) -> str:
        return f"pin {len(self.specs)} results of the step to where XLA put them"


class MovedFirst(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The dims of a matmul's operands that come first.

    Attributes:
        site: the matmul's number.
        lhs, rhs: the dim of each operand; None for one that stays. If both have one, it is
            contracted.
        lhs_spec, rhs_spec: for an operand that is only resharded from another value, its sharding;
            that value is transposed instead, before it is resharded.
    """

    site: int
    lhs: int | None = None
    rhs: int | None = None
    lhs_spec: Spec | None = None
    rhs_spec: Spec | None = None


class MoveFirst(_Edit, frozen=True, kw_only=True):
    """Matmuls have the dim that a collective moves first, so that its blocks are contiguous.

    Attributes:
        axes: the mesh axes that shard the dim, where it is sharded.
        matmuls: the matmuls, and which dims come first.
    """

    axes: tuple[str, ...]
    matmuls: tuple[MovedFirst, ...]

    def __str__(self) -> str:
        axes = ", ".join(self.axes)
        return f"compute {len(self.matmuls)} matmuls with the dim that moves over {axes} first"


class SplitBatch(_Edit, frozen=True, kw_only=True):
    """The batch is split in parts, which run side by side.

    Attributes:
        site, operand, dim: a matmul, the number of one of its operands, and the dim of that along
            which the batch lies.
        parts: the number of parts.
        shards: the shards of the batch, each of which is split by itself.
        unroll: iterations of a split scan per loop body.
    """

    site: int
    operand: int
    dim: int
    parts: _Parts
    shards: _Count = 1
    unroll: _Count = 1

    def __str__(self) -> str:
        unrolled = f", scans unrolled {self.unroll} times" if self.unroll > 1 else ""
        where = f"dim {self.dim} of operand {self.operand} of matmul {self.site}"
        return f"split the batch ({where}) in {self.parts} parts{unrolled}"


class ScatterLookup(_Edit, frozen=True, kw_only=True):
    """The gradient of an embedding lookup is scattered.

    Attributes:
        number: which of the step's scatter-adds it is.
        updates, out: how the tokens' gradients and the result lie.
        scatters: the dim of the result, the mesh axis, and the blocks that each of its chunks falls
            into; in order.
        sums: the mesh axes over which the sum is wanted whole.
    """

    number: int
    updates: Spec
    out: Spec
    scatters: tuple[tuple[int, str, int], ...]
    sums: tuple[str, ...] = ()

    def __str__(self) -> str:
        axes = " and ".join(axis for _, axis, _ in self.scatters)
        return f"scatter the gradient of lookup {self.number} over {axes}"


class EarlyMove(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A gather or an exchange of an operand, once for all that read its result.

    Attributes:
        operand: 0 for the left operand of the matmul, 1 for the right one.
        kind: "all_gather" or "all_to_all".
        axis: the mesh axis.
        before, after: how the operand lies before and after it.
        bytes_moved: bytes that each device sends.
    """

    operand: Literal[0, 1]
    kind: Kind
    axis: str
    before: Spec
    after: Spec
    bytes_moved: int


class EditedMatmul(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A matmul of a ring, or one that reads what was gathered before it.

    Attributes:
        site: its number.
        lhs, rhs, out: how its sides lie; empty in a `shard_map` of the user's.
        through: the sides seen through the constraints and reshards beside them: 0 and 1 for the
            operands, 2 for the result.
        moves: what is done to its operands before, in order.
    """

    site: int
    lhs: Spec = ()
    rhs: Spec = ()
    out: Spec = ()
    through: tuple[int, ...] = ()
    moves: tuple[EarlyMove, ...] = ()


class ReadGathered(_Edit, frozen=True, kw_only=True):
    """A matmul reads operands that are gathered before it, or that a ring has gathered.

    Attributes:
        matmul: the matmul.
        rings: the rings that keep an operand for it, by the number of their first matmul.
    """

    matmul: EditedMatmul
    rings: tuple[int, ...] = ()

    def __str__(self) -> str:
        moves = [f"the {m.kind} on {m.axis}" for m in self.matmul.moves]
        moved = " and ".join([*moves, *(f"ring {site}" for site in self.rings)])
        return f"matmul {self.matmul.site} reads what {moved} moved"


class MakeRing(_Edit, frozen=True, kw_only=True):
    """Matmuls and the collective that they wait for become a ring.

    Attributes:
        kind: the collective.
        axis: the mesh axis.
        variant: how the pieces travel.
        matmuls: the matmuls; the first names the ring.
        keep: whether the gathered value is kept whole for matmuls that come later.
        written: the place, in its body, of the collective that the user wrote; None for one that
            XLA would make.
    """

    kind: Kind
    axis: str
    variant: Variant = Variant()
    matmuls: Annotated[tuple[EditedMatmul, ...], msgspec.Meta(min_length=1)]
    keep: bool = False
    written: int | None = None

    @property
    def site(self) -> int:
        """The number of the first matmul, which names the ring."""
        return self.matmuls[0].site

    def __str__(self) -> str:
        sites = [str(m.site) for m in self.matmuls]
        listed = ", ".join(sites[:_SHOWN]) + ", ..." * (len(sites) > _SHOWN)
        return f"ring of {self.kind} over {self.axis}, {self.variant}: matmuls {listed}"


class GatherAhead(_Edit, frozen=True, kw_only=True):
    """Scanned weights that rings and matmuls read gathered are gathered a step of the scan ahead.

    Attributes:
        whole_layers: whether all that a step of a scan reads is; if not, what it reads up to its
            first matmul.
    """

    whole_layers: bool = False

    def __str__(self) -> str:
        what = "all weights of a layer" if self.whole_layers else "weights of scans"
        return f"gather {what} a step of the scan ahead"


class SumLate(_Edit, frozen=True, kw_only=True):
    """Sums over the batch that a scan stacks are added up once, behind the scan.

    Attributes:
        scan: which of the step's scans it is, inner ones before those around them.
        output: which of its stacked results is made from the sums.
        cuts: for each sum the dims of its operand over which devices add up, and the mesh axes that
            shard each.
    """

    scan: int
    output: int
    cuts: tuple[tuple[tuple[int, tuple[str, ...]], ...], ...]

    def __str__(self) -> str:
        axes = dict.fromkeys(axis for cut in self.cuts for _, on in cut for axis in on)
        return f"add up result {self.output} of scan {self.scan} over {', '.join(axes)} behind it"


class InterleaveColumns(_Edit, frozen=True, kw_only=True):
    """The columns of a fused weight are permuted, so that a device has its share of every part.

    Attributes:
        site: the matmul's index.
        source: its source line.
        dims: the dim of the columns in its operands and result; None where one does not have it.
        parted: which of the three is made of the parts, or taken apart: 0, 1: an operand, 2: the
            result. The other one that has the columns is the weight, or its gradient.
        sections: the columns of each part.
        axes: the mesh axes that shard the columns.
        spec: the mesh axes on each dim of the weight, as it is stored.
    """

    site: int
    source: str
    dims: tuple[int | None, int | None, int | None]
    parted: int
    sections: tuple[int, ...]
    axes: tuple[str, ...]
    spec: Spec

    @property
    def why(self) -> str:
        """Say what the step does as it is written."""
        axes = ", ".join(self.axes)
        return (
            f"the matmul at {self.source} has {len(self.sections)} parts, which are slices of "
            f"columns sharded over {axes}: activations move to give each device its share"
        )

    def __str__(self) -> str:
        parts, axes = len(self.sections), ", ".join(self.axes)
        return (
            f"give each device along {axes} its share of the {parts} parts of matmul {self.site} "
            f"at {self.source}"
        )


Summand = tuple[tuple[tuple[int, tuple[str, ...]], ...], ...]
"""The dims of each operand that a sum adds up, and all the mesh axes that shard each."""


class SumCarried(_Edit, frozen=True, kw_only=True):
    """Sums over the batch that a scan adds into its carry are added up once, behind the scan.

    Attributes:
        scan: which of the step's scans it is, inner ones before those around them.
        carry: the position of the carry.
        source: the source line of the scan.
        axes: the mesh axes over which devices add up behind the scan.
        sums: the sums that the carry is made of, in order.
    """

    scan: int
    carry: int
    source: str
    axes: tuple[str, ...]
    sums: tuple[Summand, ...]

    @property
    def why(self) -> str:
        """Say what the step does as it is written."""
        axes = ", ".join(self.axes)
        return f"the loop at {self.source} adds up gradients over {axes} in each iteration"

    def __str__(self) -> str:
        axes = ", ".join(self.axes)
        return f"add up carry {self.carry} of the scan at {self.source} over {axes} behind it"


class UpdateAtBoundary(_Edit, frozen=True, kw_only=True):
    """A scan computes what it uses in few of its iterations in these alone.

    Attributes:
        scan: which of the step's scans it is, inner ones before those around them.
        source: its source line.
        runs: in how many of its iterations the scan uses it, if numbers that the step is given
            count from 0.
        iterations: the iterations of the scan.
        at_end: whether the last iteration is one of these.
    """

    scan: int
    source: str
    runs: int
    iterations: int
    at_end: bool

    @property
    def why(self) -> str:
        """Say what the step does as it is written."""
        return (
            f"the loop at {self.source} computes in all of its {self.iterations} iterations what "
            f"it uses in {self.runs}"
        )

    def __str__(self) -> str:
        return (
            f"compute what the scan at {self.source} uses in {self.runs} of {self.iterations} "
            "iterations in these alone"
        )


class TransformPerShard(_Edit, frozen=True, kw_only=True):
    """Each device computes the Fourier transforms of a source line of its own shard.

    Pins, rings and batch splits may come before it or not: they move equations, not lines.

    Attributes:
        source: the source line.
        lengths: what is transformed: the last dims, with these lengths.
        spec: the mesh axes on each dim of its operand and result.
    """

    source: str
    lengths: tuple[int, ...]
    spec: Spec

    def __str__(self) -> str:
        return f"transform each device's shard at {self.source}, sharded as {_text(self.spec)}"


class SplitExchange(_Edit, frozen=True, kw_only=True):
    """The exchanges of a user's `shard_map` go in chunks of their columns.

    Attributes:
        shard_map: which of the step's it is.
        parts: the number of chunks.
    """

    shard_map: int
    parts: _Parts

    def __str__(self) -> str:
        return f"exchange the columns of shard_map {self.shard_map} in {self.parts} chunks"


class ShareViews(_Edit, frozen=True, kw_only=True):
    """Dims of size 1 are left out once for all matmuls that read a value."""

    def __str__(self) -> str:
        return "leave out dims of size 1 once for all matmuls that read a value"


Edit = (
    DropTypes | Recompute | Keep | Offload | SortPerShard | StackMatrices | PinArgument | PinValue
    | GatherTable | Pin | PinResults | InterleaveColumns | MoveFirst | UpdateAtBoundary | SumCarried
    | SplitBatch | ScatterLookup | ReadGathered | MakeRing | GatherAhead | TransformPerShard
    | SumLate | SplitExchange | ShareViews
)  # fmt: skip


# The order of edits. Pins stand before a batch split, and after it for the matmuls of its parts.
ORDER: tuple[tuple[type[_Edit], ...], ...] = (
    (DropTypes,),
    (Recompute,),
    (Keep,),
    (Offload,),
    (SortPerShard,),
    (StackMatrices,),
    (PinArgument, PinValue),
    (GatherTable, Pin, PinResults),
    (InterleaveColumns,),
    (MoveFirst,),
    (UpdateAtBoundary,),
    (SumCarried,),
    (SplitBatch,),
    (Pin,),
    (ScatterLookup,),
    (MakeRing, ReadGathered),
    (GatherAhead,),
    (TransformPerShard,),
    (SumLate,),
    (SplitExchange,),
    (ShareViews,),
)
_AFTER_SPLIT = 13
LAYOUTS = tuple(kind for kinds in ORDER[: _AFTER_SPLIT - 1] for kind in kinds)
"""The kinds of edits that come before a batch split and before rings."""
REPAIRS = (
    *(SortPerShard, StackMatrices, PinArgument, PinValue, InterleaveColumns),
    *(UpdateAtBoundary, SumCarried),
)
"""The kinds of edits that repair what a user wrote so that shardings cost much."""
# Plans number matmuls as they are before these.
AFTER_NUMBERING = tuple(kind for kinds in ORDER[_AFTER_SPLIT + 1 :] for kind in kinds)


def in_order(edits: Iterable[Edit]) -> list[Edit]:
    """Put edits in the order in which they are applied; pins after a batch split stay after it."""
    edits = list(edits)
    split = next((n for n, edit in enumerate(edits) if isinstance(edit, SplitBatch)), len(edits))

    def place(number: int) -> int:
        first = _AFTER_SPLIT if number > split and isinstance(edits[number], Pin) else 0
        return next(p for p in range(first, len(ORDER)) if isinstance(edits[number], ORDER[p]))

    return [edits[number] for number in sorted(range(len(edits)), key=place)]


def specs_of(edit: Any) -> Iterator[Spec]:
    """Yield every sharding that an edit has, also inside its matmuls and moves."""
    fields = msgspec.structs.astuple(edit) if isinstance(edit, msgspec.Struct) else edit
    if not isinstance(fields, tuple):
        return
    if fields and all(isinstance(f, tuple) and all(isinstance(a, str) for a in f) for f in fields):
        yield fields
        return
    for field in fields:
        yield from specs_of(field)


def _text(spec: Spec) -> str:
    return f"({', '.join('+'.join(axes) or 'None' for axes in spec)})"
