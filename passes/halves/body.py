"""Hold the equations of a body with a split batch, and its values: joined, in parts, or both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax import Array, lax

from jaxoverlap._jax import compat, inlining
from jaxoverlap.passes.analysis.batch import BatchSplit, Followed
from jaxoverlap.passes.halves.own_names import OwnNames

_COMBINED: dict[str, Callable[[Array, Array], Array]] = {
    "add": lax.add,
    "mul": lax.mul,
    "max": lax.max,
    "min": lax.min,
    "and": lax.bitwise_and,
    "or": lax.bitwise_or,
    "xor": lax.bitwise_xor,
}


class HostMemoryError(Exception):
    """A value in the host's memory would be split or joined, which XLA would do on the host."""


class SplitBody:
    """The equations of one body, as they are made, and its values: joined, in parts, or both."""

    def __init__(self, split: BatchSplit):
        self.eqns: list[Any] = []
        self._split = split
        self._parts: dict[Any, tuple[int, list[Any]]] = {}
        self._wholes: dict[Any, Any] = {}
        self._own = OwnNames(self.eqns)

    def bound(self, var: Any, dim: int | None) -> list[Any]:
        """Bind an operand of the body: in parts along a dim, or undivided."""
        if dim is None:
            return [var]
        parts = self._new_parts(var, dim)
        self._parts[var] = dim, parts
        return parts

    def _new_parts(self, var: Any, dim: int) -> list[Any]:
        return [self._new_part(var, dim) for _ in range(self._split.parts)]

    def _new_part(self, var: Any, dim: int) -> Any:
        return compat.sized_var(var, dim, self._split.part(var.aval.shape[dim]))

    def alias(self, var: Any, atom: Any) -> None:
        """Let a value be another one."""
        if self.dim(atom) is None:
            self._wholes[var] = self._whole_of(atom)
        else:
            self._parts[var] = self._parts[atom]

    def dim(self, atom: Any) -> int | None:
        """Return the dim along which a value is in parts; None if it is undivided."""
        if compat.is_literal(atom) or atom not in self._parts:
            return None
        return self._parts[atom][0]

    def values(self, atom: Any, dim: int | None, like: Any) -> list[Any]:
        """Return a value's parts along a dim, or the joined value if the dim is None."""
        return [self.joined(atom, like)] if dim is None else self.parts(atom, dim, like)

    def flat(self, atoms: Sequence[Any], dims: Sequence[int | None], like: Any) -> list[Any]:
        """Return the parts of each value along its dim, or the joined value, in order."""
        return [
            v for atom, dim in zip(atoms, dims, strict=True) for v in self.values(atom, dim, like)
        ]

    def made(self, outvars: Sequence[Any], dims: Sequence[int | None]) -> list[Any]:
        """Bind results: in parts along a dim, or undivided."""
        return [v for var, dim in zip(outvars, dims, strict=True) for v in self.bound(var, dim)]

    def _whole_of(self, atom: Any) -> Any:
        return atom if compat.is_literal(atom) else self._wholes.get(atom, atom)

    def joined(self, atom: Any, like: Any) -> Any:
        """Return an undivided value; parts are joined, once."""
        if compat.is_literal(atom) or atom not in self._parts or atom in self._wholes:
            return self._whole_of(atom)
        dim, parts = self._parts[atom]
        _check_memory(atom, "joined", like)
        whole, split = compat.like_var(atom), self._split
        self.eqns += inlining.inline(
            lambda *p: [_join(p, dim, split)], parts, [whole], like, alike=("join", dim, split)
        )
        self._wholes[atom] = whole
        return whole

    def parts(self, atom: Any, dim: int, like: Any) -> list[Any]:
        """Return the parts of a value along a dim; an undivided value is split."""
        if self.dim(atom) == dim:
            return self._parts[atom][1]
        whole, split = self.joined(atom, like), self._split
        _check_memory(whole, "split", like)
        if (parts := self._own.parts(whole, dim, split, like)) is None:
            parts = self._new_parts(atom, dim)
            self.eqns += inlining.inline(
                lambda x: _split(x, dim, split), [whole], parts, like, alike=("cut", dim, split)
            )
        if not compat.is_literal(atom) and atom not in self._parts:
            self._wholes[atom] = whole
            self._parts[atom] = dim, parts
        return parts

    def whole(self, eqn: Any) -> None:
        """Run an equation as it is, on undivided values."""
        invars = [self.joined(v, eqn) for v in eqn.invars]
        same = all(a is b for a, b in zip(invars, eqn.invars, strict=True))
        self.eqns.append(eqn if same else eqn.replace(invars=invars))
        self._own.made(self.eqns[-1])

    def parted(self, eqn: Any, followed: Followed) -> None:
        """Run an equation on each part."""
        operands = [
            self.values(v, d, eqn) for v, d in zip(eqn.invars, followed.operands, strict=True)
        ]
        params = {**eqn.params, **followed.params}
        made: list[list[Any]] = []
        for i in range(self._split.parts):
            outvars = [
                compat.like_var(v) if isinstance(how, str) else self._new_part(v, how)
                for v, how in zip(eqn.outvars, followed.results, strict=True)
            ]
            invars = [self._of_part(some, i, eqn) for some in operands]
            self.eqns.append(eqn.replace(invars=invars, outvars=outvars, params=params))
            made.append(outvars)
        for position, (var, how) in enumerate(zip(eqn.outvars, followed.results, strict=True)):
            parts = [outvars[position] for outvars in made]
            if not isinstance(how, str):
                self._parts[var] = how, parts
                continue
            self.eqns += inlining.inline(_combined(how), parts, [var], eqn, alike=("combine", how))

    def _of_part(self, values: Sequence[Any], part: int, eqn: Any) -> Any:
        """Return the operand of an equation on a part: the part, or the value that parts share."""
        return values[part] if len(values) > 1 else self._own.of(values[0], part, eqn)


def _check_memory(atom: Any, what: str, eqn: Any) -> None:
    """Refuse to split or join a value in the host's memory.

    Raises:
        HostMemoryError: if the value is in the host's memory.
    """
    if compat.in_host_memory(atom):
        raise HostMemoryError(
            f"{atom.aval.str_short()} in host memory would be {what} for {eqn.primitive.name}"
        )


def _combined(how: str) -> Callable[..., list[Array]]:
    def combined(first: Array, *others: Array) -> list[Array]:
        for other in others:
            first = _COMBINED[how](first, other)
        return [first]

    return combined


def _split(x: Array, dim: int, split: BatchSplit) -> list[Array]:
    """Split an array into parts along a dim, each with the same share of every shard."""
    shape, size = x.shape, x.shape[dim]
    rest = size // (split.shards * split.parts)
    blocks = lax.reshape(x, (*shape[:dim], split.shards, split.parts, rest, *shape[dim + 1 :]))
    part = (*shape[:dim], split.shards * rest, *shape[dim + 1 :])
    return [
        lax.reshape(lax.slice_in_dim(blocks, i, i + 1, axis=dim + 1), part)
        for i in range(split.parts)
    ]


def _join(parts: Sequence[Array], dim: int, split: BatchSplit) -> Array:
    """Join the parts of an array."""
    shape = parts[0].shape
    block = (*shape[:dim], split.shards, 1, shape[dim] // split.shards, *shape[dim + 1 :])
    joined = lax.concatenate([lax.reshape(p, block) for p in parts], dim + 1)
    return lax.reshape(joined, (*shape[:dim], shape[dim] * split.parts, *shape[dim + 1 :]))
