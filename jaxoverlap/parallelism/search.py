"""Search all legal configurations of a model on a cluster: exact, and small.

Candidates are visited in the order of lower bounds, the fastest first, until a bound is slower than
the last of the results: first a split with any recompute; then, of each ZeRO stage, with the choice
of recompute whose layers are the fastest of those that fit in memory; then in its densest
placement; last in all its placements.
"""

from __future__ import annotations

import bisect
import functools
import heapq
import itertools
import math
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from jaxoverlap.hardware.cluster import Cluster
from jaxoverlap.parallelism.bounds import LowerBounds
from jaxoverlap.parallelism.configuration import AXES, Configuration
from jaxoverlap.parallelism.iteration_time import IterationTime
from jaxoverlap.parallelism.keys import kernels_of, with_recompute
from jaxoverlap.parallelism.memory import (
    Kept,
    Memory,
    StageMemory,
    everything,
    peak_of,
    stages_memory,
)
from jaxoverlap.parallelism.model import ELEMENT, Transformer
from jaxoverlap.parallelism.placement import Placement, densest, placements
from jaxoverlap.parallelism.recompute import POLICIES, VALUES, canonical
from jaxoverlap.parallelism.stack import Stack
from jaxoverlap.parallelism.terms import StepTerms

_FULLEST = 0.95  # of the allocator's pool: beyond that fragmentation decides, which is not counted
_SEQUENCES = 16  # of a micro-batch, for which choices of recompute are compared
_FASTEST = 3  # choices of recompute of which one is the fastest for any micro-batch
_CLEARLY_FEWER = 0.97  # of the bytes: below that a slower choice of recompute is worth a look
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
        splits: splits of the devices that divide everything evenly, and whose weights fit.
        priced: configurations whose seconds were estimated, over all their placements; of the
            others a bound is enough.
        smallest: of what does not fit, what needs least memory; None if all fit.
        search_s: seconds that the search took.
    """

    best: tuple[Scored, ...]
    splits: int
    priced: int
    smallest: tuple[Configuration, Memory] | None
    search_s: float


@dataclass(frozen=True, kw_only=True)
class Space:
    """Which configurations a search may take.

    Attributes:
        axes: the sizes allowed of some axes; others may have any.
        overlap: whether rings and gathers ahead hide collectives, as `jaxoverlap.overlap` does
            where the training software is this project's.
        recompute: the one choice of recompute that is allowed, as `Configuration` takes it; None:
            any that the training software has.
        pool: the share of a GPU's memory that the allocator may take; None: the largest that the
            training software leaves room beside.
    """

    axes: Mapping[str, Collection[int]]
    overlap: bool = True
    recompute: str | None = None
    pool: float | None = None

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
    model: Transformer,
    cluster: Cluster,
    global_batch: int,
    space: Space,
    stack: Stack,
    budget: float = math.inf,
) -> Iterator[Configuration]:
    """Yield every legal split of a cluster's devices, with each size of micro-batch and piece.

    Args:
        budget: bytes of a device; splits that need more whatever else is chosen are left out.
    """
    for sizes in factorizations(cluster.num_devices, len(AXES)):
        axes: dict[str, Any] = dict(zip(AXES, sizes, strict=True))
        if any(axes[name] not in allowed for name, allowed in space.axes.items()):
            continue
        if (axes["expert"] > 1 and not model.experts) or model.heads % axes["model"]:
            continue
        if model.layers < axes["pipeline"] or global_batch % (
            axes["data"] * axes["fsdp"] * axes["expert"]
        ):
            continue
        if least_bytes(model, Configuration(**axes), stack, global_batch) <= budget:
            yield from _sized(model, global_batch, axes, space, stack, budget)


def _sized(
    model: Transformer,
    global_batch: int,
    axes: dict[str, Any],
    space: Space,
    stack: Stack,
    budget: float,
) -> Iterator[Configuration]:
    here = global_batch // (axes["data"] * axes["fsdp"] * axes["expert"])
    micro_batches = [b for b in range(1, here + 1) if here % b == 0 and b & (b - 1) == 0]
    several = axes["model"] > 1 and model.experts and stack.experts_on_model
    whole = (False, True) if several else (False,)
    pieces = interleavings(model, axes["pipeline"])
    for interleave, experts_on_model in itertools.product(pieces, whole):
        config = Configuration(
            **axes,
            interleave=interleave,
            recompute="none",
            sequence_parallel=axes["model"] > 1,
            experts_on_model=experts_on_model,
            overlap=space.overlap and stack.overlaps,
        )
        # Of larger micro-batches there are fewer, and interleaving asks for rounds of them.
        if not config.illegal(model, global_batch, stack):
            for size in micro_batches:
                if interleave == 1 or here // size % config.pipeline == 0:
                    # A twentieth of the time of replace(), which checks again.
                    sized = object.__new__(Configuration)
                    sized.__dict__.update(config.__dict__, micro_batch=size)
                    if least_bytes(model, sized, stack, global_batch) > budget:
                        break
                    yield sized


def interleavings(model: Transformer, pipeline: int) -> list[int]:
    """Return the chunks that a stage may have: any, if all but the ends have as many layers."""
    most = -(-model.layers // pipeline)
    return [1] + [
        v
        for v in range(2, most + 1 if pipeline > 1 else 2)
        if -model.layers % (pipeline * v) <= _LIGHTER
    ]


Choice = tuple[float, str]  # bytes that a layer keeps of a token; recompute


def menu(stack: Stack, model: Transformer) -> tuple[str, ...]:
    """Return every choice of recompute that a training software has for a model, each once."""
    groups = stack.recomputes + (stack.recomputes_experts if model.experts else ())
    groups += stack.recomputes_latent if model.kv_rank else ()
    return _menu(groups, values_of(model))


@functools.cache
def _menu(named: tuple[tuple[str, ...], ...], values: frozenset[str]) -> tuple[str, ...]:
    """Return every choice of recompute of these groups.

    Args:
        values: those that a model's layers have; of others nothing is said but by a policy's name.
    """
    groups = [part for group in named if (part := frozenset(group) & values)]
    every = itertools.product((False, True), repeat=len(groups))
    found = dict[frozenset[str], str]()
    for name, saved in POLICIES.items():
        found.setdefault(values & saved, canonical(name))
    choices = list[str]()
    for taken in every:
        kept = values.difference(*itertools.compress(groups, taken))
        if kept in found:
            choices.append(found[kept])
        elif "gate" not in kept or "up" in kept:  # of two that cost alike one choice is enough
            choices.append(canonical("saves " + "+".join(v for v in VALUES if v in kept)))
    return tuple(dict.fromkeys((*choices, "full")))


def values_of(model: Transformer) -> frozenset[str]:
    """Return the values that a model's layers have (`recompute.VALUES`)."""
    kinds = [kind for _, kind in model.kinds]
    lacks = set() if model.gated else {"gate"}
    lacks |= set() if any(kind.experts for kind in kinds) else {"dispatch"}
    return frozenset(VALUES) - lacks


def zero_stages(
    config: Configuration, model: Transformer, global_batch: int, stack: Stack
) -> list[Configuration]:
    """Return a split with each stage of ZeRO that it can have; as it is, if it can have none."""
    stages = stack.zero_stages if config.replicas > config.fsdp else ()
    zero = [replace(config, zero_stage=stage) for stage in stages]
    return [one for one in zero if not one.illegal(model, global_batch, stack)] or [config]


def memory_budget(cluster: Cluster, stack: Stack, pool: float | None = None) -> float:
    """Return the bytes of a GPU that a step may need by the count, with the allocator's reserve."""
    share = stack.most_pool if pool is None else pool
    return _FULLEST * share * cluster.chip.memory_bytes / stack.reserve


def search(
    model: Transformer,
    cluster: Cluster,
    times: IterationTime,
    *,
    space: Space,
    keep: int = 10,
) -> Found:
    """Find the fastest configurations that fit in memory."""
    began, count = time.perf_counter(), 0
    walk = _Walk(model, cluster, times, space, keep)
    every = splits(model, cluster, times.global_batch, space, times.stack, walk.budget)
    for split in every:
        count += 1
        walk.add(walk.bound_s(split), _SPLIT, split)
    if not count:  # what needs least is named
        for split in splits(model, cluster, times.global_batch, space, times.stack):
            count += 1
            list(walk.fitting(split))
    kept, priced = walk.run()
    return Found(kept, count, priced, walk.smallest, time.perf_counter() - began)


def least_bytes(
    model: Transformer, config: Configuration, stack: Stack, global_batch: int
) -> float:
    """Return a lower bound of a device's memory: weights, inputs of layers, logits."""
    shards = config.fsdp * config.pipeline
    params = sum(model.layer_params(config.model, config.expert)) * model.layers / shards
    tokens = config.micro_batch * model.sequence / config.context
    stream = ELEMENT * model.hidden / config.model
    if config.pipeline == 1:
        kept = tokens * (model.layers * stream + stack.logit_bytes * model.vocab / config.model)
    elif stack.lockstep:
        kept = 0.0
    else:  # the first stage has as many micro-batches in flight as there are stages
        flying = min(config.pipeline, config.micro_batches(global_batch))
        kept = tokens * stream * (model.layers // config.pipeline) * flying
    return stack.weight_bytes * params + kept


def fits_at_all(
    model: Transformer, cluster: Cluster, times: IterationTime, *, space: Space
) -> bool:
    """Return whether any legal configuration fits in a cluster's memory."""
    walk = _Walk(model, cluster, times, space, 1)
    every = splits(model, cluster, times.global_batch, space, times.stack, walk.budget)
    return any(True for split in every for _ in walk.fitting(split))


_SPLIT, _FITTING, _PLACED = range(3)  # how far a candidate has come


class _Walk:
    """Candidates in the order of their bounds, and the fastest configurations so far."""

    def __init__(
        self, model: Transformer, cluster: Cluster, times: IterationTime, space: Space, keep: int
    ):
        self.model, self.cluster, self.times, self.space = model, cluster, times, space
        self.keep = keep
        self.budget = memory_budget(cluster, times.stack, space.pool)
        self.waiting = list[tuple[float, int, int, Configuration, Memory | None]]()
        self.best = list[tuple[float, int, Scored]]()  # a heap, slowest first
        self.smallest: tuple[Configuration, Memory] | None = None
        self.bounds = LowerBounds(times)
        self._overlap = space.overlap and times.stack.overlaps
        self._menu = functools.cache(self._menu_uncached)
        self._least_s = functools.cache(self._least_uncached)
        self._number = itertools.count()

    def add(
        self, bound_s: float, stage: int, config: Configuration, needs: Memory | None = None
    ) -> None:
        """Put a candidate among those that wait."""
        heapq.heappush(self.waiting, (bound_s, next(self._number), stage, config, needs))

    def run(self) -> tuple[tuple[Scored, ...], int]:
        """Return the fastest configurations, and how many were estimated in all placements."""
        priced = 0
        while self.waiting:
            bound_s, _, stage, config, needs = heapq.heappop(self.waiting)
            if len(self.best) == self.keep and bound_s > -self.best[0][0]:
                break
            if stage == _SPLIT:
                for one, memory in self.fitting(config):
                    self.add(self.bounds.step_s(one), _FITTING, one, memory)
            elif stage == _FITTING:
                closer_s = self.times.terms(config, densest(config, self.cluster)).step_s
                self.add(closer_s, _PLACED, config, needs)
            else:
                assert needs is not None
                self._take(best_placement(config, self.cluster, self.times, needs))
                priced += 1
        return tuple(scored for *_, scored in sorted(self.best, reverse=True)), priced

    def _take(self, scored: Scored) -> None:
        item = (-scored.step_s, -next(self._number), scored)
        if len(self.best) < self.keep:
            heapq.heappush(self.best, item)
        elif item > self.best[0]:
            heapq.heapreplace(self.best, item)

    def fitting(self, split: Configuration) -> Iterator[tuple[Configuration, Memory]]:
        """Yield a split with each stage of ZeRO, and the fastest recompute with which it fits.

        None is one more, if it fits: it alone casts no weights again, which is not a layer's alone.
        """
        stack, batch, tokens = self.times.stack, self.times.global_batch, _tokens(self.model, split)
        key = kernels_of(split)
        none, choices = self._choices(key)
        whole = everything(self.model, key, stack)
        for zero in zero_stages(split, self.model, batch, stack):
            stages = stages_memory(self.model, zero, stack, batch)

            def needs(choice: Choice, stages: tuple[StageMemory, ...] = stages) -> Memory:
                size, recompute = choice
                return peak_of(stages, Kept.of_choice(size * tokens, recompute, whole))

            def fits(choice: Choice) -> bool:
                return needs(choice).total <= self.budget

            index = bisect.bisect_left(choices, True, key=fits)
            choice = choices[min(index, len(choices) - 1)]
            config, memory = replace(zero, recompute=choice[1]), needs(choice)
            if index < len(choices):
                yield config, memory
            elif self.smallest is None or memory.total < self.smallest[1].total:
                self.smallest = config, memory
            if none is not None and fits(none):
                yield replace(zero, recompute="none"), needs(none)

    def bound_s(self, split: Configuration) -> float:
        """Return a lower bound of a split's seconds, with any recompute and placement."""
        return self.bounds.step_s(split, self._least_s(kernels_of(split)))

    def _least_uncached(self, key: Configuration) -> float:
        """Return the least seconds of a layer with any choice of recompute.

        None sends as little as no recompute at all.
        """
        none = with_recompute(key, "none")
        bound_s = self.bounds.layer_s(none, self._overlap)
        unbeaten, choices = self._choices(key)
        fastest = (recompute for _, recompute in choices[:_FASTEST])
        uncast_s = self.times.kernels.uncast_s
        kernels_s = [uncast_s(with_recompute(key, r)) for r in fastest]
        kernels_s += [] if unbeaten is None else [uncast_s(none)]
        return bound_s - uncast_s(none) + min(kernels_s)

    def _choices(self, key: Configuration) -> tuple[Choice | None, tuple[Choice, ...]]:
        """Return none, if it is a choice, and the others, fastest first, of `kernels_of`.

        They are compared for some sequences of a micro-batch, enough that launches do not hide
        them; bytes are by the token.
        """
        return self._menu(replace(key, micro_batch=_SEQUENCES, context=min(key.context, 2)))

    def _menu_uncached(self, like: Configuration) -> tuple[Choice | None, tuple[Choice, ...]]:
        key, only = kernels_of(like), self.space.recompute
        every = menu(self.times.stack, self.model)
        choices = (canonical(only),) if only else (*every, "none", "full")
        tokens = _tokens(self.model, key)
        none, kept = None, list[Choice]()
        for _, size, recompute in sorted(set(self.bounds.cost_of_choices(key, choices))):
            choice = size / tokens, recompute
            if recompute == "none" and not only:
                none = choice
            # Sorted by seconds: a choice has to have clearly fewer bytes than those before it.
            elif not kept or choice[0] < _CLEARLY_FEWER * kept[-1][0] or recompute == "full":
                kept.append(choice)
        return none, tuple(kept)


def _tokens(model: Transformer, config: Configuration) -> float:
    """Tokens of a micro-batch on a device."""
    return config.micro_batch * model.sequence / config.context


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
