"""Say when settings are measured, chosen and changed; and put a choice into the control."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxoverlap.train.compression.averager import Averager
from jaxoverlap.train.compression.choose import choose
from jaxoverlap.train.compression.layers import Layer
from jaxoverlap.train.compression.state import Control, SyncState
from jaxoverlap.train.compression.sync import Sync
from jaxoverlap.train.compression.worker import of_one, specs_of, with_workers


def measures(sync: Sync, count: int) -> bool:
    """Return whether settings are chosen before step `count`."""
    return bool(sync.every) and count > 0 and count % sync.every == 0


def accumulates(sync: Sync, count: int) -> bool:
    """Return whether the gradients of step `count` are added up for the next choice."""
    return bool(sync.every) and count % sync.every >= sync.every - sync.accumulate


def in_use(sync: Sync, control: Control) -> Control:
    """Return the control with the chosen settings in use, if their step has come."""
    count = int(control.count)
    if count < sync.start:
        return control
    begins = 0 < sync.start == count
    if begins or (sync.every and count >= sync.every and count % sync.every == sync.beside):
        return replace(control, settings=control.pending)
    return control


def measure_over(mesh: Mesh, averager: Averager) -> Callable[[SyncState], Any]:
    """Return a function that measures over a mesh, from a state with a dim of workers."""

    def measured(sync: SyncState) -> Any:
        errors, norms, new = averager.measure(of_one(sync))
        return errors, norms, with_workers(new)

    def call(sync: SyncState) -> Any:
        spec = specs_of(sync, averager.axis)
        return jax.shard_map(
            measured,
            mesh=mesh,
            in_specs=(spec,),
            out_specs=(P(), P(), spec),
            axis_names={averager.axis},
            check_vma=False,
        )(sync)

    return call


def measuring(mesh: Mesh, averager: Averager, sync: SyncState) -> Any:
    """Return the jitted program that measures all candidates; it donates the state."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, sync)
    replicated = jax.sharding.NamedSharding(mesh, P())
    return jax.jit(
        measure_over(mesh, averager),
        donate_argnums=0,
        out_shardings=(replicated, replicated, shardings),
    )


def chosen(
    sync: Sync, layers: Sequence[Layer], workers: int, control: Control, errors: Any, norms: Any
) -> Control:
    """Return the control with settings that come into use next, from what was measured."""
    errors, norms = np.asarray(errors, np.float32), np.asarray(norms, np.float32)
    choice = choose(sync, layers, workers, errors=errors, norms=norms, norms_before=control.norms)
    return replace(
        control,
        pending=choice.settings,
        reference=choice.reference,
        guarded=np.asarray(choice.guarded, np.int32),
        norms=norms,
        errors=errors,
    )
