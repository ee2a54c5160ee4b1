"""Run the rows of a step in parts, side by side.

    y = dot_general x w ;  z = tanh y

->  x0, x1 = <parts of x> ;  y0 = dot_general x0 w ;  y1 = dot_general x1 w ;  z0 = tanh y0 ; ...

Nothing of one part waits for the other, so that the collectives of each hide behind the matmuls of
the other, and no matmul is cut along a sharded dim, as rings would. The parts stay apart through
scans, remats and conditionals, in the forward and the backward pass; a sum over the rows is the sum
of those of the parts. An equation that mixes the rows runs as it is, on the parts joined.

Micro-batches that overlap are those of Domino (arXiv:2409.15241, section 3.2, its row split).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax import Array, lax

from jaxoverlap._jax import compat, inlining
from jaxoverlap.passes.halves.own_names import OwnNames, own_slices
from jaxoverlap.passes.halves.rows import Cut, Followed, follow

_COMBINED: dict[str, Callable[[Array, Array], Array]] = {
    "add": lax.add,
    "mul": lax.mul,
    "max": lax.max,
    "min": lax.min,
    "and": lax.bitwise_and,
    "or": lax.bitwise_or,
    "xor": lax.bitwise_xor,
}

_CALLS = ("custom_jvp_call", "custom_vjp_call", "eval_jaxpr", "closed_call", "core_call")

Dims = list[int | None]
RowsOf = Callable[[Any], int | None]


class Halved:
    """A step whose rows run in parts, and of which no derivative will be taken.

    Attributes:
        jaxpr: the step.
        mixing: the equations that mix the rows, and so run on the parts joined.
        unroll: how many steps of its scans stand in one body; 1 where none could be unrolled.
    """

    def __init__(self, jaxpr: Any, rows_of: RowsOf, cut: Cut, unroll: int = 1):
        """Run the rows of a step in parts.

        Args:
            jaxpr: the step.
            rows_of: the dim of a value along which the rows to be cut lie; None if it has none.
            cut: how they are cut.
            unroll: how many steps of a cut scan stand in one body of its loop: parts hide behind
                each other only within one.
        """
        self.mixing: list[Any] = []
        self.unroll = 1
        self._rows_of, self._cut, self._unroll = rows_of, cut, unroll
        body = _Body(cut)
        for var in jaxpr.invars:
            if (dim := self._start(var)) is not None:
                body.parts(var, dim, jaxpr.eqns[0])
        for eqn in jaxpr.eqns:
            self._eqn(body, eqn)
        outvars = [body.joined(v, jaxpr.eqns[-1]) for v in jaxpr.outvars]
        self.jaxpr = jaxpr.replace(eqns=body.eqns, outvars=outvars)

    def _body(
        self, jaxpr: Any, around: Any, given: Dims, wanted: Sequence[int | None] | None = None
    ) -> tuple[Any, Dims]:
        """Run a body on parts.

        Args:
            jaxpr: the body.
            around: the equation whose body it is.
            given: the dims along which its operands' rows lie; None for one that is whole.
            wanted: the same of its results; None for as they come.

        Returns:
            The new body, whose operands and results are the parts in the place of each value that
            is in parts; and the dims along which its results' rows lie.
        """
        body = _Body(self._cut)
        invars = [
            v for var, dim in zip(jaxpr.invars, given, strict=True) for v in body.bound(var, dim)
        ]
        for eqn in jaxpr.eqns:
            self._eqn(body, eqn)
        dims = [body.dim(v) for v in jaxpr.outvars] if wanted is None else list(wanted)
        outvars = body.flat(jaxpr.outvars, dims, around)
        return compat.with_binders(jaxpr, invars, outvars).replace(eqns=body.eqns), dims

    # -- equations ----------------------------------------------------------------------------

    def _eqn(self, body: _Body, eqn: Any) -> None:
        if (called := self._opened(body, eqn)) is not None:
            inner, results = called
            for one in inner:
                self._eqn(body, one)
            for var, atom in zip(eqn.outvars, results, strict=True):
                body.alias(var, atom)
            return
        inside = _CALLED.get(eqn.primitive.name)
        if inside and inside(self, body, eqn):
            return
        dims = [body.dim(v) for v in eqn.invars]
        if all(d is None for d in dims):
            body.whole(eqn)
        elif followed := follow(eqn, dims, self._cut):
            body.parted(eqn, followed)
        else:
            self.mixing.append(eqn)
            body.whole(eqn)

    def _opened(self, body: _Body, eqn: Any) -> Any:
        """Open an inner jit, or a call with a derivative of its own, where rows go into it."""
        called = eqn.params.get("call_jaxpr") if eqn.primitive.name in _CALLS else None
        if called is None and not compat.is_plain_jit(eqn):
            return None
        if all(d is None for d in self._operand_dims(body, eqn)):
            return None
        return inlining.opened(eqn, called or eqn.params["jaxpr"])

    def _operand_dims(self, body: _Body, eqn: Any) -> Dims:
        """Return where the rows of a body's operands lie; whole ones are to be cut."""
        return [self._start(v) if (d := body.dim(v)) is None else d for v in eqn.invars]

    def _start(self, atom: Any) -> int | None:
        if compat.is_literal(atom) or (dim := self._rows_of(atom)) is None:
            return None
        return dim if self._cut.divides(atom.aval.shape[dim]) else None

    def _scan(self, body: _Body, eqn: Any) -> bool:
        """Run a scan on parts, if it does not scan over the rows themselves."""
        num_consts, num_carry = compat.scan_counts(eqn)
        first = num_consts + num_carry
        dims = self._operand_dims(body, eqn)
        if all(d is None for d in dims):
            return False
        if any(d == 0 for d in dims[first:]):
            return False
        given = [*dims[:first], *(None if d is None else d - 1 for d in dims[first:])]
        inner = eqn.params["jaxpr"]
        while True:
            out = self._tried(inner, eqn, given)
            grown = [
                new if old is None else old
                for old, new in zip(given[num_consts:first], out, strict=False)
            ]
            if grown == given[num_consts:first]:
                break
            given[num_consts:first] = grown
        wanted = [*given[num_consts:first], *out[num_carry:]]
        new, _ = self._body(inner, eqn, given, wanted)
        outer = [*given[:first], *(None if d is None else d + 1 for d in given[first:])]
        results = [*wanted[:num_carry], *(None if d is None else d + 1 for d in wanted[num_carry:])]
        parts = self._cut.parts

        def count(some: Sequence[int | None]) -> int:
            return sum(1 if d is None else parts for d in some)

        counts = count(given[:num_consts]), count(given[num_consts:first])
        invars = body.flat(eqn.invars, outer, eqn)
        scan = compat.new_scan(eqn, new, counts, invars, body.made(eqn.outvars, results))
        has_rows = [d is not None for d in given[first:] for _ in range(1 if d is None else parts)]
        body.eqns.append(self._unrolled(scan, has_rows))
        return True

    def _unrolled(self, scan: Any, has_rows: Sequence[bool]) -> Any:
        """Unroll a scan that the user has not, and that has no other inside.

        Args:
            scan: the scan, in parts.
            has_rows: of each operand that it scans over, whether it holds rows.
        """
        length, unroll, inner = (scan.params[name] for name in ("length", "unroll", "jaxpr"))
        if unroll != 1 or length % self._unroll or _has_scan(inner):
            return scan
        self.unroll = self._unroll
        apart = own_slices(inner, has_rows, scan)
        return scan.replace(params={**scan.params, "unroll": self._unroll, "jaxpr": apart})

    def _tried(self, jaxpr: Any, around: Any, given: Dims) -> Dims:
        """Run a body on parts only to see where the rows of its results lie."""
        before = list(self.mixing)
        _, dims = self._body(jaxpr, around, given)
        self.mixing = before
        return dims

    def _remat(self, body: _Body, eqn: Any) -> bool:
        dims = self._operand_dims(body, eqn)
        if all(d is None for d in dims):
            return False
        new, out = self._body(eqn.params["jaxpr"], eqn, dims)
        invars, outvars = body.flat(eqn.invars, dims, eqn), body.made(eqn.outvars, out)
        params = {**eqn.params, "jaxpr": new}
        body.eqns.append(eqn.replace(invars=invars, outvars=outvars, params=params))
        return True

    def _cond(self, body: _Body, eqn: Any) -> bool:
        dims = self._operand_dims(body, eqn)
        if all(d is None for d in dims) or dims[0] is not None:
            return False
        branches = eqn.params["branches"]
        came = [self._tried(branch, eqn, dims[1:]) for branch in branches]
        out = [next((d for d in some if d is not None), None) for some in zip(*came, strict=True)]
        new = tuple(self._body(branch, eqn, dims[1:], out)[0] for branch in branches)
        invars, outvars = body.flat(eqn.invars, dims, eqn), body.made(eqn.outvars, out)
        body.eqns.append(
            eqn.replace(invars=invars, outvars=outvars, params={**eqn.params, "branches": new})
        )
        return True

    def _barrier(self, body: _Body, eqn: Any) -> bool:
        dims = [body.dim(v) for v in eqn.invars]
        if all(d is None for d in dims):
            return False
        invars, outvars = body.flat(eqn.invars, dims, eqn), body.made(eqn.outvars, dims)
        body.eqns.append(eqn.replace(invars=invars, outvars=outvars))
        return True


def _has_scan(jaxpr: Any) -> bool:
    return any(
        eqn.primitive.name == "scan" or any(map(_has_scan, compat.jaxprs_in(eqn)))
        for eqn in jaxpr.eqns
    )


_CALLED: dict[str, Callable[[Halved, _Body, Any], bool]] = {
    "scan": Halved._scan,
    "remat2": Halved._remat,
    "checkpoint": Halved._remat,
    "cond": Halved._cond,
    "optimization_barrier": Halved._barrier,
}


class _Body:
    """The equations of one body, as they are made, and its values: whole, in parts, or both."""

    def __init__(self, cut: Cut):
        self.eqns: list[Any] = []
        self._cut = cut
        self._parts: dict[Any, tuple[int, list[Any]]] = {}
        self._wholes: dict[Any, Any] = {}
        self._own = OwnNames(self.eqns)

    def bound(self, var: Any, dim: int | None) -> list[Any]:
        """Bind an operand of the body: in parts along a dim, or whole."""
        if dim is None:
            return [var]
        parts = self._new_parts(var, dim)
        self._parts[var] = dim, parts
        return parts

    def _new_parts(self, var: Any, dim: int) -> list[Any]:
        return [self._new_part(var, dim) for _ in range(self._cut.parts)]

    def _new_part(self, var: Any, dim: int) -> Any:
        return compat.sized_var(var, dim, self._cut.part(var.aval.shape[dim]))

    def alias(self, var: Any, atom: Any) -> None:
        """Let a value be another one."""
        if self.dim(atom) is None:
            self._wholes[var] = self._whole_of(atom)
        else:
            self._parts[var] = self._parts[atom]

    def dim(self, atom: Any) -> int | None:
        """Return the dim along which a value is in parts; None if it is whole."""
        if compat.is_literal(atom) or atom not in self._parts:
            return None
        return self._parts[atom][0]

    def values(self, atom: Any, dim: int | None, like: Any) -> list[Any]:
        """Return a value's parts along a dim, or the whole value."""
        return [self.joined(atom, like)] if dim is None else self.parts(atom, dim, like)

    def flat(self, atoms: Sequence[Any], dims: Sequence[int | None], like: Any) -> list[Any]:
        """Return the parts or the whole of each of several values, in order."""
        return [
            v for atom, dim in zip(atoms, dims, strict=True) for v in self.values(atom, dim, like)
        ]

    def made(self, outvars: Sequence[Any], dims: Sequence[int | None]) -> list[Any]:
        """Bind results: in parts, or whole."""
        return [v for var, dim in zip(outvars, dims, strict=True) for v in self.bound(var, dim)]

    def _whole_of(self, atom: Any) -> Any:
        return atom if compat.is_literal(atom) else self._wholes.get(atom, atom)

    def joined(self, atom: Any, like: Any) -> Any:
        """Return a whole value; parts are joined, once."""
        if compat.is_literal(atom) or atom not in self._parts or atom in self._wholes:
            return self._whole_of(atom)
        dim, parts = self._parts[atom]
        whole, cut = compat.like_var(atom), self._cut
        self.eqns += inlining.inline(
            lambda *p: [_join(p, dim, cut)], parts, [whole], like, alike=("join", dim, cut)
        )
        self._wholes[atom] = whole
        return whole

    def parts(self, atom: Any, dim: int, like: Any) -> list[Any]:
        """Return the parts of a value along a dim; a whole value is cut."""
        if self.dim(atom) == dim:
            return self._parts[atom][1]
        whole, cut = self.joined(atom, like), self._cut
        if (parts := self._own.parts(whole, dim, cut, like)) is None:
            parts = self._new_parts(atom, dim)
            self.eqns += inlining.inline(
                lambda x: _cut(x, dim, cut), [whole], parts, like, alike=("cut", dim, cut)
            )
        if not compat.is_literal(atom) and atom not in self._parts:
            self._wholes[atom] = whole
            self._parts[atom] = dim, parts
        return parts

    def whole(self, eqn: Any) -> None:
        """Run an equation as it is, on whole values."""
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
        for i in range(self._cut.parts):
            outvars = [
                compat.like_var(v) if isinstance(how, str) else self._new_part(v, how)
                for v, how in zip(eqn.outvars, followed.results, strict=True)
            ]
            invars = [self._of_part(some, i, eqn) for some in operands]
            self.eqns.append(eqn.replace(invars=invars, outvars=outvars, params=params))
            made.append(outvars)
        for place, (var, how) in enumerate(zip(eqn.outvars, followed.results, strict=True)):
            parts = [outvars[place] for outvars in made]
            if not isinstance(how, str):
                self._parts[var] = how, parts
                continue
            self.eqns += inlining.inline(_combined(how), parts, [var], eqn, alike=("combine", how))

    def _of_part(self, values: Sequence[Any], part: int, eqn: Any) -> Any:
        """Return what an equation on a part reads: the part, or a whole value."""
        return values[part] if len(values) > 1 else self._own.of(values[0], part, eqn)


def _combined(how: str) -> Callable[..., list[Array]]:
    def combined(first: Array, *others: Array) -> list[Array]:
        for other in others:
            first = _COMBINED[how](first, other)
        return [first]

    return combined


def _cut(x: Array, dim: int, cut: Cut) -> list[Array]:
    """Cut an array in parts along a dim: of each shard the same share."""
    shape, size = x.shape, x.shape[dim]
    rest = size // (cut.shards * cut.parts)
    split = lax.reshape(x, (*shape[:dim], cut.shards, cut.parts, rest, *shape[dim + 1 :]))
    part = (*shape[:dim], cut.shards * rest, *shape[dim + 1 :])
    return [
        lax.reshape(lax.slice_in_dim(split, i, i + 1, axis=dim + 1), part) for i in range(cut.parts)
    ]


def _join(parts: Sequence[Array], dim: int, cut: Cut) -> Array:
    """Join the parts of an array."""
    shape = parts[0].shape
    split = (*shape[:dim], cut.shards, 1, shape[dim] // cut.shards, *shape[dim + 1 :])
    joined = lax.concatenate([lax.reshape(p, split) for p in parts], dim + 1)
    return lax.reshape(joined, (*shape[:dim], shape[dim] * cut.parts, *shape[dim + 1 :]))
