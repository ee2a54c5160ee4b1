"""Define `Elastic`: local updates whose workers may be lost, and come back."""

from __future__ import annotations

import contextlib
import itertools
import math
import uuid
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import jax
import msgspec
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxoverlap._jax import jits
from jaxoverlap._jax.key_value_store import awaited
from jaxoverlap._util.limits import number
from jaxoverlap.train.arguments import check_workers, function
from jaxoverlap.train.elastic import regroup
from jaxoverlap.train.local_updates.local_updates import LocalUpdates
from jaxoverlap.train.local_updates.state import LocalState

_ROOT = "jaxoverlap/elastic"

# It returns the devices that are alive; on exit it raises in every process if one was lost.
Live = Callable[[Sequence[Any]], AbstractContextManager[Sequence[Any]]]


@dataclass(frozen=True)
class ElasticRound:
    """A completed round.

    Attributes:
        number: of the round, from 0.
        workers: that took part, as indices along the workers' axis of the full mesh.
        metrics: of the train step, [every, workers, ...], in the order of `workers`.
        discarded: how often the round was begun before and discarded, as a worker was lost.
    """

    number: int
    workers: tuple[int, ...]
    metrics: Any
    discarded: int


@dataclass(frozen=True)
class _Group:
    """Workers that train together: their local updates, and the state that they have."""

    workers: tuple[int, ...]
    updates: LocalUpdates
    state: LocalState


class Elastic:
    """Train by local updates in many processes, with the workers that are there.

        jax.config.update("jax_enable_recoverability", True)
        jax.distributed.initialize(..., heartbeat_timeout_seconds=10)
        elastic = Elastic(
            lambda mesh: LocalUpdates(step, mesh, outer=co2(every=12), donate=False), mesh,
            init=lambda mesh: init_state(), batches=batches,
        )
        while elastic.number < rounds:
            done = elastic.round()
        elastic.finish()

    A round in which a worker is lost is discarded by all and taken again, from the state before it,
    by the workers that stay: averages are over these alone. A process that is started again calls
    the same, and its workers join at the next round's begin, with the consolidated state of those
    that stayed (`LocalUpdates.consolidate`). See docs/local_updates.md for what is lost.

    Process 0 may not be lost: JAX's coordinator runs in it.

    Args:
        make: make(mesh) -> the local updates of the workers of a mesh, with `donate=False`; it is
            called for each set of workers, which costs a compilation.
        mesh: of all workers. The devices of one worker belong to one process.
        axis: the workers' axis.
        init: init(mesh) -> the state of one worker, the same in all processes.
        batches: batches(number of the round, worker) -> that worker's own batches, a tree of
            arrays [every, batch, ...]; called for this process's workers. The batches of a worker
            that is lost are left out.
        within_s: how long a process that joins waits for process 0's answer.
        live: for tests; `jax.experimental.multihost_utils.live_devices` if None.

    Raises:
        ValueError: if JAX would end all processes with the first that is lost, or local updates
            cannot lose a worker.
    """

    def __init__(
        self,
        make: Callable[[Mesh], LocalUpdates],
        mesh: Mesh,
        *,
        axis: str = "data",
        init: Callable[[Mesh], Any],
        batches: Callable[[int, int], Any],
        within_s: float = 60.0,
        live: Live | None = None,
    ):
        check_workers(mesh, axis)
        self._make = function("make", make, "make(mesh) -> LocalUpdates")
        self._init = function("init", init, "init(mesh) -> the state of one worker")
        self._batches = function("batches", batches, "batches(number, worker) -> arrays")
        self._mesh, self._axis = mesh, axis
        if live is None:
            _check_recoverable()
        self._live: Live = live or multihost_utils.live_devices
        self._devices = np.moveaxis(mesh.devices, mesh.axis_names.index(axis), 0)
        self._process = _process_of_workers(self._devices)
        self._group: _Group | None = None
        self._changes = 0  # of workers, counted alike in all processes
        store = jits.key_value_store() if jax.process_count() > 1 else None
        self._newcomers = Newcomers(store, number("within_s", within_s, above=0))

    def __repr__(self) -> str:
        """Return the next round and the workers of the last one."""
        return f"Elastic: round {self.number} is next, workers {list(self.workers)} of {self._axis}"

    @property
    def number(self) -> int:
        """Return the number of the next round; 0 in a process that has not joined yet."""
        return 0 if self._group is None else int(self._group.state.round)

    @property
    def workers(self) -> tuple[int, ...]:
        """Return the workers of the last round, in the order of the state's leading dim."""
        return () if self._group is None else self._group.workers

    @property
    def updates(self) -> LocalUpdates:
        """Return the local updates of `workers`: `updates.params(state)` has the parameters."""
        return self._taken().updates

    @property
    def state(self) -> LocalState:
        """Return the state after the last round."""
        return self._taken().state

    def round(self) -> ElasticRound:
        """Run a round with the workers that are alive, and wait for it.

        Raises:
            NonFiniteRoundError: as `LocalUpdates.round`; call this again to go on.
        """
        discarded = 0
        while True:
            try:
                with self._live(list(self._devices.flat)) as alive:
                    group = self._grouped(self._alive(alive))
                    batches = self._of_group(group)
                    state, metrics = group.updates.round(group.state, batches)
                    jax.block_until_ready((state, metrics))
            except multihost_utils.ProcessFailureError as error:
                self._forget(error.failed_devices)
                discarded += 1
                continue
            number = int(state.round) - 1
            self._group = replace(group, state=state)
            return ElasticRound(number, group.workers, metrics, discarded)

    def finish(self) -> None:
        """Wait until all processes that are alive call this: process 0 has to leave last."""
        lost = contextlib.suppress(multihost_utils.ProcessFailureError)  # not waited for
        with lost, self._live(list(self._devices.flat)):
            pass

    # -- who is there -----------------------------------------------------------------------------

    def _taken(self) -> _Group:
        if self._group is None:
            raise ValueError("no round was taken yet: call round() first")
        return self._group

    def _alive(self, devices: Sequence[Any]) -> tuple[int, ...]:
        """Return the workers all of whose devices are alive."""
        alive = set(devices)
        found = [w for w, own in enumerate(self._devices) if alive.issuperset(own.flat)]
        return tuple(found)

    def _forget(self, devices: set[Any]) -> None:
        """Leave out workers that were lost, also those that are back already, without a state."""
        if self._group is None:
            return
        lost = {w for w, own in enumerate(self._devices) if devices.intersection(own.flat)}
        stay = [w for w in self._group.workers if w not in lost]
        if len(stay) < len(self._group.workers):
            self._changes += 1
            stay = ordered(stay, self._changes)
            mesh = self._mesh_of(stay)
            state = self._restricted(self._group.state, mesh)
            self._group = _Group(stay, self._updates(mesh), state)

    def _grouped(self, alive: tuple[int, ...]) -> _Group:
        """Return the group of those that are alive, the state on all of them."""
        group, answer = self._group, self._agreed(alive)
        if group is not None and set(alive) == set(group.workers):
            return group
        self._changes = answer.changes + 1
        workers = ordered(alive, self._changes)
        mesh = self._mesh_of(workers)
        updates = self._updates(mesh)
        if not answer.stay:
            one = regroup.placed(self._init(mesh), mesh)
            return _Group(workers, updates, updates.init(one))
        return _Group(workers, updates, self._joined(group, answer.stay, workers, updates))

    def _agreed(self, alive: tuple[int, ...]) -> JoinReply:
        """Return which workers have the state, the same in all processes."""
        me, group = jax.process_index(), self._group
        stay = () if group is None else tuple(w for w in group.workers if w in alive)
        mine = JoinReply(stay, self._changes)
        if jax.process_count() == 1:
            return mine
        if me == 0:
            new = sorted({self._process[w] for w in alive if w not in stay} - {0})
            self._newcomers.answer(new, stay, self._changes)
            return mine
        return mine if group is not None else self._newcomers.ask()

    # -- states -----------------------------------------------------------------------------------

    def _joined(
        self,
        group: _Group | None,
        stay: tuple[int, ...],
        workers: tuple[int, ...],
        updates: LocalUpdates,
    ) -> LocalState:
        """Return the state of workers of whom some have it: the others get it from those."""
        mesh, stays, one = updates.mesh, None, None
        if group is not None:
            of_stay = self._mesh_of([w for w in workers if w in stay])
            stays = self._restricted(group.state, of_stay)
            if stays.control is not None:
                updates.sent_bytes(stays)  # raises if other layers are compressed now
            if len(stay) == len(workers):
                return stays
            one = self._updates(of_stay).consolidate(stays)
            one = one.each_on_host(lambda leaf: regroup.placed(leaf, of_stay))
        shapes = regroup.without_workers(updates.abstract(self._init(mesh)), self._axis)
        row = workers.index(min(stay))
        found = regroup.from_worker(one, shapes, mesh, self._axis, row)
        full = updates.spread(found.each_on_host(np.asarray))
        own = stays and stays.arrays
        return regroup.merged(full.arrays, own, self._axis).with_host_of(full)

    def _restricted(self, state: LocalState, mesh: Mesh) -> LocalState:
        arrays = regroup.restricted(state.arrays, mesh, self._axis)
        return arrays.with_host_of(state)

    def _mesh_of(self, workers: Sequence[int]) -> Mesh:
        devices = self._devices[list(workers)]
        names = self._mesh.axis_names
        devices = np.moveaxis(devices, 0, names.index(self._axis))
        return Mesh(devices, names, axis_types=self._mesh.axis_types)

    def _updates(self, mesh: Mesh) -> LocalUpdates:
        updates = self._make(mesh)
        if not isinstance(updates, LocalUpdates) or updates.mesh != mesh:
            raise ValueError(
                f"make(mesh) returned {updates!r}: expected LocalUpdates on the mesh that it is "
                "given"
            )
        if updates.donate:
            raise ValueError(
                "make(mesh) returned LocalUpdates that donate their state: a round that fails is "
                "taken again from it; make them with donate=False"
            )
        if updates.outer.eager or updates.shard_outer:
            raise ValueError(
                "an eager outer optimizer, or shard_outer=True: a worker that is lost takes outer "
                "state along that nobody else has; use another algorithm, or leave that out"
            )
        if updates.overlap is not None and jax.process_count() > 1:
            raise ValueError(
                "make(mesh) returned LocalUpdates that are overlapped: processes agree on such a "
                "program by counting their meetings, which one that comes back does not know; "
                "make them with overlap=False"
            )
        return updates

    # -- batches ----------------------------------------------------------------------------------

    def _of_group(self, group: _Group) -> Any:
        """Return the batches of a round as global arrays; a process makes its workers' shards."""
        number, me = int(group.state.round), jax.process_index()
        mine = [w for w in group.workers if self._process[w] == me]
        given = {w: self._batches(number, w) for w in mine}
        own = {w: [np.asarray(leaf) for leaf in jax.tree.leaves(b)] for w, b in given.items()}
        treedef = jax.tree.structure(given[mine[0]])
        at = NamedSharding(group.updates.mesh, P(None, self._axis))

        def one(number: int) -> jax.Array:
            every, rows, *rest = own[mine[0]][number].shape

            def part(index: Any) -> np.ndarray:
                worker = group.workers[(index[1].start or 0) // rows]
                return own[worker][number]

            whole = (every, rows * len(group.workers), *rest)
            return jax.make_array_from_callback(whole, at, part)

        return treedef.unflatten(map(one, range(treedef.num_leaves)))


def ordered(workers: Sequence[int], changes: int) -> tuple[int, ...]:
    """Return workers in another order after each change.

    XLA:CPU keeps a connection for each order of devices as long as the job lives, also one of which
    a process was lost: the same devices in the same order would get it again. Any order will do for
    local updates.

    Args:
        workers: that are alive.
        changes: so many orders were used before, of these or other workers.
    """
    orders = itertools.permutations(sorted(workers))
    return next(itertools.islice(orders, changes % math.factorial(len(workers)), None))


def _process_of_workers(devices: np.ndarray) -> list[int]:
    """Return the process of each worker."""
    found = []
    for worker, own in enumerate(devices):
        processes = {device.process_index for device in own.flat}
        if len(processes) > 1:
            raise ValueError(
                f"worker {worker} has devices of the processes {sorted(processes)}: expected those "
                "of one process, so that a process that is lost takes whole workers along"
            )
        found.append(processes.pop())
    return found


def _check_recoverable() -> None:
    if not jax.distributed.is_initialized():
        raise ValueError(
            "jax.distributed was not initialized: workers are lost with their process; call "
            "jax.distributed.initialize() first, in each process"
        )
    if not jax.config.jax_enable_recoverability:
        raise ValueError(
            "jax_enable_recoverability is off: JAX ends all processes where one is lost; call "
            'jax.config.update("jax_enable_recoverability", True) before '
            "jax.distributed.initialize()"
        )


# -- processes that join --------------------------------------------------------------------------


class JoinReply(msgspec.Struct):
    """The answer of process 0 to a process that joins.

    Attributes:
        stay: the workers that have the state.
        changes: how often the workers changed so far.
    """

    stay: tuple[int, ...]
    changes: int


class Newcomers:
    """One process's side of telling those that join which workers have the state, by JAX's store.

    Process 0 runs the coordinator, without which no process goes on, so it always knows. A process
    that joins leaves a token of its own before it is counted as alive, and process 0 answers to
    the token.

    Args:
        store: of `jax.distributed`; None in a single process, which has nobody to ask.
        within_s: how long an answer is waited for.
    """

    def __init__(self, store: Any, within_s: float):
        self._store, self._within_s = store, within_s
        self._token, self._asked = uuid.uuid4().hex, 0
        self._answered: dict[str, int] = {}
        if store is not None:
            mine = f"{_ROOT}/token/{jax.process_index()}"
            store.key_value_set(mine, self._token, allow_overwrite=True)

    def ask(self) -> JoinReply:
        """Return process 0's reply in this round to a process that joins.

        Raises:
            RuntimeError: if it does not.
        """
        text = awaited(self._store, self._key(self._token, self._asked), self._within_s)
        self._asked += 1
        if text is None:
            raise RuntimeError(
                f"process 0 did not answer within {self._within_s:g} s: every process of the job "
                "has to call round() of an Elastic that is made alike"
            )
        return msgspec.json.decode(text, type=JoinReply)

    def answer(self, processes: Iterable[int], stay: Sequence[int], changes: int) -> None:
        """Answer to processes that join, as process 0."""
        text = msgspec.json.encode(JoinReply(tuple(stay), changes)).decode()
        for process in processes:
            token = awaited(self._store, f"{_ROOT}/token/{process}", self._within_s)
            if token is None:
                raise RuntimeError(
                    f"process {process} is alive and made no Elastic within {self._within_s:g} s"
                )
            times = self._answered.get(token, 0)
            self._store.key_value_set(self._key(token, times), text)
            self._answered[token] = times + 1

    def _key(self, token: str, times: int) -> str:
        return f"{_ROOT}/answer/{token}/{times}"
