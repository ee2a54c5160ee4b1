"""Define `LocalUpdates`: rounds of many steps, compiled into one program each."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxoverlap._util.limits import flag
from jaxoverlap.api import Overlapped, overlap
from jaxoverlap.passes.scheduling.scheduler import Scheduler
from jaxoverlap.train.arguments import (
    check_finite,
    check_floats,
    floating,
    function,
    warn_of_raw_keys,
)
from jaxoverlap.train.compression.averager import Averager
from jaxoverlap.train.compression.sync import Sync
from jaxoverlap.train.local_updates import second_device
from jaxoverlap.train.local_updates.finite import Reports, RoundReport
from jaxoverlap.train.local_updates.outer import Outer
from jaxoverlap.train.local_updates.round import Rounds, Step
from jaxoverlap.train.local_updates.state import (
    LocalState,
    ParamsIn,
    bytes_on_device,
    check_made_by,
    fragments_of,
    made_by,
    named_shardings,
)
from jaxoverlap.train.local_updates.step_check import check_batches, check_outer, check_step
from jaxoverlap.train.optax_update import update
from jaxoverlap.train.over_workers import OverWorkers, without_workers
from jaxoverlap.train.placement import mean_of_workers
from jaxoverlap.train.programs import batch_like, key_of, like, without_first


class LocalUpdates(OverWorkers):
    """Train with local updates: every worker takes `outer.every` steps alone, then all average.

        updates = LocalUpdates(train_step, mesh, axis="data", outer=co2(every=12))
        state = updates.init(state)
        for batches in rounds:                              # [every, global batch, ...]
            state, metrics = updates.round(state, batches)  # metrics are [every, workers, ...]
        params = updates.params(state)

    A round is one compiled program, in which an average that is under way overlaps with the steps.
    On CPU hosts, where one device runs its programs one after the other, the average goes over a
    second device of each process if there is one for each (`second_device.py`).

    Args:
        train_step: train_step(state, batch) -> (state, metrics), jitted or not, of one worker: it
            knows nothing of the others. Its state is any pytree; typed keys in it
            (`jax.random.key`) are made different for each worker. Constraints on the mesh's other
            axes stay what they are. It is mapped over workers with `jax.vmap`.
        mesh: of automatic axes, the workers' one among them.
        axis: the mesh axis of the workers: one worker for each index along it.
        outer: the outer optimizer, as `co2(every=12)`.
        params: where the train state has its parameters: a key, an attribute or a number; None if
            it is the parameters.
        shard_outer: whether to keep the outer optimizer's state, and where the round began,
            scattered over the workers: a reduce-scatter and an all-gather instead of each
            all-reduce (ZeRO).
        outer_dtype: of the outer optimizer's state and of where rounds begin, as jnp.float32 for
            parameters in bfloat16, which lose small outer steps; None for the parameters' own. What
            is sent stays in theirs.
        sync: how averages are compressed, as `compression.lgreco(compression.power_sgd(4))`; its
            steps are rounds. None sends them as they are.
        stacked: for `sync`: keys of the parameters; leaves below one of them have a first dim of
            layers.
        overlap: whether rounds are overlapped (`jaxoverlap.overlap`), or with which options of it.
            By True, workers of one CPU device each are not: there is nothing to overlap.
        check: whether a worker whose steps end in something infinite or not a number goes back to
            where they began, and a `NonFiniteRoundError` says so. The train state is then held
            twice on a device during a round. Without it a NaN reaches all workers and stays.
        donate: whether a round may reuse the memory of the state given; False keeps that state
            valid, so that a round that fails can be taken again (`Elastic`).

    Raises:
        ValueError: for a mesh without the axis, or with explicit or manual axes.
    """

    state_type = LocalState
    comes_from = "init(), spread(), a round, or a checkpoint restored to abstract()"

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
        super().__init__(
            mesh, axis, sync=sync, stacked=stacked, overlap=overlap, scatter=self.shard_outer
        )
        alone = mesh.size == self.workers and mesh.devices.flat[0].platform == "cpu"
        if overlap is True and alone:  # no collectives in a step, and no scheduler on CPUs
            self.overlap = None
        function("train_step", train_step, "train_step(state, batch) -> (state, metrics)")
        if sync is None and stacked:
            raise ValueError(f"stacked={stacked!r} without sync: it says what is compressed")
        self.outer = outer.for_workers(self.workers)
        self._last_round: tuple[Any, int] = (None, 0)  # a state's `round`, on devices and here
        self._check_finite, self._reports = flag("check", check), Reports()
        self._step = train_step._fn if isinstance(train_step, Overlapped) else train_step
        self._params_in = ParamsIn(params)
        self._outer_dtype = None if outer_dtype is None else floating("outer_dtype", outer_dtype)

    # -- states -----------------------------------------------------------------------------------

    def init(self, state: Any) -> LocalState:
        """Return the state of all workers from that of one, placed on the mesh.

        Raises:
            ValueError: if it is sharded over the workers' axis or is on another mesh, has no
                parameters where `params` says, or others than finite floats there.
        """
        warn_of_raw_keys(state)
        check_finite(self._params_in.get(state))
        return self._init(state)

    def abstract(self, state: Any, *, workers: int | None = None) -> LocalState:
        """Return what `init` would, as shapes with shardings; to lower for a pod, say.

        Args:
            state: of one worker, arrays or shapes.
            workers: of the run that wrote a checkpoint, if others than the mesh has; what differs
                between them is then replicated on every device, for `consolidate`.
        """
        return self._abstract(state, workers=workers)

    def params(self, state: LocalState) -> Any:
        """Return the parameters, with the average that is under way applied; the state stays."""
        self._check_state(state)
        averager, arrays = self._in_use(state), state.arrays
        rounds = self._rounds(arrays, averager)
        at = jax.tree.map(lambda spec: self._placement.at(*spec), rounds.specs)
        name = ("params", averager.settings if averager else None)
        program = self._program(name, arrays, lambda: jax.jit(rounds.flushed, out_shardings=at))
        return program(arrays)

    def consolidate(self, state: LocalState) -> LocalState:
        """Return a state without workers: what another number of them can go on from (`spread`).

        The state may be of any number of workers, on any mesh: of these local updates or of others
        with the same outer optimizer. Parameters and outer state stay, what is under way is
        averaged. Of what else differs between workers (an inner optimizer's moments) floats
        are averaged and the rest is worker 0's. For the same number of workers keep the state
        itself, which loses nothing.
        """
        self._check_of_workers(state)
        found = without_workers(state.arrays, self._consolidated, self.axis)
        return found.with_host_of(state)

    def _with_host(self, state: LocalState, initial: Any) -> LocalState:
        return replace(super()._with_host(state, initial), made_by=made_by(self.outer.kind))

    def _check_made(self, state: LocalState, comes_from: str) -> None:
        super()._check_made(state, comes_from)
        check_made_by(state, self.outer.kind)

    def _consolidated(self, state: LocalState) -> LocalState:
        if self.outer.eager:  # each has applied its own part of what is under way
            left = self.outer.left(len(state.finite))
            state = replace(state, sent=jax.tree.map(lambda own: own * left, state.sent))
        found = self._each_worker(state, mean_of_workers)
        if self.outer.same_start:  # an average of equals may round
            first = jax.tree.map(lambda x: x[0], self._params_in.get(state.worker))
            found = replace(found, worker=self._params_in.put(found.worker, first))
        return replace(found, finite=jnp.ones((), jnp.float32))

    def _initial(self, state: LocalState) -> Any:
        return state.worker

    def _of_all(self, state: LocalState) -> LocalState:
        return self._copied(self._with_rest(state))

    def _with_rest(self, state: LocalState) -> LocalState:
        """Return a consolidated state whose `sent` is right for this number of workers.

        With an eager outer optimizer a worker applies its share of what it sends at once, and what
        is left of it (`Outer.left`) with the next round. A consolidated state has what is left; so
        that as much is left of another number of workers, it is scaled. Where nothing is left, as
        of one worker, the rest is applied here.
        """
        if not self.outer.eager:
            return state
        if left := self.outer.left(self.workers):
            sent = jax.tree.map(lambda rest: rest / left, state.sent)
            return replace(state, sent=sent)
        updates, moved = update(self.outer.transform, state.sent, state.optimizer[0], state.begin)
        begin = optax.apply_updates(state.begin, updates)
        sent = jax.tree.map(jnp.zeros_like, state.sent)
        return replace(state, begin=begin, optimizer=(moved,), sent=sent)

    def _each_worker(self, state: LocalState, change: Callable[[Any], Any]) -> LocalState:
        return state.each_worker(change, eager=self.outer.eager)

    def _params(self, state: LocalState) -> Any:
        return jax.tree.map(without_first, self._params_in.get(state.worker))

    def _initial_params(self, initial: Any) -> Any:
        return self._params_in.get(initial)

    def _new(self, initial: Any) -> LocalState:
        params = jax.tree.map(jnp.asarray, self._params_in.get(initial))
        begin = jax.tree.map(lambda x: x.astype(self._outer_dtype or x.dtype), params)
        transform = self.outer.transform
        optimizer = tuple(
            transform.init(take(begin)) for take in fragments_of(begin, self.outer.fragments)
        )
        sent = jax.tree.map(jnp.zeros_like, params) if self.outer.delay else None
        one = LocalState(initial, begin, optimizer, sent, jnp.int32(0), jnp.ones((), jnp.float32))
        return replace(self._copied(one), sync=self._loop and self._loop.new_state(params))

    def _shardings(self, initial: Any) -> LocalState:
        """Return the sharding of each leaf of the state that `init` makes of one worker's."""
        outer, place, params = self.outer, self._placement, self._params_in.get(initial)
        check_floats(params)
        specs = jax.tree.map(place.spec_of, params)
        shapes = jax.eval_shape(lambda p: jax.tree.map(jnp.asarray, p), params)
        stacked = place.stacked(specs)
        begin = stacked if outer.eager else place.outer(shapes, specs)
        others = place.at(place.axis) if outer.eager else place.at()
        return LocalState(
            worker=place.stacked(jax.tree.map(place.spec_of, initial)),
            begin=begin,
            optimizer=tuple(
                place.of_optimizer(outer.transform, take(shapes), take(begin), others=others)
                for take in fragments_of(shapes, outer.fragments)
            ),
            sent=stacked if outer.delay else None,
            round=place.at(),
            finite=place.at(place.axis),
            sync=self._loop and self._loop.shardings(shapes, specs),
        )

    # -- rounds -----------------------------------------------------------------------------------

    def round(
        self, state: LocalState, batches: Any, *, steps: int | None = None
    ) -> tuple[LocalState, Any]:
        """Run a round; the state is donated, unless `donate` is False.

        Args:
            state: from `init`, `spread` or the round before.
            batches: a tree of arrays [every, global batch, ...]; each worker gets an equal part of
                the global batch, in order. Arrays [every] have a number a step, for all workers; a
                step that needs no batch gets None.
            steps: of this round, if fewer than the outer optimizer's `every`, as for the last one
                of a run: batches are then [steps, ...]. Fragments need full rounds.

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
        index = self._index_of(state) if outer.has_waits else 0
        outer = outer.of_round(index)
        arrays, control = state.arrays, state.control
        program_of = functools.partial(self._round_of, arrays, batches, outer)
        if self._loop is None:
            program = self._programs.get(*program_of(None))
        else:
            turn = self._loop.turn(self._params(state), state.sync, control, program_of)
            program, control, arrays = turn.program, turn.control, replace(arrays, sync=turn.sync)
        arrays, metrics, seen = program(arrays, batches)
        self._reports.append(seen)
        self._last_round = (arrays.round, index + 1) if outer.has_waits else (None, 0)
        return replace(arrays.with_host_of(state), control=control), metrics

    def _index_of(self, state: LocalState) -> int:
        """Return a round's index; only of a state that the last round did not return is it read."""
        array, index = self._last_round
        return index if state.round is array else int(state.round)

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

    def lower(self, state: LocalState, batches: Any) -> Any:
        """Lower a round as one program: arrays or shapes with shardings, as for `jax.jit`.

        Returns:
            What `jaxoverlap.overlap(...).lower` does (or, without overlap, `jax.jit(...).lower`):
            compile it to audit and simulate.
        """
        self._check_of_workers(state)
        check_batches(batches, self.outer.every, self.workers, self.axis)
        check_step(self._step, state.worker, batches, self.axis, self.workers)
        program = self._one_program(state.arrays, self._in_use(state), self.outer)
        return program.lower(state.arrays, batches)

    def _round_of(
        self, state: LocalState, batches: Any, outer: Outer, averager: Averager | None
    ) -> tuple[Hashable, Callable[[], Any]]:
        """Return the key of a round's program and what makes it, which holds shapes alone.

        A round of compressed averages is lowered when it is made, so that it can be compiled while
        another one runs; other rounds are compiled when they first run.
        """
        place = self._placement
        shapes = jax.tree.map(like, state)
        rows = jax.tree.map(
            lambda b: batch_like(b, place.at(*(None, self.axis)[: np.ndim(b)])), batches
        )
        settings = (averager.settings, averager.accumulate) if averager else None
        key = ("round", outer.every, outer.waits, settings, key_of((shapes, rows)))
        hides = outer.delay and not outer.waits
        beside = second_device.mesh_beside(self.mesh) if hides else None

        def make() -> Any:
            check_step(self._step, shapes.worker, rows, self.axis, self.workers)
            if beside is not None:
                rounds = self._rounds(shapes, averager, outer)
                return second_device.Runner(rounds, beside, named_shardings(shapes))
            program = self._one_program(shapes, averager, outer)
            return program if averager is None else program.lower(shapes, rows)

        return key, make

    def _one_program(self, state: LocalState, averager: Averager | None, outer: Outer) -> Any:
        rounds, at = self._rounds(state, averager, outer), named_shardings(state)

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
            limits = replace(limits, extra_bytes=limits.extra_bytes + self._extra_bytes(state))
        return overlap(jitted, **{**self.overlap, "schedule": limits})

    def _extra_bytes(self, state: LocalState) -> int:
        """Return the bytes on a device of what a round keeps while its steps run.

        These are the average that is under way, what it is of, where the next round begins, and
        the train state that a worker may go back to.
        """
        if not (self.outer.delay or self.outer.lag):
            return 0
        params = self._params_in.get(state.worker)
        kept = state.worker if self._check_finite else ()
        return 3 * bytes_on_device(params) + bytes_on_device(kept)

    def _rounds(
        self, state: LocalState, averager: Averager | None = None, outer: Outer | None = None
    ) -> Rounds:
        outer = outer or self.outer  # of a short round another one
        params = self._params_in.get(state.worker)
        specs = jax.tree.map(lambda leaf: P(*leaf.sharding.spec[1:]), params)
        takes = fragments_of(params, outer.fragments)
        return Rounds(
            self._step, outer, self._params_in, self._placement, specs, takes, averager,
            self._check_finite,
        )  # fmt: skip

    def _program(self, name: Hashable, args: Any, make: Any) -> Any:
        """Return the program of a name for arguments like these, made once."""
        return self._programs.get((name, key_of(args)), make)
