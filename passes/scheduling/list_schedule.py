"""Put tasks in an order: collectives early enough to hide, within a ceiling of memory.

Plain values, no XLA: `passes/scheduling/reorder.py` makes them of a computation. A list scheduler
after Graham (1966), with one lane that computes and one for each class of links: it walks through
time, and always takes the first task of XLA's order that can run. Two things differ from XLA's own.
A start is issued as soon as its values are there and its turn has come, so that what it hides
behind comes after it. And while a collective is on its way, whatever else is ready may run; where a
rule says so (`turn`), what the longest path to the end hangs on goes first, and all else is kept
for the waits (Hu, Operations Research 9, 1961).
"""

from __future__ import annotations

import functools
import heapq
from bisect import insort
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

# A turn says what computes next: the first of XLA's order; the first of it that is ready; of those
# that are ready the one from which the path to the end is longest.
Turn = Literal["first", "ready", "path"]


@dataclass(frozen=True)
class Flight:
    """The collective that a start sets off: the lane that it takes, and for how long."""

    lane: str
    seconds: float


@dataclass(frozen=True)
class Task:
    """One instruction, as far as its place in the order matters.

    Attributes:
        needs: tasks that come before it, for their values or by control.
        seconds: time on the compute lane; 0 for what only names a value.
        flight: the collective of an asynchronous start.
        awaits: the start of a done.
        holds: the buffers it reads and writes.
        extra_bytes: bytes that it needs beside those while it runs, as a loop's body does.
        is_matmul: whether it is a matmul or holds some; what is bound by arithmetic shares memory's
            bandwidth best.
    """

    needs: tuple[int, ...] = ()
    seconds: float = 0.0
    flight: Flight | None = None
    awaits: int | None = None
    holds: tuple[int, ...] = ()
    extra_bytes: int = 0
    is_matmul: bool = False

    @property
    def anchored(self) -> bool:
        """Return whether it has a place of its own; others come just before what needs them."""
        return self.flight is not None or (self.awaits is None and self.seconds > 0)


@dataclass(frozen=True)
class Problem:
    """The tasks of a computation, in XLA's order.

    Attributes:
        tasks: each needs only earlier ones.
        buffer_bytes: size of each buffer.
        kept: buffers that are still needed when the computation ends.
    """

    tasks: tuple[Task, ...]
    buffer_bytes: tuple[int, ...] = ()
    kept: frozenset[int] = frozenset()

    # Every rule asks for these, so they are worked out once.

    @functools.cached_property
    def users(self) -> list[list[int]]:
        """The tasks that need each task."""
        users: list[list[int]] = [[] for _ in self.tasks]
        for index, task in enumerate(self.tasks):
            for need in set(task.needs):
                users[need].append(index)
        return users

    @functools.cached_property
    def deadlines(self) -> list[float]:
        """The time by which each task has to have run, in seconds of compute."""
        return _deadlines(self.tasks, self.users, _compute_before(self.tasks))

    @functools.cached_property
    def paths(self) -> list[float]:
        """Seconds of the longest path from each task to the end."""
        return _paths(self.tasks, self.users)


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
        bare: starts of collectives with no matmul before their done.
    """

    seconds: float
    peak_bytes: int
    bare: tuple[int, ...]


def order_outcome(problem: Problem, order: Sequence[int]) -> OrderOutcome:
    """Predict an order's seconds and peak memory. Each lane carries one collective at a time."""
    clock, memory = _Clock(), _Memory(problem)
    matmuls, bare, at = 0, list[int](), dict[int, int]()
    for index in order:
        task = problem.tasks[index]
        clock.run(index, task)
        memory.run(task)
        matmuls += task.is_matmul
        at[index] = matmuls
        if task.awaits is not None and at[task.awaits] == matmuls:
            bare.append(task.awaits)
    return OrderOutcome(max(clock.now, *clock.busy_until.values(), 0.0), memory.peak, tuple(bare))


def on_the_way(problem: Problem, order: Sequence[int]) -> int:
    """Count the most collectives of an order in flight at a time, on a link or waiting for it."""
    clock, most = _Clock(), 0
    for index in order:
        clock.run(index, problem.tasks[index])
        if problem.tasks[index].flight:
            most = max(most, sum(arrives > clock.now for arrives in clock.arrives.values()))
    return most


def live_bytes(problem: Problem, order: Sequence[int]) -> Iterator[int]:
    """Yield the bytes live while each task of an order runs, with what it needs beside."""
    memory = _Memory(problem)
    for index in order:
        yield memory.after(problem.tasks[index])
        memory.run(problem.tasks[index])


def list_schedule(problem: Problem, rule: Rule) -> list[int]:
    """Order the problem's tasks by a rule, every task after those that it needs."""
    return list(_late(problem, _Scheduler(problem, rule).anchors()))


def earlier(problem: Problem, order: Sequence[int], start: int) -> list[int]:
    """Move one start of an order, and what it needs, before the last matmul in front of it."""
    anchors = [index for index in order if problem.tasks[index].anchored]
    front = anchors[: anchors.index(start)]
    matmuls = [at for at, index in enumerate(front) if problem.tasks[index].is_matmul]
    at = matmuls[-1] if matmuls else 0
    rest = [index for index in anchors[at:] if index != start]
    return list(_late(problem, [*front[:at], start, *rest]))


def _late(problem: Problem, anchors: Sequence[int]) -> Iterator[int]:
    """Yield all tasks: the anchors in order, each other just before the first that needs it.

    So a done waits no sooner than it must, however wrong the predicted seconds are.
    """
    emitted: set[int] = set()
    rest = [i for i, task in enumerate(problem.tasks) if not task.anchored]
    for index in (*anchors, *rest):
        stack = [index]
        while stack:
            missing = [n for n in problem.tasks[stack[-1]].needs if n not in emitted]
            if missing:
                stack += sorted(missing, reverse=True)
                continue
            if (at := stack.pop()) not in emitted:
                emitted.add(at)
                yield at


@dataclass
class _Clock:
    """The clock, as tasks are put one after the other."""

    now: float = 0.0
    busy_until: dict[str, float] = field(default_factory=dict)  # by lane
    arrives: dict[int, float] = field(default_factory=dict)  # by start

    def run(self, index: int, task: Task) -> None:
        if task.flight:
            begins = max(self.now, self.busy_until.get(task.flight.lane, 0.0))
            self.arrives[index] = begins + task.flight.seconds
            self.busy_until[task.flight.lane] = self.arrives[index]
        elif task.awaits is not None:
            self.now = max(self.now, self.arrives[task.awaits])
        self.now += task.seconds


class _Memory:
    """The live bytes, as tasks are put one after the other."""

    def __init__(self, problem: Problem):
        self._bytes, self._kept = problem.buffer_bytes, problem.kept
        self._uses = Counter(buffer for task in problem.tasks for buffer in task.holds)
        self._live: set[int] = set()
        self.live = self.peak = 0

    def after(self, task: Task) -> int:
        """Return the live bytes while a task would run now."""
        new = set(task.holds) - self._live
        return self.live + task.extra_bytes + sum(self._bytes[b] for b in new)

    def run(self, task: Task) -> None:
        self.peak = max(self.peak, self.after(task))
        for buffer in task.holds:
            if buffer not in self._live:
                self._live.add(buffer)
                self.live += self._bytes[buffer]
        for buffer in task.holds:
            self._uses[buffer] -= 1
            if not self._uses[buffer] and buffer not in self._kept:
                self._live.discard(buffer)
                self.live -= self._bytes[buffer]


class _Scheduler:
    """The walk through time that puts the tasks in order."""

    def __init__(self, problem: Problem, rule: Rule):
        self._tasks, self._rule = problem.tasks, rule
        self._clock, self._memory = _Clock(), _Memory(problem)
        self._missing = [len(set(task.needs)) for task in self._tasks]
        self._users, self._deadline = problem.users, problem.deadlines
        self._rank: Sequence[float] = range(len(self._tasks))  # who computes first: the least
        if rule.turn == "path":
            self._rank = [-seconds for seconds in problem.paths]
        self._computed = 0.0
        self._starts: list[tuple[float, int]] = []  # those that are ready, the most urgent first
        self._ready: list[int] = []  # those that compute, the first to run first
        self._flying: list[tuple[float, int]] = []  # ready dones, by arrival
        self._on_the_way = 0
        self._next = 0  # the first task of XLA's order that computes and has not run
        self._done = [False] * len(self._tasks)
        self._order: list[int] = []

    def anchors(self) -> list[int]:
        """Return the anchored tasks in order."""
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
        else:
            self._put(index)

    def _put(self, index: int) -> None:
        pending = [index]
        while pending:
            at = pending.pop()
            task = self._tasks[at]
            self._clock.run(at, task)
            self._memory.run(task)
            self._computed += task.seconds
            self._on_the_way += (task.flight is not None) - (task.awaits is not None)
            self._done[at] = True
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
        for place, (deadline, index) in enumerate(self._starts):
            if not due or self._is_due(deadline, self._tasks[index]):
                return self._starts.pop(place)[1]
        return None

    def _is_due(self, deadline: float, task: Task) -> bool:
        assert task.flight
        lead_s = self._rule.leads[task.flight.lane] * task.flight.seconds
        return (
            self._on_the_way < self._rule.in_flight
            and deadline - self._computed <= lead_s
            and self._memory.after(task) <= self._rule.ceiling_bytes
        )

    def _compute(self) -> int | None:
        """Pop the first task by the rule's turn that can run, and fits."""
        while self._next < len(self._tasks) and (
            self._done[self._next] or not self._computes(self._next)
        ):
            self._next += 1
        for place, index in enumerate(self._ready):
            if self._rule.turn == "first" and index != self._next:
                return None
            if self._memory.after(self._tasks[index]) <= self._rule.ceiling_bytes:
                return self._ready.pop(place)
        return None

    def _computes(self, index: int) -> bool:
        task = self._tasks[index]
        return task.anchored and task.flight is None


def _paths(tasks: Sequence[Task], users: Sequence[Sequence[int]]) -> list[float]:
    """Return the seconds of the longest path from each task to the end, collectives included."""
    paths = [0.0] * len(tasks)
    for index in reversed(range(len(tasks))):
        flight = tasks[index].flight
        own = flight.seconds if flight else tasks[index].seconds
        paths[index] = own + max((paths[user] for user in users[index]), default=0.0)
    return paths


def _compute_before(tasks: Sequence[Task]) -> list[float]:
    """Return the seconds of compute before each task, in XLA's order."""
    before, total = [], 0.0
    for task in tasks:
        before.append(total)
        total += task.seconds
    return [*before, total]


def _deadlines(
    tasks: Sequence[Task], users: Sequence[Sequence[int]], before: Sequence[float]
) -> list[float]:
    """Return each task's deadline: the compute before its first use, in XLA's order.

    A value that a collective sends is due earlier by the collective's own seconds.
    """
    deadline = [before[-1]] * len(tasks)
    for index in reversed(range(len(tasks))):
        for user in users[index]:
            at = before[user] if tasks[user].seconds > 0 else deadline[user]
            flight = tasks[user].flight
            deadline[index] = min(deadline[index], at - (flight.seconds if flight else 0.0))
    return deadline
