"""Put the collectives that XLA will make synchronous where they cost least.

After the schedule XLA makes one synchronous instruction of a start and its done if no kernel runs
between them, and puts it where the done was. Starts in between then come first,
and their collectives take the link: a permute of 0.4 ms would wait for 10 ms of gathered weights
that nobody needs yet. Dones in between are waited for first.

XLA: `xla/hlo/transforms/collectives/convert_async_collectives_to_sync.cc`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jaxoverlap.passes.estimation.tasks import Problem


def synchronous(problem: Problem, order: Sequence[int]) -> dict[int, int]:
    """Return the dones of an order that XLA will make synchronous, each with its start.

    Pairs are left out that another task needs in between, as by a control dependency.
    """
    found: dict[int, int] = {}
    since = set[int]()  # the starts since the last kernel
    for index in order:
        task = problem.tasks[index]
        if task.flight:
            since.add(index)
        elif task.awaits in since:
            if task.needs == (task.awaits,) and problem.users[task.awaits] == [index]:
                found[index] = task.awaits
        elif task.seconds > 0:
            since.clear()
    return found


def as_compiled(problem: Problem, order: Sequence[int]) -> list[int]:
    """Return the order as XLA emits it: a synchronous collective runs where its done was."""
    start_of = synchronous(problem, order)
    starts = set(start_of.values())
    result: list[int] = []
    for index in order:
        if index not in starts:
            result += [start_of[index], index] if index in start_of else [index]
    return result


def ahead(problem: Problem, order: Sequence[int]) -> list[int]:
    """Return an order with synchronous collectives before what else its link, or a done, waits for.

    Each comes after the starts on other links, with whose collectives it overlaps.
    """
    done_of = {start: done for done, start in synchronous(problem, order).items()}
    return list(_ahead(problem, order, done_of))


def _ahead(problem: Problem, order: Sequence[int], done_of: dict[int, int]) -> Iterator[int]:
    tasks = problem.tasks
    waiting: dict[int, str] = {}  # starts with their links, that have their turn
    put = set[int]()
    for index in order:
        task = tasks[index]
        if index in put:
            continue
        if index in done_of and task.flight:
            waiting[index] = task.flight.lane
            continue
        if task.awaits is not None or (task.flight and task.flight.lane in waiting.values()):
            for start in waiting:
                yield from (start, done_of[start])
                put |= {start, done_of[start]}
            waiting.clear()
        if index not in put:
            yield index
