"""The loop that measures, chooses and changes settings, for steps and for rounds alike."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxoverlap.train.compression import schedule
from jaxoverlap.train.compression.averager import Averager, averager_of
from jaxoverlap.train.compression.explain import explained, in_vain
from jaxoverlap.train.compression.state import Control, SyncState, checked, kept_by_workers
from jaxoverlap.train.compression.sync import Sync
from jaxoverlap.train.placement import WorkerPlacement, copies
from jaxoverlap.train.programs import Programs


class Turn(NamedTuple):
    """One average of a run.

    Attributes:
        averager: at the settings in use.
        control: for the average after this one.
        sync: the state of the compression before this average.
    """

    averager: Averager
    control: Control
    sync: SyncState


class ControlLoop:
    """The settings of a synchronisation from average to average, and programs by settings.

    Settings change at fixed numbers of averages, so that all processes and a run that resumes
    change them alike.

    Attributes:
        sync: the synchronisation.
        programs: compiled, of all settings that were used last.
    """

    def __init__(
        self, sync: Sync, mesh: Mesh, axis: str, stacked: Sequence[str], *, shared: bool = False
    ):
        self.sync, self.programs = sync, Programs()
        self._placement = WorkerPlacement(mesh, axis, False)
        self._stacked, self._shared = tuple(stacked), shared
        self._averagers: dict[Hashable, Averager] = {}

    def averager(self, params: Any) -> Averager:
        """Return the averager of one worker's parameters, at the default settings.

        It warns once where compression is off for most of the bytes, or can choose nothing.

        Args:
            params: arrays or shapes.
        """
        leaves, treedef = jax.tree.flatten(params)
        key = (treedef, *((leaf.shape, str(leaf.dtype)) for leaf in leaves))
        if key not in self._averagers:
            placement = self._placement
            self._averagers[key] = found = averager_of(
                self.sync,
                params,
                axis=placement.axis,
                workers=placement.workers,
                stacked=self._stacked,
                shared=self._shared,
            )
            if text := in_vain(found, params):
                warnings.warn(text, stacklevel=2)
        return self._averagers[key]

    def new_control(self, params: Any) -> Control:
        """Return the control of a run that begins."""
        averager = self.averager(params)
        return Control.new(averager.sync, averager.layers)

    def new_state(self, params: Any) -> SyncState:
        """Return the state of all workers when a run begins, with a dim of workers."""
        sync = self.averager(params).init(params)
        return kept_by_workers(sync, lambda leaf: copies(leaf, self._placement.workers))

    def shardings(self, params: Any, specs: Any) -> SyncState:
        """Return the sharding of each leaf of the state of all workers."""
        averager, placement = self.averager(params), self._placement
        leaves = jax.tree.leaves(specs, is_leaf=lambda spec: isinstance(spec, P))
        own = {str(n): placement.at(placement.axis, *leaves[n]) for n in averager.of_leaf}
        shapes = jax.eval_shape(averager.init, params)
        at = jax.tree.map(lambda _: placement.at(), shapes)
        return replace(
            at,
            error=own if shapes.error else {},
            accumulated=dict(own) if shapes.accumulated else {},
        )

    def in_use(self, params: Any, control: Control) -> Averager:
        """Return the averager at the settings in use."""
        averager = self.averager(params)
        control = checked(control, averager.sync, averager.layers)
        return averager.at(control.settings)

    def explain(self, params: Any, control: Control) -> str:
        """Return a table of what an average sends, a row a layer."""
        averager = self.averager(params)
        control = checked(control, averager.sync, averager.layers)
        return explained(averager.at(control.settings), control, params)

    def turn(
        self,
        params: Any,
        state: SyncState,
        control: Control,
        compile_beside: Callable[[Averager], None],
    ) -> Turn:
        """Measure and choose where that is due, and return what the next average is to do.

        Args:
            params: shapes or arrays of one worker's parameters.
            state: of all workers, on the mesh; it is donated where it is measured.
            control: of the run.
            compile_beside: starts to compile the program of an averager in a thread.
        """
        averager = self.averager(params)
        sync, layers = averager.sync, averager.layers
        control = checked(control, sync, layers)
        count = int(control.count)
        accumulate = schedule.accumulates(sync, count) and bool(layers)
        if layers:
            if schedule.measures(sync, count):
                state, control = self._measured(averager, state, control)
                for accumulates in (False, True):
                    compile_beside(averager.at(control.pending, accumulate=accumulates))
            if count == 0 < sync.start:
                first = schedule.accumulates(sync, sync.start)
                compile_beside(averager.at(control.pending, accumulate=first))
            control = schedule.in_use(sync, control)
        at = averager.at(control.settings, accumulate=accumulate)
        return Turn(at, control.stepped(), state)

    def _measured(
        self, averager: Averager, state: SyncState, control: Control
    ) -> tuple[SyncState, Control]:
        """Measure errors on the gradients added up, and choose the settings that come next."""
        mesh = self._placement.mesh
        shapes = tuple((x.shape, x.sharding) for x in jax.tree.leaves(state))
        program = self.programs.get(
            ("measure", shapes), lambda: schedule.measuring(mesh, averager, state)
        )
        errors, norms, state = program(state)
        workers = self._placement.workers
        return state, schedule.chosen(
            averager.sync, averager.layers, workers, control, errors, norms
        )
