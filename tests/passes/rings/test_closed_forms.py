"""Count hops, bytes and peak memory of every public ring, in its jaxpr and in compiled HLO.

Compiled HLO says how many collectives there are and what they carry. It does not say what a
ring holds at once: XLA's peak is one number for all buffers, the operands' slices and the matmuls'
workspace among them. So peak bytes are counted in the jaxpr, whose order is the schedule's.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoverlap
from jaxoverlap import ring
from jaxoverlap.flags import options_for
from jaxoverlap.passes.rings import orders as forms
from jaxoverlap.plan.plan import Variant
from jaxoverlap.simulation import hlo
from jaxoverlap.simulation.audit import Collective, audit
from tests.support.engine import AXIS, RINGS, SLICED, equations
from tests.support.pods import pytestmark as pod_marks

N = 8  # of the compiled rings
EVERY = [*RINGS, *SLICED]
EXCHANGES = [v for v in EVERY if v.style in ("direct", "sliced")]
# Each style and slices of a ring are compiled: the rest differs in nothing that XLA sees.
COMPILED = [str(v) for v in EVERY if str(v) not in ("one_way x 2", "direct x 2", "sliced x 4")]
WHOLE = {"all_gather": "all-gather", "reduce_scatter": "reduce-scatter", "all_to_all": "all-to-all"}
HOPS = {"ppermute": "collective-permute", **WHOLE}  # a jaxpr's names, and HLO's


class Case(NamedTuple):
    """A public function of `jaxoverlap.ring`, with its shapes and variants.

    Attributes:
        collective: the collective that it does, named as in `passes/rings/orders.py`.
        shapes: returns the shapes of its operands on each of n devices.
        carried: the shapes of what one hop carries if it is not cut into pieces.
        variants: the variants that it has.
    """

    collective: forms.Collective
    shapes: Callable[[int], list[tuple[int, ...]]]
    carried: list[tuple[int, ...]]
    variants: list[Variant]

    @property
    def chunk_bytes(self) -> int:
        return 4 * sum(map(math.prod, self.carried))


CASES = {
    "all_gather_matmul": Case("all_gather", lambda n: [(8, 16), (16, 8)], [(8, 16)], EVERY),
    "matmul_reduce_scatter": Case("reduce_scatter", lambda n: [(8 * n, 16), (16, 4)], [(8, 4)], EVERY),
    "matmul_all_reduce": Case("all_reduce", lambda n: [(8 * n, 16), (16, 4)], [(8, 4)], EVERY),
    "all_to_all_matmul": Case("all_to_all", lambda n: [(4 * n, 8), (8 * n, 4)], [(4, 8)], EXCHANGES),
    "matmul_all_to_all": Case("all_to_all", lambda n: [(4, 16), (16, 8 * n)], [(4, 8)], EXCHANGES),
    "ring_attention": Case("all_gather", lambda n: [(1, 8, 2, 4)] * 3, [(1, 8, 2, 4)] * 2, RINGS),
    "query_split_attention": Case(
        "reduce_scatter", lambda n: [(1, 8 * n, 2, 4)] * 3 + [(2, 4, 8)], [(1, 8, 8)], EVERY
    ),
}  # fmt: skip

names = pytest.mark.parametrize("name", CASES)


def test_no_ring_is_forgotten():
    assert set(CASES) == set(ring.__all__)


def expected(name: str, variant: Variant, n: int) -> dict[str, tuple[int, int]]:
    """Return by collective how many there are, and the bytes that each device sends in them."""
    case = CASES[name]
    carried = forms.bytes_sent(case.collective, n, case.chunk_bytes)
    half = "reduce_scatter" if case.collective == "all_reduce" else case.collective
    kind = WHOLE[half] if variant.style == "sliced" else "collective-permute"
    hops = forms.num_hops(variant, n) * len(case.carried)
    if case.collective == "all_reduce":
        return {kind: (hops, carried // 2), "all-gather": (1, carried // 2)}
    return {kind: (hops, carried)}


def on_mesh(name: str, variants: list[Variant], mesh: Mesh) -> tuple[Callable, list]:
    """Return a function for `shard_map` of all variants, each in its own scope, and its arguments.

    Each variant has operands of its own, as XLA would send once what two rings send alike.
    """

    def body(*args):
        results = []
        for i, variant in enumerate(variants):
            with jax.named_scope(f"variant{i}_"):
                mine = [a[0, i] for a in args]
                results.append(getattr(ring, name)(*mine, AXIS, variant=variant)[None])
        return results

    n = mesh.size
    at = NamedSharding(mesh, P(AXIS))
    shapes = [(n, len(variants), *shape) for shape in CASES[name].shapes(n)]
    args = [jax.ShapeDtypeStruct(shape, jnp.float32, sharding=at) for shape in shapes]
    mapped = jax.shard_map(body, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS), check_vma=False)
    return mapped, args


def cpus(n: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:n]), (AXIS,))


def scope(op_name: str) -> int:
    """Return the number of the variant whose scope an operation stands in."""
    (number,) = set(re.findall(r"variant(\d+)_", op_name))
    return int(number)


# -- what is sent ---------------------------------------------------------------------------------


@names
def test_what_is_sent_in_the_jaxpr(name: str):
    for variant in CASES[name].variants:
        mapped, args = on_mesh(name, [variant], cpus(N))
        counts: Counter[str] = Counter()
        carried: Counter[str] = Counter()
        for eqn in equations(jax.make_jaxpr(mapped)(*args).jaxpr):
            if kind := HOPS.get(eqn.primitive.name):
                counts[kind] += 1
                carried[kind] += sent_by(kind, *(v.aval.size * 4 for v in eqn.invars))
        got = {kind: (counts[kind], carried[kind]) for kind in counts}
        assert got == expected(name, variant, N), variant


def sent_by(kind: str, *operands: int) -> int:
    """Return the bytes that each of N devices sends in a collective."""
    if kind == "all-gather":
        return (N - 1) * sum(operands)
    return sum(operands) if kind == "collective-permute" else sum(operands) * (N - 1) // N


def check_compiled(name: str, mesh: Mesh, options: dict[str, Any]) -> None:
    """Check that compiled HLO's collectives, and what they carry, are those of the closed forms."""
    variants = [v for v in CASES[name].variants if str(v) in COMPILED]
    mapped, args = on_mesh(name, variants, mesh)
    # These tests spend their time on compiling; the level is that of code, not of HLO.
    options = {"xla_backend_optimization_level": 0, **options}
    text = jax.jit(mapped, compiler_options=options).lower(*args).compile().as_text()
    assert text
    module = hlo.parse(text)
    collectives: dict[tuple[int, str], list[Collective]] = {}
    for collective in audit(text).collectives:
        at = scope(op_name(module, collective))
        collectives.setdefault((at, collective.kind), []).append(collective)
    for i, variant in enumerate(variants):
        mine = {kind: of for (at, kind), of in collectives.items() if at == i}
        got = {kind: (len(of), sum(c.bytes_moved for c in of)) for kind, of in mine.items()}
        assert got == expected(name, variant, N), variant
        assert {c.runs for of in mine.values() for c in of} == {1}


def op_name(module: hlo.Module, collective: Collective) -> str:
    """Return the name of the JAX operation that a collective came from, even if it is wrapped."""
    body = module.body(collective.computation)
    (start,) = (i for i in body if i.name == collective.name)
    inside = [i for called in start.called for i in module.computations.get(called, ())]
    return start.op_name or next(filter(None, (i.op_name for i in inside)))


@names
def test_what_is_sent_in_hlo_for_cpus(name: str):
    check_compiled(name, cpus(N), {})


class TestPods:
    pytestmark = pod_marks

    @names
    def test_what_is_sent_in_hlo_for_pods(self, name: str):
        mesh = jaxoverlap.pod_mesh(f"h100-sxm:1x{N}", {AXIS: N})
        check_compiled(name, mesh, options_for(mesh))


# -- what is held ---------------------------------------------------------------------------------


class Op(NamedTuple):
    """An equation; a buffer is a number, and a barrier's results are its operands."""

    name: str
    reads: list[int]
    writes: list[int]
    fixed: bool  # a slice whose place no device works out: part of what it is cut from


CUTS = {"dynamic_slice", "slice"}
VIEWS = {"reshape", "transpose", "squeeze", "broadcast_in_dim", "convert_element_type", *CUTS}


class Program:
    """A jaxpr as a list of operations, in the order of the schedule that it asks for."""

    def __init__(self, jaxpr: Any):
        self.sizes: list[int] = []  # bytes by buffer
        self.ops: list[Op] = []
        self.arguments = [self._new(v) for v in jaxpr.invars]
        self._run(jaxpr, self.arguments)

    def _new(self, variable: Any) -> int:
        self.sizes.append(variable.aval.size * variable.aval.dtype.itemsize)
        return len(self.sizes) - 1

    def _run(self, jaxpr: Any, given: list[int]) -> list[int]:
        """Add the operations of a jaxpr, calls opened, and return the buffers of its results."""
        of = dict(zip(jaxpr.invars, given, strict=True))
        of |= {v: self._new(v) for v in jaxpr.constvars}

        def read(atom: Any) -> list[int]:
            return [] if hasattr(atom, "val") else [of[atom]]

        for eqn in jaxpr.eqns:
            reads = [b for atom in eqn.invars for b in read(atom)]
            inner = next((v for v in map(jaxpr_in, eqn.params.values()) if v is not None), None)
            if inner is not None and eqn.primitive.name != "reduce_scatter":
                given = [b for a in eqn.invars for b in (read(a) or [self._new(a)])]
                of |= zip(eqn.outvars, self._run(inner, given), strict=True)
                continue
            writes = [self._new(v) for v in eqn.outvars]
            if eqn.primitive.name == "optimization_barrier":
                same = zip(eqn.invars, writes, strict=True)
                writes = [b for atom, new in same for b in (read(atom) or [new])]
            of |= zip(eqn.outvars, writes, strict=True)
            fixed = not any(not hasattr(a, "val") for a in eqn.invars[1:])
            self.ops.append(Op(eqn.primitive.name, reads, writes, fixed))
        return [b for atom in jaxpr.outvars for b in (read(atom) or [self._new(atom)])]

    def readers(self, buffer: int) -> Iterator[tuple[int, Op]]:
        """Yield the operations that read a buffer, with their places; no barriers."""
        for position, op in enumerate(self.ops):
            if buffer in op.reads and op.name != "optimization_barrier":
                yield position, op

    def uses(self, buffer: int, through: set[str]) -> Iterator[tuple[int, Op]]:
        """Yield the readers of a buffer, and of what operations of these names make of it."""
        for position, op in self.readers(buffer):
            if op.name in through:
                yield from self.uses(op.writes[0], through)
            else:
                yield position, op

    def is_operand(self, buffer: int) -> bool:
        """Return whether the buffer is an argument, or lies in one at a fixed place."""
        maker = next((op for op in self.ops if buffer in op.writes and op.name in VIEWS), None)
        if maker is None:
            return buffer in self.arguments
        return maker.fixed and self.is_operand(maker.reads[0])

    def done(self, hop: Op) -> int:
        """Return where a hop is waited for: at the first that reads what it wrote, barriers too."""
        positions = (p for p, op in enumerate(self.ops) if set(hop.writes) & set(op.reads))
        return next(positions, len(self.ops))


def jaxpr_in(value: Any) -> Any:
    inner = getattr(value, "jaxpr", value)
    return inner if hasattr(inner, "eqns") else None


def lives(program: Program) -> Iterator[tuple[int, int, int]]:
    """Yield (first, last, bytes) of the buffers that `ring.peak_bytes` counts, by operations."""
    written = {b for op in program.ops if op.name in HOPS for b in op.writes}
    for position, op in enumerate(program.ops):
        if op.name in HOPS:
            done = program.done(op)
            (source,), (target,) = op.reads, op.writes
            if source not in written and not program.is_operand(source):
                yield position, done, program.sizes[source]
            if op.name == "all_to_all":  # lays out by receiver what it sends
                yield position, done, program.sizes[source]
            reads = list(program.uses(target, VIEWS | {"concatenate"}))
            last = max([done, *(p for p, by in reads if by.name in {*HOPS, "dot_general"})])
            if reads:  # else it is a part of the result, as a sum is once it has come
                yield position, last, program.sizes[target]
        elif op.name == "dot_general":
            sent = hops_of(program, op.writes[0])
            if sent:  # else it becomes the result
                yield position, min(sent), program.sizes[op.writes[0]]


def hops_of(program: Program, product: int) -> list[int]:
    """Return the places where a product, or a sum that it is in, is sent."""
    others = {op.name for op in program.ops} - {*HOPS, "dot_general"}
    return [position for position, op in program.uses(product, others) if op.name in HOPS]


def peak(name: str, variant: Variant, n: int) -> int:
    """Return the most bytes alive at once during a matmul."""
    mapped, args = on_mesh(name, [variant], cpus(n))
    (mapped_eqn,) = (
        e for e in equations(jax.make_jaxpr(mapped)(*args).jaxpr) if e.primitive.name == "shard_map"
    )
    program = Program(mapped_eqn.params["jaxpr"])
    lifetimes = list(lives(program))
    matmuls = [position for position, op in enumerate(program.ops) if op.name == "dot_general"]
    return max(sum(b for first, last, b in lifetimes if first <= at <= last) for at in matmuls)


@pytest.mark.parametrize("n", [2, 3, 4])
@names
def test_what_is_held_in_the_jaxpr(name: str, n: int):
    case = CASES[name]
    for variant in case.variants:
        wanted = forms.peak_bytes(case.collective, variant, n, case.chunk_bytes)
        assert peak(name, variant, n) == wanted, variant
