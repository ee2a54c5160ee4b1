"""The loop that measures, chooses and changes settings, for steps and for rounds alike."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxoverlap.train.compression.averager import Averager, averager_of
from jaxoverlap.train.compression.choose import choose
from jaxoverlap.train.compression.explain import explained, in_vain
from jaxoverlap.train.compression.state import Control, SyncState
from jaxoverlap.train.compression.sync import Sync
from jaxoverlap.train.placement import WorkerPlacement, copies, over_workers
from jaxoverlap.train.programs import Programs

# Of an averager: the key of the program that averages with it, and what lowers that program.
ProgramOf = Callable[[Averager], tuple[Hashable, Callable[[], Any]]]


class Turn(NamedTuple):
    """One average of a run.

    Attributes:
        program: that averages.
        averager: at the settings in use.
        control: for the average after this one.
        sync: the state of the compression before this average.
    """

    program: Any
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
        self,
        sync: Sync,
        placement: WorkerPlacement,
        stacked: Sequence[str],
        *,
        shared: bool = False,
    ):
        self.sync, self.programs, self._placement = sync, Programs(), placement
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
        return sync.each_worker(lambda leaf: copies(leaf, self._placement.workers))

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
        return averager.at(control.checked(averager.sync, averager.layers).settings)

    def explain(self, params: Any, control: Control) -> str:
        """Return a table of what an average sends, a row a layer."""
        averager = self.averager(params)
        control = control.checked(averager.sync, averager.layers)
        return explained(averager.at(control.settings), control, params)

    def turn(self, params: Any, state: SyncState, control: Control, program_of: ProgramOf) -> Turn:
        """Measure and choose where that is due, and return what the next average is to do.

        Programs of settings that are chosen are compiled in a thread, from their choice to their
        use.

        Args:
            params: shapes or arrays of one worker's parameters.
            state: of all workers, on the mesh; it is donated where it is measured.
            control: of the run.
            program_of: gives the key of a program and what lowers it.
        """
        averager = self.averager(params)
        sync, layers = averager.sync, averager.layers
        control = control.checked(sync, layers)
        count, ahead = int(control.count), list[bool]()
        if layers and sync.measures(count):
            state, control = self._measured(averager, state, control)
            ahead = [False, True]
        if layers and count == 0 < sync.start:
            ahead.append(sync.accumulates(sync.start))
        for accumulate in ahead:
            chosen = averager.at(control.pending, accumulate=accumulate)
            self.programs.beside(*program_of(chosen))
        if sync.changes(count):
            control = replace(control, settings=control.pending)
        accumulate = sync.accumulates(count) and bool(layers)
        used = averager.at(control.settings, accumulate=accumulate)
        key, lower = program_of(used)
        program = self.programs.get(key, lambda: lower().compile())
        return Turn(program, used, control.stepped(), state)

    def _measured(
        self, averager: Averager, state: SyncState, control: Control
    ) -> tuple[SyncState, Control]:
        """Measure errors on the gradients added up, and choose the settings that come next."""
        shapes = tuple((x.shape, x.sharding) for x in jax.tree.leaves(state))
        program = self.programs.get(("measure", shapes), lambda: self._measuring(averager, state))
        errors, norms, state = program(state)
        errors, norms = np.asarray(errors, np.float32), np.asarray(norms, np.float32)
        choice = choose(
            averager.sync,
            averager.layers,
            averager.workers,
            errors=errors,
            norms=norms,
            norms_before=control.norms,
        )
        return state, replace(
            control,
            pending=choice.settings,
            reference=choice.reference,
            guarded=np.asarray(choice.guarded, np.int32),
            norms=norms,
            errors=errors,
        )

    def _measuring(self, averager: Averager, state: SyncState) -> Any:
        """Return the jitted program that measures all candidates; it donates the state."""
        mesh, axis, specs = self._placement.mesh, averager.axis, SyncState.specs(averager.axis)

        def measure(sync: SyncState) -> Any:
            errors, norms, new = averager.measure(sync.without_workers())
            return errors, norms, new.with_workers()

        at = self._placement.at()
        return jax.jit(
            over_workers(measure, mesh, axis, (specs,), (P(), P(), specs)),
            donate_argnums=0,
            out_shardings=(at, at, jax.tree.map(lambda leaf: leaf.sharding, state)),
        )
