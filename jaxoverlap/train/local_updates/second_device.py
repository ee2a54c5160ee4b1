"""Run a round's average on second devices, concurrently with the steps, where one cannot.

XLA:CPU runs the programs of a device, and the collectives in them, one after the other. Programs on
other devices of the same process run concurrently. So the average is a program of its own, on a
mesh of the devices that each process has left. JAX starts programs without waiting for them, so no
thread of ours is needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxoverlap.train.local_updates.finite import RoundReport
from jaxoverlap.train.local_updates.round import Rounds
from jaxoverlap.train.local_updates.state import LocalState


def mesh_beside(mesh: Mesh) -> Mesh | None:
    """Return a mesh like another one, of other devices of the same processes; None if too few.

    Only for CPUs: a GPU overlaps collectives with kernels by itself.
    """
    used = list(mesh.devices.flat)
    if not isinstance(mesh, Mesh) or used[0].platform != "cpu":
        return None
    taken = set(used)
    free: dict[int, list[Any]] = {}
    for device in used[0].client.devices():
        if device not in taken:
            free.setdefault(device.process_index, []).append(device)
    found = []
    for device in used:
        if not free.get(device.process_index):
            return None
        found.append(free[device.process_index].pop(0))
    devices = np.array(found, dtype=object).reshape(mesh.devices.shape)
    return Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)


class Runner:
    """A round as three programs: the average, the concurrent steps, and the outer step."""

    def __init__(self, rounds: Rounds, others: Mesh, shardings: LocalState):
        beside = replace(rounds, placement=replace(rounds.placement, mesh=others))
        self._pair = dict(zip(rounds.placement.mesh.devices.flat, others.devices.flat, strict=True))
        self._back = {there: here for here, there in self._pair.items()}
        self._mesh, self._others = rounds.placement.mesh, others
        self._average = jax.jit(beside.averaged)
        ones = jnp.ones(rounds.placement.workers, jnp.float32)
        self._fine = jax.jit(lambda: ones, out_shardings=shardings.finite)()  # of steps to come
        self._params_in = rounds.params_in

        def steps(worker: Any, batches: Any) -> tuple[Any, Any, jax.Array]:
            after, metrics = rounds.steps(worker, batches, rounds.outer.every)
            kept, fine = rounds.kept(worker, after)
            return kept, metrics, fine

        def applied(state: LocalState, started: Any, average: Any, told: Any) -> Any:
            seen = RoundReport.new(state.round, rounds.placement.workers)
            after, fine = rounds.applied(state, started, average, 0)
            return replace(after, round=after.round + 1), seen.joined(told, fine)

        whole = NamedSharding(self._mesh, P())
        self._steps = jax.jit(steps, out_shardings=(shardings.worker, None, shardings.finite))
        self._applied = jax.jit(applied, out_shardings=(shardings, whole))

    def compile(self) -> Runner:
        """Return the round itself: its programs are compiled when they first run."""
        return self

    def __call__(self, state: LocalState, batches: Any) -> tuple[LocalState, Any, RoundReport]:
        """Run a round; nothing here waits for a program."""
        fine = state.finite, self._fine
        there = _moved((state.sent, state.sync, fine), self._others, self._pair)
        average, sync, told = _moved(self._average(*there), self._mesh, self._back)
        worker, metrics, finite = self._steps(state.worker, batches)
        started = self._params_in.get(state.worker)
        stepped = replace(state, worker=worker, finite=finite, sync=sync)
        state, seen = self._applied(stepped, started, average, told)
        return state, metrics, seen


def _moved(tree: Any, mesh: Mesh, pair: Mapping[Any, Any]) -> Any:
    """Copy arrays to a mesh device by device, so that nothing leaves its process."""

    def one(array: jax.Array) -> jax.Array:
        assert isinstance(array.sharding, NamedSharding)
        parts = [jax.device_put(s.data, pair[s.device]) for s in array.addressable_shards]
        at = NamedSharding(mesh, array.sharding.spec)
        return jax.make_array_from_single_device_arrays(array.shape, at, parts)

    return jax.tree.map(one, tree)
