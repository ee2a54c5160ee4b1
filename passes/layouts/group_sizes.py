"""Count the tokens that a device has of each expert, where a step counts those of all devices.

    sizes = bincount experts          # experts: [tokens]
    ...  ragged_dot x w sizes         # x: the tokens, sorted by expert

Users write such a count in many ways: with `jnp.bincount`, as a sum of one-hot vectors, by a
scatter. What the equations do is checked by running them.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxoverlap._jax import compat
from jaxoverlap.passes.analysis.batch import BatchSplit, follow
from jaxoverlap.passes.analysis.def_use import DefUse
from jaxoverlap.passes.analysis.known import KnownValues
from jaxoverlap.passes.layouts.local_equations import (
    LocalEquation,
    NotLocalError,
    Tokens,
    is_alike,
    is_made_here,
    local,
    run,
)

_TRIES = 4  # random lists of experts, by which it is checked that sizes count them


class GroupSizes:
    """The counts of what a sort sorts by.

    Attributes:
        keys: the values that have the expert of each token, in whatever order.
    """

    def __init__(self, key: Any, uses: DefUse, known: KnownValues, shards: int):
        """Take the facts of a body.

        Args:
            key: what is sorted: the expert of each token.
            uses: the body's makers and readers.
            known: its known values.
            shards: among how many devices the tokens are divided.
        """
        self._key, self._uses, self._known, self._shards = key, uses, known, shards
        self._base = self._source(key)
        self.keys = {key, self._base}

    def of(self, sizes: Any) -> tuple[LocalEquation, ...]:
        """Return the equations that count a device's own tokens of each expert.

        Raises:
            NotLocalError: if the sizes are anything else but the counts of what is sorted.
        """
        base, positions = self._base, list[int]()
        todo = [sizes]
        while todo:
            var = todo.pop()
            position = self._uses.made.get(var)
            if var in self.keys or self._known.of(var) is not None:
                continue
            if position is None:
                raise NotLocalError("sizes of groups are not computed where the tokens are sorted")
            if position not in positions:
                positions.append(position)
                todo += compat.variables(self._uses.eqns[position].invars)
        if base.aval.shape[0] % self._shards:
            raise NotLocalError("the devices do not divide the tokens")
        dims: dict[Any, int | None] = dict.fromkeys(self.keys, 0)
        made, sums = list[LocalEquation](), set[Any]()
        for position in sorted(positions):
            eqn = self._uses.eqns[position]
            is_sum = sums.issuperset(compat.variables(eqn.invars))
            if is_sum and eqn.primitive.name == "convert_element_type":
                made.append(LocalEquation(eqn, (None,), ("add",)))
            else:
                made.append(self._counting(eqn, dims))
            (how,) = made[-1].results
            if isinstance(how, str):
                sums.add(eqn.outvars[0])
            else:
                dims[eqn.outvars[0]] = how.dim
        if sizes not in sums:
            raise NotLocalError("sizes of groups do not count what is sorted")
        self._check(sizes, made)
        return tuple(made)

    def _source(self, var: Any) -> Any:
        """Return the value that another one has the elements of."""
        maker = self._uses.maker(var)
        while maker is not None and maker.primitive.name in ("reshape", "convert_element_type"):
            if maker.primitive.name == "convert_element_type" and not _is_wide(maker):
                break
            var, maker = maker.invars[0], self._uses.maker(maker.invars[0])
        return var

    def _counting(self, eqn: Any, dims: dict[Any, int | None]) -> LocalEquation:
        """An equation of a count, on a device's own tokens."""
        given = [None if compat.is_literal(v) else dims.get(v) for v in eqn.invars]
        if eqn.primitive.name == "scatter-add":
            operand, _, updates = eqn.invars
            start, dim = self._known.of(operand), given[1]
            if start is None or start.any() or dim is None or given[2] is not None:
                raise NotLocalError("sizes of groups do not count what is sorted")
            if not is_alike(self._known, updates, dim):
                raise NotLocalError("sizes of groups are weighted")
            return local(eqn, (None, dim, dim), ("add",))
        split, has_tokens = BatchSplit(1, self._shards), any(d is not None for d in given)
        made = follow(eqn, given, split) if has_tokens else None
        if made is None or len(made.results) != 1 or made.results[0] in ("max", "min"):
            raise NotLocalError(f"{eqn.primitive.name} computes sizes of groups")
        for var, dim, own in zip(eqn.invars, made.operands, given, strict=True):
            table = self._known.of(var)
            alike = table is None or is_made_here(table)
            if dim is not None and own is None:
                alike = is_alike(self._known, var, dim)
            if not alike or own not in (None, dim):
                raise NotLocalError("sizes of groups depend on positions")
        (how,) = made.results
        how = how if isinstance(how, str) else Tokens(how, False)
        return local(eqn, made.operands, (how,), made.params)

    def _check(self, sizes: Any, made: list[LocalEquation]) -> None:
        """Check that sizes count each expert's tokens: by running the equations on random ones.

        Each token adds what its expert alone decides, so that sizes are a matrix times the true
        ones; a matrix that gives back some random lists of sizes is that of counting.

        Raises:
            NotLocalError: if they do not; or if an expert may be negative, and is not counted as
                the first: then its tokens come first, and the groups begin behind them.
        """
        experts, rng, base = sizes.aval.shape[0], np.random.default_rng(0), self._base
        count = self._key.aval.shape[0] // self._shards
        shape = (base.aval.shape[0] // self._shards, *base.aval.shape[1:])

        def counts(of: np.ndarray) -> np.ndarray:
            with jax.ensure_compile_time_eval():
                values = {key: jnp.asarray(of, key.aval.dtype) for key in self.keys}
                values[base] = values[base].reshape(shape)
                run(made, values, self._known, self._shards)
                return np.asarray(values[sizes])

        for _ in range(_TRIES):
            of = rng.choice(experts, count, p=rng.dirichlet(np.ones(experts)))
            if not (counts(of) == np.bincount(of, minlength=experts)).all():
                raise NotLocalError("sizes of groups do not count what is sorted")
        if not self._is_expert() and counts(np.full(count, -1))[0] != count:
            raise NotLocalError("the numbers of experts may be negative")

    def _is_expert(self) -> bool:
        """Return whether what is counted is never negative: the number of a largest element."""
        if (maker := self._uses.maker(self._base)) is None:
            return False
        name = maker.primitive.name
        return name in ("argmax", "argmin") or (name == "top_k" and self._base is maker.outvars[1])


def _is_wide(eqn: Any) -> bool:
    """Return whether a conversion of integers loses none."""
    before, after = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
    kinds = (jnp.issubdtype(dtype, jnp.integer) for dtype in (before, after))
    return all(kinds) and math.log2(jnp.iinfo(after).max) >= math.log2(jnp.iinfo(before).max)
