"""Define `data_parallel`: a train step whose gradients are averaged compressed."""

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

from jaxoverlap._util.expect import expect
from jaxoverlap._util.limits import flag
from jaxoverlap.api import overlap as overlapped
from jaxoverlap.cost.groups import groups_of
from jaxoverlap.cost.model import CostModel
from jaxoverlap.train.arguments import check_floats, check_shared, function, transformation
from jaxoverlap.train.compression.averager import Averager
from jaxoverlap.train.compression.control_loop import ControlLoop
from jaxoverlap.train.compression.explain import AveragePrice, price
from jaxoverlap.train.compression.state import Flags, SyncState, TrainState
from jaxoverlap.train.compression.sync import Sync
from jaxoverlap.train.compression.worker import WorkerStep
from jaxoverlap.train.over_workers import OverWorkers, without_workers
from jaxoverlap.train.placement import mean_of_workers
from jaxoverlap.train.programs import batch_like, key_of, like

_UNREAD = 2  # steps whose flags are not looked at yet, so that the host does not wait for devices


class DataParallel(OverWorkers):
    """A train step in which workers average their gradients compressed.

        step = data_parallel(jax.value_and_grad(loss), optax.adamw(1e-3), mesh,
                             sync=lgreco(power_sgd(4), every=500))
        state = step.init(params)
        for batch in batches:
            state, loss = step(state, batch)

    Args:
        loss_and_grads: loss_and_grads(params, batch) -> (value, gradients) of one worker's part of
            the batch, as `jax.value_and_grad(loss)` gives; the value is any tree of numbers. It
            runs in a shard_map over the workers' axis: constraints may name the other axes.
        optimizer: any optax one; it sees the averaged gradients.
        mesh: of automatic axes, the workers' one among them.
        axis: the mesh axis of the workers.
        sync: `uniform(power_sgd(4))`, `lgreco(...)`, `accordion(...)`.
        stacked: keys of the parameters; leaves below one of them have a first dim of layers, and
            each layer is a matrix of its own.
        in_backward: whether gradients of stacked leaves are averaged inside the backward scan that
            makes them, each overlapped with the layer below. All layers of such a leaf then have
            one setting, as a scan's iterations are one program.
        stateful: whether the model has a state besides its parameters (BatchNorm's averages, nnx's
            state, keys): `step.init(params, model)`, and loss_and_grads(params, model, batch) ->
            ((value, the state after it), gradients), as `jax.value_and_grad(loss, has_aux=True)`
            gives. Its floats are averaged over the workers; of typed keys each worker sees its own,
            and the next step has new ones; integers have to be the same on all workers.
        overlap: whether the step is overlapped (`jaxoverlap.overlap`), or with which options.

    Raises:
        ValueError: for a mesh without the axis, or with explicit or manual axes.
    """

    state_type = TrainState
    comes_from = "init(), spread(), a step, or a checkpoint restored to abstract()"

    def __init__(
        self,
        loss_and_grads: Callable[..., tuple[Any, Any]],
        optimizer: optax.GradientTransformation,
        mesh: Mesh,
        *,
        axis: str = "data",
        sync: Sync,
        stacked: Sequence[str] = (),
        in_backward: bool = False,
        stateful: bool = False,
        overlap: bool | Mapping[str, Any] = False,
    ):
        expect(isinstance(sync, Sync), "sync", sync, "one such as lgreco(power_sgd(4))")
        function("loss_and_grads", loss_and_grads, "as jax.value_and_grad(loss) is")
        transformation("optimizer", optimizer)
        self._stateful = flag("stateful", stateful)
        self._in_backward = flag("in_backward", in_backward)
        super().__init__(
            mesh, axis, sync=sync, stacked=stacked, overlap=overlap, shared=self._in_backward
        )
        self._loop: ControlLoop = self._needs_sync()
        self._loss_and_grads, self._optimizer, self._flags = loss_and_grads, optimizer, Flags()

    # -- states -----------------------------------------------------------------------------------

    def init(self, params: Any, model: Any = None) -> TrainState:
        """Return the state of a run that begins, placed on the mesh.

        Args:
            params: arrays, replicated over the workers' axis; sharded over other axes or not.
            model: with `stateful`, the model's state besides its parameters, likewise.

        Raises:
            ValueError: if a parameter is not of floats, or is sharded over the workers.
        """
        initial = jax.tree.map(
            lambda x: x if hasattr(x, "shape") else jnp.asarray(x), (params, model)
        )
        return self._init(initial)

    def abstract(self, params: Any, model: Any = None, *, workers: int | None = None) -> TrainState:
        """Return what `init` would, as shapes with shardings: to restore a checkpoint, say.

        Args:
            params, model: arrays or shapes.
            workers: of the run that wrote the checkpoint, if others than the mesh has; what differs
                between them is then replicated on every device, for `consolidate`.
        """
        return self._abstract((params, model), workers=workers)

    def consolidate(self, state: TrainState) -> TrainState:
        """Return a state without workers, from that of any number of them on any mesh.

        What workers have not sent yet is averaged: so much is owed to the parameters, whoever pays
        it. All else is the same on all workers.
        """
        self._check_of_workers(state)

        def mean(sync: SyncState) -> SyncState:
            return sync.each_worker(mean_of_workers)

        return replace(state, sync=without_workers(state.sync, mean, self.axis))

    def _initial(self, state: TrainState) -> Any:
        return state.params, state.model

    def _each_worker(self, state: TrainState, change: Callable[[Any], Any]) -> TrainState:
        return replace(state, sync=state.sync.each_worker(change))

    def _params(self, state: TrainState) -> Any:
        return state.params

    def _initial_params(self, initial: Any) -> Any:
        return initial[0]

    def _new(self, initial: Any) -> TrainState:
        params, model = jax.tree.map(jnp.asarray, initial)
        optimizer = self._optimizer.init(params)
        return TrainState(params, optimizer, self._loop.new_state(params), None, model)

    def _shardings(self, initial: Any) -> TrainState:
        params, model = initial
        check_floats(params)
        if (model is not None) != self._stateful:
            raise ValueError(
                "a model's state with stateful=False: give data_parallel stateful=True"
                if model is not None
                else "stateful=True without the model's state: give init(params, model)"
            )
        place = self._placement
        specs = jax.tree.map(place.spec_of, params)
        at = jax.tree.map(lambda spec: place.at(*spec), specs)
        optimizer = place.of_optimizer(self._optimizer, params, at, others=place.at())
        of_model = jax.tree.map(lambda leaf: place.at(*place.spec_of(leaf)), model)
        return TrainState(at, optimizer, self._loop.shardings(params, specs), None, of_model)

    # -- steps ------------------------------------------------------------------------------------

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, Any]:
        """Take a step; the state is donated.

        Settings change here, at fixed numbers of steps, so that all processes and a run that
        resumes change them alike.

        Args:
            state: from `init`, a checkpoint, or the step before.
            batch: a tree of arrays [global batch, ...]; each worker gets an equal part, and all of
                what is a scalar.

        Returns:
            The state, and the first result of loss_and_grads averaged over the workers (integers
            as float32).

        Raises:
            NonFiniteGradientError: if the gradient of a step before was not finite. It is
                raised two steps late at most (`check` raises it at once) and the state given here
                is still good.
            ValueError: for a state of another setting, or a batch that workers cannot share.
        """
        self._check_batch(batch)
        self._check_state(state)
        self.check(unread=_UNREAD)

        program_of = functools.partial(self._lowering, state, batch)
        turn = self._loop.turn(state.params, state.sync, state.control, program_of)
        arrays = replace(state.arrays, sync=turn.sync)
        arrays, value, finite = turn.program(arrays, batch)
        number = int(turn.control.count) - 1
        self._flags.append((number, finite, turn.averager.layers))
        return replace(arrays, control=turn.control), value

    def check(self, *, unread: int = 0) -> None:
        """Raise if the gradient of a step so far was not finite; wait for all but `unread` steps.

        Raises:
            NonFiniteGradientError: naming the first such step and its layers.
        """
        self._flags.check(unread)

    def explain(self, state: TrainState, *, cost: CostModel | None = None) -> str:
        """Return a table of the synchronisation: a row a layer, its setting, bytes and error.

        Args:
            state: arrays or shapes.
            cost: of the cluster, as `jaxoverlap.cost.find.cost_model` gives, to add the price of an
                average.
        """
        table = super().explain(state)
        return table if cost is None else f"{table}\n{self.price(state, cost)}"

    def price(self, state: TrainState, cost: CostModel) -> AveragePrice:
        """Return the estimated seconds of an average on a cluster, compressed and uncompressed."""
        averager = self._loop.in_use(state.params, state.control)
        group = groups_of(self.mesh, cost.cluster)[self.axis]
        return price(averager, state.params, cost, group)

    def sent_bytes(self, state: TrainState, *, also: int = 4) -> float:
        """Return the bytes that a worker sends in a step at the state's settings.

        Args:
            state: from `init` or a step.
            also: bytes of the first result of loss_and_grads; 4 for one float32.
        """
        averager = self._loop.in_use(state.params, state.control)
        floats = (x for x in jax.tree.leaves(state.model) if jnp.issubdtype(x.dtype, jnp.inexact))
        return averager.sent_bytes(state.params, also=also + sum(x.nbytes for x in floats))

    def lower(self, state: TrainState, batch: Any, *, settings: Sequence[int] | None = None) -> Any:
        """Lower the step as one program, at some settings: to audit and simulate.

        Args:
            state: arrays or shapes with shardings.
            batch: the same.
            settings: for each layer the index among its candidates; the default ones if None.
        """
        self._check_batch(batch)
        averager = self._loop.averager(state.params)
        default = [averager.sync.default(layer) for layer in averager.layers]
        chosen = np.array(default if settings is None else settings, np.int32)
        return self._jitted(state.arrays, averager.at(chosen)).lower(state.arrays, batch)

    # -- programs ---------------------------------------------------------------------------------

    def _jitted(self, state: Any, averager: Averager) -> Any:
        at = jax.tree.map(lambda x: x.sharding, state)
        step = WorkerStep(
            self._loss_and_grads, self._optimizer, averager, self._in_backward, self._stateful
        )
        jitted = jax.jit(step.over(self.mesh), donate_argnums=0, out_shardings=(at, None, None))
        return jitted if self.overlap is None else overlapped(jitted, **self.overlap)

    def _lowering(
        self, state: Any, batch: Any, averager: Averager
    ) -> tuple[Hashable, Callable[[], Any]]:
        """Return the key of a program and what lowers it, which holds shapes alone."""
        place = self._placement
        rows = jax.tree.map(lambda b: batch_like(b, place.at(*(self.axis,)[: np.ndim(b)])), batch)
        shapes = jax.tree.map(like, state.arrays)
        key = ("step", averager.settings, averager.accumulate, key_of((shapes, rows)))
        return key, lambda: self._jitted(shapes, averager).lower(shapes, rows)

    def _check_batch(self, batch: Any) -> None:
        for leaf in jax.tree.leaves(batch):
            check_shared(np.shape(leaf), 0, self.workers, f"workers along {self.axis!r}")


data_parallel = DataParallel  # the name by which it is made
