"""A step as edits have left it: what a pass is given, and what it returns."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from jax.sharding import Mesh

from jaxoverlap._jax import explicit
from jaxoverlap.passes.analysis.einsum import Spec
from jaxoverlap.passes.analysis.errors import UserError
from jaxoverlap.passes.analysis.jaxprs import Dot, dots
from jaxoverlap.plan.edits import (
    AFTER_NUMBERING,
    DropTypes,
    Edit,
    Keep,
    Offload,
    Recompute,
    SortPerShard,
    StackMatrices,
    specs_of,
)


@dataclass(frozen=True)
class EditedStep:
    """A step after some edits.

    Attributes:
        jaxpr: the step, flattened.
        mesh: its mesh.
        arguments: the sharding of each of its arguments; None where that is not known.
        edits: the edits, in order.
        before: the step before the last kind of edits; None for one that was not edited.
        untyped: the step as types were dropped from it; None where they were not.
        facts: the results of passes besides the jaxpr, by the kind of their edits.
    """

    jaxpr: Any
    mesh: Mesh
    arguments: tuple[Spec | None, ...]
    edits: tuple[Edit, ...] = ()
    before: EditedStep | None = None
    untyped: EditedStep | None = None
    facts: Mapping[type, Any] = field(default_factory=dict)

    def to(self, jaxpr: Any, facts: Mapping[type, Any] | None = None) -> EditedStep:
        """Return the step with another jaxpr, and further facts."""
        return replace(self, jaxpr=jaxpr, facts={**self.facts, **(facts or {})})

    def has(self, *kinds: type) -> bool:
        """Return whether some edits are of these kinds."""
        return any(isinstance(edit, kinds) for edit in self.edits)

    @property
    def result(self) -> Any:
        """The jaxpr that is compiled: types that were dropped are put back."""
        if self.untyped is None:
            return self.jaxpr
        return explicit.typed_as(self.jaxpr, self.untyped.jaxpr)

    @property
    def numbered(self) -> EditedStep:
        """The step whose matmuls have the numbers that edits of rings and `explain()` name."""
        step = self
        while step.before is not None and isinstance(step.edits[-1], AFTER_NUMBERING):
            step = step.before
        return step

    @property
    def unpinned(self) -> EditedStep:
        """The step as its matmuls are numbered: before any pin or other edit of these."""
        first = (DropTypes, Recompute, Keep, Offload, SortPerShard, StackMatrices)
        return [s for s in self.stages if all(isinstance(edit, first) for edit in s.edits)][-1]

    @property
    def matmuls(self) -> tuple[Dot, ...]:
        """The matmuls as edits of rings number them, and as `explain()` does."""
        return dots(self.numbered.jaxpr)

    @property
    def stages(self) -> list[EditedStep]:
        """The step after each kind of edits, the original one first."""
        return [*(self.before.stages if self.before else ()), self]


def check_sites(known: Collection[int], edits: Iterable[tuple[int, Edit]]) -> None:
    """Refuse an edit that names a matmul that is not there.

    Args:
        known: the numbers of the step's matmuls.
        edits: numbers of matmuls, each with the edit that names it.
    """
    for site, edit in edits:
        if site not in known:
            raise misfit(edit, f"the step has {len(known)} matmuls, counted from 0, and no {site}")


def check_axes(mesh: Mesh, edits: Iterable[Edit]) -> None:
    """Refuse an edit with a sharding that names no axis of the mesh, or one axis twice."""
    for edit, spec in ((one, spec) for one in edits for spec in specs_of(one)):
        axes = [axis for on_dim in spec for axis in on_dim]
        check_named(mesh, edit, axes)
        for axis in axes:
            if axes.count(axis) > 1:
                raise misfit(edit, f"{axis!r} is in one sharding {axes.count(axis)} times")


def check_named(mesh: Mesh, edit: Edit, axes: Iterable[str]) -> None:
    """Refuse an edit over an axis that the mesh does not have."""
    for axis in axes:
        if axis not in mesh.shape:
            raise misfit(edit, f"{axis!r} is no axis of the mesh {dict(mesh.shape)}")


def check_rank(edit: Edit, spec: Spec, var: Any) -> None:
    """Refuse an edit whose sharding of a value has fewer dims than the value, or more."""
    if len(spec) != var.aval.ndim:
        shape = tuple(var.aval.shape)
        raise misfit(edit, f"the sharding has {len(spec)} dims, and the value's shape is {shape}")


def misfit(edit: Edit, why: str) -> UserError:
    """Make the error that says why an edit does not fit a step."""
    return UserError(
        f"the edit does not fit the step: {edit}: {why}. Take the plan that explain() or tune() "
        "gives for this step, and leave out edits or change their variants"
    )
