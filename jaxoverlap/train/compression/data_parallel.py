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
    check_workers,
    flag,
    function,
    keys,
    overlap_options,
    transformation,
)
from jaxoverlap.train.compression import schedule
from jaxoverlap.train.compression.averager import Averager, averager_of
from jaxoverlap.train.compression.explain import Price, explained, price
from jaxoverlap.train.compression.programs import Programs
from jaxoverlap.train.compression.state import (
    Control,
    Flags,
    SyncState,
    TrainState,
    check_placed,
    checked,
)
from jaxoverlap.train.compression.sync import Sync
from jaxoverlap.train.compression.worker import WorkerStep
from jaxoverlap.train.placement import Placement

_UNREAD = 2  # steps whose flags are not looked at yet, so that the host does not wait for devices


class DataParallel:
    """A train step that averages gradients over workers, compressed; made by `data_parallel`."""

    def __init__(
        self,
        loss_and_grads: Callable[[Any, Any], tuple[Any, Any]],
        optimizer: optax.GradientTransformation,
        mesh: Mesh,
        *,
        axis: str,
        sync: Sync,
        stacked: Sequence[str],
        in_backward: bool,
        overlap: bool | Mapping[str, Any],
    ):
        if not isinstance(sync, Sync):
            raise ValueError(f"sync={sync!r}: expected one such as lgreco(power_sgd(4))")
        check_workers(mesh, axis)
        function("loss_and_grads", loss_and_grads, "as jax.value_and_grad(loss) is")
        transformation("optimizer", optimizer)
        self.mesh, self.axis, self.sync = mesh, axis, sync
        self._loss_and_grads, self._optimizer = loss_and_grads, optimizer
        self._stacked, self._in_backward = (
            keys("stacked", stacked),
            flag("in_backward", in_backward),
        )
        self._placement = Placement(mesh, axis, False)
        self._overlap = overlap_options(overlap)
        self._programs = Programs()
        self._flags = Flags()
        self._averagers: dict[Hashable, Averager] = {}

    @property
    def workers(self) -> int:
        """Return how many workers there are."""
        return self._placement.workers

    # -- states -----------------------------------------------------------------------------------

    def init(self, params: Any) -> TrainState:
        """Return the state of a run that begins, placed on the mesh.

        Args:
            params: arrays, whole along the workers' axis; sharded over other axes or not.
        """
        params = jax.tree.map(lambda x: x if hasattr(x, "shape") else jnp.asarray(x), params)
        at = self._shardings(params)
        new = jax.jit(self._new, out_shardings=(at.params, at.optimizer, at.sync))
        params, optimizer, sync = new(params)
        control = Control.new(self.sync, self._averager(params).layers)
        return TrainState(params, optimizer, sync, control)

    def abstract(self, params: Any) -> TrainState:
        """Return what `init` would, as shapes with shardings: to restore a checkpoint, say."""
        at = self._shardings(params)
        control = Control.new(self.sync, self._averager(params).layers)
        new, optimizer, sync = jax.eval_shape(self._new, params)
        shapes = TrainState(new, optimizer, sync, control)
        return jax.tree.map(
            lambda s, place: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=place), shapes, at
        )

    def _new(self, params: Any) -> tuple[Any, Any, SyncState]:
        params = jax.tree.map(jnp.asarray, params)
        sync = self._averager(params).init(params)
        copies = lambda tree: jax.tree.map(  # noqa: E731
            lambda x: jnp.broadcast_to(x, (self.workers, *x.shape)), tree
        )
        sync = replace(sync, error=copies(sync.error), accumulated=copies(sync.accumulated))
        return params, self._optimizer.init(params), sync

    def _averager(self, params: Any) -> Averager:
        leaves, treedef = jax.tree.flatten(params)
        key = (treedef, *((leaf.shape, str(leaf.dtype)) for leaf in leaves))
        if key not in self._averagers:
            self._averagers[key] = averager_of(
                self.sync,
                params,
                axis=self.axis,
                workers=self.workers,
                stacked=self._stacked,
                shared=self._in_backward,
            )
        return self._averagers[key]

    def _shardings(self, params: Any) -> TrainState:
        place = self._placement
        specs = jax.tree.map(place.spec_of, params)
        at = jax.tree.map(lambda spec: place.at(*spec), specs)
        optimizer = place.of_optimizer(self._optimizer, params, at, others=place.at())
        averager = self._averager(params)
        leaf_specs = jax.tree.leaves(specs, is_leaf=lambda s: isinstance(s, P))
        own = {str(n): place.at(self.axis, *leaf_specs[n]) for n in averager.of_leaf}
        shapes = jax.eval_shape(averager.init, params)
        sync = SyncState(
            count=place.at(),
            error=own if shapes.error else {},
            accumulated=dict(own) if shapes.accumulated else {},
            shared=jax.tree.map(lambda _: place.at(), shapes.shared),
            finite=place.at(),
        )
        control = Control.new(self.sync, averager.layers)
        return TrainState(at, optimizer, sync, jax.tree.map(lambda _: place.at(), control))

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
        averager = self._averager(state.params)
        control = checked(state.control, self.sync, averager.layers)
        self.check(unread=_UNREAD)
        count = int(control.count)
        if averager.layers:
            if schedule.measures(self.sync, count):
                state, control = self._measured(state, control)
                for accumulate in (False, True):
                    self._compile_beside(state, batch, control.pending, accumulate)
            if count == 0 < self.sync.start:
                accumulate = schedule.accumulates(self.sync, self.sync.start)
                self._compile_beside(state, batch, control.pending, accumulate)
            control = schedule.in_use(self.sync, control)
        accumulate = schedule.accumulates(self.sync, count) and bool(averager.layers)
        program = self._program(state, batch, control.settings, accumulate)
        (params, optimizer, sync), value, finite = program(
            (state.params, state.optimizer, state.sync), batch
        )
        self._flags.add(count, finite, averager.layers)
        return TrainState(params, optimizer, sync, control.stepped()), value

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
        averager = self._averager(state.params)
        control = checked(state.control, self.sync, averager.layers)
        table = explained(averager.at(control.settings), control, state.params)
        return table if cost is None else f"{table}\n{self.price(state, cost)}"

    def price(self, state: TrainState, cost: CostModel) -> Price:
        """Return the seconds of an average on a cluster: compressed, and raw."""
        averager = self._averager(state.params)
        control = checked(state.control, self.sync, averager.layers)
        group = groups_of(self.mesh, cost.cluster)[self.axis]
        return price(averager.at(control.settings), state.params, cost, group)

    def sent_bytes(self, state: TrainState, *, also: int = 4) -> float:
        """Return the bytes that a worker sends in a step at the state's settings.

        Args:
            state: from `init` or a step.
            also: bytes of the first result of loss_and_grads; 4 for one float32.
        """
        averager = self._averager(state.params)
        control = checked(state.control, self.sync, averager.layers)
        return averager.at(control.settings).sent_bytes(state.params, also=also)

    def lower(self, state: TrainState, batch: Any, *, settings: Sequence[int] | None = None) -> Any:
        """Lower the step as one program, at some settings: to audit and simulate.

        Args:
            state: arrays or shapes with shardings.
            batch: the same.
            settings: for each layer the place among its candidates; the default ones if None.
        """
        self._check_batch(batch)
        layers = self._averager(state.params).layers
        default = [self.sync.default(layer) for layer in layers]
        chosen = np.array(default if settings is None else settings, np.int32)
        args = ((state.params, state.optimizer, state.sync), batch)
        return self._jitted(state, chosen, False).lower(*args)

    # -- programs ---------------------------------------------------------------------------------

    def _jitted(self, state: Any, settings: np.ndarray, accumulate: bool) -> Any:
        averager = self._averager(state.params).at(settings, accumulate=accumulate)
        at = jax.tree.map(lambda x: x.sharding, (state.params, state.optimizer, state.sync))
        step = WorkerStep(self._loss_and_grads, self._optimizer, averager, self._in_backward)
        return self._maybe_overlapped(
            jax.jit(step.over(self.mesh), donate_argnums=0, out_shardings=(at, None, None))
        )

    def _maybe_overlapped(self, jitted: Any) -> Any:
        return jitted if self._overlap is None else overlapped(jitted, **self._overlap)

    def _program(self, state: Any, batch: Any, settings: np.ndarray, accumulate: bool) -> Any:
        key, make = self._compiling(state, batch, settings, accumulate)
        return self._programs.get(key, make)

    def _compile_beside(
        self, state: Any, batch: Any, settings: np.ndarray, accumulate: bool
    ) -> None:
        key, make = self._compiling(state, batch, settings, accumulate)
        self._programs.beside(key, make)

    def _compiling(
        self, state: Any, batch: Any, settings: np.ndarray, accumulate: bool
    ) -> tuple[Hashable, Callable[[], Any]]:
        """Return the key of a program and what compiles it, which holds shapes alone."""
        placed = jax.tree.map(self._batch_like, batch)
        args = jax.tree.map(_like, ((state.params, state.optimizer, state.sync), placed))
        leaves, treedef = jax.tree.flatten(args)
        shapes = tuple((x.shape, str(x.dtype), x.sharding) for x in leaves)
        key = ("step", tuple(settings.tolist()), accumulate, treedef, shapes)
        like = TrainState(*args[0], control=state.control)

        def make() -> Any:
            return self._jitted(like, settings, accumulate).lower(*args).compile()

        return key, make

    def _batch_like(self, leaf: Any) -> jax.ShapeDtypeStruct:
        sharding = getattr(leaf, "sharding", None)
        if not isinstance(sharding, NamedSharding):
            sharding = self._placement.at(self.axis)
        dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
        return jax.ShapeDtypeStruct(np.shape(leaf), dtype, sharding=sharding)

    def _measured(self, state: TrainState, control: Control) -> tuple[TrainState, Control]:
        """Measure errors on the gradients added up, and choose the settings that come next."""
        averager = self._averager(state.params)
        shapes = tuple(x.shape for x in jax.tree.leaves(state.sync))
        program = self._programs.get(
            ("measure", shapes), lambda: schedule.measuring(self.mesh, averager, state.sync)
        )
        errors, norms, sync = program(state.sync)
        control = schedule.chosen(self.sync, averager.layers, self.workers, control, errors, norms)
        return replace(state, sync=sync), control

    def _check_batch(self, batch: Any) -> None:
        for leaf in jax.tree.leaves(batch):
            shape = np.shape(leaf)
            if not shape or shape[0] % self.workers:
                raise ValueError(
                    f"a batch of shape {shape}: expected a first dim that is a multiple of the "
                    f"{self.workers} workers along {self.axis!r}; change either"
                )


def _like(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)


def data_parallel(
    loss_and_grads: Callable[[Any, Any], tuple[Any, Any]],
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    *,
    axis: str = "data",
    sync: Sync,
    stacked: Sequence[str] = (),
    in_backward: bool = False,
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
        overlap=overlap,
    )
