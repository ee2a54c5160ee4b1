"""Search for the layout in which a step is fastest, by asking XLA's partitioner about each.

Propagation chooses a layout by priorities; here price chooses. A candidate pins the results of all
matmuls to one layout; XLA partitions it, and the partitioned program is estimated: what will be
waited for if its collectives hide as well as they can, and memory. The layouts that the arguments
suggest come first, and mostly the best of them is one of these; then one axis at a time changes
(`layout.neighbours`), and then single source lines take another of the first layouts, until
nothing is faster or the questions are used up.

The search counts questions, and not seconds: every process of a step must come to the same end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxoverlap._jax import compat
from jaxoverlap.passes.analysis.einsum import Spec
from jaxoverlap.passes.analysis.jaxprs import Dot
from jaxoverlap.passes.layouts.dims import DimNames
from jaxoverlap.passes.layouts.layout import Layout, by_size, neighbours, spec_of
from jaxoverlap.passes.layouts.pins import Pins
from jaxoverlap.plan.limits import GAIN, LAYOUT_MEMORY, LAYOUT_STEP, RIVAL_LAYOUT


@dataclass(frozen=True)
class PricedLayout:
    """The answer to one question: the step with some pins, as XLA partitions it.

    Attributes:
        step_s: its estimated seconds.
        peak_bytes: its estimated memory.
        why_not: why it cannot be taken, as where a result would lie in another way; empty if it
            can.
    """

    step_s: float
    peak_bytes: int
    why_not: str = ""


Ask = Callable[[Pins], PricedLayout]


@dataclass(frozen=True)
class LayoutCandidate:
    """A way to lay out the step.

    Attributes:
        pins: its pins; none for the step as it is.
        answer: the answer about them.
        layout: the layout that they are of; None for the step as it is.
    """

    pins: Pins
    answer: PricedLayout
    layout: Layout | None = None


@dataclass
class LayoutSearch:
    """A search, and what it has found so far.

    Attributes:
        matmuls: the matmuls whose results may be pinned.
        dims: the named dims of the step.
        sizes: devices along each mesh axis.
        ask: evaluates one set of pins.
        plain: the answer without pins.
        most: the most questions to ask.
        thorough: whether to go on where none of the layouts to start from is faster.
        best: the fastest candidate; the step as it is as long as nothing is faster.
        asked: the number of sets evaluated.
    """

    matmuls: tuple[Dot, ...]
    dims: DimNames
    sizes: Mapping[str, int]
    ask: Ask
    plain: PricedLayout
    most: int
    thorough: bool = False
    best: LayoutCandidate = field(init=False)
    asked: int = 0
    _first: list[LayoutCandidate] = field(default_factory=list)
    _answers: dict[Any, PricedLayout | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.best = LayoutCandidate({}, self.plain)

    def run(self, starts: Iterable[Layout]) -> None:
        """Search from the layouts to start from."""
        if not self.matmuls:
            return
        self._first = [c for layout in starts if (c := self._try(layout))]
        if self._first and (self.best.pins or self.thorough):
            fastest = min(self._first, key=lambda c: c.answer.step_s)
            assert fastest.layout is not None
            self._improve(fastest.layout)
            self._mix()
        if self.best.answer.step_s > self.plain.step_s * (1 - GAIN):
            self.best = LayoutCandidate({}, self.plain)

    def rivals(self, most: int) -> list[LayoutCandidate]:
        """Return the best candidate and others that rings or halves may make faster.

        They are the layouts to start from, as its neighbours differ from the best one by little,
        and the step without pins. None is slower than that by the search's own price.

        Args:
            most: the most candidates with pins to return.
        """
        if not self.best.pins:
            return [self.best]
        limit_s = min(self.best.answer.step_s * RIVAL_LAYOUT, self.plain.step_s)
        others = [c for c in self._first if c.answer.step_s <= limit_s]
        others.sort(key=lambda c: c.answer.step_s)
        pinned = [self.best, *(c for c in others if c.pins != self.best.pins)][:most]
        unpinned = [LayoutCandidate({}, self.plain)] if self.plain.step_s <= limit_s else []
        return [*pinned, *unpinned]

    def leave_out(self, chosen: Mapping[int, Spec | None]) -> None:
        """Leave out the pins that equal XLA's own choice, if the step is as fast without them.

        Args:
            chosen: the shardings that XLA chooses for results without pins, by matmul id.
        """
        pins = self.best.pins
        self._keep({site: spec for site, spec in pins.items() if chosen.get(site) != spec})

    def thin_out(self, most: int) -> None:
        """Leave out the pins without which the step is as fast: many at a time, then one by one.

        This is delta debugging (Zeller and Hildebrandt, TSE 2002): what is left is needed, each.

        Args:
            most: the most further sets of pins to evaluate.
        """
        self.most = self.asked + most
        together = len(self.best.pins)
        while together > 1 and self.asked < self.most:
            together = (together + 1) // 2
            sites = list(self.best.pins)
            for first in range(0, len(sites), together):
                gone = sites[first : first + together]
                self._keep({s: p for s, p in self.best.pins.items() if s not in gone})

    def gain_s(self, site: int) -> float | None:
        """Return the seconds that one pin saves given the others; None if not evaluated."""
        if len(self.best.pins) == 1:
            return self.plain.step_s - self.best.answer.step_s
        fewer = {s: spec for s, spec in self.best.pins.items() if s != site}
        answer = self._answers.get(frozenset(fewer.items()))
        return answer.step_s - self.best.answer.step_s if answer else None

    def _keep(self, fewer: Pins) -> None:
        """Keep only some of the best candidate's pins, if the step is as fast with them alone."""
        answer = self._answer(fewer) if fewer else None
        if answer and answer.step_s <= self.best.answer.step_s * (1 + LAYOUT_STEP):
            self.best = LayoutCandidate(fewer, answer, self.best.layout)

    def _improve(self, layout: Layout) -> None:
        """Go from a layout to a faster neighbour, as long as there is one."""
        names = by_size([dot.eqn.outvars[0] for dot in self.matmuls], self.dims)
        while (faster := next(self._faster(layout, names), None)) is not None:
            layout = faster

    def _faster(self, layout: Layout, names: list[int]) -> Iterator[Layout]:
        for other in neighbours(layout, names):
            before_s = self.best.answer.step_s
            candidate = self._try(other)
            if candidate is self.best and self.best.answer.step_s < before_s * (1 - LAYOUT_STEP):
                yield other

    def _mix(self) -> None:
        """Take the layout of single source lines from another of the layouts to start from.

        A mixture of experts has its tokens on all devices, except where the experts work.
        """
        for other in sorted(self._first, key=lambda c: c.answer.step_s):
            for sites in self._by_line():
                pins = {**self.best.pins, **{site: other.pins[site] for site in sites}}
                answer = self._answer(pins)
                if answer and answer.step_s < self.best.answer.step_s * (1 - LAYOUT_STEP):
                    self.best = LayoutCandidate(pins, answer, self.best.layout)

    def _by_line(self) -> Iterator[list[int]]:
        """Yield the numbers of the matmuls of each source line."""
        lines: dict[Any, list[int]] = {}
        for dot in self.matmuls:
            file, line, _ = compat.source_line(dot.eqn)
            lines.setdefault((file, line), []).append(dot.index)
        yield from lines.values()

    def _try(self, layout: Layout) -> LayoutCandidate | None:
        """Evaluate a layout of the full step, and record it if it is the best so far."""
        pins = self._pins(layout)
        if (answer := self._answer(pins)) is None:
            return None
        candidate = LayoutCandidate(pins, answer, layout)
        if answer.step_s < self.best.answer.step_s:
            self.best = candidate
        return candidate

    def _answer(self, pins: Pins) -> PricedLayout | None:
        """Ask about pins; None if that was done, they cannot be taken, or no question is left."""
        key = frozenset(pins.items())
        if key in self._answers or self.asked >= self.most:
            return None
        self.asked += 1
        answer = self.ask(pins)
        fits = answer.peak_bytes <= self.plain.peak_bytes * LAYOUT_MEMORY
        self._answers[key] = answer if fits and not answer.why_not else None
        return self._answers[key]

    def _pins(self, layout: Layout) -> Pins:
        def spec(dot: Dot) -> Spec:
            out = dot.eqn.outvars[0]
            return spec_of(self.dims.of(out), out.aval.shape, layout, self.sizes)

        return {dot.index: spec(dot) for dot in self.matmuls}
