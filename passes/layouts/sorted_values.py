"""Follow what a step sorts by expert, until it is in the order of the tokens again, or summed.

    order = argsort experts            # sorted; each is the position of a token
    x = gather tokens order            # sorted
    y = ragged_dot x w sizes           # sorted; sizes count the tokens of each expert
    z = scatter zeros order y          # in the order of the tokens

If nothing else depends on the order, a device that sorts its own tokens alone computes the same: of
each token the same numbers, and of a sum the sum over its tokens. `SortedValues` checks that, and
says of each equation how it runs on some of the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from jaxoverlap._jax import compat
from jaxoverlap.passes.analysis.batch import BatchSplit, follow
from jaxoverlap.passes.analysis.jaxprs import Body
from jaxoverlap.passes.analysis.known import KnownValues, computed
from jaxoverlap.passes.layouts.group_sizes import GroupSizes
from jaxoverlap.passes.layouts.local_equations import (
    LocalEquation,
    NotLocalError,
    Tokens,
    is_alike,
    local,
    position_form,
)

_SAME = ("broadcast_in_dim", "reshape", "squeeze")  # they leave a position as it is


class SortedValues:
    """The values of a body that depend on the order of one of its sorts.

    Attributes:
        local: the equations that make or read them, by their indices.
        known: the body's known values.
    """

    def __init__(self, body: Body, known: KnownValues, start: int, shards: int):
        """Follow the values.

        Args:
            body: the body.
            known: its known values.
            start: the index of the sort.
            shards: among how many devices the tokens are divided, in their order.

        Raises:
            NotLocalError: if a device cannot sort its own tokens alone.
        """
        self.local: dict[int, LocalEquation] = {}
        self.known, eqns = known, body.eqns
        self._shards = shards
        self._tokens: dict[Any, Tokens] = {}
        self._key = eqns[start].invars[0]
        (self._count,) = self._key.aval.shape
        self._split = BatchSplit(1, shards)
        self._sizes = GroupSizes(self._key, body.uses, known, shards)
        for position, eqn in enumerate(eqns):
            if position == start:
                self.local[position] = self._start(eqn)
            elif self._depends(eqn.invars):
                self.local[position] = self._equation(eqn)
            else:
                continue
            for var, how in zip(eqn.outvars, self.local[position].results, strict=True):
                if isinstance(how, Tokens):
                    self._tokens[var] = how
        if self._depends(body.outvars):
            raise NotLocalError("a value in the order of the sort is returned")

    # -- operands -----------------------------------------------------------------------------

    def _depends(self, atoms: Sequence[Any]) -> bool:
        """Return whether some values are in the order of the sort, or say where tokens are."""
        return any((one := self._of(v)) is not None and not one.is_plain for v in atoms)

    def _of(self, atom: Any) -> Tokens | None:
        return None if compat.is_literal(atom) else self._tokens.get(atom)

    def _positions(self, atom: Any, dim: int) -> np.ndarray | None:
        """Return a known value that is a function of the position along a dim, which is divided."""
        table = self.known.of(atom)
        if table is None or table.ndim <= dim or not table.size == table.shape[dim] == self._count:
            return None
        return None if position_form(table.reshape(-1)) is None else table.reshape(-1)

    def _is_identity(self, table: np.ndarray | None) -> bool:
        return table is not None and bool((table == np.arange(self._count)).all())

    def _divides(self, size: int) -> None:
        if size % self._shards:
            raise NotLocalError(f"{self._shards} devices do not divide {size} tokens")

    def _compared(self, tokens: Tokens) -> Tokens:
        """Return a function of positions, with whether those of each device give the same.

        Of positions in the order of the sort only a constant is the same: a token has another one
        among those of its device.
        """
        assert tokens.table is not None
        devices = tokens.table.size if tokens.of_sorted else self._shards
        by_device = tokens.table.reshape(devices, -1)
        return replace(tokens, is_alike=bool((by_device == by_device[:1]).all()))

    # -- equations ----------------------------------------------------------------------------

    def _start(self, eqn: Any) -> LocalEquation:
        if any(v.aval.shape != (self._count,) for v in eqn.invars):
            raise NotLocalError("it sorts more than one list")
        self._divides(self._count)
        results = list[Tokens | str]()
        for number, var in enumerate(eqn.invars):
            table = self._positions(var, 0)
            if table is not None and number < eqn.params["num_keys"]:
                raise NotLocalError("it sorts positions")
            if table is None and self.known.of(var) is not None:
                raise NotLocalError("it sorts what is known")
            of_sorted = None if table is None else False
            results.append(Tokens(0, True, of_sorted, table))
        self._sizes.keys.add(eqn.outvars[0])
        return LocalEquation(eqn, (0,) * len(eqn.invars), tuple(results))

    def _equation(self, eqn: Any) -> LocalEquation:
        name = eqn.primitive.name
        if compat.has_jaxprs(eqn) and not name.startswith("scatter"):
            raise NotLocalError(f"{name} reads a value in the order of the sort")
        if name == "sort":
            return self._inverse(eqn)
        if name == "gather" and self._is_index(eqn.invars[1]):
            return self._gather(eqn)
        if name.startswith("scatter"):
            return self._scatter(eqn)
        if name == "ragged_dot_general":
            return self._ragged(eqn)
        if (made := self._of_positions(eqn)) is not None:
            return made
        if any(map(self._is_index, compat.variables(eqn.invars))):
            raise NotLocalError(f"{name} computes with positions of sorted tokens")
        return self._followed(eqn)

    def _is_index(self, atom: Any) -> bool:
        tokens = self._of(atom)
        return tokens is not None and tokens.refers

    def _inverse(self, eqn: Any) -> LocalEquation:
        """Sort the positions that a sort has made: where each token went."""
        key, *others = eqn.invars
        tokens = self._of(key)
        known = [self._positions(v, 0) for v in others if v.aval.shape == (self._count,)]
        if (
            tokens is None
            or not tokens.is_sorted
            or tokens.of_sorted is not False
            or not self._is_identity(tokens.table)
            or eqn.params["num_keys"] != 1
            or len(known) != len(others)
            or not all(self._is_identity(table) for table in known)
        ):
            raise NotLocalError("values in the order of the sort are sorted again")
        first = Tokens(0, False, False, tokens.table)
        found = (Tokens(0, False, True, tokens.table) for _ in others)
        return LocalEquation(eqn, (0,) * len(eqn.invars), (first, *found))

    def _of_positions(self, eqn: Any) -> LocalEquation | None:
        """An equation of positions alone, whose result is a function of them; None for others."""
        tokens = [one for v in eqn.invars if (one := self._of(v)) is not None]
        first = tokens[0]
        if any(one.table is None for one in tokens):
            return None
        if eqn.primitive.name in _SAME:
            made = self._followed(eqn)
            (to,) = made.results
            assert isinstance(to, Tokens)
            return replace(made, results=(replace(first, dim=to.dim),))
        places = {(one.dim, one.is_sorted, one.of_sorted) for one in tokens}
        tables = [self._table(v, first) for v in eqn.invars]
        known = [table for table in tables if table is not None]
        if len(places) > 1 or len(known) < len(tables) or (table := computed(eqn, known)) is None:
            return None
        dims = tuple(first.dim if v.aval.ndim else None for v in eqn.invars)
        made = self._compared(replace(first, table=np.broadcast_to(table, (self._count,))))
        return LocalEquation(eqn, dims, (made,))

    def _table(self, atom: Any, like: Tokens) -> np.ndarray | None:
        """Return an operand of an equation of positions as a function of them."""
        if (tokens := self._of(atom)) is not None:
            return tokens.table
        if (table := self.known.of(atom)) is None:
            return None
        if table.size == 1:
            return table.reshape(())
        return self._positions(atom, like.dim) if like.is_sorted == like.of_sorted else None

    def _followed(self, eqn: Any) -> LocalEquation:
        """An equation that computes each token of its results from the same one, or adds them."""
        tokens = [self._of(v) for v in eqn.invars]
        orders = {one.is_sorted for one in tokens if one is not None}
        made = follow(eqn, [None if one is None else one.dim for one in tokens], self._split)
        if made is None or len(orders) > 1:
            raise NotLocalError(f"{eqn.primitive.name} reads tokens together")
        for var, dim, own in zip(eqn.invars, made.operands, tokens, strict=True):
            if own is not None and own.dim != dim:
                raise NotLocalError(f"{eqn.primitive.name} reads tokens together")
            if dim is not None and own is None and not is_alike(self.known, var, dim):
                raise NotLocalError(f"{eqn.primitive.name} reads tokens in two orders")
        (is_sorted,) = orders
        results = tuple(
            how if isinstance(how, str) else Tokens(how, is_sorted) for how in made.results
        )
        return local(eqn, made.operands, results, made.params)

    def _gather(self, eqn: Any) -> LocalEquation:
        """Read tokens at the positions that a sort has made."""
        operand, indices = eqn.invars[:2]
        numbers, at = eqn.params["dimension_numbers"], self._of(indices)
        assert at is not None
        dim = _only(numbers.start_index_map, numbers.collapsed_slice_dims, indices)
        given, positions = self._of(operand), self._indexed(at, operand.aval.shape[dim])
        if given is None and at.of_sorted:
            raise NotLocalError("tokens are read at positions of the sort")
        if given is not None and (given.dim != dim or given.is_sorted != at.of_sorted):
            raise NotLocalError("tokens are read in another order than they have")
        rows = [d for d in range(eqn.outvars[0].aval.ndim) if d not in numbers.offset_dims]
        made = Tokens(rows[at.dim], at.is_sorted)
        if operand in self._sizes.keys and positions and operand.aval.ndim == 1:
            self._sizes.keys.add(eqn.outvars[0])
        if given is not None and given.refers:
            if not positions:
                raise NotLocalError("positions are read at those of slots")
            made = self._compared(replace(made, of_sorted=given.of_sorted, table=given.table))
        return local(eqn, (dim, at.dim), (made,))

    def _scatter(self, eqn: Any) -> LocalEquation:
        """Write tokens to the positions that a sort has made; or add them to what has no tokens."""
        operand, indices, updates = eqn.invars
        numbers, at = eqn.params["dimension_numbers"], self._of(indices)
        if at is None or self._of(operand) is not None:
            raise NotLocalError("sorted tokens are written at positions of others")
        dim = _only(numbers.scatter_dims_to_operand_dims, numbers.inserted_window_dims, indices)
        rows = [d for d in range(updates.aval.ndim) if d not in numbers.update_window_dims]
        row, given = rows[at.dim], self._of(updates)
        made = self._written(updates, given, at, row)
        if not at.refers:
            start = self.known.of(operand)
            adds = eqn.primitive.name == "scatter-add" and start is not None and not start.any()
            if not adds or made.refers:
                raise NotLocalError(f"{eqn.primitive.name} writes sorted tokens at other positions")
            return local(eqn, (None, at.dim, row), ("add",))
        one_by_one = self._indexed(at, operand.aval.shape[dim])
        is_set = eqn.primitive.name == "scatter" and one_by_one
        if (made.refers or eqn.primitive.name == "scatter") and not is_set:
            raise NotLocalError("several slots are written to one place")
        is_sorted = bool(at.of_sorted)
        if is_sorted and not is_alike(self.known, operand, dim):
            raise NotLocalError("tokens in two orders are added")
        return local(eqn, (dim, at.dim, row), (replace(made, dim=dim, is_sorted=is_sorted),))

    def _written(self, var: Any, given: Tokens | None, at: Tokens, row: int) -> Tokens:
        """Return what is written, in the order of the positions at which it is."""
        if given is not None:
            if given.dim != row or given.is_sorted != at.is_sorted:
                raise NotLocalError("tokens are written in another order than they have")
            return given
        if is_alike(self.known, var, row):
            return Tokens(row, at.is_sorted)
        if (table := self._positions(var, row)) is not None:
            return Tokens(row, at.is_sorted, at.is_sorted, table)
        if at.is_sorted:
            raise NotLocalError("tokens are written in another order than they have")
        return Tokens(row, False)

    def _indexed(self, at: Tokens, size: int) -> bool:
        """Check that positions are those of a dim; return whether each is one of its own.

        A token may have several slots: then its position is the slot's, divided.
        """
        assert at.table is not None
        slots, rest = divmod(self._count, size)
        if rest or not (at.table == np.arange(self._count) // max(slots, 1)).all():
            raise NotLocalError("positions are not those of the tokens")
        self._divides(size)
        return slots == 1

    def _ragged(self, eqn: Any) -> LocalEquation:
        """A ragged matmul whose groups are the sorted tokens of each expert."""
        if len(eqn.invars) != 3:
            raise NotLocalError("a ragged matmul has an offset of groups")
        lhs, rhs, sizes = eqn.invars
        numbers = eqn.params["ragged_dot_dimension_numbers"]
        (summed, of_rhs), (batch, _) = numbers.dot_dimension_numbers
        tokens, other = self._of(lhs), self._of(rhs)
        if tokens is None or not tokens.is_sorted or tokens.refers or batch:
            raise NotLocalError("a ragged matmul reads sorted tokens in another way")
        if tuple(numbers.lhs_ragged_dimensions) != (tokens.dim,) or self._of(sizes) is not None:
            raise NotLocalError("a ragged matmul has another ragged dim")
        counted = self._sizes.of(sizes)
        if tokens.dim not in summed:
            if other is not None:
                raise NotLocalError("a ragged matmul multiplies sorted tokens")
            free = [d for d in range(lhs.aval.ndim) if d not in summed]
            made = local(eqn, (tokens.dim, None, None), (Tokens(free.index(tokens.dim), True),))
        else:
            dim = of_rhs[list(summed).index(tokens.dim)]
            if other is None or other.dim != dim or not other.is_sorted or other.refers:
                raise NotLocalError("a ragged matmul sums tokens in two orders")
            made = local(eqn, (tokens.dim, dim, None), ("add",))
        return replace(made, sizes=counted)


def _only(indexed: Sequence[int], gone: Sequence[int], indices: Any) -> int:
    """Return the only dim that is indexed, by the last dim of the indices.

    Raises:
        NotLocalError: if there are others.
    """
    if len(indexed) != 1 or tuple(gone) != tuple(indexed) or indices.aval.shape[-1] != 1:
        raise NotLocalError("positions are those of several dims")
    return indexed[0]
