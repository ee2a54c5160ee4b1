"""Hold the state of local updates, and take its parts apart."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

_MADE_BY = 96  # bytes: all of `Outer.kind` of the known algorithms, and names of users' own


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LocalState:
    """The state between two rounds, a pytree of arrays; checkpoint all of it.

    Attributes:
        worker: the train state of each worker; a leading dim of workers on every leaf.
        begin: the parameters where the round begins: the same on all workers (with the eager outer
            optimizer a copy each, along a leading dim of workers).
        optimizer: the outer optimizer's state, one for each fragment.
        sent: what each worker sends during the next round, a leading dim of workers; None where
            nothing is under way between rounds.
        round: how many rounds were run, int32 [].
        finite: 1 for each worker whose steps since it last sent were finite, float32 [workers].
        sync: what the compression of averages keeps (`compression.SyncState`); None without.
        control: its settings, on the host; None without.
        made_by: the outer optimizer (`Outer.kind`) as UTF-8, on the host, uint8 [96]: an array, so
            that checkpoints have it.
    """

    worker: Any
    begin: Any
    optimizer: tuple[Any, ...]
    sent: Any
    round: Any
    finite: Any
    sync: Any = None
    control: Any = None
    made_by: Any = None

    @property
    def arrays(self) -> LocalState:
        """Return what is on devices: the state without its control and who made it."""
        return dataclasses.replace(self, control=None, made_by=None)

    def with_host_of(self, other: LocalState) -> LocalState:
        """Return this state with what another one has on the host."""
        return dataclasses.replace(self, control=other.control, made_by=other.made_by)

    def each_on_host(self, change: Callable[[Any], Any]) -> LocalState:
        """Change the leaves that are on the host, arrays or shapes."""
        control, made_by = jax.tree.map(change, (self.control, self.made_by))
        return dataclasses.replace(self, control=control, made_by=made_by)

    def each_worker(self, change: Callable[[Any], Any], *, eager: bool) -> LocalState:
        """Change the leaves that differ between workers, arrays or shapes.

        Args:
            change: of a leaf.
            eager: whether the outer optimizer is, so that its state differs too.
        """
        names = ("worker", "sent", "finite", *(("begin", "optimizer") if eager else ()))
        changed = {name: jax.tree.map(change, getattr(self, name)) for name in names}
        sync = self.sync and self.sync.each_worker(change)
        return dataclasses.replace(self, sync=sync, **changed)


def made_by(kind: str) -> np.ndarray:
    """Return `LocalState.made_by` of an outer optimizer's kind."""
    return np.frombuffer(kind.encode()[:_MADE_BY].ljust(_MADE_BY), np.uint8).copy()


def check_made_by(state: LocalState, kind: str) -> None:
    """Raise a ValueError for a state of another outer optimizer; shapes do not say whose."""
    if isinstance(state.made_by, jax.ShapeDtypeStruct):
        return
    if state.made_by is None or np.shape(state.made_by) != (_MADE_BY,):
        raise ValueError(
            "the state does not say which outer optimizer made it: give what init(), spread() or "
            "a round returned, all of it"
        )
    if not np.array_equal(found := np.asarray(state.made_by, np.uint8), made_by(kind)):
        name = bytes(found).decode(errors="replace").rstrip()
        raise ValueError(
            f"the state was made by {name}, and these local updates have {kind}: give it to local "
            "updates with that outer optimizer, or go on from its parameters with init()"
        )


@dataclass(frozen=True)
class ParamsIn:
    """The parameters' key, attribute or index in a train state; None if they are the state.

    A train state is taken apart as JAX does it, so that it may be of any registered type.
    """

    where: str | int | None

    def get(self, state: Any) -> Any:
        """Return the parameters of a state.

        Raises:
            ValueError: if they are not there.
        """
        if self.where is None:
            return state
        parts, _, index = self._parts(state)
        return parts[index]

    def put(self, state: Any, params: Any) -> Any:
        """Return a state with other parameters."""
        if self.where is None:
            return params
        parts, structure, index = self._parts(state)
        return structure.unflatten([*parts[:index], params, *parts[index + 1 :]])

    def _parts(self, state: Any) -> tuple[list[Any], Any, int]:
        """Return a state's own parts, what puts them together, and which has the parameters."""
        flat, structure = jax.tree_util.tree_flatten_with_path(
            state, is_leaf=lambda part: part is not state
        )
        names = [_name(path) for path, _ in flat]
        parts = [part for _, part in flat]
        if self.where in names:
            return parts, structure, names.index(self.where)
        # A type that was registered without keys names no parts: a copy with marks for parts says
        # which of them an attribute is; and so do negative numbers, and those of a NamedTuple.
        marks = [object() for _ in parts]
        try:
            marked: Any = structure.unflatten(marks)
            is_key = isinstance(self.where, int) or isinstance(state, Mapping)
            found = marked[self.where] if is_key else getattr(marked, str(self.where))
            return parts, structure, marks.index(found)
        except (KeyError, IndexError, AttributeError, TypeError, ValueError):
            raise ValueError(
                f"no parameters at {self.where!r} in a train state of type "
                f"{type(state).__name__}: give params=, the key, attribute or number under which "
                "it has them, or None where the state is the parameters"
            ) from None


def _name(path: Sequence[Any]) -> Any:
    """Return the key, attribute or number in a path of one entry; None for what has no parts."""
    names = ("key", "idx", "name")
    return next((getattr(e, n) for e in path for n in names if hasattr(e, n)), None)


def fragments_of(params: Any, count: int) -> tuple[Callable[[Any], Any], ...]:
    """Return for each fragment a function that replaces all other leaves of a tree by None.

    Leaves stay in order, in parts of about equal bytes.

    Raises:
        ValueError: if there are fewer leaves than fragments.
    """
    if count == 1:
        return (lambda tree: tree,)
    leaves, structure = jax.tree.flatten(params)
    if len(leaves) < count:
        raise ValueError(
            f"fragments={count} of parameters with {len(leaves)} leaves: expected at most as many "
            "fragments as leaves"
        )
    number = _parts([leaf.size * leaf.dtype.itemsize for leaf in leaves], count)

    def taker(fragment: int) -> Callable[[Any], Any]:
        def take(tree: Any) -> Any:
            values = structure.flatten_up_to(tree)  # a None of the parameters is no leaf
            kept = [v if n == fragment else None for v, n in zip(values, number, strict=True)]
            return structure.unflatten(kept)

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


def named_shardings(state: LocalState) -> LocalState:
    """Return the shardings of a state's leaves, or raise if one is on no mesh."""

    def one(leaf: Any) -> NamedSharding:
        if not isinstance(leaf.sharding, NamedSharding):
            raise ValueError(
                f"a state with a leaf that lies at {leaf.sharding}: give what init(), spread() or "
                "a round returned, or a checkpoint restored to the shardings of abstract()"
            )
        return leaf.sharding

    return jax.tree.map(one, state)


def bytes_on_device(tree: Any) -> int:
    """Return the bytes of a tree's arrays on one device."""
    leaves = (leaf for leaf in jax.tree.leaves(tree) if hasattr(leaf.dtype, "itemsize"))
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)
