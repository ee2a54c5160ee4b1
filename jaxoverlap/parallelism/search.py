"""Search all legal configurations of a model on a cluster: exact, and small.

Candidates are pruned by three rules that cannot lose the best one. Illegal splits and those that
do not fit in memory are dropped. Of one split and ZeRO stage only the least recompute that fits is
evaluated, which is never slower in the model. And candidates are evaluated in the order of two
bounds (kernels without any collective; then the densest placement), until a bound is slower than
the last of the results.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from jaxoverlap.hardware.cluster import Cluster
from jaxoverlap.parallelism.configuration import AXES, Configuration, Recompute
from jaxoverlap.parallelism.iteration_time import IterationTime, StepTerms
from jaxoverlap.parallelism.memory import Memory, StageParams, peak, state_bytes
from jaxoverlap.parallelism.model import Transformer
from jaxoverlap.parallelism.placement import Placement, densest, place, placements
from jaxoverlap.parallelism.stack import Stack

RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")  # fastest first
_LIGHTER = 2  # chunks that may have a layer fewer where stages interleave: the first and the last


@dataclass(frozen=True)
class Scored:
    """A configuration with its best placement, its seconds by term, and its memory."""

    configuration: Configuration
    placement: Placement
    terms: StepTerms
    memory: Memory

    @property
    def step_s(self) -> float:
        """Estimated seconds of a step."""
        return self.terms.step_s

    @property
    def shown(self) -> str:
        """The configuration in words, its axes as they are placed, major to minor."""
        return f"{self.placement}, {self.configuration.settings}"


@dataclass(frozen=True)
class Found:
    """The outcome of a search.

    Attributes:
        best: the fastest, fastest first.
        splits: splits of the devices that divide everything evenly.
        fitting: configurations that fit in memory, one for each split and ZeRO stage.
        priced: those whose seconds were estimated, over all their placements.
        smallest: of what does not fit, what needs least memory; None if all fit.
        search_s: seconds that the search took.
    """

    best: tuple[Scored, ...]
    splits: int
    fitting: int
    priced: int
    smallest: tuple[Configuration, Memory] | None
    search_s: float


@dataclass(frozen=True, kw_only=True)
class Space:
    """Which configurations a search may take.

    Attributes:
        axes: the sizes allowed of some axes; others may have any.
        overlap: whether rings and gathers ahead hide collectives, as `jaxoverlap.overlap` does.
    """

    axes: Mapping[str, Collection[int]]
    overlap: bool = True

    def __post_init__(self) -> None:
        if unknown := set(self.axes) - set(AXES):
            raise ValueError(f"unknown axes {sorted(unknown)}: known are {', '.join(AXES)}")
        for axis, sizes in self.axes.items():
            listed = isinstance(sizes, Collection) and len(sizes) > 0
            if not listed or not all(type(n) is int and n > 0 for n in sizes):
                raise ValueError(
                    f"axes={{{axis!r}: {sizes!r}}}: expected the sizes allowed, as in "
                    f"{{{axis!r}: [1, 2]}}"
                )


def splits(
    model: Transformer, cluster: Cluster, global_batch: int, space: Space, stack: Stack
) -> Iterator[Configuration]:
    """Yield every legal split of a cluster's devices, with each size of micro-batch and piece."""
    for sizes in factorizations(cluster.num_devices, len(AXES)):
        axes: dict[str, int] = dict(zip(AXES, sizes, strict=True))
        if any(axes[name] not in allowed for name, allowed in space.axes.items()):
            continue
        if (axes["expert"] > 1 and not model.experts) or model.heads % axes["model"]:
            continue
        if model.layers < axes["pipeline"] or global_batch % (
            axes["data"] * axes["fsdp"] * axes["expert"]
        ):
            continue
        yield from _sized(model, global_batch, axes, space, stack)


def _sized(
    model: Transformer, global_batch: int, axes: dict[str, int], space: Space, stack: Stack
) -> Iterator[Configuration]:
    here = global_batch // (axes["data"] * axes["fsdp"] * axes["expert"])
    micro_batches = [b for b in range(1, here + 1) if here % b == 0 and b & (b - 1) == 0]
    pieces = interleavings(model, axes["pipeline"])
    for micro_batch, interleave in itertools.product(micro_batches, pieces):
        config = Configuration(
            **axes,
            micro_batch=micro_batch,
            interleave=interleave,
            recompute="none",
            sequence_parallel=axes["model"] > 1,
            overlap=space.overlap,
        )
        if not config.illegal(model, global_batch, stack):
            yield config


def interleavings(model: Transformer, pipeline: int) -> list[int]:
    """Return the chunks that a stage may have: any, if all but the ends have as many layers."""
    most = -(-model.layers // pipeline)
    return [1] + [
        v
        for v in range(2, most + 1 if pipeline > 1 else 2)
        if -model.layers % (pipeline * v) <= _LIGHTER
    ]


def ways_to_save(
    config: Configuration, model: Transformer, global_batch: int, stack: Stack
) -> Iterator[list[Configuration]]:
    """Yield a split's memory options: for each ZeRO stage, recompute, fastest first."""
    stages = stack.zero_stages if config.replicas > config.fsdp else ()
    zero = [replace(config, zero_stage=stage) for stage in stages]
    legal = [one for one in zero if not one.illegal(model, global_batch, stack)]
    for one in legal or [config]:
        yield [replace(one, recompute=r) for r in RECOMPUTES]


def search(
    model: Transformer,
    cluster: Cluster,
    times: IterationTime,
    *,
    space: Space,
    keep: int = 10,
) -> Found:
    """Find the fastest configurations that fit in memory."""
    began, stack, global_batch = time.perf_counter(), times.stack, times.global_batch
    budget = cluster.chip.memory_bytes / stack.reserve
    fitting = list[tuple[float, int, Configuration, Memory]]()
    smallest: tuple[Configuration, Memory] | None = None
    too_large = set[Configuration]()  # larger micro-batches, which come later, need no less memory
    count = 0
    for split in splits(model, cluster, global_batch, space, stack):
        count += 1
        if (key := replace(split, micro_batch=1)) in too_large:
            continue
        before = len(fitting)
        for options in ways_to_save(split, model, global_batch, stack):
            config, needs = _fitting(model, options, stack, global_batch, budget)
            if needs.total <= budget:
                bound_s = times.bound_s(config, place(config, cluster))
                fitting.append((bound_s, len(fitting), config, needs))
            elif smallest is None or needs.total < smallest[1].total:
                smallest = (config, needs)
        if len(fitting) == before:
            too_large.add(key)
    kept, priced = _fastest(sorted(fitting), cluster, times, keep) if keep else ((), 0)
    took_s = time.perf_counter() - began
    return Found(kept, count, len(fitting), priced, smallest, took_s)


def _fitting(
    model: Transformer, options: list[Configuration], stack: Stack, global_batch: int, budget: float
) -> tuple[Configuration, Memory]:
    """Return the first option that fits in memory, or else the one that needs least."""
    params = StageParams.largest(model, options[0], even=stack.lockstep)
    if sum(state_bytes(model, options[0], stack, params)) > budget:  # whatever is computed again
        options = options[-1:]
    needs = [(config, peak(model, config, stack, global_batch)) for config in options[:1]]
    while needs[-1][1].total > budget and len(needs) < len(options):
        config = options[len(needs)]
        needs.append((config, peak(model, config, stack, global_batch)))
    fits = needs[-1][1].total <= budget
    return needs[-1] if fits else min(needs, key=lambda pair: pair[1].total)


def _fastest(
    fitting: list[tuple[float, int, Configuration, Memory]],
    cluster: Cluster,
    times: IterationTime,
    keep: int,
) -> tuple[tuple[Scored, ...], int]:
    """Evaluate candidates in the order of their bounds, until a bound exceeds the results.

    A candidate whose turn has come by its first bound gets a second one, of its densest placement,
    and waits for its turn by that before its placements are tried.
    """
    kept, priced = list[tuple[float, int, Scored]](), 0  # a heap, slowest first
    waiting = [
        (bound_s, number, False, config, needs) for bound_s, number, config, needs in fitting
    ]
    while waiting:  # sorted, so a heap
        bound_s, number, close, config, needs = heapq.heappop(waiting)
        if len(kept) == keep and bound_s > -kept[0][0]:
            break
        if not close:
            closer_s = times.terms(config, densest(config, cluster)).step_s
            heapq.heappush(waiting, (closer_s, number, True, config, needs))
            continue
        scored = best_placement(config, cluster, times, needs)
        priced += 1
        item = (-scored.step_s, -number, scored)
        if len(kept) < keep:
            heapq.heappush(kept, item)
        elif item > kept[0]:
            heapq.heapreplace(kept, item)
    return tuple(scored for *_, scored in sorted(kept, reverse=True)), priced


def best_placement(
    config: Configuration, cluster: Cluster, times: IterationTime, needs: Memory
) -> Scored:
    """Evaluate a configuration in each placement, and return the fastest."""
    options = (
        Scored(config, at, times.terms(config, at), needs) for at in placements(config, cluster)
    )
    return min(options, key=lambda scored: scored.step_s)


def factorizations(product: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Yield each way to write a product as so many ordered factors."""
    if parts == 1:
        yield (product,)
        return
    for first in range(1, product + 1):
        if product % first == 0:
            for rest in factorizations(product // first, parts - 1):
                yield (first, *rest)
