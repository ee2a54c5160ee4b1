"""Compare the shardings that decisions are based on with XLA's partitioned program.

The pass reads the shardings of each matmul, and concludes how the devices divide its work and which
collectives it waits for (`passes/planning/splits.py`). XLA's partitioned module has what one device
multiplies, and which collectives are adjacent. Both are compared here, matmul by matmul.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import jax
from jax.sharding import Mesh

from jaxoverlap._jax import compat, jits
from jaxoverlap.passes.analysis.flatten import flatten
from jaxoverlap.passes.analysis.jaxprs import dots
from jaxoverlap.passes.analysis.matmul_collectives import BESIDE, TAGGED, collectives_of_sites
from jaxoverlap.passes.analysis.partitioned import partitioned
from jaxoverlap.passes.analysis.partitioner_collectives import moved
from jaxoverlap.passes.planning.matmuls import matmul_of
from jaxoverlap.passes.planning.profit import local_sizes
from jaxoverlap.passes.planning.splits import Refusal, ShardedMatmul
from jaxoverlap.plan.collectives import KIND_OF, OPCODES
from jaxoverlap.simulation import hlo
from jaxoverlap.simulation.device_groups import axes_of
from jaxoverlap.simulation.hlo_work import work

# XLA gathers along two axes in two collectives, one after the other, and slices a sum.
_BETWEEN = (*BESIDE, *OPCODES, "dynamic-slice")
# A scatter may be a sum that each device slices; both send sums of the same axes.
_SENT = {"all_gather": "gather", "all_to_all": "exchange", "collective_permute": "exchange",
         "reduce_scatter": "sum", "all_reduce": "sum"}  # fmt: skip

_Sent = frozenset[tuple[str, str]]


class Agreement(NamedTuple):
    """The count of a step's matmuls that XLA treats as the pass expects, and the others.

    Attributes:
        same: matmuls whose local work and collectives are as expected.
        joined: matmuls that XLA has joined with another, which have no work of their own.
        unread: matmuls whose shardings mesh axes cannot express; the pass skips them.
        otherwise: the differences, a line per matmul.
    """

    same: int
    joined: int
    unread: int
    otherwise: tuple[str, ...]


def agreement(traced: jax.stages.Traced, mesh: Mesh) -> Agreement:
    """Compare what the pass concludes of a traced step with XLA's partitioned module.

    Args:
        traced: the step.
        mesh: of a pod: programs for CPU devices are fused before they can be read.
    """
    jaxpr = flatten(jits.traced_params(traced)["jaxpr"])
    program = partitioned(traced, jaxpr, mesh)
    products = _products(program.module)
    sent = {(c.computation, c.name): c for c in moved(program.module)}
    adjacent = collectives_of_sites(program.module, _BETWEEN)
    same, joined, unread, otherwise = 0, 0, 0, []
    for dot in dots(jaxpr):
        shardings = program.shardings.get(dot.index)
        matmul = shardings and matmul_of(dot, shardings, dict(mesh.shape))
        if not isinstance(matmul, ShardedMatmul) or dot.inside:
            unread += 1
        elif dot.index not in products:
            joined += 1
        else:
            sent_adjacent = _sent(
                (KIND_OF[c.kind], axes_of(c.groups, mesh.size, dict(mesh.shape)))
                for index in adjacent.get(dot.index, ())
                if (c := sent.get(index))
            )
            if text := _difference(matmul, products[dot.index], sent_adjacent):
                otherwise.append(f"{dot.index} {compat.source_line(dot.eqn)[:2]}: {text}")
            else:
                same += 1
    return Agreement(same, joined, unread, tuple(otherwise))


def _difference(matmul: ShardedMatmul, products: int, sent: _Sent) -> str:
    """Say how XLA treats a matmul otherwise; empty if it does not."""
    expected = math.prod(local_sizes(matmul).values())
    if products != expected:
        return f"{products / expected:.3g} times the work that its shardings say"
    splits = [s for s in matmul.splits if not isinstance(s, Refusal)]
    if len(splits) < len(matmul.splits):
        return ""  # the pass has said that it does not understand the split
    wanted = _sent((s.collective.kind, (s.axis,)) for s in splits if s.collective)
    if missing := wanted - sent:
        there = _named(sent) or "nothing"
        return f"no adjacent collective sends {_named(missing)}; there is {there}"
    return ""


def _sent(moves: Iterable[tuple[str, Iterable[str]]]) -> _Sent:
    """Pair each kind of sending with each mesh axis that it runs along."""
    return frozenset((_SENT.get(kind, kind), axis) for kind, axes in moves for axis in axes)


def _named(sent: _Sent) -> str:
    return ", ".join(f"{kind}s along {axis}" for kind, axis in sorted(sent))


def _products(module: hlo.Module) -> dict[int, int]:
    """Map each matmul of a step, by its number, to the multiply-adds that one device does.

    A matmul that XLA does twice has those of both. One that XLA has joined with another is missing.
    """
    products: dict[int, int] = {}
    for body in module.computations.values():
        shapes = {i.name: i.shape for i in body}
        for i in body:
            if i.opcode == "dot" and (tag := TAGGED.search(i.line)):
                (matmul,) = work(module, i, shapes).matmuls
                number = int(tag.group(1))
                products[number] = products.get(number, 0) + matmul.flops // 2
    return products
