"""Search for the layout in which a step is fastest, by asking XLA's partitioner about each.

Propagation chooses a layout by priorities; here price chooses. A candidate pins the results of all
matmuls to one layout; XLA partitions it, and the partitioned program is estimated: what will be
waited for if its collectives hide as well as they can, and memory. The layouts that the arguments
suggest come first, and mostly the best of them is one of these; then one axis at a time changes
(`layout.neighbours`), until nothing is faster or the questions are used up.

The search counts questions, and not seconds: every process of a step must come to the same end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxoverlap.passes.analysis.einsum import Spec
from jaxoverlap.passes.analysis.jaxprs import Dot
from jaxoverlap.passes.layouts.dims import DimNames
from jaxoverlap.passes.layouts.layout import Layout, by_size, neighbours, spec_of
from jaxoverlap.passes.layouts.pins import Pins

_GAIN = 0.01  # of the step: an estimate that says less does not tell two layouts apart
_STEP = 0.002  # of the step: a smaller gain is no reason to go on from another layout
_MEMORY = 1.05  # times the memory that the step needs without pins


@dataclass(frozen=True)
class Answer:
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


Ask = Callable[[Pins], Answer]


@dataclass
class LayoutSearch:
    """A search, and what it has found so far.

    Attributes:
        matmuls: the matmuls whose results may be pinned.
        dims: the named dims of the step.
        sizes: devices along each mesh axis.
        ask: asks about one set of pins.
        plain: the answer without pins.
        most: the most questions to ask.
        thorough: whether to go on where none of the layouts to start from is faster.
        pins: the best pins; none as long as nothing is faster than without.
        best: their answer.
        layout: the layout that they are of; None as long as there are none.
        asked: questions asked.
    """

    matmuls: tuple[Dot, ...]
    dims: DimNames
    sizes: Mapping[str, int]
    ask: Ask
    plain: Answer
    most: int
    thorough: bool = False
    pins: Pins = field(default_factory=dict)
    best: Answer = field(init=False)
    layout: Layout | None = None
    asked: int = 0
    _answers: dict[Any, Answer | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.best = self.plain

    def run(self, starts: Iterable[Layout], chosen: Mapping[int, Spec | None]) -> None:
        """Search from the layouts to start from.

        Args:
            starts: these layouts.
            chosen: how XLA lays out the results without pins, by the number of the matmul.
        """
        start = self._first(list(starts)) if self.matmuls else None
        if start is None or not (self.pins or self.thorough):
            return
        self._improve(start)
        if self.best.step_s > self.plain.step_s * (1 - _GAIN):
            self.pins, self.best, self.layout = {}, self.plain, None
        self._leave_out(chosen)

    def _first(self, starts: list[Layout]) -> Layout | None:
        """Ask about the layouts to start from, and return the fastest of them."""
        answers = [
            (answer.step_s, n) for n, layout in enumerate(starts) if (answer := self._try(layout))
        ]
        return starts[min(answers)[1]] if answers else None

    def _improve(self, layout: Layout) -> None:
        """Go from a layout to a faster neighbour, as long as there is one."""
        names = by_size([dot.eqn.outvars[0] for dot in self.matmuls], self.dims)
        while (faster := next(self._faster(layout, names), None)) is not None:
            layout = faster

    def _faster(self, layout: Layout, names: list[int]) -> Iterator[Layout]:
        for other in neighbours(layout, names):
            before = self.best.step_s
            answer = self._try(other)
            if answer and answer is self.best and answer.step_s < before * (1 - _STEP):
                yield other

    def _leave_out(self, chosen: Mapping[int, Spec | None]) -> None:
        """Leave out the pins that say what XLA does unasked, if it does so without them."""
        needed = {site: spec for site, spec in self.pins.items() if chosen.get(site) != spec}
        if len(needed) == len(self.pins) or self.asked >= self.most:
            return
        answer = self._answer(needed)
        if answer and answer.step_s <= self.best.step_s * (1 + _STEP):
            self.pins, self.best = needed, answer

    def thin_out(self, most: int) -> None:
        """Leave out the pins without which the step is as fast: many at a time, then one by one.

        This is delta debugging (Zeller and Hildebrandt, TSE 2002): what is left is needed, each.

        Args:
            most: the most further questions to ask.
        """
        self.most = self.asked + most
        together = len(self.pins)
        while together > 1 and self.asked < self.most:
            together = (together + 1) // 2
            sites = list(self.pins)
            for first in range(0, len(sites), together):
                self._without(sites[first : first + together])

    def _without(self, sites: list[int]) -> None:
        fewer = {site: spec for site, spec in self.pins.items() if site not in sites}
        answer = self._answer(fewer) if fewer else None
        if answer and answer.step_s <= self.best.step_s * (1 + _STEP):
            self.pins, self.best = fewer, answer

    def gain_s(self, site: int) -> float | None:
        """Return the seconds that one of the pins saves beside the others; None if not asked."""
        if len(self.pins) == 1:
            return self.plain.step_s - self.best.step_s
        fewer = {s: spec for s, spec in self.pins.items() if s != site}
        answer = self._answers.get(frozenset(fewer.items()))
        return answer.step_s - self.best.step_s if answer else None

    def _try(self, layout: Layout) -> Answer | None:
        """Ask about a layout of the whole step, and keep it if it is the best so far."""
        pins = self._pins(layout)
        answer = self._answer(pins)
        if answer and answer.step_s < self.best.step_s:
            self.pins, self.best, self.layout = pins, answer, layout
        return answer

    def _answer(self, pins: Pins) -> Answer | None:
        """Ask about pins; None if that was done, they cannot be taken, or no question is left."""
        key = frozenset(pins.items())
        if key in self._answers or self.asked >= self.most:
            return None
        self.asked += 1
        answer = self.ask(pins)
        fits = answer.peak_bytes <= self.plain.peak_bytes * _MEMORY
        self._answers[key] = answer if fits and not answer.why_not else None
        return self._answers[key]

    def _pins(self, layout: Layout) -> Pins:
        def spec(dot: Dot) -> Spec:
            out = dot.eqn.outvars[0]
            return spec_of(self.dims.of(out), out.aval.shape, layout, self.sizes)

        return {dot.index: spec(dot) for dot in self.matmuls}
