"""Define `data_parallel`: a train step whose gradients are averaged compressed."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxoverlap.api import overlap as overlapped
from jaxoverlap.cost.groups import groups_of
from jaxoverlap.cost.model import CostModel
from jaxoverlap.train.arguments import (
    check_floats,
    check_is,
    check_workers,
    flag,
    function,
    keys,
    overlap_options,
    transformation,
)
from jaxoverlap.train.compression.averager import Averager
from jaxoverlap.train.compression.control_loop import ControlLoop
from jaxoverlap.train.compression.explain import AveragePrice, price
from jaxoverlap.train.compression.state import (
    COMES_FROM,
    Flags,
    SyncState,
    TrainState,
    check_placed,
    kept_by_workers,
)
from jaxoverlap.train.compression.sync import Sync
from jaxoverlap.train.compression.worker import WorkerStep
from jaxoverlap.train.placement import WorkerPlacement, copies, mean_of_workers
from jaxoverlap.train.programs import batch_like, key_of, like

_UNREAD = 2  # steps whose flags are not looked at yet, so that the host does not wait for devices


class DataParallel:
    """A train step that averages gradients over workers, compressed; made by `data_parallel`."""

    def __init__(
        self,
        loss_and_grads: Callable[..., tuple[Any, Any]],
        optimizer: optax.GradientTransformation,
        mesh: Mesh,
        *,
        axis: str,
        sync: Sync,
        stacked: Sequence[str],
        in_backward: bool,
        stateful: bool,
        overlap: bool | Mapping[str, Any],
    ):
        if not isinstance(sync, Sync):
            raise ValueError(f"sync={sync!r}: expected one such as lgreco(power_sgd(4))")
        check_workers(mesh, axis)
        function("loss_and_grads", loss_and_grads, "as jax.value_and_grad(loss) is")
        transformation("optimizer", optimizer)
        self.mesh, self.axis, self.sync = mesh, axis, sync
        self._loss_and_grads, self._optimizer = loss_and_grads, optimizer
        self._stacked, self._stateful = keys("stacked", stacked), flag("stateful", stateful)
        self._in_backward = flag("in_backward", in_backward)
        self._placement = WorkerPlacement(mesh, axis, False)
        self._overlap = overlap_options(overlap)
        self._loop = ControlLoop(sync, mesh, axis, self._stacked, shared=self._in_backward)
        self._flags = Flags()

    @property
    def workers(self) -> int:
        """Return how many workers there are."""
        return self._placement.workers

    # -- states -----------------------------------------------------------------------------------

    def init(self, params: Any, model: Any = None) -> TrainState:
        """Return the state of a run that begins, placed on the mesh.

        Args:
            params: arrays, whole along the workers' axis; sharded over other axes or not.
            model: with `stateful`, the model's state besides its parameters, likewise.

        Raises:
            ValueError: if a parameter is not of floats, or is sharded over the workers.
        """
        params, model = jax.tree.map(
            lambda x: x if hasattr(x, "shape") else jnp.asarray(x), (params, model)
        )
        check_floats(params)
        at = self._shardings(params, model)
        new = jax.jit(self._new, out_shardings=(at.params, at.optimizer, at.sync, at.model))
        params, optimizer, sync, model = new(*self._placement.on_mesh((params, model)))
        return TrainState(params, optimizer, sync, self._loop.new_control(params), model)

    def abstract(self, params: Any, model: Any = None, *, workers: int | None = None) -> TrainState:
        """Return what `init` would, as shapes with shardings: to restore a checkpoint, say.

        Args:
            params, model: arrays or shapes.
            workers: of the run that wrote the checkpoint, if others than the mesh has; what differs
                between them is then whole on every device, for `consolidate`.
        """
        at = self._shardings(params, model)
        new, optimizer, sync, model = jax.eval_shape(self._new, params, model)
        shapes = TrainState(new, optimizer, sync, self._loop.new_control(params), model)
        like = jax.tree.map(
            lambda s, place: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=place), shapes, at
        )
        if workers is None or workers == self.workers:
            return like
        return replace(like, sync=kept_by_workers(like.sync, self._placement.of_workers(workers)))

    def consolidate(self, state: TrainState) -> TrainState:
        """Return a state without workers, from that of any number of them on any mesh.

        What workers have not sent yet is averaged: so much is owed to the parameters, whoever pays
        it. All else is the same on all workers.
        """
        check_is(state, TrainState, COMES_FROM)

        def one(leaf: jax.Array) -> jax.Array:
            at = leaf.sharding
            where = (
                NamedSharding(at.mesh, P(*at.spec[1:])) if isinstance(at, NamedSharding) else None
            )
            return jax.jit(mean_of_workers, out_shardings=where)(leaf)

        return replace(state, sync=kept_by_workers(state.sync, one))

    def spread(self, state: TrainState) -> TrainState:
        """Return the state of all workers from a consolidated one.

        Raises:
            ValueError: if other layers are compressed with this number of workers.
        """
        check_is(state, TrainState, "consolidate()")
        self._loop.in_use(state.params, state.control)
        place = self._placement
        params, model = place.with_specs_of((state.params, state.model))
        at = self._shardings(params, model)
        optimizer = jax.tree.map(jnp.copy, jax.device_put(state.optimizer, at.optimizer))

        def of_all(sync: SyncState) -> SyncState:
            return kept_by_workers(sync, lambda leaf: copies(leaf, self.workers))

        sync = jax.jit(of_all, out_shardings=at.sync)(place.on_mesh(state.sync))
        return TrainState(params, optimizer, sync, state.control, model)

    def _new(self, params: Any, model: Any) -> tuple[Any, Any, SyncState, Any]:
        params, model = jax.tree.map(jnp.asarray, (params, model))
        return params, self._optimizer.init(params), self._loop.new_state(params), model

    def _shardings(self, params: Any, model: Any) -> TrainState:
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
        sync, control = self._loop.shardings(params, specs), self._loop.new_control(params)
        of_model = jax.tree.map(lambda leaf: place.at(*place.spec_of(leaf)), model)
        whole = jax.tree.map(lambda _: place.at(), control)
        return TrainState(at, optimizer, sync, whole, of_model)

    # -- steps ------------------------------------------------------------------------------------

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, Any]:
        """Take a step; the state is donated.

        Settings change here, at fixed numbers of steps, so that all processes and a run that
        resumes change them alike.

        Args:
            state: from `init`, a checkpoint, or the step before.
            batch: a tree of arrays [global batch, ...]; each worker gets an equal part.

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
        check_placed(state, self.workers)
        self.check(unread=_UNREAD)

        def compile_beside(averager: Averager) -> None:
            self._loop.programs.beside(*self._compiling(state, batch, averager))

        turn = self._loop.turn(state.params, state.sync, state.control, compile_beside)
        state = replace(state, sync=turn.sync)
        program = self._loop.programs.get(*self._compiling(state, batch, turn.averager))
        (params, optimizer, model, sync), value, finite = program(_arrays(state), batch)
        number = int(turn.control.count) - 1
        self._flags.add(number, finite, turn.averager.layers)
        return TrainState(params, optimizer, sync, turn.control, model), value

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
        table = self._loop.explain(state.params, state.control)
        return table if cost is None else f"{table}\n{self.price(state, cost)}"

    def price(self, state: TrainState, cost: CostModel) -> AveragePrice:
        """Return the seconds of an average on a cluster: compressed, and raw."""
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
        floats = (x for x in jax.tree.leaves(state.model) if jnp.issubdtype(x.dtype, jnp.floating))
        return averager.sent_bytes(state.params, also=also + sum(x.nbytes for x in floats))

    def lower(self, state: TrainState, batch: Any, *, settings: Sequence[int] | None = None) -> Any:
        """Lower the step as one program, at some settings: to audit and simulate.

        Args:
            state: arrays or shapes with shardings.
            batch: the same.
            settings: for each layer the place among its candidates; the default ones if None.
        """
        self._check_batch(batch)
        averager = self._loop.averager(state.params)
        default = [averager.sync.default(layer) for layer in averager.layers]
        chosen = np.array(default if settings is None else settings, np.int32)
        args = (_arrays(state), batch)
        return self._jitted(state, averager.at(chosen)).lower(*args)

    # -- programs ---------------------------------------------------------------------------------

    def _jitted(self, state: Any, averager: Averager) -> Any:
        at = jax.tree.map(lambda x: x.sharding, _arrays(state))
        step = WorkerStep(
            self._loss_and_grads, self._optimizer, averager, self._in_backward, self._stateful
        )
        jitted = jax.jit(step.over(self.mesh), donate_argnums=0, out_shardings=(at, None, None))
        return jitted if self._overlap is None else overlapped(jitted, **self._overlap)

    def _compiling(
        self, state: Any, batch: Any, averager: Averager
    ) -> tuple[Hashable, Callable[[], Any]]:
        """Return the key of a program and what compiles it, which holds shapes alone."""
        placed = jax.tree.map(self._batch_like, batch)
        args = jax.tree.map(like, (_arrays(state), placed))
        params, optimizer, model, sync = args[0]
        shapes = TrainState(params, optimizer, sync, state.control, model)
        key = ("step", averager.settings, averager.accumulate, key_of(args))
        return key, lambda: self._jitted(shapes, averager).lower(*args).compile()

    def _batch_like(self, leaf: Any) -> jax.ShapeDtypeStruct:
        return batch_like(leaf, self._placement.at(self.axis))

    def _check_batch(self, batch: Any) -> None:
        for leaf in jax.tree.leaves(batch):
            shape = np.shape(leaf)
            if not shape or shape[0] % self.workers:
                raise ValueError(
                    f"a batch of shape {shape}: expected a first dim that is a multiple of the "
                    f"{self.workers} workers along {self.axis!r}; change either"
                )


def _arrays(state: TrainState) -> tuple[Any, Any, Any, SyncState]:
    """Return what is on devices."""
    return state.params, state.optimizer, state.model, state.sync


def data_parallel(
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
) -> DataParallel:
    """Return a train step in which workers average their gradients compressed.

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
            makes them, each beside the layer below. All layers of such a leaf then have one
            setting, as a scan's iterations are one program.
        stateful: whether the model has a state besides its parameters (BatchNorm's averages, nnx's
            state, keys): `step.init(params, model)`, and loss_and_grads(params, model, batch) ->
            ((value, the state after it), gradients), as `jax.value_and_grad(loss, has_aux=True)`
            gives. Its floats are averaged over the workers; of typed keys each worker sees its own,
            and the next step has new ones; integers have to be the same on all workers.
        overlap: whether the step is overlapped (`jaxoverlap.overlap`), or with which options.

    Raises:
        ValueError: for a mesh without the axis, or with explicit or manual axes.
    """
    return DataParallel(
        loss_and_grads,
        optimizer,
        mesh,
        axis=axis,
        sync=sync,
        stacked=stacked,
        in_backward=in_backward,
        stateful=stateful,
        overlap=overlap,
    )
