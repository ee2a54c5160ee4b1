"""Split the batch of a step into independent parts whose collectives overlap with matmuls.

    y = dot_general x w ;  z = tanh y

->  x0, x1 = <parts of x> ;  y0 = dot_general x0 w ;  y1 = dot_general x1 w ;  z0 = tanh y0 ; ...

Nothing of one part waits for the other, so that the collectives of each hide behind the matmuls of
the other, and no matmul is split along a sharded dim, as rings would. The parts stay apart through
scans, remats and conditionals, in the forward and the backward pass; a sum over the batch adds the
parts' sums. An equation that mixes batch elements runs as it is, on the parts joined.

Micro-batches that overlap are those of Domino (arXiv:2409.15241, section 3.2, its row split).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jaxoverlap._jax import compat, inlining
from jaxoverlap.passes.analysis.batch import BatchSplit, follow
from jaxoverlap.passes.analysis.dims import DimNames
from jaxoverlap.passes.analysis.jaxprs import dots, equations
from jaxoverlap.passes.edited import EditedStep, check_sites, misfit
from jaxoverlap.passes.halves.body import SplitBody
from jaxoverlap.passes.halves.own_names import own_slices
from jaxoverlap.passes.halves.start import BatchDim
from jaxoverlap.passes.halves.windows import ShardedWindows
from jaxoverlap.plan.edits import SplitBatch

_CALLS = ("custom_jvp_call", "custom_vjp_call", "eval_jaxpr", "closed_call", "core_call")

Dims = list[int | None]
RowsOf = Callable[[Any], int | None]


def run(step: EditedStep, edits: Sequence[SplitBatch]) -> EditedStep:
    """Split the batch that an edit names; `EditedStep.facts` has a `Halved`."""
    (edit,) = edits
    every = dots(step.jaxpr)
    check_sites(range(len(every)), [(edit.site, edit)])
    operands = every[edit.site].eqn.invars
    if not (0 <= edit.operand < len(operands) and 0 <= edit.dim < operands[edit.operand].aval.ndim):
        raise misfit(edit, f"matmul {edit.site} has no such dim")
    split, size = BatchSplit(edit.shards, edit.parts), operands[edit.operand].aval.shape[edit.dim]
    if not split.divides(size):
        raise misfit(edit, f"its {size} rows do not divide in {edit.shards} x {edit.parts}")
    dims, sizes = DimNames(step.jaxpr), dict(step.mesh.shape)
    rows = BatchDim(dims.of(operands[edit.operand])[edit.dim], edit.shards, 0)
    done = Halved(
        step.jaxpr,
        lambda var: rows.dim(dims, var),
        split,
        edit.unroll,
        whole=ShardedWindows(step.unpinned.jaxpr, step.arguments, dims, sizes),
    )
    return step.to(done.jaxpr, {SplitBatch: done})


class Halved:
    """A step whose batch runs in parts, and of which no derivative will be taken.

    Attributes:
        jaxpr: the step.
        mixing: the equations that mix batch elements, and so run on the parts joined.
        unroll: how many steps of its scans are in one body; 1 where none could be unrolled.
    """

    def __init__(
        self,
        jaxpr: Any,
        rows_of: RowsOf,
        split: BatchSplit,
        unroll: int = 1,
        whole: Callable[[Any], bool] = lambda eqn: False,
    ):
        """Split the batch of a step into parts.

        Args:
            jaxpr: the step.
            rows_of: the batch dim of a value; None if it has none.
            split: the batch split.
            unroll: how many steps of a split scan are in one body of its loop: parts hide behind
                each other only within one.
            whole: returns whether an equation needs the undivided batch, whatever its rule says.

        Raises:
            HostMemoryError: if a value in the host's memory would have to be split or joined.
        """
        self.mixing: list[Any] = []
        self.unroll = 1
        self._rows_of, self._split, self._unroll, self._whole = rows_of, split, unroll, whole
        body = SplitBody(split)
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
            given: the batch dim of each operand; None for one that is undivided.
            wanted: the same of its results; None for as they come.

        Returns:
            The new body, whose operands and results are the parts instead of each value that
            is in parts; and the batch dims of its results.
        """
        body = SplitBody(self._split)
        invars = [
            v for var, dim in zip(jaxpr.invars, given, strict=True) for v in body.bound(var, dim)
        ]
        for eqn in jaxpr.eqns:
            self._eqn(body, eqn)
        dims = [body.dim(v) for v in jaxpr.outvars] if wanted is None else list(wanted)
        outvars = body.flat(jaxpr.outvars, dims, around)
        return compat.with_binders(jaxpr, invars, outvars).replace(eqns=body.eqns), dims

    # -- equations ----------------------------------------------------------------------------

    def _eqn(self, body: SplitBody, eqn: Any) -> None:
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
        elif not self._whole(eqn) and (followed := follow(eqn, dims, self._split)):
            body.parted(eqn, followed)
        else:
            self.mixing.append(eqn)
            body.whole(eqn)

    def _opened(self, body: SplitBody, eqn: Any) -> Any:
        """Inline an inner jit, or a call with a custom derivative, if it reads split operands."""
        called = eqn.params.get("call_jaxpr") if eqn.primitive.name in _CALLS else None
        if called is None and not compat.is_plain_jit(eqn):
            return None
        if all(d is None for d in self._operand_dims(body, eqn)):
            return None
        return inlining.opened(eqn, called or eqn.params["jaxpr"])

    def _operand_dims(self, body: SplitBody, eqn: Any) -> Dims:
        """Return the batch dim of each operand of an equation; undivided ones are to be split."""
        return [self._start(v) if (d := body.dim(v)) is None else d for v in eqn.invars]

    def _start(self, atom: Any) -> int | None:
        if compat.is_literal(atom) or compat.in_host_memory(atom):
            return None
        if (dim := self._rows_of(atom)) is None:
            return None
        return dim if self._split.divides(atom.aval.shape[dim]) else None

    def _scan(self, body: SplitBody, eqn: Any) -> bool:
        """Run a scan on parts, if it does not scan over the batch dim."""
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
        parts = self._split.parts

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

        One that offloads values to the host's memory is not unrolled: XLA:GPU refuses the slices
        of host memory that the iterations of one body would read and write.

        Args:
            scan: the scan, in parts.
            has_rows: of each operand that it scans over, whether it has a batch dim.
        """
        length, unroll, inner = (scan.params[name] for name in ("length", "unroll", "jaxpr"))
        if (
            unroll != 1
            or length % self._unroll
            or any(_is_scan_or_offloads(eqn) for eqn, _ in equations(inner))
        ):
            return scan
        self.unroll = self._unroll
        apart = own_slices(inner, has_rows, scan)
        return scan.replace(params={**scan.params, "unroll": self._unroll, "jaxpr": apart})

    def _tried(self, jaxpr: Any, around: Any, given: Dims) -> Dims:
        """Return the batch dims of a body's results, found by running the body on parts."""
        before = list(self.mixing)
        _, dims = self._body(jaxpr, around, given)
        self.mixing = before
        return dims

    def _remat(self, body: SplitBody, eqn: Any) -> bool:
        dims = self._operand_dims(body, eqn)
        if all(d is None for d in dims):
            return False
        new, out = self._body(eqn.params["jaxpr"], eqn, dims)
        invars, outvars = body.flat(eqn.invars, dims, eqn), body.made(eqn.outvars, out)
        params = {**eqn.params, "jaxpr": new}
        body.eqns.append(eqn.replace(invars=invars, outvars=outvars, params=params))
        return True

    def _cond(self, body: SplitBody, eqn: Any) -> bool:
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

    def _barrier(self, body: SplitBody, eqn: Any) -> bool:
        dims = [body.dim(v) for v in eqn.invars]
        if all(d is None for d in dims):
            return False
        invars, outvars = body.flat(eqn.invars, dims, eqn), body.made(eqn.outvars, dims)
        body.eqns.append(eqn.replace(invars=invars, outvars=outvars))
        return True


def _is_scan_or_offloads(eqn: Any) -> bool:
    values = (*eqn.invars, *eqn.outvars)
    return eqn.primitive.name == "scan" or any(map(compat.in_host_memory, values))


_CALLED: dict[str, Callable[[Halved, SplitBody, Any], bool]] = {
    "scan": Halved._scan,
    "remat2": Halved._remat,
    "checkpoint": Halved._remat,
    "cond": Halved._cond,
    "optimization_barrier": Halved._barrier,
}
