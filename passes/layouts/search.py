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
    asked: int = 0
    _seen: set[Any] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.best = self.plain

    def run(self, starts: Iterable[Layout], chosen: Mapping[int, Spec | None]) -> None:
        """Search from the layouts to start from.

        Args:
            starts: these layouts.
            chosen: how XLA lays out the results without pins, by the number of the matmul.
        """
        start = self._first(list(starts))
        if start is None or not (self.pins or self.thorough):
            return
        self._improve(start)
        if self.best.step_s > self.plain.step_s * (1 - _GAIN):
            self.pins, self.best = {}, self.plain
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

    def _try(self, layout: Layout) -> Answer | None:
        """Ask about a layout of the whole step, and keep it if it is the best so far."""
        pins = self._pins(layout)
        answer = self._answer(pins)
        if answer and answer.step_s < self.best.step_s:
            self.pins, self.best = pins, answer
        return answer

    def _answer(self, pins: Pins) -> Answer | None:
        """Ask about pins; None if that was done, they cannot be taken, or no question is left."""
        key = frozenset(pins.items())
        if key in self._seen or self.asked >= self.most:
            return None
        self._seen.add(key)
        self.asked += 1
        answer = self.ask(pins)
        fits = answer.peak_bytes <= self.plain.peak_bytes * _MEMORY
        return answer if fits and not answer.why_not else None

    def _pins(self, layout: Layout) -> Pins:
        def spec(dot: Dot) -> Spec:
            out = dot.eqn.outvars[0]
            return spec_of(self.dims.of(out), out.aval.shape, layout, self.sizes)

        return {dot.index: spec(dot) for dot in self.matmuls}
