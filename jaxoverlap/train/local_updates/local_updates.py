"""Define `LocalUpdates`: rounds of many steps, compiled into one program each."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxoverlap.api import Overlapped, overlap
from jaxoverlap.passes.scheduling.scheduler import Scheduler
from jaxoverlap.train.arguments import (
    check_arrays,
    check_count,
    check_is,
    check_workers,
    flag,
    floating,
    function,
    keys,
    overlap_options,
    warn_of_raw_keys,
    whole,
)
from jaxoverlap.train.compression.averager import Averager
from jaxoverlap.train.compression.control_loop import ControlLoop
from jaxoverlap.train.compression.state import Control
from jaxoverlap.train.compression.sync import Sync
from jaxoverlap.train.local_updates import second_device
from jaxoverlap.train.local_updates.consolidate import (
    consolidated,
    of_workers,
    spread,
    with_rest,
)
from jaxoverlap.train.local_updates.finite import Reports, RoundReport
from jaxoverlap.train.local_updates.outer import Outer
from jaxoverlap.train.local_updates.round import Rounds, Step
from jaxoverlap.train.local_updates.shardings import (
    beside_bytes,
    like_at,
    named_shardings,
    shardings_of,
)
from jaxoverlap.train.local_updates.state import LocalState, ParamsIn, fragments_of
from jaxoverlap.train.local_updates.step_check import check_batches, check_outer, check_step
from jaxoverlap.train.placement import WorkerPlacement
from jaxoverlap.train.programs import Programs, batch_like, key_of, like

COMES_FROM = "init(), spread(), a round, or a checkpoint restored to abstract()"


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
        outer_dtype: of the outer optimizer's state and of where rounds begin, as jnp.float32 for
            parameters in bfloat16, which lose small outer steps; None for the parameters' own. What
            is sent stays in theirs.
        sync: how averages are compressed, as `compression.lgreco(compression.power_sgd(4))`; its
            steps are rounds. None sends them as they are.
        stacked: for `sync`: keys of the parameters; leaves below one of them have a first dim of
            layers.
        overlap: whether rounds are overlapped (`jaxoverlap.overlap`), or with which options of it.
        check: whether a worker whose steps end in something infinite or not a number goes back to
            where they began, and a `NonFiniteRoundError` says so. The train state is then held
            twice on a device during a round. Without it a NaN reaches all workers and stays.
        donate: whether a round may reuse the memory of the state given; False keeps that state
            valid, so that a round that fails can be taken again (`Elastic`).

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
        outer_dtype: Any = None,
        sync: Sync | None = None,
        stacked: Sequence[str] = (),
        overlap: bool | Mapping[str, Any] = True,
        check: bool = True,
        donate: bool = True,
    ):
        self.donate, self.shard_outer = flag("donate", donate), flag("shard_outer", shard_outer)
        check_outer(outer, sync, shard_outer=self.shard_outer)
        check_workers(mesh, axis)
        function("train_step", train_step, "train_step(state, batch) -> (state, metrics)")
        stacked = keys("stacked", stacked)
        if sync is None and stacked:
            raise ValueError(f"stacked={stacked!r} without sync: it says what is compressed")
        self.mesh, self.axis, self.outer, self.sync = mesh, axis, outer, sync
        self._check_finite, self._reports = flag("check", check), Reports()
        self._step = train_step._fn if isinstance(train_step, Overlapped) else train_step
        self._params_in = ParamsIn(params)
        self._placement = WorkerPlacement(mesh, axis, shard_outer)
        self._outer_dtype = None if outer_dtype is None else floating("outer_dtype", outer_dtype)
        self.overlap = overlap_options(overlap)
        self._loop = None if sync is None else ControlLoop(sync, mesh, axis, stacked)
        self._programs = Programs() if self._loop is None else self._loop.programs

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
        warn_of_raw_keys(state)
        shardings = self._shardings(state)
        new = jax.jit(self._new, out_shardings=shardings)(self._placement.on_mesh(state))
        return replace(new, control=self._new_control(state))

    def abstract(self, state: Any, *, workers: int | None = None) -> LocalState:
        """Return what `init` would, as shapes with shardings; to lower for a pod, say.

        Args:
            state: of one worker, arrays or shapes.
            workers: of the run that wrote a checkpoint, if others than the mesh has; what differs
                between them is then whole on every device along their dim, for `consolidate`.
        """
        shapes = jax.eval_shape(self._new, state)
        found = jax.tree.map(like_at, shapes, self._shardings(state))
        whole_at, control = self._placement.at(), self._new_control(state)
        found = replace(found, control=jax.tree.map(lambda x: like_at(x, whole_at), control))
        if workers is None or workers == self.workers:
            return found
        return of_workers(
            found, self.outer, self._placement.of_workers(whole("workers", workers, 1))
        )

    def params(self, state: LocalState) -> Any:
        """Return the parameters, with the average that is under way applied; the state stays."""
        self._check_state(state)
        averager, state = self._in_use(state), replace(state, control=None)
        rounds = self._rounds(state, averager)
        at = jax.tree.map(lambda spec: self._placement.at(*spec), rounds.specs)
        name = ("params", averager.settings if averager else None)
        program = self._program(name, state, lambda: jax.jit(rounds.flushed, out_shardings=at))
        return program(state)

    def consolidate(self, state: LocalState) -> LocalState:
        """Return a state without workers: what another number of them can go on from (`spread`).

        The state may be of any number of workers, on any mesh: of these local updates or of others
        with the same outer optimizer. Parameters and outer state are kept, what is under way is
        averaged. Of what else differs between workers (an inner optimizer's moments) floats
        are averaged and the rest is worker 0's. For the same number of workers keep the state
        itself, which loses nothing.
        """
        check_is(state, LocalState, COMES_FROM)
        return consolidated(state, self.outer, self._params_in, self._placement)

    def spread(self, state: LocalState) -> LocalState:
        """Return the state of all workers from a consolidated one, wherever that lies.

        Raises:
            ValueError: if other layers are compressed with this number of workers.
        """
        check_is(state, LocalState, "consolidate()")
        if self._loop is not None:  # raises for another synchronisation
            self._loop.in_use(self._params_in.get(state.worker), state.control)
        state, control = replace(state, control=None), state.control
        worker = self._placement.with_specs_of(state.worker)
        shardings = self._shardings(worker)

        def of_all(state: LocalState) -> LocalState:
            return spread(with_rest(state, self.outer, self.workers), self.outer, self.workers)

        program = jax.jit(of_all, out_shardings=shardings)
        placed = self._placement.on_mesh(replace(state, worker=worker))
        return replace(program(placed), control=control)

    def _new(self, state: Any) -> LocalState:
        params = jax.tree.map(jnp.asarray, self._params_in.get(state))
        begin = jax.tree.map(lambda x: x.astype(self._outer_dtype or x.dtype), params)
        transform = self.outer.transform
        optimizer = tuple(
            transform.init(take(begin)) for take in fragments_of(begin, self.outer.fragments)
        )
        sent = jax.tree.map(jnp.zeros_like, params) if self.outer.delay else None
        one = LocalState(state, begin, optimizer, sent, jnp.int32(0), jnp.ones(()))
        all_workers = spread(one, self.outer, self.workers)
        return replace(all_workers, sync=self._loop and self._loop.new_state(params))

    def _new_control(self, state: Any) -> Control | None:
        return self._loop and self._loop.new_control(self._params_in.get(state))

    def _shardings(self, state: Any) -> LocalState:
        """Return the sharding of each leaf of the state that `init` makes of one worker's."""
        self._params_in.check(state)
        return shardings_of(state, self.outer, self._params_in, self._placement, self._loop)

    # -- rounds -----------------------------------------------------------------------------------

    def round(
        self, state: LocalState, batches: Any, *, steps: int | None = None
    ) -> tuple[LocalState, Any]:
        """Run a round; the state is donated, unless `donate` is False.

        Args:
            state: from `init`, `spread` or the round before.
            batches: a tree of arrays [every, global batch, ...]; each worker gets an equal part of
                the global batch, in order.
            steps: of this round, if fewer than the outer optimizer's `every`, as for the last one
                of a run: batches are then [steps, ...]. Fragments need whole rounds.

        Returns:
            The state, and the train step's metrics, [every, workers, ...].

        Raises:
            NonFiniteRoundError: if something of a round before was left out as it was not finite.
                It is raised three rounds late at most (`check` raises it at once), and the state
                given here is still good.
            ValueError: if batches have another number of steps, or workers cannot share them.
        """
        outer = self.outer if steps is None else self.outer.shortened(steps)
        check_batches(batches, outer.every, self.workers, self.axis)
        self._check_state(state)
        self._reports.check(1)
        control, averager = state.control, None
        state = replace(state, control=None)
        if self._loop is not None:

            def compile_beside(averager: Averager) -> None:
                self._programs.beside(*self._round_of(state, batches, averager))

            turn = self._loop.turn(self._one_worker(state), state.sync, control, compile_beside)
            averager, control, state = turn.averager, turn.control, replace(state, sync=turn.sync)
        runner = self._programs.get(*self._round_of(state, batches, averager))
        state, metrics, seen = runner(state, batches)
        self._reports.add(seen)
        return replace(state, control=control), metrics

    def check(self, state: LocalState) -> None:
        """Wait for the rounds so far, and raise if something of one was left out.

        Args:
            state: of the last round; it has what its workers have not reported yet.

        Raises:
            NonFiniteRoundError: naming the first such round.
        """
        at = self._placement.at()
        program = self._program("finite", (), lambda: jax.jit(lambda f: f, out_shardings=at))
        self._reports.check(0)
        self._reports.check_unsent(int(state.round), program(state.finite))

    def explain(self, state: LocalState) -> str:
        """Return a table of what a round's average sends, a row a layer; needs `sync`."""
        return self._needs_sync().explain(self._one_worker(state), state.control)

    def sent_bytes(self, state: LocalState) -> float:
        """Return the bytes that a worker sends in a round at the state's settings; needs `sync`."""
        params = self._one_worker(state)
        return self._needs_sync().in_use(params, state.control).sent_bytes(params)

    def _needs_sync(self) -> ControlLoop:
        if self._loop is None:
            raise ValueError("these local updates send averages as they are: give them sync=")
        return self._loop

    def _in_use(self, state: LocalState) -> Averager | None:
        return self._loop and self._loop.in_use(self._one_worker(state), state.control)

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
        check_batches(batches, self.outer.every, self.workers, self.axis)
        averager, state = self._in_use(state), replace(state, control=None)
        check_step(self._step, state.worker, batches, self.axis)
        return self._one_program(state, averager).lower(state, batches)

    def _round_of(
        self, state: LocalState, batches: Any, averager: Averager | None
    ) -> tuple[Hashable, Callable[[], Any]]:
        """Return the key of a round's program and what makes it, which holds shapes alone.

        A round of compressed averages is compiled when it is made, so that it can be made beside
        the one that runs; another one when it first runs.
        """
        place = self._placement
        shapes = jax.tree.map(like, state)
        rows = jax.tree.map(lambda b: batch_like(b, place.at(None, self.axis)), batches)
        settings = (averager.settings, averager.accumulate) if averager else None
        key = ("round", settings, key_of((shapes, rows)))
        beside = second_device.mesh_beside(self.mesh) if self.outer.delay else None

        def make() -> Any:
            check_step(self._step, shapes.worker, rows, self.axis)
            if beside is not None:
                rounds = self._rounds(shapes, averager)
                return second_device.Runner(rounds, beside, named_shardings(shapes))
            program = self._one_program(shapes, averager)
            return program if averager is None else program.lower(shapes, rows).compile()

        return key, make

    def _one_program(self, state: LocalState, averager: Averager | None = None) -> Any:
        rounds, at = self._rounds(state, averager), named_shardings(state)

        def local_round(state: LocalState, batches: Any) -> tuple[LocalState, Any, RoundReport]:
            return rounds.round(state, batches)

        out = (at, None, self._placement.at())
        donated = 0 if self.donate else ()
        jitted = jax.jit(local_round, donate_argnums=donated, out_shardings=out)
        if self.overlap is None:
            return jitted
        if "plan" in self.overlap:  # it has the limits of the step that it was made for
            return overlap(jitted, **self.overlap)
        limits = self.overlap.get("schedule", Scheduler())
        if limits is not None:
            params = self._params_in.get(state.worker)
            beside = beside_bytes(self.outer, params, state.worker if self._check_finite else ())
            limits = replace(limits, extra_bytes=limits.extra_bytes + beside)
        return overlap(jitted, **{**self.overlap, "schedule": limits})

    def _rounds(self, state: LocalState, averager: Averager | None = None) -> Rounds:
        params = self._params_in.get(state.worker)
        specs = jax.tree.map(lambda leaf: P(*leaf.sharding.spec[1:]), params)
        takes = fragments_of(params, self.outer.fragments)
        return Rounds(
            self._step, self.outer, self._params_in, self._placement, specs, takes, averager,
            self._check_finite,
        )  # fmt: skip

    def _program(self, name: Hashable, args: Any, make: Any) -> Any:
        """Return the program of a name for arguments like these, made once."""
        return self._programs.get((name, key_of(args)), make)

    def _check_state(self, state: LocalState) -> None:
        check_is(state, LocalState, COMES_FROM)
        check_arrays(replace(state, control=None), state.control)
        check_count((state.worker, state.sent, state.finite), self.workers)
        if (state.sync is None) != (self._loop is None):
            raise ValueError(
                f"a state {'without' if state.sync is None else 'with'} a compression of averages, "
                f"and local updates {'without' if self._loop is None else 'with'} it: give the "
                "state to local updates that were made alike, with sync=, or without"
            )
