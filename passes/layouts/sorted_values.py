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

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxoverlap._jax import compat
from jaxoverlap.passes.analysis.batch import BatchSplit, follow
from jaxoverlap.passes.analysis.def_use import DefUse
from jaxoverlap.passes.analysis.known import KnownValues, computed

_SAME = ("broadcast_in_dim", "reshape", "squeeze")  # they leave a position as it is
_ONE_BY_ONE = ("reshape", "convert_element_type", "copy")
_COMBINED = ("add", "max", "min")
_TRIES = 4  # random lists of experts, by which it is checked that sizes count them


class NotLocalError(Exception):
    """Raised with the reason for which devices cannot sort their own tokens alone."""


@dataclass(frozen=True)
class Tokens:
    """A value with a dim of tokens.

    Attributes:
        dim: the dim.
        is_sorted: whether the tokens are in the order of the sort.
        of_sorted: of a value that is a function of positions, whether these are positions in the
            order of the sort; None for any other value.
        table: [tokens], the value at each position.
        is_alike: whether the positions of each device give the same values.
    """

    dim: int
    is_sorted: bool
    of_sorted: bool | None = None
    table: np.ndarray | None = None
    is_alike: bool = False

    @property
    def refers(self) -> bool:
        """Whether its values say where tokens are."""
        return self.table is not None and not self.is_alike

    @property
    def is_plain(self) -> bool:
        """Whether it is in the order of the tokens, and does not say where some are."""
        return not self.is_sorted and not self.refers


@dataclass(frozen=True)
class LocalEquation:
    """An equation that a device runs on its own tokens.

    Attributes:
        eqn: the equation, with the parameters that it then has.
        operands: the dim of tokens of each operand; None for one that has none.
        results: the same of each result; or the primitive that combines those of all devices.
        sizes: the equations that count the device's own tokens of each expert, for a ragged matmul.
    """

    eqn: Any
    operands: tuple[int | None, ...]
    results: tuple[Tokens | str, ...]
    sizes: tuple[LocalEquation, ...] = ()


class SortedValues:
    """The values of a body that depend on the order of one of its sorts.

    Attributes:
        local: the equations that make or read them, by their indices.
        known: the body's known values.
    """

    def __init__(self, eqns: Sequence[Any], outvars: Sequence[Any], start: int, shards: int):
        """Follow the values.

        Args:
            eqns: the body's equations.
            outvars: its results.
            start: the index of the sort.
            shards: among how many devices the tokens are divided, in their order.

        Raises:
            NotLocalError: if a device cannot sort its own tokens alone.
        """
        self.local: dict[int, LocalEquation] = {}
        self.known = KnownValues()
        self._uses, self._shards = DefUse(eqns, outvars), shards
        self._tokens: dict[Any, Tokens] = {}
        self._key = eqns[start].invars[0]
        (self._count,) = self._key.aval.shape
        self._split = BatchSplit(1, shards)
        for position, eqn in enumerate(eqns):
            self.known.see(eqn)
            if position == start:
                self.local[position] = self._start(eqn)
            elif self._depends(eqn.invars):
                self.local[position] = self._equation(eqn)
            else:
                continue
            for var, how in zip(eqn.outvars, self.local[position].results, strict=True):
                if isinstance(how, Tokens):
                    self._tokens[var] = how
        if self._depends(outvars):
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

    def _is_alike(self, atom: Any, dim: int) -> bool:
        """Return whether all elements along a dim of a value are known to be equal."""
        table = self.known.of(atom)
        if not is_made_here(table):
            return False
        assert table is not None
        return table.ndim == 0 or table.shape[dim] == 1

    def _is_identity(self, table: np.ndarray | None) -> bool:
        return table is not None and bool((table == np.arange(self._count)).all())

    def _divides(self, size: int) -> None:
        if size % self._shards:
            raise NotLocalError(f"{self._shards} devices do not divide {size} tokens")

    def _compared(self, tokens: Tokens) -> Tokens:
        """Return a function of positions, with whether those of each device give the same."""
        assert tokens.table is not None
        by_device = tokens.table.reshape(self._shards, -1)
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
        for var, dim in zip(eqn.invars, made.operands, strict=True):
            if dim is not None and self._of(var) is None and not self._is_alike(var, dim):
                raise NotLocalError(f"{eqn.primitive.name} reads tokens in two orders")
        (is_sorted,) = orders
        results = tuple(
            how if isinstance(how, str) else Tokens(how, is_sorted) for how in made.results
        )
        return _local(eqn, made.operands, results, made.params)

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
        if given is not None and given.refers:
            if not positions:
                raise NotLocalError("positions are read at those of slots")
            made = self._compared(replace(made, of_sorted=given.of_sorted, table=given.table))
        return _local(eqn, (dim, at.dim), (made,))

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
            return _local(eqn, (None, at.dim, row), ("add",))
        one_by_one = self._indexed(at, operand.aval.shape[dim])
        is_set = eqn.primitive.name == "scatter" and one_by_one
        if made.refers and not is_set:
            raise NotLocalError("positions are added")
        is_sorted = bool(at.of_sorted)
        if is_sorted and not self._is_alike(operand, dim):
            raise NotLocalError("tokens in two orders are added")
        return _local(eqn, (dim, at.dim, row), (replace(made, dim=dim, is_sorted=is_sorted),))

    def _written(self, var: Any, given: Tokens | None, at: Tokens, row: int) -> Tokens:
        """Return what is written, in the order of the positions at which it is."""
        if given is not None:
            if given.dim != row or given.is_sorted != at.is_sorted:
                raise NotLocalError("tokens are written in another order than they have")
            return given
        if self._is_alike(var, row):
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
        lhs, rhs, sizes = eqn.invars[:3]
        numbers = eqn.params["ragged_dot_dimension_numbers"]
        (summed, of_rhs), (batch, _) = numbers.dot_dimension_numbers
        tokens, other = self._of(lhs), self._of(rhs)
        if tokens is None or not tokens.is_sorted or tokens.refers or batch:
            raise NotLocalError("a ragged matmul reads sorted tokens in another way")
        if tuple(numbers.lhs_ragged_dimensions) != (tokens.dim,) or self._of(sizes) is not None:
            raise NotLocalError("a ragged matmul has another ragged dim")
        counted = self._counted(sizes)
        if tokens.dim not in summed:
            if other is not None:
                raise NotLocalError("a ragged matmul multiplies sorted tokens")
            free = [d for d in range(lhs.aval.ndim) if d not in summed]
            made = _local(eqn, (tokens.dim, None, None), (Tokens(free.index(tokens.dim), True),))
        else:
            dim = of_rhs[list(summed).index(tokens.dim)]
            if other is None or other.dim != dim or not other.is_sorted or other.refers:
                raise NotLocalError("a ragged matmul sums tokens in two orders")
            made = _local(eqn, (tokens.dim, dim, None), ("add",))
        return replace(made, sizes=counted)

    # -- sizes of groups ----------------------------------------------------------------------

    def _counted(self, sizes: Any) -> tuple[LocalEquation, ...]:
        """Return the equations that count the tokens of each expert, from what the sort sorts."""
        base, positions = self._base(self._key), list[int]()
        todo = [sizes]
        while todo:
            var = todo.pop()
            position = self._uses.made.get(var)
            if var in (base, self._key) or self.known.of(var) is not None:
                continue
            if position is None:
                raise NotLocalError("sizes of groups are not computed where the tokens are sorted")
            if position not in positions:
                positions.append(position)
                todo += compat.variables(self._uses.eqns[position].invars)
        self._divides(base.aval.shape[0])
        dims: dict[Any, int | None] = {base: 0, self._key: 0}
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
        self._check_counts(sizes, base, made)
        return tuple(made)

    def _base(self, var: Any) -> Any:
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
            start, dim = self.known.of(operand), given[1]
            if start is None or start.any() or dim is None or given[2] is not None:
                raise NotLocalError("sizes of groups do not count what is sorted")
            if not self._is_alike(updates, dim):
                raise NotLocalError("sizes of groups are weighted")
            return _local(eqn, (None, dim, dim), ("add",))
        made = follow(eqn, given, self._split) if any(d is not None for d in given) else None
        if made is None or len(eqn.outvars) != 1:
            raise NotLocalError(f"{eqn.primitive.name} computes sizes of groups")
        for var, dim, own in zip(eqn.invars, made.operands, given, strict=True):
            if dim is not None and own is None and not self._is_alike(var, dim):
                raise NotLocalError("sizes of groups depend on positions")
        (how,) = made.results
        how = how if isinstance(how, str) else Tokens(how, False)
        return _local(eqn, made.operands, (how,), made.params)

    def _check_counts(self, sizes: Any, base: Any, made: Sequence[LocalEquation]) -> None:
        """Check that sizes count each expert's tokens: by running the equations on random ones.

        Each token adds what its expert alone decides, so that sizes are a matrix times the true
        ones; a matrix that gives back some random lists of sizes is that of counting.

        Raises:
            NotLocalError: if they do not; or if an expert may be negative, and is not counted as
                the first: then its tokens come first, and the groups begin behind them.
        """
        experts, rng = sizes.aval.shape[0], np.random.default_rng(0)
        count = self._count // self._shards
        shape = (base.aval.shape[0] // self._shards, *base.aval.shape[1:])

        def counts(of: np.ndarray) -> np.ndarray:
            with jax.ensure_compile_time_eval():
                given = jnp.asarray(of.reshape(shape), base.aval.dtype)
                values = {base: given, self._key: given.reshape(-1).astype(self._key.aval.dtype)}
                run(made, values, self.known, self._shards)
                return np.asarray(values[sizes])

        for _ in range(_TRIES):
            of = rng.choice(experts, count, p=rng.dirichlet(np.ones(experts)))
            if not (counts(of) == np.bincount(of, minlength=experts)).all():
                raise NotLocalError("sizes of groups do not count what is sorted")
        if not self._is_expert(base) and counts(np.full(count, -1))[0] != count:
            raise NotLocalError("the numbers of experts may be negative")

    def _is_expert(self, var: Any) -> bool:
        """Return whether a value is never negative: the number of a largest element."""
        maker = self._uses.maker(var)
        while maker is not None and maker.primitive.name in (
            "reshape",
            "convert_element_type",
            "copy",
        ):
            var, maker = maker.invars[0], self._uses.maker(maker.invars[0])
        if maker is None:
            return False
        name = maker.primitive.name
        return name in ("argmax", "argmin") or (name == "top_k" and var is maker.outvars[1])


def run(
    equations: Sequence[LocalEquation], values: dict[Any, Any], known: KnownValues, shards: int
) -> None:
    """Run equations on a device's own tokens.

    Args:
        equations: the equations.
        values: what the device has of each value that they read; gets what they make.
        known: the values that are made where they are read.
        shards: among how many devices the tokens are divided.
    """
    for one in equations:
        eqn, own = one.eqn, dict(values)
        run(one.sizes, own, known, shards)
        operands = [
            made_here(v, dim, known, shards) if compat.is_literal(v) or v not in own else own[v]
            for v, dim in zip(eqn.invars, one.operands, strict=True)
        ]
        if eqn.primitive.name == "sharding_constraint":  # of sorted tokens: XLA chooses
            made = operands
        else:
            made = compat.evaluate_eqn(eqn, operands)
        values.update(zip(eqn.outvars, made, strict=True))


def made_here(atom: Any, dim: int | None, known: KnownValues, shards: int) -> Any:
    """Return a device's part of a known operand."""
    table, shape = known.of(atom), list(atom.aval.shape)
    assert table is not None
    if dim is not None:
        shape[dim] //= shards
    if table.size == 1:
        return jnp.full(shape, table.reshape(())[()], atom.aval.dtype)
    form = position_form(table.reshape(-1))
    assert form is not None
    slots, first = form
    along = next(d for d, size in enumerate(table.shape) if size > 1)
    return jax.lax.broadcasted_iota(atom.aval.dtype, shape, along) // slots + first


def is_made_here(table: np.ndarray | None) -> bool:
    """Return whether a known value is made where it is read: a constant, or positions."""
    if table is None or sum(size > 1 for size in table.shape) > 1:
        return False
    return table.size == 1 or position_form(table.reshape(-1)) is not None


def position_form(table: np.ndarray) -> tuple[int, int] | None:
    """Return a and b of positions `p // a + b`; None for another function of positions p."""
    if not np.issubdtype(table.dtype, np.integer):
        return None
    first = int(table[0])
    slots = int(np.argmax(table != first)) or len(table)
    fits = (table == np.arange(len(table)) // slots + first).all()
    return (slots, first) if fits else None


def _local(
    eqn: Any,
    operands: Sequence[int | None],
    results: Sequence[Tokens | str],
    params: Any = (),
) -> LocalEquation:
    """Return an equation as a device runs it.

    Raises:
        NotLocalError: if nothing combines the devices' results.
    """
    if any(isinstance(how, str) and how not in _COMBINED for how in results):
        raise NotLocalError(f"nothing combines the parts of {eqn.primitive.name}")
    own = eqn.replace(params={**eqn.params, **dict(params)})
    return LocalEquation(own, tuple(operands), tuple(results))


def _only(indexed: Sequence[int], gone: Sequence[int], indices: Any) -> int:
    """Return the only dim that is indexed, by the last dim of the indices.

    Raises:
        NotLocalError: if there are others.
    """
    if len(indexed) != 1 or tuple(gone) != tuple(indexed) or indices.aval.shape[-1] != 1:
        raise NotLocalError("positions are those of several dims")
    return indexed[0]


def _is_wide(eqn: Any) -> bool:
    """Return whether a conversion of integers loses none."""
    before, after = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
    kinds = (jnp.issubdtype(dtype, jnp.integer) for dtype in (before, after))
    return all(kinds) and math.log2(jnp.iinfo(after).max) >= math.log2(jnp.iinfo(before).max)
