"""Describe the tasks of a computation: what they need, how long they take, where they fly."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from jaxoverlap.passes.estimation.feeding import Feeds, starts_fed


@dataclass(frozen=True)
class Flight:
    """The collective that a start sets off.

    Attributes:
        lane: the link that it takes.
        seconds: for how long.
        stream: the communication stream that it waits its turn on; None for none.
    """

    lane: str
    seconds: float
    stream: int | None = None

    @property
    def queues(self) -> tuple[str | int, ...]:
        """Return what carries one collective at a time: its link and its stream."""
        return (self.lane,) if self.stream is None else (self.lane, self.stream)


@dataclass(frozen=True)
class Task:
    """One instruction, with all that its position in the schedule depends on.

    Attributes:
        needs: tasks that come before it, for their values or by control.
        seconds: time on the compute lane; 0 for what only names a value.
        flight: the collective of an asynchronous start.
        awaits: the start of a done.
        holds: the buffers it reads and writes, each once.
        extra_bytes: further bytes that it needs while it runs, as a loop's body does.
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
        """Return True for collectives and kernels; others run just before their first user."""
        return self.flight is not None or (self.awaits is None and self.seconds > 0)


@dataclass(frozen=True)
class Problem:
    """The tasks of a computation, in XLA's order.

    Attributes:
        tasks: each needs only earlier ones.
        buffer_bytes: size of each buffer.
        kept: buffers that are still live when the computation ends.
        apart: the starts that must not be on their way when a task runs, by the task, which is a
            start or runs some inside (`streams.apart`).
    """

    tasks: tuple[Task, ...]
    buffer_bytes: tuple[int, ...] = ()
    kept: frozenset[int] = frozenset()
    apart: Mapping[int, frozenset[int]] = field(default_factory=dict)

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
    def dones(self) -> dict[int, int]:
        """The done of each start that has one."""
        return {task.awaits: i for i, task in enumerate(self.tasks) if task.awaits is not None}

    @functools.cached_property
    def unanchored(self) -> list[int]:
        """The tasks that run just before their first user."""
        return [index for index, task in enumerate(self.tasks) if not task.anchored]

    @functools.cached_property
    def holders(self) -> list[list[int]]:
        """The tasks that hold each buffer."""
        holders: list[list[int]] = [[] for _ in self.buffer_bytes]
        for index, task in enumerate(self.tasks):
            for buffer in task.holds:
                holders[buffer].append(index)
        return holders

    @functools.cached_property
    def own_bytes(self) -> list[int]:
        """The bytes that each task needs while it runs: its buffers and its scratch memory."""
        sizes = self.buffer_bytes
        return [task.extra_bytes + sum(sizes[b] for b in task.holds) for task in self.tasks]

    @functools.cached_property
    def deadlines(self) -> list[float]:
        """The time by which each task has to have run, in seconds of compute."""
        return _deadlines(self.tasks, self.users, _compute_before(self.tasks))

    @functools.cached_property
    def paths(self) -> list[float]:
        """Seconds of the longest path from each task to the end."""
        return _paths(self.tasks, self.users)

    @functools.cached_property
    def feeds(self) -> Feeds:
        """The starts that each kernel and each done leads to, with no other in between."""
        flies = [task.flight is not None for task in self.tasks]
        leads = [task.seconds > 0 or task.awaits is not None for task in self.tasks]
        return starts_fed(flies, leads, self.users)


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
