"""The state of local updates, and where its arrays lie on the mesh."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LocalState:
    """The state between two rounds, a pytree of arrays; checkpoint it whole.

    Attributes:
        worker: the train state of each worker; a leading dim of workers on every leaf.
        begin: the parameters where the round begins: the same on all workers (with the eager outer
            optimizer a copy each, along a leading dim of workers).
        optimizer: the outer optimizer's state, one for each fragment.
        sent: what each worker sends during the next round, a leading dim of workers; None where
            nothing is under way between rounds.
        sync: what the compression of averages keeps (`compression.SyncState`); None without.
        control: its settings, on the host; None without.
    """

    worker: Any
    begin: Any
    optimizer: tuple[Any, ...]
    sent: Any
    sync: Any = None
    control: Any = None


@dataclass(frozen=True)
class ParamsIn:
    """The place of the parameters in a train state: a key, an attribute, a number, or all of it."""

    where: str | int | None

    def get(self, state: Any) -> Any:
        """Return the parameters of a state.

        Raises:
            ValueError: if they are not there.
        """
        if self.where is None:
            return state
        try:
            if isinstance(self.where, str) and not isinstance(state, Mapping):
                return getattr(state, self.where)
            return state[self.where]
        except (KeyError, IndexError, AttributeError, TypeError):
            raise ValueError(
                f"no parameters at {self.where!r} in a train state of type "
                f"{type(state).__name__}: give params=, the key, attribute or number under which "
                "it has them, or None where the state is the parameters"
            ) from None

    def put(self, state: Any, params: Any) -> Any:
        """Return a state with other parameters."""
        if self.where is None:
            return params
        if isinstance(state, Mapping):
            return type(state)({**state, self.where: params})  # type: ignore[call-arg]
        if isinstance(self.where, int):
            parts = [*state[: self.where], params, *state[self.where + 1 :]]
            return type(state)(*parts) if hasattr(state, "_fields") else type(state)(parts)
        if hasattr(state, "_replace"):
            return state._replace(**{self.where: params})
        return dataclasses.replace(state, **{self.where: params})


@dataclass(frozen=True)
class Placement:
    """Where arrays lie: the mesh, the workers' axis, and whether outer state is scattered over it.

    Scattered is a leaf along its first dim that the workers divide and no other axis takes; a leaf
    without such a dim stays whole.
    """

    mesh: Mesh
    axis: str
    scatter: bool

    @property
    def workers(self) -> int:
        """Return how many workers there are."""
        return self.mesh.shape[self.axis]

    def spec_of(self, leaf: Any) -> P:
        """Return the spec of a worker's own leaf, which may not name the workers' axis.

        Raises:
            ValueError: if it does, or the leaf lies on another mesh.
        """
        sharding = getattr(leaf, "sharding", None)
        if not isinstance(sharding, NamedSharding):
            return P()
        if sharding.mesh.shape != self.mesh.shape:
            raise ValueError(
                f"a leaf of the train state lies on a mesh of {dict(sharding.mesh.shape)}, and "
                f"the step was given one of {dict(self.mesh.shape)}; make the state on that"
            )
        if self.axis in jax.tree.leaves(tuple(sharding.spec)):
            raise ValueError(
                f"a leaf of the train state is sharded over {self.axis!r} ({sharding.spec}), which "
                "is the workers' axis: give the state of one worker, whole along it"
            )
        return sharding.spec

    def at(self, *spec: Any) -> NamedSharding:
        """Return the sharding of a spec."""
        return NamedSharding(self.mesh, P(*spec))

    def stacked(self, specs: Any) -> Any:
        """Return the shardings of leaves with a leading dim of workers."""
        return jax.tree.map(lambda spec: self.at(self.axis, *spec), specs)

    def outer(self, shapes: Any, specs: Any) -> Any:
        """Return the shardings of outer state that is like parameters."""
        return jax.tree.map(
            lambda shape, spec: self.at(*self.outer_spec(shape.shape, spec)), shapes, specs
        )

    def outer_spec(self, shape: Sequence[int], spec: P) -> P:
        """Return the spec of a leaf of outer state."""
        dim = self.scattered_dim(shape, spec)
        full = [*spec, *(None,) * (len(shape) - len(spec))]
        if dim is not None:
            full[dim] = self.axis
        return P(*full)

    def scattered_dim(self, shape: Sequence[int], spec: P) -> int | None:
        """Return the dim along which a leaf of outer state is scattered, or None."""
        if not self.scatter:
            return None
        full = [*spec, *(None,) * (len(shape) - len(spec))]
        for dim, size in enumerate(shape):
            if full[dim] is None and size and size % self.workers == 0:
                return dim
        return None


def fragments_of(params: Any, count: int) -> tuple[Callable[[Any], Any], ...]:
    """Return for each fragment what takes its leaves out of a tree, None in place of the others.

    Leaves stay in order, in parts of about equal bytes.

    Raises:
        ValueError: if there are fewer leaves than fragments.
    """
    leaves, _ = jax.tree.flatten(params)
    if len(leaves) < count:
        raise ValueError(
            f"fragments={count} of parameters with {len(leaves)} leaves: expected at most as many "
            "fragments as leaves"
        )
    if count == 1:
        return (lambda tree: tree,)
    number = _parts([leaf.size * leaf.dtype.itemsize for leaf in leaves], count)

    def taker(fragment: int) -> Callable[[Any], Any]:
        def take(tree: Any) -> Any:
            values, treedef = jax.tree.flatten(tree, is_leaf=lambda leaf: leaf is None)
            kept = [v if n == fragment else None for v, n in zip(values, number, strict=True)]
            return jax.tree.unflatten(treedef, kept)

        return take

    return tuple(map(taker, range(count)))


def _parts(sizes: Sequence[int], count: int) -> list[int]:
    """Number the part of each size: contiguous, none empty, about equal in sum."""
    total, before, numbers = sum(sizes), 0, list[int]()
    for place, size in enumerate(sizes):
        middle = int((before + size / 2) * count / total) if total else 0
        last = numbers[-1] if numbers else -1
        least = max(last, count - (len(sizes) - place), 0)
        numbers.append(min(max(middle, least), last + 1, count - 1))
        before += size
    return numbers


def joined(tree: Any, part: Any) -> Any:
    """Return a tree with the leaves of a part of it that are not None."""
    return jax.tree.map(
        lambda old, new: old if new is None else new, tree, part, is_leaf=lambda leaf: leaf is None
    )
