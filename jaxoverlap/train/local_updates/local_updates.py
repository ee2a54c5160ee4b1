"""Define `LocalUpdates`: rounds of many steps, compiled into one program each."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxoverlap.api import Overlapped, overlap
from jaxoverlap.passes.scheduling.scheduler import Scheduler
from jaxoverlap.train.arguments import check_workers, flag, function, keys, overlap_options
from jaxoverlap.train.compression import schedule
from jaxoverlap.train.compression.averager import Averager, averager_of
from jaxoverlap.train.compression.explain import explained
from jaxoverlap.train.compression.state import Control, SyncState, checked
from jaxoverlap.train.compression.sync import Sync
from jaxoverlap.train.local_updates import second_device
from jaxoverlap.train.local_updates.consolidate import consolidated, optimizer_shardings, spread
from jaxoverlap.train.local_updates.finite import Reports, Seen
from jaxoverlap.train.local_updates.outer import Outer
from jaxoverlap.train.local_updates.round import Rounds, Step
from jaxoverlap.train.local_updates.state import LocalState, ParamsIn, fragments_of
from jaxoverlap.train.placement import Placement


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
        sync: how averages are compressed, as `compression.lgreco(compression.power_sgd(4))`; its
            steps are rounds. None sends them as they are.
        stacked: for `sync`: keys of the parameters; leaves below one of them have a first dim of
            layers.
        overlap: whether rounds are overlapped (`jaxoverlap.overlap`), or with which options of it.
        check: whether a worker whose steps end in something infinite or not a number goes back to
            where they began, and a `NonFiniteRoundError` says so. The train state is then held
            twice on a device during a round. Without it a NaN reaches all workers and stays.

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
        sync: Sync | None = None,
        stacked: Sequence[str] = (),
        overlap: bool | Mapping[str, Any] = True,
        check: bool = True,
    ):
        if not isinstance(outer, Outer):
            raise ValueError(f"outer={outer!r}: expected an outer optimizer, as co2(every=12)")
        check_workers(mesh, axis)
        function("train_step", train_step, "train_step(state, batch) -> (state, metrics)")
        if sync is not None and not isinstance(sync, Sync):
            raise ValueError(f"sync={sync!r}: expected None, or one such as uniform(power_sgd(4))")
        if sync is None and keys("stacked", stacked):
            raise ValueError(f"stacked={stacked!r} without sync: it says what is compressed")
        check, shard_outer = flag("check", check), flag("shard_outer", shard_outer)
        if outer.eager and shard_outer:
            raise ValueError(
                "shard_outer=True with an eager outer optimizer: its state differs between "
                "workers, so there is nothing to scatter; leave out either"
            )
        if sync is not None and shard_outer:
            raise ValueError(
                "shard_outer=True with sync: a compressed average is whole on every worker, so "
                "nothing is saved by scattering it; leave out either"
            )
        self.mesh, self.axis, self.outer, self.sync = mesh, axis, outer, sync
        self._stacked = keys("stacked", stacked)
        self._check_finite, self._reports = check, Reports()
        self._step = train_step._fn if isinstance(train_step, Overlapped) else train_step
        self._params_in = ParamsIn(params)
        self._placement = Placement(mesh, axis, shard_outer)
        self._overlap = overlap_options(overlap)
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
        new = jax.jit(self._new, out_shardings=shardings)(state)
        return replace(new, control=self._new_control(state))

    def abstract(self, state: Any) -> LocalState:
        """Return what `init` would, as shapes with shardings; to lower for a pod, say."""

        def like(leaf: Any, at: NamedSharding) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=at)

        shapes = jax.eval_shape(self._new, state)
        found = jax.tree.map(like, shapes, self._shardings(state))
        whole, control = self._placement.at(), self._new_control(state)
        return replace(found, control=jax.tree.map(lambda leaf: like(leaf, whole), control))

    def params(self, state: LocalState) -> Any:
        """Return the parameters, with the average that is under way applied; the state stays."""
        state, rounds = replace(state, control=None), self._rounds(state)
        at = jax.tree.map(lambda spec: self._placement.at(*spec), rounds.specs)
        name = ("params", rounds.averager.settings if rounds.averager else None)
        program = self._program(name, state, lambda: jax.jit(rounds.flushed, out_shardings=at))
        return program(state)

    def consolidate(self, state: LocalState) -> LocalState:
        """Return a state without workers: what another number of them can go on from (`spread`).

        Parameters and outer state are kept, what is under way is averaged. Of what else differs
        between workers (an inner optimizer's moments) floats are averaged and the rest is worker
        0's. For the same number of workers keep the state itself, which loses nothing.
        """
        control, rounds = state.control, self._rounds(state)
        state, at = replace(state, control=None), self._placement.at()
        program = jax.jit(lambda s: consolidated(rounds, s), out_shardings=at)
        found = self._program("consolidate", state, lambda: program)(state)
        return replace(found, control=control)

    def spread(self, state: LocalState) -> LocalState:
        """Return the state of all workers from a consolidated one."""
        shardings = self._shardings(state.worker)
        program = jax.jit(lambda s: spread(s, self.outer, self.workers), out_shardings=shardings)
        return replace(program(replace(state, control=None)), control=state.control)

    def _new(self, state: Any) -> LocalState:
        params = jax.tree.map(jnp.asarray, self._params_in.get(state))
        transform = self.outer.transform
        optimizer = tuple(
            transform.init(take(params)) for take in fragments_of(params, self.outer.fragments)
        )
        sent = jax.tree.map(jnp.zeros_like, params) if self.outer.delay else None
        averager = self._averager(params)
        sync = averager.init(params) if averager else None
        one = LocalState(state, params, optimizer, sent, jnp.int32(0), jnp.ones(()), sync)
        return spread(one, self.outer, self.workers)

    def _averager(self, params: Any) -> Averager | None:
        """Return what compresses averages of one worker's parameters, at the default settings."""
        if self.sync is None:
            return None
        return averager_of(
            self.sync, params, axis=self.axis, workers=self.workers, stacked=self._stacked
        )

    def _new_control(self, state: Any) -> Control | None:
        averager = self._averager(self._params_in.get(state))
        return Control.new(averager.sync, averager.layers) if averager else None

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
            round=place.at(),
            finite=place.at(self.axis),
            sync=self._sync_shardings(shapes, specs),
        )

    def _sync_shardings(self, params: Any, specs: Any) -> SyncState | None:
        averager, place = self._averager(params), self._placement
        if averager is None:
            return None
        leaves = jax.tree.leaves(specs, is_leaf=lambda spec: isinstance(spec, P))
        own = {str(n): place.at(self.axis, *leaves[n]) for n in averager.of_leaf}
        shapes = jax.eval_shape(averager.init, params)
        at = jax.tree.map(lambda _: place.at(), shapes)
        return replace(
            at,
            error=own if shapes.error else {},
            accumulated=dict(own) if shapes.accumulated else {},
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
            NonFiniteRoundError: if something of a round before was left out as it was not finite.
                It is raised three rounds late at most (`check` raises it at once), and the state
                given here is still good.
            ValueError: if batches have another number of steps, or workers cannot share them.
        """
        self._check(batches)
        self._reports.check(1)
        if self.sync is None:
            runner = self._program("round", (state, batches), lambda: self._runner(state))
            state, metrics, seen = runner(state, batches)
            self._reports.add(seen)
            return state, metrics
        return self._compressed_round(state, batches)

    def check(self, state: LocalState) -> None:
        """Wait for the rounds so far, and raise if something of one was left out.

        Args:
            state: of the last round; it has what its workers have not reported yet.

        Raises:
            NonFiniteRoundError: naming the first such round.
        """
        whole = self._placement.at()
        program = self._program("finite", (), lambda: jax.jit(lambda f: f, out_shardings=whole))
        self._reports.check(0)
        self._reports.check_unsent(int(state.round), program(state.finite))

    def _compressed_round(self, state: LocalState, batches: Any) -> tuple[LocalState, Any]:
        """Run a round; measure and change settings where that is due."""
        averager = self._averager_of(state)
        control = checked(state.control, averager.sync, averager.layers)
        count, state = int(control.count), replace(state, control=None)
        if averager.layers and schedule.measures(averager.sync, count):
            program = self._program(
                "measure", state.sync, lambda: schedule.measuring(self.mesh, averager, state.sync)
            )
            errors, norms, sync = program(state.sync)
            state = replace(state, sync=sync)
            control = schedule.chosen(
                averager.sync, averager.layers, self.workers, control, errors, norms
            )
        control = schedule.in_use(averager.sync, control)
        accumulate = schedule.accumulates(averager.sync, count)
        name = ("round", tuple(control.settings.tolist()), accumulate)
        at = averager.at(control.settings, accumulate=accumulate)
        runner = self._program(name, (state, batches), lambda: self._runner(state, at))
        state, metrics, seen = runner(state, batches)
        self._reports.add(seen)
        return replace(state, control=control.stepped()), metrics

    def explain(self, state: LocalState) -> str:
        """Return a table of what a round's average sends, a row a layer; needs `sync`."""
        averager = self._averager_of(state)
        control = checked(state.control, averager.sync, averager.layers)
        return explained(averager.at(control.settings), control, self._one_worker(state))

    def sent_bytes(self, state: LocalState) -> float:
        """Return the bytes that a worker sends in a round at the state's settings; needs `sync`."""
        averager = self._averager_of(state)
        control = checked(state.control, averager.sync, averager.layers)
        return averager.at(control.settings).sent_bytes(self._one_worker(state))

    def _averager_of(self, state: LocalState) -> Averager:
        averager = self._averager(self._one_worker(state))
        if averager is None:
            raise ValueError("these local updates send averages as they are: give them sync=")
        return averager

    def _one_worker(self, state: LocalState) -> Any:
        """Return the shapes of one worker's parameters."""
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype),
            self._params_in.get(state.worker),
        )

    def lower(self, state: LocalState, batches: Any) -> Any:
        """Lower a round as one program: arrays or shapes with shardings, as for `jax.jit`.

        Returns:
            What `jaxoverlap.overlap(...).lower` does (or, without overlap, `jax.jit(...).lower`):
            compile it to audit and simulate.
        """
        self._check(batches)
        state = replace(state, control=None)
        return self._one_program(state).lower(state, batches)

    def _runner(self, state: LocalState, averager: Averager | None = None) -> Any:
        if (others := second_device.mesh_beside(self.mesh)) is not None and self.outer.delay:
            rounds = self._rounds(state, averager)
            return second_device.Runner(rounds, others, _shardings_of(state))
        return self._one_program(state, averager)

    def _one_program(self, state: LocalState, averager: Averager | None = None) -> Any:
        rounds, at = self._rounds(state, averager), _shardings_of(state)

        def local_round(state: LocalState, batches: Any) -> tuple[LocalState, Any, Seen]:
            return rounds.round(state, batches)

        out = (at, None, self._placement.at())
        jitted = jax.jit(local_round, donate_argnums=0, out_shardings=out)
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

        These are the average that is under way, what it is of, where the next round begins, and
        with `check` the train state that a worker may go back to.
        """
        if not (self.outer.delay or self.outer.lag):
            return 0
        params = _bytes_on_device(self._params_in.get(state.worker))
        return 3 * params + (_bytes_on_device(state.worker) if self._check_finite else 0)

    def _rounds(self, state: LocalState, averager: Averager | None = None) -> Rounds:
        if averager is None and self.sync is not None:
            averager = self._averager_of(state)
            if state.control is not None:
                averager = averager.at(checked(state.control, self.sync, averager.layers).settings)
        params = self._params_in.get(state.worker)
        specs = jax.tree.map(lambda leaf: P(*leaf.sharding.spec[1:]), params)
        takes = fragments_of(params, self.outer.fragments)
        return Rounds(
            self._step, self.outer, self._params_in, self._placement, specs, takes, averager,
            self._check_finite,
        )  # fmt: skip

    def _program(self, name: Hashable, args: Any, make: Any) -> Any:
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


def _bytes_on_device(tree: Any) -> int:
    leaves = (leaf for leaf in jax.tree.leaves(tree) if hasattr(leaf.dtype, "itemsize"))
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)


def _shardings_of(state: LocalState) -> LocalState:
    return jax.tree.map(_named_sharding, state)


def _named_sharding(leaf: Any) -> NamedSharding:
    if not isinstance(leaf.sharding, NamedSharding):
        raise ValueError(
            f"a state with a leaf that lies at {leaf.sharding}: give what init(), spread() or a "
            "round returned, or a checkpoint restored to the shardings of abstract()"
        )
    return leaf.sharding
