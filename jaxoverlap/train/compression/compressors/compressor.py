"""Define what a compressor is, and the one that sends all: averages, states, bytes and errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Protocol, Self, runtime_checkable

import jax
import jax.numpy as jnp

from jaxoverlap.train.compression.layers import Layer
from jaxoverlap.train.compression.wire import Average, Kind, WireRequest, sent_bytes

Setting = int | float  # a rank, a number of bits, a fraction


class Averaged(NamedTuple):
    """The outcome of an average of one matrix.

    Attributes:
        mean: of all workers' matrices, as far as it was sent: the same on all workers to the bit.
        kept: the error, which this worker did not send of its matrix; the mean over workers of
            `kept`, plus `mean`, is the mean of the matrices. None without error feedback.
        state: for the next average.
    """

    mean: jax.Array
    kept: jax.Array | None
    state: Any


@runtime_checkable
class Compressor(Protocol):
    """A method to average matrices over workers with fewer bytes.

    Attributes:
        setting: the default one, which `uniform` uses for every layer.
        error_feedback: whether what was not sent is added to the next gradient.
        memory_passes: how often an average reads or writes the matrix, in float32; for its price.
    """

    memory_passes: ClassVar[int]

    @property
    def setting(self) -> Setting:
        """Return the default setting."""
        ...

    @property
    def error_feedback(self) -> bool:
        """Return whether what was not sent is added to the next gradient."""
        ...

    def with_setting(self, setting: Setting) -> Compressor:
        """Return the same with another default setting, or raise if there is no such one."""
        ...

    def at(self, setting: Setting, layer: Layer) -> Setting:
        """Return a setting as this layer can have it: a rank is at most the layer's own."""
        ...

    def candidates(self, layer: Layer) -> tuple[Setting, ...]:
        """Return the settings to choose from, in order of bytes; the default one is among them."""
        ...

    def init(self, layer: Layer, key: jax.Array, settings: Sequence[Setting]) -> Any:
        """Return the state of one matrix, the same on all workers, for any of the settings."""
        ...

    def average(
        self, matrix: jax.Array, state: Any, *, layer: Layer, setting: Setting, at: Worker
    ) -> Average:
        """Average a float32 matrix over the workers: a generator that returns `Averaged`."""
        ...

    def requests(self, layer: Layer, setting: Setting, workers: int) -> list[tuple[Kind, float]]:
        """Return kind and bytes of each value that `average` yields for one matrix, in order."""
        ...

    def errors(self, matrix: jax.Array, state: Any, settings: Sequence[Setting]) -> jax.Array:
        """Return the norm of what each setting would lose of a matrix, [settings], in one go."""
        ...


class Worker(NamedTuple):
    """The index of a worker in an average.

    Attributes:
        workers: how many there are.
        number: of this one, traced.
        key: for what is random: different for every worker, layer and step.
    """

    workers: int
    number: jax.Array
    key: jax.Array


class OneSetting:
    """A base of compressors whose setting is one field, and that keep no state.

    Attributes:
        field: that field's name.
    """

    field: ClassVar[str]

    @property
    def setting(self) -> Setting:
        """Return the default setting."""
        return getattr(self, self.field)

    def with_setting(self, setting: Setting) -> Self:
        """Return the same with another default setting, or raise if there is no such one."""
        return replace(self, **{self.field: setting})  # type: ignore[type-var]  # a dataclass

    def at(self, setting: Setting, layer: Layer) -> Setting:
        """Return the setting, which every layer can have."""
        return setting

    def init(self, layer: Layer, key: jax.Array, settings: Sequence[Setting]) -> Any:
        """Return no state."""
        return None


def sent(compressor: Compressor, layer: Layer, setting: Setting, workers: int) -> float:
    """Return the bytes that a worker sends for one matrix of a layer: the closed form."""
    requests = compressor.requests(layer, setting, workers)
    return sum(sent_bytes(kind, size, workers) for kind, size in requests)


@dataclass(frozen=True, kw_only=True)
class NoCompression:
    """Send matrices as they are: what the others are compared with.

    With error feedback nothing is left for the next gradient.
    """

    memory_passes: ClassVar[int] = 0
    setting: int = 1
    error_feedback: bool = False

    def with_setting(self, setting: Setting) -> NoCompression:
        """Return the same."""
        return self

    def at(self, setting: Setting, layer: Layer) -> Setting:
        """Return the only setting."""
        return 1

    def candidates(self, layer: Layer) -> tuple[Setting, ...]:
        """Return the only setting."""
        return (1,)

    def init(self, layer: Layer, key: jax.Array, settings: Sequence[Setting]) -> None:
        """Return no state."""

    def average(
        self, matrix: jax.Array, state: Any, *, layer: Layer, setting: Setting, at: Worker
    ) -> Average:
        """Average a matrix: one mean."""
        mean = yield WireRequest("mean", matrix.astype(layer.dtype))
        kept = jnp.zeros_like(matrix) if self.error_feedback else None
        return Averaged(mean.astype(jnp.float32), kept, state)

    def requests(self, layer: Layer, setting: Setting, workers: int) -> list[tuple[Kind, float]]:
        """Return kind and bytes of each value that `average` yields for one matrix, in order."""
        return [("mean", layer.size * layer.itemsize)]

    def errors(self, matrix: jax.Array, state: Any, settings: Sequence[Setting]) -> jax.Array:
        """Return no error."""
        return jnp.zeros(len(settings))


none = NoCompression  # the name by which it is made
