"""The state of a synchronisation: what workers keep, and the choice of settings."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxoverlap.train.compression.layers import Layer
from jaxoverlap.train.compression.sync import RAW, Sync


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SyncState:
    """What a synchronisation keeps on devices, a pytree; see `transform`.

    Attributes:
        count: averages so far, int32.
        error: what a worker has not sent yet, float32, by the number of the leaf; empty without
            error feedback.
        accumulated: sums of a worker's gradients since the window of a measurement began, float32,
            by the number of the leaf; empty where nothing is measured.
        shared: the compressor's state of each layer, the same on all workers.
        finite: 1 for each layer whose last gradient was finite, and last for all other leaves.
    """

    count: Any
    error: dict[str, Any]
    accumulated: dict[str, Any]
    shared: tuple[Any, ...]
    finite: Any

    def each_worker(self, change: Callable[[Any], Any]) -> SyncState:
        """Change the leaves that differ between workers."""
        error, accumulated = jax.tree.map(change, (self.error, self.accumulated))
        return replace(self, error=error, accumulated=accumulated)

    def without_workers(self) -> SyncState:
        """Return a worker's state from its part of that of all: without the dim of workers."""
        return self.each_worker(lambda leaf: leaf.squeeze(0))

    def with_workers(self) -> SyncState:
        """Return a worker's part of the state of all from its own."""
        return self.each_worker(lambda leaf: leaf[None])

    @staticmethod
    def specs(axis: str) -> SyncState:
        """Return the specs of the state of all workers, for each field."""
        return SyncState(P(), P(axis), P(axis), P(), P())  # type: ignore[arg-type]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Control:
    """The settings, and what they were chosen by: small arrays on the host, a pytree.

    Attributes:
        count: steps so far.
        settings: of each layer, as indices among its candidates, int32 [layers]; -1 where it is not
            compressed.
        pending: the settings that come into use next.
        reference: those whose error was the budget of the last choice.
        guarded: 1 if the guard replaced the last choice by the reference.
        norms: of the layers' gradients at the last measurement; NaN before the first.
        errors: what was measured last, float32 [layers, most candidates]; NaN before the first.
        made_for: the number of the sync and the layers that the state belongs to, uint32.
    """

    count: Any
    settings: Any
    pending: Any
    reference: Any
    guarded: Any
    norms: Any
    errors: Any
    made_for: Any

    @classmethod
    def new(cls, sync: Sync, layers: Sequence[Layer]) -> Control:
        """Return the control of a run that begins: default settings, or none until `sync.start`."""
        default = np.array([sync.default(layer) for layer in layers], np.int32)
        most = max((len(sync.candidates(layer)) for layer in layers), default=0)
        return cls(
            count=np.zeros((), np.int32),
            settings=np.full_like(default, RAW) if sync.start else default,
            pending=default,
            reference=default,
            guarded=np.zeros((), np.int32),
            norms=np.full(len(layers), np.nan, np.float32),
            errors=np.full((len(layers), most), np.nan, np.float32),
            made_for=np.asarray(sync.made_for(layers), np.uint32),
        )

    def stepped(self) -> Control:
        """Return the control after one more step."""
        return replace(self, count=np.asarray(self.count + 1, np.int32))

    def checked(self, sync: Sync, layers: Sequence[Layer]) -> Control:
        """Return the control as numpy arrays, wherever a checkpoint has put them.

        Raises:
            ValueError: if the state was made for another sync, another model, other workers, or
                names settings that there are not.
        """
        if isinstance(self.made_for, jax.ShapeDtypeStruct):  # of shapes: a run that begins
            return Control.new(sync, layers)
        control = jax.tree.map(np.asarray, self)
        expected = sync.made_for(layers)
        if int(control.made_for) != expected or control.settings.shape != (len(layers),):
            raise ValueError(
                f"this state was made for another synchronisation or model (number "
                f"{int(control.made_for)}; here {expected}: {sync}). Resume with the settings that "
                "the checkpoint was written with, or start from its parameters with init(); the "
                "state is as it was"
            )
        for layer, now, next_ in zip(layers, control.settings, control.pending, strict=True):
            known = range(len(sync.candidates(layer)))
            if next_ not in known or (now not in known and (now != RAW or not sync.start)):
                raise ValueError(
                    f"settings {now} and {next_} of {layer.name}: expected indices of the "
                    f"candidates {sync.candidates(layer)}"
                )
        return control


UPDATE = "the optimizer's update"


class NonFiniteGradientError(ValueError):
    """A gradient was infinite or not a number; it was left out, with all others of its step.

    Attributes:
        step: its number, from 0.
        layers: the names of the layers; "raw leaves" for those that are not compressed, and
            "the optimizer's update" where gradients were finite and that was not.
    """

    def __init__(self, step: int, layers: list[str]):
        self.step, self.layers = step, layers
        gradients = f"the gradient of {', '.join(layers)}, or its average,"
        super().__init__(
            f"step {step}: {UPDATE if layers == [UPDATE] else gradients} is infinite or not a "
            "number. The step was left out: parameters, optimizer and error feedback are as before "
            "it. Look at its batch or lower the learning rate, and go on from the state you have"
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """The state of training, a pytree to checkpoint.

    Attributes:
        params: parameters, the same on all workers.
        optimizer: the optimizer's state.
        sync: what the synchronisation keeps on devices; a leading dim of workers on what differs.
        control: the settings (`Control`), on the host.
        model: the model's state besides its parameters, the same on all workers; None without one.
    """

    params: Any
    optimizer: Any
    sync: SyncState
    control: Any
    model: Any = None

    @property
    def arrays(self) -> TrainState:
        """Return what is on devices: the state without its control."""
        return replace(self, control=None)

    def with_host_of(self, other: TrainState) -> TrainState:
        """Return this state with what another one has on the host."""
        return replace(self, control=other.control)

    def each_on_host(self, change: Callable[[Any], Any]) -> TrainState:
        """Change the leaves that are on the host, arrays or shapes."""
        return replace(self, control=jax.tree.map(change, self.control))


class Flags(deque[tuple[int, Any, Sequence[Layer]]]):
    """The flags of the last averages, which the host reads some steps late, so as not to wait."""

    def check(self, unread: int) -> None:
        """Read all but the last `unread` flags; raise for the first that is not 1.

        Raises:
            NonFiniteGradientError: naming the step and its layers.
        """
        while len(self) > unread:
            step, finite, layers = self.popleft()
            bad = np.flatnonzero(np.asarray(finite) != 1)
            if len(bad):
                self.clear()
                names = [*(layer.name for layer in layers), "raw leaves"]
                gradients = [names[n] for n in bad if n < len(names)]
                raise NonFiniteGradientError(step, gradients or [UPDATE])
