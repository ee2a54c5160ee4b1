"""Choose each ring's number of pieces by Lagom's search on the unified model, before any compile.

Each matmul with a collective that could hide is a communication and its computation: undivided, the
collective in slices, a ring of as many pieces as devices, or of twice as many. All start undivided,
on one channel (`jaxoverlap.tuning.lagom.search`, arXiv 2602.20656), with the collectives for which
no matmul is split and the other kernels, both as the schedule by rules has them. The results are
full plans to compile, best first, and the estimated cost of each ring's variants, by which later
moves are ordered.

This goes beyond the paper: Lagom tunes channels, chunks and threads; granularity as one more
setting of a communication is this project's design.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from jaxoverlap.cost.groups import Group, Sent
from jaxoverlap.cost.kernels import KernelWork
from jaxoverlap.cost.model import CostModel
from jaxoverlap.passes.planning.layout import traffic
from jaxoverlap.passes.planning.profit import SLICES, chunk, full_kernel
from jaxoverlap.passes.planning.ring_plan import Member, Ring
from jaxoverlap.plan.collectives import OPCODE_OF
from jaxoverlap.plan.edits import MakeRing
from jaxoverlap.plan.plan import Plan, Variant
from jaxoverlap.simulation.replay import group_of
from jaxoverlap.simulation.timeline import Timeline
from jaxoverlap.tuning.lagom.model import (
    CHUNK_BYTES,
    Communication,
    Computation,
    Makespan,
    SettingSpace,
)
from jaxoverlap.tuning.lagom.search import Config, SettingIndex, search

_FINER = 2  # times as many pieces as devices


@dataclass(frozen=True)
class Site:
    """A ring that the step could have, as the model sees it.

    Attributes:
        number: the number of the matmul that it is named after.
        source: "file:line" of its first matmul.
        variants: its possible variants, by the number of pieces; 1: not decomposed.
        communication, computation: its collective and its matmuls, undivided and in each of these
            numbers of pieces.
    """

    number: int
    source: str
    variants: Mapping[int, Variant]
    communication: Communication
    computation: Computation

    def pieces(self, variant: Variant) -> int:
        """Return the number of pieces that a variant splits this matmul's collective into."""
        if variant.style == "plain":
            return 1
        ring = self.communication.ring
        return variant.slices if variant.style == "sliced" else ring * variant.slices


def site_of(ring: Ring, source: str, group: Group) -> Site:
    """Describe a ring as a communication and a computation.

    Args:
        ring: of dtypes in the cost tables, its variant one of hops.
        source: "file:line" of its first matmul.
        group: the devices along its axis.
    """
    layout, runs = ring.first, ring.members[0].dot.runs
    devices, size = layout.ring.axis_size, layout.chunk()
    variants = {1: Variant("plain")}
    variants |= {n: Variant("sliced", n) for n in SLICES if n < devices and size % n == 0}
    variants |= {devices * n: Variant(ring.variant.style, n) for n in (1, _FINER) if size % n == 0}
    sent = traffic(layout)[layout.ring.axis]
    space = SettingSpace(chunk_bytes=(CHUNK_BYTES,), pieces=tuple(sorted(variants)))
    kind = OPCODE_OF[ring.kind]
    cut = tuple((n, _kernels(ring.members, n, ring.arrives)) for n in sorted(variants) if n > 1)
    return Site(
        ring.site,
        source,
        variants,
        Communication(kind, sent, group, runs, space=space, ring=devices),
        Computation(KernelWork(tuple(full_kernel(m) for m in ring.members)), runs, cut),
    )


def _kernels(members: Sequence[Member], pieces: int, arrives: bool) -> tuple[KernelWork, ...]:
    """List the kernels of one piece: each member's matmul, and the copies for it."""
    layouts = [member.layout for member in members]
    hops = all(layout and pieces >= layout.ring.axis_size for layout in layouts)
    chunks = [chunk(member, pieces, arrives, sums=hops) for member in members]
    return tuple(
        work for m, copied in chunks for work in (KernelWork((m,)), KernelWork(memory_bytes=copied))
    )


@dataclass(frozen=True)
class GranularityModel:
    """The matmuls of a step that could have a ring, in the unified model.

    Attributes:
        sites: these matmuls, each with its collective, in the order in which they run.
        problem: the search problem, the communications of `sites` first; None without sites.
        every: the plan with all rings that there could be, one-way unless that is impossible.
    """

    sites: tuple[Site, ...] = ()
    problem: Makespan | None = None
    every: Plan | None = None

    @property
    def rings(self) -> dict[int, MakeRing]:
        """The rings that there could be, by the number of their first matmul."""
        return {ring.site: ring for ring in self.every.rings} if self.every else {}

    def plans(self, count: int) -> list[dict[int, Variant]]:
        """List the best variants for all matmuls together that Lagom's search finds, best first.

        Args:
            count: the most to list; any two differ in a tenth of the matmuls or more, as the search
                changes one matmul after the other and its best are all but the same.
        """
        if self.problem is None:
            return []
        plans: list[dict[int, Variant]] = []
        for tried in sorted(search(self.problem).trace, key=lambda t: t.outcome.step_s):
            plan = self._variants(tried.config)
            differences = (sum(plan[n] != other[n] for n in plan) for other in plans)
            if all(10 * count >= len(plan) and count for count in differences):
                plans.append(plan)
        return plans[:count]

    def _variants(self, config: Config) -> dict[int, Variant]:
        settings = zip(self.sites, config, strict=False)  # others' communications follow
        return {s.number: s.variants[s.communication.space.setting(i)[1]] for s, i in settings}

    def lost_per_second(self, number: int, now: Variant, to: Variant, waited_s: float) -> float:
        """Return Lagom's H of another variant: computation seconds added per exposed second saved.

        Args:
            number: the matmul's id.
            now, to: its variant now, and the one to move to.
            waited_s: seconds that kernels wait for it now, as simulated.

        Returns:
            Infinite where nothing is gained, and for a matmul that the model does not have.
        """
        if number not in self._indices:
            return math.inf
        added_s = self.computation_s(number, to) - self.computation_s(number, now)
        gained_s = waited_s - self._exposed_s(number, to)
        return added_s / gained_s if gained_s > 0 else math.inf

    def computation_s(self, number: int, variant: Variant) -> float:
        """Return the seconds of all runs of a ring's matmuls, with the overhead of their chunks."""
        j, p = self._indices[number], self._problem
        site = self.sites[j]
        computation = p.communications[j].site
        assert computation is not None
        return (
            site.computation.runs
            * p.alone_s(computation)
            * p.in_pieces(j, self._setting(j, variant))
        )

    def _exposed_s(self, number: int, variant: Variant) -> float:
        """Return a ring's communication seconds that nothing can hide, on NCCL's own channels."""
        j = self._indices[number]
        exposed = self.sites[j].communication.exposed_share(self.sites[j].pieces(variant))
        return exposed * self._problem.seconds(j, self._setting(j, variant))

    def _setting(self, j: int, variant: Variant) -> SettingIndex:
        """Return the index of a variant on a matmul's setting axes, with NCCL's own channels."""
        pieces = self.sites[j].pieces(variant)
        known = self.sites[j].communication.space.pieces
        nearest = min(range(len(known)), key=lambda i: abs(known[i] - pieces))
        return (*self._problem.default[j][:-1], nearest)

    @property
    def _problem(self) -> Makespan:
        assert self.problem is not None
        return self.problem

    @functools.cached_property
    def _indices(self) -> dict[int, int]:
        return {site.number: index for index, site in enumerate(self.sites)}


def granularity(
    sites: Sequence[Site], rules: Plan, step: Timeline, cost: CostModel
) -> GranularityModel:
    """Model the possible rings of a step, with all other kernels of its schedule by rules.

    Args:
        sites: all rings that there could be.
        rules: the plan by rules.
        step: that plan's simulated schedule.
        cost: the cost model of the cluster.
    """
    if not sites:
        return GranularityModel()
    model = GranularityModel(tuple(sites), _problem(sites, (), 0.0, cost))
    ringed = {d.site: d.variant for d in rules.decisions if d.site == d.ring}
    not_ringed = {site.source for site in sites if site.number not in ringed}
    plain = Variant("plain")
    sites_s = math.fsum(model.computation_s(s.number, ringed.get(s.number, plain)) for s in sites)
    counts = Counter[Sent]()
    for e in step.events:
        c = e.collective
        if e.kind == "collective" and c and not c.ring and e.source not in not_ringed:
            group = group_of(c, cost.cluster.num_devices, cost.cluster)
            counts[c.kind, c.bytes_moved, group] += e.runs
    others = tuple(Communication(*sent, runs=runs, space=_OTHERS) for sent, runs in counts.items())
    left_s = max(step.compute_s - sites_s, 0.0)
    return replace(model, problem=_problem(sites, others, left_s, cost))


_OTHERS = SettingSpace(chunk_bytes=(CHUNK_BYTES,))


def _problem(
    sites: Sequence[Site], others: tuple[Communication, ...], left_s: float, cost: CostModel
) -> Makespan:
    """Model the matmuls, each followed by an equal part of the other, memory-bound kernels."""
    part = int(left_s / len(sites) * cost.tables.memory.bytes_per_s)
    computations = [
        c for site in sites for c in (site.computation, Computation(KernelWork((), part)))
    ]
    theirs = (replace(site.communication, site=2 * i) for i, site in enumerate(sites))
    return Makespan(cost, (*theirs, *others), tuple(computations))
