"""Define `LocalUpdates`: rounds of many steps, compiled into one program each."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxoverlap.api import Overlapped, overlap
from jaxoverlap.passes.scheduling.scheduler import Scheduler
from jaxoverlap.train.local_updates import second_device
from jaxoverlap.train.local_updates.consolidate import consolidated, optimizer_shardings, spread
from jaxoverlap.train.local_updates.outer import Outer
from jaxoverlap.train.local_updates.round import Rounds, Step
from jaxoverlap.train.local_updates.state import LocalState, ParamsIn, Placement, fragments_of


class LocalUpdates:
    """Train with local updates: every worker takes `outer.every` steps alone, then all average.

        updates = LocalUpdates(train_step, mesh, axis="data", outer=co2(every=12))
        state = updates.init(state)
        for batches in rounds:                              # [every, global batch, ...]
            state, metrics = updates.round(state, batches)  # metrics are [every, workers, ...]
        params = updates.params(state)

    A round is one compiled program, in which an average that is under way runs beside the steps.
    On CPU hosts, where one device runs its programs one after the other, the average goes over a
    second device of each process if there is one for each (`second_device.py`).

    Args:
        train_step: train_step(state, batch) -> (state, metrics), jitted or not, of one worker: it
            knows nothing of the others. Its state is any pytree; typed keys in it
            (`jax.random.key`) are made different for each worker. Constraints on the mesh's other
            axes stay what they are. It is mapped over workers with `jax.vmap`.
        mesh: of automatic axes, the workers' one among them.
        axis: the mesh axis of the workers: one worker for each place along it.
        outer: the outer optimizer, as `co2(every=12)`.
        params: where the train state has its parameters: a key, an attribute or a number; None if
            it is the parameters.
        shard_outer: whether to keep the outer optimizer's state, and where the round began,
            scattered over the workers: a reduce-scatter and an all-gather in place of each
            all-reduce (ZeRO).
        overlap: whether rounds are overlapped (`jaxoverlap.overlap`), or with which options of it.

    Raises:
        ValueError: for a mesh without the axis, or with explicit or manual axes.
    """

    def __init__(
        self,
        train_step: Step,
        mesh: Mesh,
        *,
        axis: str = "data",
        outer: Outer,
        params: str | int | None = "params",
        shard_outer: bool = False,
        overlap: bool | Mapping[str, Any] = True,
    ):
        if not isinstance(outer, Outer):
            raise ValueError(f"outer={outer!r}: expected an outer optimizer, as co2(every=12)")
        if axis not in mesh.shape:
            raise ValueError(
                f"axis={axis!r}: the mesh has the axes {', '.join(mesh.axis_names)}; name the one "
                "along which the workers lie"
            )
        if any(kind != AxisType.Auto for kind in mesh.axis_types):
            raise ValueError(
                f"a mesh of axis types {mesh.axis_types}: local updates need automatic axes; make "
                "it with jax.make_mesh(..., axis_types=(AxisType.Auto,) * number of axes)"
            )
        if outer.eager and shard_outer:
            raise ValueError(
                "shard_outer=True with an eager outer optimizer: its state differs between "
                "workers, so there is nothing to scatter; leave out either"
            )
        self.mesh, self.axis, self.outer = mesh, axis, outer
        self._step = train_step._fn if isinstance(train_step, Overlapped) else train_step
        self._params_in = ParamsIn(params)
        self._placement = Placement(mesh, axis, shard_outer)
        self._overlap: dict[str, Any] | None = None
        if overlap is not False:
            self._overlap = {} if overlap is True else dict(overlap)
        self._programs: dict[Hashable, Any] = {}

    @property
    def workers(self) -> int:
        """Return how many workers there are."""
        return self._placement.workers

    # -- states -----------------------------------------------------------------------------------

    def init(self, state: Any) -> LocalState:
        """Return the state of all workers from that of one, placed on the mesh.

        Raises:
            ValueError: if it is sharded over the workers' axis or lies on another mesh, has no
                parameters where `params` says, or others than floats there.
        """
        shardings = self._shardings(state)
        return jax.jit(self._new, out_shardings=shardings)(state)

    def abstract(self, state: Any) -> LocalState:
        """Return what `init` would, as shapes with shardings; to lower for a pod, say."""
        shapes = jax.eval_shape(self._new, state)
        return jax.tree.map(
            lambda s, at: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=at),
            shapes,
            self._shardings(state),
        )

    def params(self, state: LocalState) -> Any:
        """Return the parameters, with the average that is under way applied; the state stays."""
        rounds = self._rounds(state)
        at = jax.tree.map(lambda spec: self._placement.at(*spec), rounds.specs)
        return self._program("params", state, lambda: jax.jit(rounds.flushed, out_shardings=at))(
            state
        )

    def consolidate(self, state: LocalState) -> LocalState:
        """Return a state without workers: what another number of them can go on from (`spread`).

        Parameters and outer state are kept, what is under way is averaged. Of what else differs
        between workers (an inner optimizer's moments) floats are averaged and the rest is worker
        0's. For the same number of workers keep the state itself, which loses nothing.
        """
        rounds = self._rounds(state)
        at = self._placement.at()
        program = jax.jit(lambda s: consolidated(rounds, s), out_shardings=at)
        return self._program("consolidate", state, lambda: program)(state)

    def spread(self, state: LocalState) -> LocalState:
        """Return the state of all workers from a consolidated one."""
        shardings = self._shardings(state.worker)
        program = jax.jit(lambda s: spread(s, self.outer, self.workers), out_shardings=shardings)
        return program(state)

    def _new(self, state: Any) -> LocalState:
        params = jax.tree.map(jnp.asarray, self._params_in.get(state))
        transform = self.outer.transform
        optimizer = tuple(
            transform.init(take(params)) for take in fragments_of(params, self.outer.fragments)
        )
        sent = jax.tree.map(jnp.zeros_like, params) if self.outer.delay else None
        return spread(LocalState(state, params, optimizer, sent), self.outer, self.workers)

    def _shardings(self, state: Any) -> LocalState:
        """Return the sharding of each leaf of the state that `init` makes of one worker's."""
        place = self._placement
        self._params_in.check(state)
        params = self._params_in.get(state)
        specs = jax.tree.map(place.spec_of, params)
        shapes = jax.eval_shape(lambda p: jax.tree.map(jnp.asarray, p), params)
        stacked = place.stacked(specs)
        begin = stacked if self.outer.eager else place.outer(shapes, specs)
        takes = fragments_of(shapes, self.outer.fragments)
        return LocalState(
            worker=place.stacked(jax.tree.map(place.spec_of, state)),
            begin=begin,
            optimizer=tuple(
                optimizer_shardings(self.outer, place, take(shapes), take(begin)) for take in takes
            ),
            sent=stacked if self.outer.delay else None,
        )

    # -- rounds -----------------------------------------------------------------------------------

    def round(self, state: LocalState, batches: Any) -> tuple[LocalState, Any]:
        """Run a round; the state is donated.

        Args:
            state: from `init`, `spread` or the round before.
            batches: a tree of arrays [every, global batch, ...]; each worker gets an equal part of
                the global batch, in order.

        Returns:
            The state, and the train step's metrics, [every, workers, ...].

        Raises:
            ValueError: if batches have another number of steps, or workers cannot share them.
        """
        self._check(batches)
        return self._program("round", (state, batches), lambda: self._runner(state))(state, batches)

    def lower(self, state: LocalState, batches: Any) -> Any:
        """Lower a round as one program: arrays or shapes with shardings, as for `jax.jit`.

        Returns:
            What `jaxoverlap.overlap(...).lower` does (or, without overlap, `jax.jit(...).lower`):
            compile it to audit and simulate.
        """
        self._check(batches)
        return self._one_program(state).lower(state, batches)

    def _runner(self, state: LocalState) -> Any:
        if (others := second_device.mesh_beside(self.mesh)) is not None and self.outer.delay:
            return second_device.Runner(self._rounds(state), others, _shardings_of(state))
        return self._one_program(state)

    def _one_program(self, state: LocalState) -> Any:
        rounds, at = self._rounds(state), _shardings_of(state)

        def local_round(state: LocalState, batches: Any) -> tuple[LocalState, Any]:
            return rounds.round(state, batches)

        jitted = jax.jit(local_round, donate_argnums=0, out_shardings=(at, None))
        if self._overlap is None:
            return jitted
        if "plan" in self._overlap:  # it has the limits of the step that it was made for
            return overlap(jitted, **self._overlap)
        limits = self._overlap.get("schedule", Scheduler())
        if limits is not None:
            limits = replace(limits, extra_bytes=limits.extra_bytes + self._beside_bytes(state))
        return overlap(jitted, **{**self._overlap, "schedule": limits})

    def _beside_bytes(self, state: LocalState) -> int:
        """Return the bytes on a device of what a round keeps beside its steps.

        These are the average that is under way, what it is of, and where the next round begins.
        """
        if not (self.outer.delay or self.outer.lag):
            return 0
        params = jax.tree.leaves(self._params_in.get(state.worker))
        sizes = (math.prod(p.sharding.shard_shape(p.shape)) * p.dtype.itemsize for p in params)
        return 3 * sum(sizes)

    def _rounds(self, state: LocalState) -> Rounds:
        params = self._params_in.get(state.worker)
        specs = jax.tree.map(lambda leaf: P(*leaf.sharding.spec[1:]), params)
        takes = fragments_of(params, self.outer.fragments)
        return Rounds(self._step, self.outer, self._params_in, self._placement, specs, takes)

    def _program(self, name: str, args: Any, make: Any) -> Any:
        """Return the program of a name for arguments like these, made once."""
        leaves, treedef = jax.tree.flatten(args)
        key = (name, treedef, *((np.shape(x), getattr(x, "sharding", None)) for x in leaves))
        if key not in self._programs:
            self._programs[key] = make()
        return self._programs[key]

    def _check(self, batches: Any) -> None:
        every, workers = self.outer.every, self.workers
        for leaf in jax.tree.leaves(batches):
            shape = np.shape(leaf)
            if len(shape) < 2 or shape[0] != every:
                raise ValueError(
                    f"batches of shape {shape}: expected [every, global batch, ...] with "
                    f"every={every}; stack the batches of a round's steps"
                )
            if shape[1] % workers:
                raise ValueError(
                    f"batches of shape {shape}: a global batch of {shape[1]} is not a multiple of "
                    f"the {workers} workers along {self.axis!r}; change either"
                )


def _shardings_of(state: LocalState) -> LocalState:
    return jax.tree.map(_named_sharding, state)


def _named_sharding(leaf: Any) -> NamedSharding:
    if not isinstance(leaf.sharding, NamedSharding):
        raise ValueError(
            f"a state with a leaf that lies at {leaf.sharding}: give what init(), spread() or a "
            "round returned, or a checkpoint restored to the shardings of abstract()"
        )
    return leaf.sharding
