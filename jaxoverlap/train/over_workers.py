"""What steps and rounds of several workers share: their mesh, states, settings and programs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxoverlap._util.limits import whole
from jaxoverlap.train.arguments import (
    check_arrays,
    check_is,
    check_like,
    check_not_traced,
    check_workers,
    keys,
    overlap_options,
)
from jaxoverlap.train.compression.averager import Averager
from jaxoverlap.train.compression.control_loop import ControlLoop
from jaxoverlap.train.compression.sync import Sync
from jaxoverlap.train.placement import WorkerPlacement, copies, folded, is_key
from jaxoverlap.train.programs import Programs, key_of, like_at, without_first


class OverWorkers(ABC):
    """Training by the workers along an axis of a mesh: `DataParallel` and `LocalUpdates`.

    A state is a dataclass with `sync`, `control`, and `arrays`: the state without what is on the
    host (`with_host_of`, `each_on_host`).

    Attributes:
        mesh, axis: where the workers are.
        sync: how averages are compressed; None sends them as they are.
        overlap: options of `jaxoverlap.overlap`; None for no overlap.
    """

    state_type: ClassVar[type]
    comes_from: ClassVar[str]  # what gives a state, for errors

    def __init__(
        self,
        mesh: Mesh,
        axis: str,
        *,
        sync: Sync | None,
        stacked: Sequence[str],
        overlap: bool | Mapping[str, Any],
        shared: bool = False,
        scatter: bool = False,
    ):
        check_workers(mesh, axis)
        self.mesh, self.axis, self.sync = mesh, axis, sync
        self.overlap = overlap_options(overlap)
        self._placement = WorkerPlacement(mesh, axis, scatter)
        stacked = keys("stacked", stacked)
        self._loop = sync and ControlLoop(sync, self._placement, stacked, shared=shared)
        self._programs = self._loop.programs if self._loop else Programs()
        self._fitting: Hashable = None  # the shapes of the last state that was checked

    def __repr__(self) -> str:
        """Return the kind of training, its workers and how their averages are compressed."""
        sent = "averages uncompressed" if self.sync is None else f"averages by {self.sync}"
        return f"{type(self).__name__}: {self.workers} workers along {self.axis}, {sent}"

    @property
    def workers(self) -> int:
        """Return how many workers there are."""
        return self._placement.workers

    # -- what differs between steps and rounds ----------------------------------------------------

    @abstractmethod
    def _new(self, initial: Any) -> Any:
        """Return the state of all workers without its control, from what `init` takes."""

    @abstractmethod
    def _shardings(self, initial: Any) -> Any:
        """Return the sharding of each leaf of the state that `_new` makes."""

    @abstractmethod
    def _each_worker(self, state: Any, change: Callable[[Any], Any]) -> Any:
        """Change the leaves of a state that differ between workers."""

    @abstractmethod
    def _params(self, state: Any) -> Any:
        """Return one worker's parameters in a state of all, as shapes or arrays."""

    @abstractmethod
    def _initial_params(self, initial: Any) -> Any:
        """Return one worker's parameters in what `init` takes."""

    @abstractmethod
    def _initial(self, state: Any) -> Any:
        """Return what `_shardings` takes, of a consolidated state."""

    def _of_all(self, state: Any) -> Any:
        """Return the state of all workers from a consolidated one: each has a copy."""
        return self._copied(state)

    # -- states -----------------------------------------------------------------------------------

    def _init(self, initial: Any) -> Any:
        """Return the state of a run that begins, placed on the mesh."""
        program = jax.jit(self._new, out_shardings=self._shardings(initial))
        new = program(self._placement.on_mesh(initial))
        return self._with_host(new, initial)

    def _abstract(self, initial: Any, workers: int | None) -> Any:
        """Return what `_init` would, as shapes with shardings.

        Args:
            initial: what `init` takes, arrays or shapes.
            workers: of the run that wrote a checkpoint, if others than the mesh has; what differs
                between them is then replicated along their dim.
        """
        shapes, place = jax.eval_shape(self._new, initial), self._placement
        found = jax.tree.map(like_at, shapes, self._shardings(initial))
        found = self._with_host(found, initial).each_on_host(lambda x: like_at(x, place.at()))
        if workers is None or workers == self.workers:
            return found
        return self._each_worker(found, place.of_workers(whole("workers", workers, 1)))

    def _with_host(self, state: Any, initial: Any) -> Any:
        """Return the state of a run that begins with what it has on the host."""
        control = self._loop and self._loop.new_control(self._initial_params(initial))
        return replace(state, control=control)

    def spread(self, state: Any) -> Any:
        """Return the state of all workers from a consolidated one, on any mesh.

        Raises:
            ValueError: if other layers are compressed with this number of workers, or another
                algorithm or optimizer made the state.
        """
        self._check_made(state, "consolidate()")
        self._check_fits(state.arrays)
        moved = self._placement.with_specs_of(state.arrays)
        initial = self._initial(moved)
        if self._loop:  # raises for another synchronisation
            self._loop.in_use(self._initial_params(initial), state.control)
        program = jax.jit(self._of_all, out_shardings=self._shardings(initial))
        return program(moved).with_host_of(state)

    def _copied(self, state: Any) -> Any:
        """Return the state of all workers, each with a copy; keys differ between them."""

        def one(leaf: Any) -> jax.Array:
            leaf = jnp.asarray(leaf)
            if not is_key(leaf):
                return copies(leaf, self.workers)
            return jax.vmap(lambda number: folded(leaf, number))(jnp.arange(self.workers))

        return self._each_worker(state, one)

    def _check_state(self, state: Any) -> None:
        """Raise a ValueError unless a state is of arrays on devices, and of these workers."""
        self._check_made(state, self.comes_from)
        check_arrays(state.arrays)

        def check_count(leaf: jax.Array) -> jax.Array:
            if leaf.shape[:1] != (self.workers,):
                has = f"of {leaf.shape[0]} workers" if leaf.ndim else "consolidated"
                raise ValueError(
                    f"the state is {has}, and the mesh has {self.workers}: give it to "
                    "consolidate(), and that to spread(), of what the mesh belongs to"
                )
            return leaf

        self._each_worker(state.arrays, check_count)
        if (state.sync is None) != (self._loop is None):
            raise ValueError(
                f"a state {'without' if state.sync is None else 'with'} a compression of averages, "
                f"and local updates {'without' if self._loop is None else 'with'} it: give the "
                "state to local updates that were made alike, with sync=, or without"
            )
        self._check_fits(self._each_worker(state.arrays, without_first))

    def _check_of_workers(self, state: Any) -> None:
        """Raise a ValueError unless a state, of any number of workers, is of this algorithm."""
        self._check_made(state, self.comes_from)
        self._check_fits(self._each_worker(state.arrays, without_first))

    def _check_made(self, state: Any, comes_from: str) -> None:
        """Raise a ValueError for what is no state, is traced, or is of another algorithm."""
        check_is(state, self.state_type, comes_from)
        check_not_traced(state)

    def _check_fits(self, consolidated: Any) -> None:
        """Raise a ValueError unless a state is like one that `_new` would make of its parameters.

        Args:
            consolidated: the state without its workers' dims, arrays or shapes. What compresses
                averages has a check of its own (`Control.checked`).
        """
        found = jax.tree.map(_shape_of, replace(consolidated, sync=None))
        if (key := key_of(found)) != self._fitting:
            made = jax.eval_shape(self._new, self._initial(found))
            wanted = replace(self._each_worker(made, without_first), sync=None)
            check_like(found, wanted, "the state", "this optimizer makes of its parameters")
            self._fitting = key

    # -- settings ---------------------------------------------------------------------------------

    def explain(self, state: Any) -> str:
        """Return a table of what an average sends, a row a layer; needs `sync`."""
        return self._needs_sync().explain(self._params(state), state.control)

    def sent_bytes(self, state: Any) -> float:
        """Return the bytes that a worker sends in an average at the state's settings.

        It needs `sync`.
        """
        params = self._params(state)
        return self._needs_sync().in_use(params, state.control).sent_bytes(params)

    def _needs_sync(self) -> ControlLoop:
        if self._loop is None:
            raise ValueError("these local updates send averages as they are: give them sync=")
        return self._loop

    def _in_use(self, state: Any) -> Averager | None:
        """Return the averager at a state's settings; None if averages are not compressed."""
        return self._loop and self._loop.in_use(self._params(state), state.control)


def _shape_of(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


def without_workers(tree: Any, change: Callable[[Any], Any], axis: str) -> Any:
    """Change a tree of arrays, whose results lose the dim of workers, on the mesh they are on.

    Results keep the axes inside a worker, and lose the workers'.
    """

    def one(shape: Any, leaf: jax.Array) -> NamedSharding | None:
        if not isinstance(leaf.sharding, NamedSharding):
            return None
        spec = [*leaf.sharding.spec, *(None,) * (leaf.ndim - len(leaf.sharding.spec))]
        spec = spec[leaf.ndim - shape.ndim :]
        inside = P(*(None if dim == axis else dim for dim in spec))
        return NamedSharding(leaf.sharding.mesh, inside)

    shardings = jax.tree.map(one, jax.eval_shape(change, tree), tree)
    return jax.jit(change, out_shardings=shardings)(tree)
