"""Price what keeping a value saves, on the program that XLA's partitioner makes of the step.

The values that may be kept are those that cost something to compute again: results of matmuls, of
attention and other kernels of their own, of loops. Each gets a barrier with a tag, which XLA leaves
in the partitioned program; so what would not run again, collectives included, is read off the
program itself: it is what only kept values need. A gather whose result the gradients read as well
is not saved. Element-wise operations on kept values run again, as kernels do them in passing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxoverlap._jax import compat, inlining
from jaxoverlap.cost.groups import legs_of
from jaxoverlap.cost.model import CostModel
from jaxoverlap.passes.estimation.estimate import Estimate
from jaxoverlap.passes.estimation.kernels import Kernels
from jaxoverlap.passes.keep.remats import Remat
from jaxoverlap.simulation import hlo
from jaxoverlap.simulation.audit import collectives
from jaxoverlap.simulation.replay import group_of

_TAG = "jaxoverlap_kept"
_TAGGED = re.compile(rf'{_TAG}="(\d+)\.(\d+)\.(\d+)"')
# What XLA fuses into the kernels that read it, or what moves no bytes.
_CHEAP_PRIMITIVES = """
    abs add add_any and broadcast_in_dim bitcast_convert_type clamp concatenate convert_element_type
    copy cos div eq erf exp exp2 expand_dims floor ge gt integer_pow iota is_finite le log log1p
    logistic lt max min mul name ne neg not one_minus_square or pad pow random_bits random_fold_in
    random_seed random_split random_unwrap random_wrap reduce_precision reduce_sum reduce_max
    reshape rev round rsqrt select_n sharding_constraint shift_left shift_right_logical sign sin
    slice sqrt square squeeze stop_gradient sub tanh threefry2x32 transpose xor
"""
_CHEAP = frozenset(_CHEAP_PRIMITIVES.split())
_KEPT_PASSES = 3  # over a kept value's bytes: it is read and written once, and read again
_OFFLOADED_PASSES = 5  # likewise, and what the scan carries is copied once
_AHEAD = 2  # layers, or steps of a scan, whose offloaded values are on the device
Place = tuple[int, int, int]
"""The number of a remat, of an equation in it, and of a result of that."""


@dataclass(frozen=True)
class Priced:
    """A computation that computes values again.

    Attributes:
        needs: what each of its instructions reads, by their indices; those at the end are needed.
        seconds: of each instruction in a step, with its waits.
        values: the instruction of each value that may be kept.
        bytes: what a device keeps of it, in all.
        keeping_s, offloading_s: the seconds of the device's memory that either takes.
        ahead_bytes: what a device holds of it if it is offloaded: the values of two layers, or of
            two steps of a scan; a layer's share of these.
        copy_s: the seconds that the host's link needs for it, in each direction.
        hiding_s: the seconds of compute that such copies hide behind: those of the forward pass,
            which are about those of computing all values again. The backward pass takes longer.
    """

    needs: tuple[tuple[int, ...], ...]
    seconds: tuple[float, ...]
    ends: tuple[int, ...]
    values: Mapping[Place, int]
    bytes: Mapping[Place, int]
    keeping_s: Mapping[Place, float]
    offloading_s: Mapping[Place, float]
    ahead_bytes: Mapping[Place, int]
    copy_s: Mapping[Place, float]
    hiding_s: float


def is_cheap(eqn: Any) -> bool:
    """Return whether kernels compute an equation in passing: it is element-wise, or a view."""
    return eqn.primitive.name in _CHEAP


def worth_keeping(remat: Remat) -> Iterator[tuple[Place, Any]]:
    """Yield the values that are not free to recompute, each with its position."""
    for position, eqn in enumerate(remat.body.eqns):
        if is_cheap(eqn):
            continue
        for output, var in enumerate(eqn.outvars):
            if var in remat.sources:
                yield (remat.number, position, output), var


def with_barriers(jaxpr: Any, remats: Sequence[Remat]) -> Any:
    """Return an opened step with a tagged barrier on each value that may be saved."""
    places = {id(r.eqn): {var: place for place, var in worth_keeping(r)} for r in remats}

    def marked(body: Any) -> Any:
        return body.replace(
            eqns=[_marked(eqn, places.get(id(eqn), {}), marked) for eqn in body.eqns]
        )

    return marked(jaxpr)


def _marked(given: Any, places: Mapping[Any, Place], inside: Any) -> Any:
    eqn = compat.map_jaxprs(inside, given) if compat.has_jaxprs(given) else given
    if not places:
        return eqn
    eqns = list[Any]()
    body = eqn.params["jaxpr"]
    for inner in body.eqns:
        outvars = [compat.like_var(v) if v in places else v for v in inner.outvars]
        eqns.append(inner.replace(outvars=outvars))
        for new, var in zip(outvars, inner.outvars, strict=True):
            if var in places:
                (barrier,) = inlining.inline(compat.barrier, [new], [var], inner)
                eqns.append(compat.with_tag(barrier, **{_TAG: ".".join(map(str, places[var]))}))
    return eqn.replace(params={**eqn.params, "jaxpr": body.replace(eqns=eqns)})


def priced(
    module: hlo.Module,
    cost: CostModel,
    estimate: Estimate,
    remats: Sequence[Remat],
    hidden: float,
    layers: Mapping[Place, int],
) -> list[Priced]:
    """Price the computations of a partitioned step that compute values again.

    Args:
        module: of the step with barriers.
        cost: the cost model.
        estimate: of that module.
        remats: of the step.
        hidden: the share of a collective's seconds that counts although it may hide.
        layers: how many equal layers of one body compute each value.
    """
    sent = {(c.computation, c.name): c for c in collectives(module)}
    runs = {remat.number: remat.runs for remat in remats}
    found = list[Priced]()
    for name, times in _times(module, module.entry, 1).items():
        body = module.body(name)
        values = {place: at for at, i in enumerate(body) for place in _places(i)}
        if not values:
            continue
        kernels = Kernels(module, body)
        positions = {i.name: at for at, i in enumerate(body)}

        def seconds(
            i: hlo.Instruction, name: str = name, kernels: Kernels = kernels, times: int = times
        ) -> float:
            if (c := sent.get((name, i.name))) is not None:
                group = group_of(c, module.num_devices, cost.cluster)
                whole_s = sum(
                    cost.collective_s(*leg) for leg in legs_of(c.kind, c.bytes_moved, group)
                )
                waited_s = estimate.waited_s.get((name, i.name), 0.0) / times
                return max(waited_s, hidden * whole_s)
            if i.opcode in hlo.CONTROL_FLOW:
                return 0.0
            return cost.kernel_s(cost.known(kernels.work(i)))

        sizes = {place: hlo.shape_bytes(body[at].shape) for place, at in values.items()}
        needs = tuple(tuple(positions[o.partition("#")[0]] for o in i.operands) for i in body)
        own_s = tuple(times * seconds(i) for i in body)
        found.append(
            Priced(
                needs=needs,
                seconds=own_s,
                ends=tuple(at for at, i in enumerate(body) if i.is_root),
                values=values,
                bytes={place: size * runs[place[0]] for place, size in sizes.items()},
                keeping_s={
                    place: times * cost.memory_s(_KEPT_PASSES * size)
                    for place, size in sizes.items()
                },
                offloading_s={
                    place: times * cost.memory_s(_OFFLOADED_PASSES * size)
                    for place, size in sizes.items()
                },
                ahead_bytes={
                    place: _AHEAD * size // layers[place] for place, size in sizes.items()
                },
                copy_s={place: times * cost.host_copy(size)[0] for place, size in sizes.items()},
                hiding_s=sum(own_s[at] for at in _needed(needs, values.values())),
            )
        )
    return found


def _needed(needs: Sequence[Sequence[int]], results: Iterable[int]) -> set[int]:
    """Return the instructions that results are computed by."""
    found, stack = set[int](), [*results]
    while stack:
        if (at := stack.pop()) not in found:
            found.add(at)
            stack += needs[at]
    return found


def _places(i: hlo.Instruction) -> Iterator[Place]:
    tag = _TAGGED.search(i.line)
    if tag is not None and not i.shape.startswith("("):
        remat, position, output = map(int, tag.groups())
        yield remat, position, output


def _times(module: hlo.Module, name: str, times: int) -> dict[str, int]:
    """Return how often each computation runs in a step, outer ones first."""
    found = {name: times}
    for i in module.body(name):
        if i.opcode in hlo.CONTROL_FLOW:
            inner = times * ((i.trip_count or 1) if i.opcode == "while" else 1)
            for called in i.called:
                for other, count in _times(module, called, inner).items():
                    found[other] = found.get(other, 0) + count
    return found
