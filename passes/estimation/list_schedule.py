"""Put tasks in an order: collectives early enough to hide, within a ceiling of memory.

Plain values, no XLA: `passes/scheduling/reorder.py` makes them of a computation. A list scheduler
after Graham (1966), with one lane that computes and one for each class of links: it walks through
time, and of the tasks that can run takes the one whose turn it is by the rule (`Rule.turn`). A
collective waits for those before it on its link and on its communication stream. Two things differ
from XLA's own scheduler. A start is issued as soon as its operands are computed and its lead
(`Rule.leads`) is reached, so that the kernels that hide it come after it. And while a collective is
in flight, any other task that is ready may run; where a rule says so, the task with the longest
path to the end runs first, and the others fill the waits (Hu, Operations Research 9, 1961).

Words: a *start* and a *done* are the two HLO instructions of an asynchronous collective; it is *in
flight* between them. A *lane* is what runs one task at a time: the compute units, or a class of
links. An *anchored* task is a start or a kernel; any other (a done, or what only names a value) is
placed just before the first task that needs it. A task's *deadline* is the compute before its first
use, in seconds. `Problem.apart` has the starts that must not be in flight while a task runs.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from jaxoverlap.passes.estimation.feeding import NearestCollective
from jaxoverlap.passes.estimation.synchronous import synchronous
from jaxoverlap.passes.estimation.tasks import Problem, Task

# A turn says which task computes next. "first": the first one in XLA's order. "ready": the first
# that is ready. "path": of those that are ready the one with the longest path to the end. "feed":
# the one that is nearest, in seconds of compute, to the start of its next collective. "wait": the
# same, or, after a short wait, one that leads to a start sooner.
Turn = Literal["first", "ready", "path", "feed", "wait"]

_NONE = frozenset[int]()
_IDLE = 0.25  # the longest such wait, as a share of the task that would run instead


@dataclass(frozen=True)
class Rule:
    """The rule that chooses among tasks that could run.

    Attributes:
        leads: a factor for each lane. A start waits until the compute before its first use is no
            more than this many times the collective's own seconds: one that is early takes the link
            from one that is urgent. Lanes differ, since one link may be full where another is idle.
        turn: what computes next.
        in_flight: the most collectives on their way at a time.
        ceiling_bytes: the limit of live memory, kept to as far as there is a choice.
    """

    leads: Mapping[str, float]
    turn: Turn
    in_flight: int
    ceiling_bytes: int


@dataclass(frozen=True)
class OrderOutcome:
    """The predicted seconds and memory of an order.

    Attributes:
        seconds: from the first task to the end of the last, collectives included.
        peak_bytes: the most that is live at a time; operands of the computation not counted.
        unhidden: the starts with no matmul between them and their done.
        clashes: how often a collective starts while one is in flight that it must not overlap.
    """

    seconds: float
    peak_bytes: int
    unhidden: tuple[int, ...]
    clashes: int = 0


def order_outcome(problem: Problem, order: Sequence[int]) -> OrderOutcome:
    """Predict an order's seconds and peak memory: one collective at a time on a link or a stream.

    Those that XLA makes synchronous wait for no stream.
    """
    clock, memory = _Clock(frozenset(synchronous(problem, order).values())), _Memory(problem)
    matmuls, unhidden, at = 0, list[int](), dict[int, int]()
    flying, clashes = set[int](), 0
    for index in order:
        task = problem.tasks[index]
        clock.run(index, task)
        memory.run(index)
        matmuls += task.is_matmul
        at[index] = matmuls
        if task.awaits is not None and at[task.awaits] == matmuls:
            unhidden.append(task.awaits)
        clashes += len(problem.apart.get(index, _NONE) & flying)
        flying ^= {index} if task.flight else {task.awaits} if task.awaits is not None else _NONE
    seconds = max(clock.now, *clock.arrives.values(), 0.0)
    return OrderOutcome(seconds, memory.peak, tuple(unhidden), clashes)


def most_unarrived(problem: Problem, order: Sequence[int]) -> int:
    """Count the most collectives of an order that are issued but not complete at a time.

    Such a one is on its link or waits for it; its done may come much later.
    """
    clock, most = _Clock(frozenset(synchronous(problem, order).values())), 0
    arrivals: list[float] = []  # a heap
    for index in order:
        clock.run(index, problem.tasks[index])
        if problem.tasks[index].flight:
            heapq.heappush(arrivals, clock.arrives[index])
            while arrivals and arrivals[0] <= clock.now:
                heapq.heappop(arrivals)
            most = max(most, len(arrivals))
    return most


def waits_by_start(problem: Problem, order: Sequence[int]) -> dict[int, float]:
    """Return the seconds for which the kernels wait for each start of an order.

    A wait is split over the collective that is awaited and those ahead of it, on its link or its
    stream, that run meanwhile.
    """
    clock, waited = _Clock(), dict[int, float]()
    for index in order:
        task = problem.tasks[index]
        if task.flight:
            waited[index] = 0.0
        start = task.awaits
        while start is not None and clock.arrives[start] > clock.now:
            waited[start] += clock.arrives[start] - clock.begins(start, clock.now)
            start = clock.behind[start]
        clock.run(index, task)
    return waited


def live_bytes(problem: Problem, order: Sequence[int]) -> Iterator[int]:
    """Yield the bytes live while each task of an order runs, its scratch memory included."""
    memory = _Memory(problem)
    for index in order:
        yield memory.after(index)
        memory.run(index)


def list_schedule(problem: Problem, rule: Rule) -> list[int]:
    """Order the problem's tasks by a rule, every task after those that it needs."""
    return list(_place_others_late(problem, _Scheduler(problem, rule).anchors()))


def move_start_earlier(problem: Problem, order: Sequence[int], start: int) -> list[int]:
    """Move one start of an order, and what it needs, before the last matmul in front of it."""
    anchors = [index for index in order if problem.tasks[index].anchored]
    front = anchors[: anchors.index(start)]
    matmuls = [at for at, index in enumerate(front) if problem.tasks[index].is_matmul]
    at = matmuls[-1] if matmuls else 0
    rest = [index for index in anchors[at:] if index != start]
    return list(_place_others_late(problem, [*front[:at], start, *rest]))


def _place_others_late(problem: Problem, anchors: Sequence[int]) -> Iterator[int]:
    """Yield all tasks: the anchors in order, each other just before the first that needs it.

    So a done comes no sooner than it must, however wrong the predicted seconds are; except that of
    a collective that must not be in flight together with the next anchor (`Problem.apart`).
    """
    emitted: set[int] = set()
    tasks, apart, done_of = problem.tasks, problem.apart, problem.dones
    for index in (*anchors, *problem.unanchored):
        stack = [index]
        while stack:
            at = stack[-1]
            needs = tasks[at].needs
            if at in apart:
                avoided = (done_of[n] for n in apart[at] & emitted & done_of.keys())
                needs += tuple(d for d in avoided if emitted.issuperset(tasks[d].needs))
            missing = [n for n in needs if n not in emitted]
            if missing:
                stack += sorted(missing, reverse=True)
                continue
            if (at := stack.pop()) not in emitted:
                emitted.add(at)
                yield at


@dataclass
class _Clock:
    """The clock, as tasks are put one after the other."""

    synchronous: frozenset[int] = frozenset()  # starts on the stream of the kernels
    now: float = 0.0
    last: dict[str | int, int] = field(default_factory=dict)  # start, by link and by stream
    arrives: dict[int, float] = field(default_factory=dict)  # by start
    behind: dict[int, int | None] = field(default_factory=dict)  # the start that one waits for

    def run(self, index: int, task: Task) -> None:
        if flight := task.flight:
            queues = (flight.lane,) if index in self.synchronous else flight.queues
            before = [self.last[queue] for queue in queues if queue in self.last]
            self.behind[index] = max(before, key=self.arrives.__getitem__, default=None)
            self.arrives[index] = self.begins(index, self.now) + flight.seconds
            self.last.update(dict.fromkeys(queues, index))
        elif task.awaits is not None:
            self.now = max(self.now, self.arrives[task.awaits])
        self.now += task.seconds

    def begins(self, start: int, now: float) -> float:
        """Return when a collective is on its link, if not before now."""
        at = self.behind[start]
        return now if at is None else max(now, self.arrives[at])


class _Memory:
    """The live bytes, as tasks are put one after the other.

    The bytes that each task would add are kept up to date, as rules ask for them far more often
    than a buffer comes to life.
    """

    def __init__(self, problem: Problem):
        self._problem = problem
        self._new_bytes = problem.own_bytes.copy()  # of buffers that are not live yet, by task
        self._to_run = [len(holders) for holders in problem.holders]  # by buffer
        self._seen = bytearray(len(problem.holders))  # by buffer: whether it has come to life
        self.live = self.peak = 0

    def after(self, index: int) -> int:
        """Return the live bytes while a task would run now."""
        return self.live + self._new_bytes[index]

    def run(self, index: int) -> None:
        self.peak = max(self.peak, self.after(index))
        sizes, kept, holders = self._problem.buffer_bytes, self._problem.kept, self._problem.holders
        for buffer in self._problem.tasks[index].holds:
            if not self._seen[buffer]:
                self._seen[buffer] = True
                self.live += sizes[buffer]
                for holder in holders[buffer]:
                    self._new_bytes[holder] -= sizes[buffer]
            self._to_run[buffer] -= 1
            if not self._to_run[buffer] and buffer not in kept:
                self.live -= sizes[buffer]


class _Scheduler:
    """The walk through time that puts the tasks in order."""

    def __init__(self, problem: Problem, rule: Rule):
        self._tasks, self._rule = problem.tasks, rule
        self._clock, self._memory = _Clock(), _Memory(problem)
        self._missing = [len(set(task.needs)) for task in self._tasks]
        self._users, self._deadline = problem.users, problem.deadlines
        self._rank: Sequence[float] = range(len(self._tasks))  # who computes first: the least
        if rule.turn in ("path", "feed", "wait"):
            self._rank = [-seconds for seconds in problem.paths]
        self._feeding: NearestCollective | None = None
        if rule.turn in ("feed", "wait"):
            self._feeding = NearestCollective(problem.feeds, [task.seconds for task in self._tasks])
        flights = (task.flight for task in self._tasks if task.flight)
        self._longest_lead_s = max((rule.leads[f.lane] * f.seconds for f in flights), default=0.0)
        self._computed = 0.0
        self._starts: list[tuple[float, int]] = []  # those that are ready, the most urgent first
        self._ready: list[int] = []  # those that compute, the first to run first
        self._flying: list[tuple[float, int]] = []  # ready dones, by arrival
        self._on_the_way = set[int]()
        self._apart = problem.apart
        self._next = 0  # the first task of XLA's order that computes and has not run
        self._done = [False] * len(self._tasks)
        self._order: list[int] = []

    def anchors(self) -> list[int]:
        """Return the starts and the kernels, in order."""
        for index in [i for i, missing in enumerate(self._missing) if not missing]:
            self._arrive(index)
        while True:
            while self._flying and self._flying[0][0] <= self._clock.now:
                self._put(heapq.heappop(self._flying)[1])
            if (start := self._start(due=True)) is not None:
                self._put(start)
            elif (task := self._compute()) is not None:
                self._put(task)
            elif self._flying:
                self._put(heapq.heappop(self._flying)[1])
            elif (start := self._start(due=False)) is not None:
                self._put(start)
            elif self._ready:
                self._put(self._ready.pop(0))  # nothing fits under the ceiling
            else:
                return self._order

    def _arrive(self, index: int) -> None:
        """Queue a task whose needs have all run, or put it at once if it takes no time."""
        task = self._tasks[index]
        if task.flight:
            insort(self._starts, (self._deadline[index], index))
        elif task.awaits is not None:
            heapq.heappush(self._flying, (self._clock.arrives[task.awaits], index))
        elif task.seconds > 0:
            insort(self._ready, index, key=lambda ready: self._rank[ready])
            if self._feeding:
                self._feeding.arrive(index)
        else:
            self._put(index)

    def _put(self, index: int) -> None:
        pending = [index]
        while pending:
            at = pending.pop()
            task = self._tasks[at]
            self._clock.run(at, task)
            self._memory.run(at)
            self._computed += task.seconds
            if task.flight:
                self._on_the_way.add(at)
            elif task.awaits is not None:
                self._on_the_way.discard(task.awaits)
            self._done[at] = True
            if self._feeding:
                self._feeding.run(at)
            if task.anchored:
                self._order.append(at)
            for user in self._users[at]:
                self._missing[user] -= 1
                if self._missing[user]:
                    continue
                if self._tasks[user].anchored or self._tasks[user].awaits is not None:
                    self._arrive(user)
                else:
                    pending.append(user)

    def _start(self, *, due: bool) -> int | None:
        """Pop the most urgent start; if `due`, one whose turn has come and that has room."""
        if due and len(self._on_the_way) >= self._rule.in_flight:
            return None
        for position, (deadline, index) in enumerate(self._starts):
            if not due or self._is_due(deadline, index):
                return self._starts.pop(position)[1]
            if deadline - self._computed > self._longest_lead_s:
                return None  # the others are later still
        return None

    def _is_due(self, deadline: float, index: int) -> bool:
        flight = self._tasks[index].flight
        assert flight
        lead_s = self._rule.leads[flight.lane] * flight.seconds
        return (
            self._apart.get(index, _NONE).isdisjoint(self._on_the_way)
            and deadline - self._computed <= lead_s
            and self._fits(index)
        )

    def _compute(self) -> int | None:
        """Pop the first task by the rule's turn that can run, and fits."""
        while self._next < len(self._tasks) and (
            self._done[self._next] or not self._computes(self._next)
        ):
            self._next += 1
        if self._feeding and (nearest := self._feeding.next(self._fits)) is not None:
            if self._rule.turn == "wait" and self._feeds_sooner(self._feeding, nearest):
                return None
            self._ready.remove(nearest)
            return nearest
        for position, index in enumerate(self._ready):
            if self._rule.turn == "first" and index != self._next:
                return None
            if self._fits(index):
                return self._ready.pop(position)
        return None

    def _feeds_sooner(self, feeding: NearestCollective, nearest: int) -> bool:
        """Return whether a collective on its way sets off the next one sooner than a task would."""
        own_s, remaining_s = self._tasks[nearest].seconds, feeding.remaining_s(nearest)
        for arrives, done in self._flying:
            wait_s = arrives - self._clock.now
            if wait_s < own_s * _IDLE and wait_s + feeding.remaining_s(done) < remaining_s:
                return True
        return False

    def _fits(self, index: int) -> bool:
        return self._memory.after(index) <= self._rule.ceiling_bytes

    def _computes(self, index: int) -> bool:
        task = self._tasks[index]
        return task.anchored and task.flight is None
