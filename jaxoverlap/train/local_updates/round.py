"""A round of local updates, as pure functions of arrays.

The arrays are global: what differs between workers has a leading dim of workers, sharded over the
workers' axis. The train step is mapped over that dim, so that constraints and collectives
on other axes of the mesh stay what they are. Only the average is written for one worker: an
all-reduce, or a reduce-scatter where outer state is scattered.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxoverlap.train.compression.averager import Averager
from jaxoverlap.train.compression.state import SyncState
from jaxoverlap.train.compression.worker import if_finite
from jaxoverlap.train.finite import all_fine, kept_if
from jaxoverlap.train.local_updates.finite import RoundReport, each_worker, mirrors, one_hot
from jaxoverlap.train.local_updates.outer import Outer
from jaxoverlap.train.local_updates.state import LocalState, ParamsIn, joined
from jaxoverlap.train.optax_update import update
from jaxoverlap.train.placement import WorkerPlacement, over_workers

Step = Callable[[Any, Any], tuple[Any, Any]]
Take = Callable[[Any], Any]  # of a tree, the leaves of a fragment
AVERAGE = "local_updates_average"  # the scope of the collectives, by which an audit finds them


def _all(tree: Any) -> Any:
    return tree


@dataclass(frozen=True)
class Rounds:
    """The functions of a round, for one train step and one kind of state.

    Attributes:
        step: train_step(state, batch) -> (state, metrics), of one worker.
        outer: the outer optimizer, with the steps of this round.
        params_in: where a train state has its parameters.
        placement: the shardings of arrays.
        specs: the parameters' own specs, on the axes inside a worker.
        fragments: for each fragment what takes its leaves out of a tree like the parameters.
        averager: that compresses the average, at the settings of now; None sends it as it is.
        check: whether what is not finite is left out (`finite.py`).
    """

    step: Step
    outer: Outer
    params_in: ParamsIn
    placement: WorkerPlacement
    specs: Any
    fragments: tuple[Take, ...]
    averager: Averager | None = None
    check: bool = True

    def round(self, state: LocalState, batches: Any) -> tuple[LocalState, Any, RoundReport]:
        """Run the steps of a round, overlapped with the average, and the outer step."""
        outer, workers = self.outer, self.placement.workers
        metrics, seen = list[Any](), RoundReport.new(state.round, workers)
        fine_yet = jnp.ones(workers, jnp.float32)
        late, state = state.finite, replace(state, finite=fine_yet)
        for number, take in enumerate(self.fragments):
            average, sync, told = None, state.sync, None
            hides = bool(outer.delay) and not outer.waits
            if hides:  # beside the steps below
                average, sync, told = self.averaged(state.sent, sync, (late, state.finite))
            at = number * outer.part
            launch, end = at + outer.part - outer.lag, at + outer.part
            started = self.params_in.get(state.worker)
            state = self._advanced(state, batches, at, launch, hides, metrics)
            if not hides:
                progress, fine = self._progress(state, started, take), (late, state.finite)
                average, sync, told = self.averaged(progress, sync, fine, take)
                late, state = fine_yet, replace(state, finite=fine_yet)
            state = self._advanced(state, batches, launch, end, True, metrics)
            state = replace(state, sync=sync)
            state, applied = self.applied(state, started, average, number)
            seen = seen.joined(told, applied)
        state = replace(state, round=state.round + 1)
        return state, jax.tree.map(lambda *m: jnp.concatenate(m), *metrics), seen

    def _advanced(
        self,
        state: LocalState,
        batches: Any,
        begin: int,
        end: int,
        hides: bool,
        metrics: list[Any],
    ) -> LocalState:
        """Run some of a round's steps, and append their metrics.

        Where they hide a reduce-scatter and the all-gather after it, they are two loops: no
        collective can end or begin within one.
        """
        if begin == end:
            return state
        worker = state.worker
        middle = (begin + end) // 2 if hides and self.placement.scatter else begin
        for first, last in ((begin, middle), (middle, end)):
            if first < last:
                worker, seen = self.steps(worker, _cut(batches, first, last), last - first)
                metrics.append(seen)
        worker, fine = self.kept(state.worker, worker)
        return replace(state, worker=worker, finite=state.finite * fine)

    def kept(self, before: Any, after: Any) -> tuple[Any, jax.Array]:
        """Return the workers after some steps, or before them where these were not finite.

        Returns:
            The workers' states, and 1 for each worker that was finite, [workers].
        """
        if not self.check:
            return after, jnp.ones(self.placement.workers, jnp.float32)
        # Behind a barrier XLA does not join what is done with the state before the steps (how far
        # the workers came, an average's operand) with this, which would start averages after them.
        before, after = lax.optimization_barrier((before, after))
        fine = each_worker(before, after, mirrors(before, self.params_in.get(before)))
        # Of a state without leaves there is one answer for all workers.
        return kept_if(fine, after, before), jnp.broadcast_to(fine, self.placement.workers)

    def steps(self, worker: Any, batches: Any, count: int) -> tuple[Any, Any]:
        """Take `count` steps, every worker its own; metrics are [steps, workers, ...].

        Of batches [steps, rows, ...] each worker gets its part, and of scalars [steps] all.
        """
        workers, axis = self.placement.workers, self.placement.axis

        def shared_out(batch: Any) -> Any:
            if batch.ndim == 1:
                every = jnp.broadcast_to(batch[:, None], (count, workers))
                return lax.with_sharding_constraint(every, self.placement.at(None, axis))
            steps, rows, *rest = batch.shape
            split = batch.reshape(steps, workers, rows // workers, *rest)
            free = (P.UNCONSTRAINED,) * (split.ndim - 2)
            return lax.with_sharding_constraint(split, self.placement.at(None, axis, *free))

        step = jax.vmap(self.step, spmd_axis_name=axis)
        return lax.scan(step, worker, jax.tree.map(shared_out, batches), length=count)

    def _progress(self, state: LocalState, started: Any, take: Take) -> Any:
        """Return how far each worker came from where the round began, of a fragment.

        In a round that waits despite a delay that includes what is left of the round before; and
        of eager workers, which began apart, it is where they ended, less what is left.
        """
        if self.outer.waits:
            return self._waited_progress(state, started)
        begin = take(started) if self.outer.same_start else self._whole(take(state.begin), take)

        def one(begin: jax.Array, end: jax.Array) -> jax.Array:
            return (begin - end).astype(end.dtype)  # where outer state is wider, sums are not

        return jax.tree.map(one, begin, take(self.params_in.get(state.worker)))

    def _waited_progress(self, state: LocalState, started: Any) -> Any:
        left = self.outer.left(self.placement.workers)

        def moved(sent: jax.Array, start: jax.Array, end: jax.Array) -> jax.Array:
            return start - end + (left * sent).astype(end.dtype)

        moves = jax.tree.map(moved, state.sent, started, self.params_in.get(state.worker))
        if not self.outer.eager:
            return moves
        return jax.tree.map(lambda b, m: b - m.astype(b.dtype), state.begin, moves)

    def averaged(
        self, values: Any, sync: Any, fine: tuple[jax.Array, jax.Array], take: Take = _all
    ) -> tuple[Any, Any, jax.Array]:
        """Average what the workers send.

        Args:
            values: like the parameters, [workers, ...].
            sync: the state of its compression; None without.
            fine: which workers were finite in the last round and in this one, [workers] each.
            take: the fragment of the parameters that values are.

        Returns:
            The mean over the workers, the compression's state, and `fine` of all workers,
            [2, workers], on all of them.
        """
        if self.averager is None:
            mean, told = self.average(values, fine, take)
            return mean, sync, told
        axis, averager, workers = self.placement.axis, self.averager, self.placement.workers
        spec = SyncState.specs(axis)

        def of_one(values: Any, sync: SyncState, fine: Any) -> tuple[Any, Any, jax.Array]:
            own = jax.tree.map(lambda value: value.squeeze(0), values)
            old, told = sync.without_workers(), one_hot(fine, axis, workers)
            with jax.named_scope(AVERAGE):
                mean, new, (told,) = averager.average(own, old, also=[told])
            _, new = if_finite((), (), new, old)
            return mean, new.with_workers(), told * workers

        given, made = (P(axis), spec, P(axis)), (P(), spec, P())
        mapped = over_workers(of_one, self.placement.mesh, axis, given, made)
        return mapped(values, sync, fine)

    def average(self, values: Any, fine: Any, take: Take = _all) -> tuple[Any, jax.Array]:
        """Return the mean over the workers, placed as outer state is, and `fine` of all.

        Arguments and results are `averaged`'s.
        """
        place, specs = self.placement, take(self.specs)
        axis, workers = place.axis, place.workers

        def of_leaves(find: Callable[[Any, P], Any]) -> Any:
            return jax.tree.map(lambda v, spec: find(v.shape[1:], spec), values, specs)

        dims = of_leaves(place.scattered_dim)

        def of_one(values: Any, fine: Any) -> tuple[Any, jax.Array]:
            def one(value: jax.Array, dim: int) -> jax.Array:
                value = value.squeeze(0)
                if dim < 0:
                    return lax.psum(value, axis) / workers
                return lax.psum_scatter(value, axis, scatter_dimension=dim, tiled=True) / workers

            with jax.named_scope(AVERAGE):
                told = lax.psum(one_hot(fine, axis, workers), axis)
                return jax.tree.map(one, values, dims), told

        # All axes are manual: XLA:CPU aborts on sums in bfloat16 where some are automatic.
        mapped = jax.shard_map(
            of_one,
            mesh=place.mesh,
            in_specs=(of_leaves(lambda _, spec: P(axis, *spec)), P(axis)),
            out_specs=(of_leaves(place.outer_spec), P()),
            check_vma=False,
        )
        return mapped(values, fine)

    def applied(
        self, state: LocalState, started: Any, average: Any, number: int
    ) -> tuple[LocalState, jax.Array]:
        """Take an outer step on one fragment.

        Args:
            state: after the steps.
            started: the workers' parameters before the steps.
            average: the mean of what was sent, of this fragment.
            number: the fragment's.

        Returns:
            The state after it, and whether it was finite; where it was not, `begin` and the outer
            optimizer are as before it.
        """
        outer, take = self.outer, self.fragments[number]
        ended = self.params_in.get(state.worker)
        own = jax.tree.map(jnp.subtract, started, ended) if outer.delay else None
        before = take(state.begin), state.optimizer[number]
        fine, finite = jnp.ones((), bool), state.finite
        if outer.eager:
            after = self._eager_step(state, own, average)
            if self.check:
                own_fine = each_worker(before, after)
                finite, after = finite * own_fine, kept_if(own_fine, after, before)
            begin, optimizer = after
            whole = begin
        else:
            after = self.outer_step(*before, average)
            whole = self._whole(after[0], take)
            if self.check:
                fine = self._outer_fine(whole, average, after)
                after = kept_if(fine, after, before)
                if not self.placement.scatter:
                    whole = after[0]
                elif outer.same_start:  # what was gathered is kept, as the round's start is there
                    whole = kept_if(fine, whole, take(started))
                else:
                    whole = self._whole(after[0], take)
            begin, optimizer = after
        mine = take(ended)
        start = jax.tree.map(lambda b, e: _lerp(b, e, outer.keep), whole, mine)
        sent = state.sent
        if outer.waits:
            sent = jax.tree.map(jnp.zeros_like, sent)
        elif outer.delay:
            sent = own
            if outer.sends_start:
                sent = jax.tree.map(lambda b, s: (b - s).astype(s.dtype), whole, start)
        after = replace(
            state,
            worker=self.params_in.put(state.worker, joined(ended, start)),
            begin=joined(state.begin, begin),
            optimizer=_replaced(state.optimizer, number, optimizer),
            sent=sent,
            finite=finite,
        )
        return after, fine

    def _outer_fine(self, whole: Any, average: Any, after: Any) -> jax.Array:
        """Return whether an outer step is finite, bool [].

        Scattered values are not looked at: that would take an all-reduce before the all-gather,
        which has then less to hide behind.
        """
        return all_fine(whole) if self.placement.scatter else all_fine((average, after))

    def outer_step(self, begin: Any, optimizer: Any, average: Any) -> tuple[Any, Any]:
        """Return the parameters and the outer optimizer's state after an outer step."""
        if self.outer.waits:
            return jax.tree.map(lambda b, a: (b - a).astype(b.dtype), begin, average), optimizer
        updates, optimizer = update(self.outer.transform, average, optimizer, begin)
        return optax.apply_updates(begin, updates), optimizer

    def _eager_step(self, state: LocalState, own: Any, average: Any) -> tuple[Any, Any]:
        if self.outer.waits:
            same = jax.tree.map(lambda b, a: jnp.broadcast_to(a, b.shape), state.begin, average)
            return same, state.optimizer[0]
        share = 1 - self.outer.left(self.placement.workers)
        gradients = jax.tree.map(
            lambda mine, sent, mean: share * (mine - sent) + mean, own, state.sent, average
        )
        step = jax.vmap(self.outer_step, spmd_axis_name=self.placement.axis)
        return step(state.begin, state.optimizer[0], gradients)

    def _whole(self, begin: Any, take: Take = _all) -> Any:
        """Gather scattered parameters."""
        if not self.placement.scatter:
            return begin
        with jax.named_scope(AVERAGE):
            return jax.tree.map(
                lambda b, spec: lax.with_sharding_constraint(b, self.placement.at(*spec)),
                begin,
                take(self.specs),
            )

    def flushed(self, state: LocalState) -> Any:
        """Return the parameters, with what is under way applied, in their own dtypes."""
        return jax.tree.map(
            lambda found, own: found.astype(own.dtype),
            self._flushed(state),
            self.params_in.get(state.worker),
        )

    def _flushed(self, state: LocalState) -> Any:
        if not self.outer.delay:
            return state.begin
        if self.outer.has_waits:  # nothing is under way after a round that waited
            waited, begin = self.outer.waits_in(state.round - 1), self._begin(state)
            return jax.tree.map(lambda b, f: jnp.where(waited, b, f), begin, self._late(state))
        return self._late(state)

    def _begin(self, state: LocalState) -> Any:
        """Return where the round begins: of eager workers, their mean."""
        if not self.outer.eager:
            return self._whole(state.begin)
        return jax.tree.map(lambda b: b.mean(0).astype(b.dtype), state.begin)

    def _late(self, state: LocalState) -> Any:
        """Return the parameters with the average that is under way applied."""
        average, _, _ = self.averaged(state.sent, state.sync, (state.finite, state.finite))
        if not self.outer.eager:
            begin, _ = self.outer_step(state.begin, state.optimizer[0], average)
            return self._whole(begin)
        nothing = jax.tree.map(jnp.zeros_like, state.sent)
        begin, _ = self._eager_step(state, nothing, average)
        return jax.tree.map(lambda b: b.mean(0).astype(b.dtype), begin)


def _lerp(begin: jax.Array, end: jax.Array, keep: float) -> jax.Array:
    """Return begin + keep · (end - begin), begin for every worker; ends have a dim of workers."""
    if not keep:
        return jnp.broadcast_to(begin.astype(end.dtype), end.shape)
    return (begin + keep * (end - begin)).astype(end.dtype)


def _cut(batches: Any, begin: int, end: int) -> Any:
    return jax.tree.map(lambda b: b[begin:end], batches)


def _replaced(parts: tuple[Any, ...], number: int, part: Any) -> tuple[Any, ...]:
    return (*parts[:number], part, *parts[number + 1 :])
