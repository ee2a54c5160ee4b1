"""Average a tree of gradients over workers: compressed layers, and the rest in one all-reduce."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxoverlap.train.compression.compressors.compressor import (
    Averaged,
    Compressor,
    NoCompression,
    Setting,
    Worker,
    sent,
)
from jaxoverlap.train.compression.layers import Layer, layers_of
from jaxoverlap.train.compression.state import SyncState
from jaxoverlap.train.compression.sync import RAW, Sync
from jaxoverlap.train.compression.wire import Average, mean_of, sent_bytes, together
from jaxoverlap.train.finite import all_fine


class LeafState(NamedTuple):
    """The compression state of one leaf, or of one matrix of a stacked leaf.

    Attributes:
        error, accumulated: like the gradient, float32, or None.
        shared: the compressor's state of each layer of the leaf.
        finite: 1 where the gradient was finite on this worker, of each layer of the leaf.
    """

    error: jax.Array | None
    accumulated: jax.Array | None
    shared: tuple[Any, ...]
    finite: tuple[jax.Array, ...]


class Reduced(NamedTuple):
    """A leaf whose average is done already."""

    mean: jax.Array
    state: LeafState


class _Started(NamedTuple):
    """A leaf whose average is under way: its gradient, its state, and a generator a matrix."""

    gradient: jax.Array
    state: LeafState
    averages: list[Average]


@dataclass(frozen=True)
class Averager:
    """The functions of a synchronisation, for one tree of parameters and fixed settings.

    They run where the workers' axis is manual, and see one worker's arrays.

    Attributes:
        sync: the compressor, and whether gradients are measured.
        structure: the parameters' tree, whose leaves are numbered; a None of it is no leaf.
        layers: those that are compressed.
        settings: one for each layer; None for a layer that is uncompressed for now.
        axis: the mesh axis of the workers.
        workers: its size.
        accumulate: whether gradients are added up for a measurement.
        left_raw: uncompressed matrices, as the default setting does not halve their bytes.
        fixed: whether `sync` was to choose settings and has nothing to choose (`Sync.is_fixed`);
            it then never measures.
    """

    sync: Sync
    structure: Any
    layers: tuple[Layer, ...]
    settings: tuple[Setting | None, ...]
    axis: str
    workers: int
    accumulate: bool = False
    left_raw: tuple[Layer, ...] = ()
    fixed: bool = False

    @cached_property
    def of_leaf(self) -> dict[int, list[int]]:
        """Return the numbers of the layers that each compressed leaf has."""
        found = dict[int, list[int]]()
        for number, layer in enumerate(self.layers):
            found.setdefault(layer.leaf, []).append(number)
        return found

    def init(self, params: Any) -> SyncState:
        """Return the state of a worker; parameters are arrays or shapes."""
        leaves = jax.tree.leaves(params)
        zeros = {str(n): jnp.zeros(leaves[n].shape, jnp.float32) for n in self.of_leaf}
        feeds = self.sync.compressor.error_feedback
        return SyncState(
            count=jnp.zeros((), jnp.int32),
            error=zeros if feeds else {},
            accumulated=dict(zeros) if self.sync.every else {},
            shared=tuple(map(self._shared, range(len(self.layers)))),
            finite=jnp.ones(len(self.layers) + 1, jnp.float32),
        )

    def _shared(self, number: int) -> Any:
        layer, key = self.layers[number], jax.random.fold_in(jax.random.key(self.sync.seed), number)
        settings = self.sync.candidates(layer)
        if not layer.stack:
            return self.sync.compressor.init(layer, key, settings)
        keys = jax.random.split(key, layer.stack)
        each = [self.sync.compressor.init(layer, k, settings) for k in keys]
        return jax.tree.map(lambda *parts: jnp.stack(parts), *each)

    # -- one leaf, or one matrix of a stacked leaf ------------------------------------------------

    def leaf_states(self, state: SyncState) -> dict[int, LeafState]:
        """Return what belongs to each compressed leaf."""
        return {
            leaf: LeafState(
                state.error.get(str(leaf)),
                state.accumulated.get(str(leaf)),
                tuple(state.shared[n] for n in numbers),
                tuple(jnp.ones((), jnp.float32) for _ in numbers),
            )
            for leaf, numbers in self.of_leaf.items()
        }

    def _started(
        self, leaf: int, gradient: jax.Array, state: LeafState, count: Any, position: Any = None
    ) -> _Started:
        """Add what was held back to a gradient, and start the average of its matrices.

        Args:
            leaf: its number.
            gradient: the leaf's, or that of one matrix of its stack.
            state: of the same.
            count: averages so far.
            position: in the stack, of the one matrix.
        """
        total = gradient.astype(jnp.float32)
        if state.error is not None:
            total = total + self.sync.error_decay * state.error
        if self.accumulate:
            assert state.accumulated is not None
            state = state._replace(accumulated=state.accumulated + total)
        averages = list[Average]()
        for number, shared in zip(self.of_leaf[leaf], state.shared, strict=True):
            if position is None:
                parts = self._matrices(number, total, shared)
            else:
                layer = self.layers[number]
                parts = [(position, total.reshape(layer.rows, layer.cols), shared)]
            averages += [self._average(number, *part, count) for part in parts]
        return _Started(gradient, state._replace(finite=self._finite(leaf, total)), averages)

    def _matrices(self, number: int, leaf: jax.Array, shared: Any) -> list[tuple[int, Any, Any]]:
        """Return the matrices of a layer: position in the stack, values, the compressor's state."""
        layer = self.layers[number]

        def own(position: int) -> Any:
            return jax.tree.map(lambda x: x[position], shared) if layer.stack else shared

        return [(n, matrix, own(n)) for n, matrix in enumerate(layer.matrices(leaf))]

    def _average(
        self, number: int, position: Any, matrix: jax.Array, shared: Any, count: Any
    ) -> Average:
        worker = lax.axis_index(self.axis)
        key = jax.random.key(self.sync.seed, impl="rbg")  # many bits at little cost
        for part in (count, number, position, worker):
            key = jax.random.fold_in(key, part)
        at = Worker(self.workers, worker, key)
        compressor, setting = self.method(number)
        layer = self.layers[number]
        return compressor.average(matrix, shared, layer=layer, setting=setting, at=at)

    def method(self, number: int) -> tuple[Compressor, Setting]:
        """Return the compressor of a layer at the averager's settings, and its setting."""
        setting = self.settings[number]
        if setting is None:
            return NoCompression(error_feedback=self.sync.compressor.error_feedback), 1
        return self.sync.compressor, setting

    def _done(self, leaf: int, started: _Started, done: list[Averaged]) -> Reduced:
        """Put a leaf, or one matrix of a stacked one, together from its matrices' averages."""
        gradient, old, shared = started.gradient, started.state, list[Any]()
        states = [one.state for one in done]
        for number in self.of_leaf[leaf]:
            count = len(done) // len(self.of_leaf[leaf])  # the stack's, or one of a scan's position
            parts, states = states[:count], states[count:]
            stacked = self.layers[number].stack and gradient.ndim == len(self.layers[number].shape)
            shared.append(jax.tree.map(lambda *p: jnp.stack(p), *parts) if stacked else parts[0])
        mean = _joined([one.mean for one in done], gradient.shape).astype(gradient.dtype)
        error = old.error
        if error is not None:
            error = _joined([one.kept for one in done if one.kept is not None], gradient.shape)
        return Reduced(mean, old._replace(error=error, shared=tuple(shared)))

    def _together(
        self, started: Mapping[int, _Started], more: Sequence[jax.Array] = ()
    ) -> tuple[dict[int, Reduced], list[jax.Array]]:
        """Run the averages of several leaves, and of more values, side by side."""
        averages = [average for one in started.values() for average in one.averages]
        averages += map(mean_of, more)
        results = iter(together(averages, axis=self.axis, workers=self.workers))
        done = {
            leaf: self._done(leaf, one, list(itertools.islice(results, len(one.averages))))
            for leaf, one in started.items()
        }
        return done, list(results)

    def reduce_slices(
        self,
        gradients: Mapping[int, jax.Array],
        states: Mapping[int, LeafState],
        count: Any,
        position: Any,
    ) -> dict[int, Reduced]:
        """Average one matrix of each of several stacked leaves; arrays lack the stack's dim.

        Args:
            gradients: by the number of the leaf.
            states: the same; `shared` and `error` of this position.
            count: averages so far.
            position: in the stack.
        """
        started = {
            leaf: self._started(leaf, gradient, states[leaf], count, position)
            for leaf, gradient in gradients.items()
        }
        return self._together(started)[0]

    # -- the whole tree ---------------------------------------------------------------------------

    def average(
        self,
        gradients: Any,
        state: SyncState,
        *,
        reduced: Mapping[int, Reduced] | None = None,
        also: Sequence[jax.Array] = (),
    ) -> tuple[Any, SyncState, list[jax.Array]]:
        """Average gradients over the workers.

        Args:
            gradients: a tree like the parameters; a leaf that is None is left out.
            state: of this worker.
            reduced: leaves whose average is done already, by number.
            also: more arrays to average, in the same all-reduce as the uncompressed leaves.

        Returns:
            The means, the state, and the means of `also`.
        """
        leaves = self.structure.flatten_up_to(gradients)
        present = {n: leaf for n, leaf in enumerate(leaves) if leaf is not None}
        states, before = self.leaf_states(state), dict(reduced or {})
        started = {
            leaf: self._started(leaf, present[leaf], states[leaf], state.count)
            for leaf in self.of_leaf
            if leaf in present and leaf not in before
        }
        uncompressed = [n for n in present if n not in self.of_leaf]
        known = {leaf: one.state.finite for leaf, one in {**before, **started}.items()}
        finite = self._flags(known, [present[n] for n in uncompressed])
        more = [*(present[n] for n in uncompressed), *also, finite]
        done, results = self._together(started, more)
        done |= before
        means = {leaf: one.mean for leaf, one in done.items()}
        means |= zip(uncompressed, results, strict=False)
        # Finite gradients may have a mean that is not: sums of 16 bits are soon too large.
        known = {leaf: self._finite(leaf, one.mean) for leaf, one in done.items()}
        after = self._flags(known, [means[n] for n in uncompressed])
        new = self._with(state, {leaf: one.state for leaf, one in done.items()})
        new = replace(new, finite=(results[-1] == 1).astype(jnp.float32) * after)
        tree = self.structure.unflatten(map(means.get, range(len(leaves))))
        return tree, new, results[len(uncompressed) : -1]

    def _finite(self, leaf: int, values: jax.Array) -> tuple[jax.Array, ...]:
        """Return 1 for each layer of a leaf whose values are finite on this worker."""
        own = (self.layers[number].values(values) for number in self.of_leaf[leaf])
        return tuple(jnp.isfinite(part).all().astype(jnp.float32) for part in own)

    def _flags(
        self, finite: Mapping[int, tuple[jax.Array, ...]], uncompressed: Sequence[jax.Array]
    ) -> jax.Array:
        """Return 1 for each layer that is finite here, and last for all uncompressed leaves.

        Args:
            finite: by leaf, `LeafState.finite`.
            uncompressed: values of the other leaves.
        """
        flags = [jnp.ones((), jnp.float32) for _ in self.layers]
        for leaf, own in finite.items():
            for number, flag in zip(self.of_leaf[leaf], own, strict=True):
                flags[number] = flag.min()
        return jnp.stack([*flags, all_fine(uncompressed).astype(jnp.float32)])

    def _with(self, state: SyncState, leaves: Mapping[int, LeafState]) -> SyncState:
        """Return the state of all leaves with that of some of them, after one more average."""
        shared = list(state.shared)
        error, accumulated = dict(state.error), dict(state.accumulated)
        for leaf, one in leaves.items():
            for number, own in zip(self.of_leaf[leaf], one.shared, strict=True):
                shared[number] = own
            if str(leaf) in error:
                error[str(leaf)] = one.error
            if str(leaf) in accumulated:
                accumulated[str(leaf)] = one.accumulated
        return SyncState(state.count + 1, error, accumulated, tuple(shared), state.finite)

    # -- measuring --------------------------------------------------------------------------------

    def at(self, places: Any, *, accumulate: bool = False) -> Averager:
        """Return the averager at other settings, given as indices into each layer's candidates."""
        chosen = tuple(
            None if place == RAW else self.sync.candidates(layer)[place]
            for layer, place in zip(self.layers, places.tolist(), strict=True)
        )
        return replace(self, settings=chosen, accumulate=accumulate)

    def measure(self, state: SyncState) -> tuple[jax.Array, jax.Array, SyncState]:
        """Measure what every candidate of every layer would lose of the gradients added up.

        Returns:
            Errors [layers, most candidates], NaN where a layer has fewer, and the gradients' norms
            [layers]: each the mean over workers, and for a stack the sum over its matrices; and
            the state with its sums at zero.
        """
        most = max(len(self.sync.candidates(layer)) for layer in self.layers)
        rows, norms = [], []
        for number, layer in enumerate(self.layers):
            settings, shared = self.sync.candidates(layer), state.shared[number]
            summed = state.accumulated[str(layer.leaf)] / self.sync.accumulate
            row, norm = jnp.zeros(len(settings), jnp.float32), jnp.zeros((), jnp.float32)
            for _, matrix, own in self._matrices(number, summed, shared):
                row += self.sync.compressor.errors(matrix, own, settings)
                norm += jnp.linalg.norm(matrix)
            rows.append(jnp.pad(row, (0, most - len(settings)), constant_values=jnp.nan))
            norms.append(norm)
        both = jnp.concatenate([jnp.stack(rows), jnp.stack(norms)[:, None]], axis=1)
        mean = lax.psum(both, self.axis) / self.workers
        zeros = jax.tree.map(jnp.zeros_like, state.accumulated)
        return mean[:, :-1], mean[:, -1], replace(state, accumulated=zeros)

    # -- bytes ------------------------------------------------------------------------------------

    def sent_bytes(self, params: Any, *, also: int = 0) -> float:
        """Return the bytes that a worker sends in an average: the closed form.

        Args:
            params: arrays or shapes.
            also: bytes of what else is averaged with the uncompressed leaves.
        """
        total = sum(self.layer_bytes(n) for n in range(len(self.layers)))
        raw = sum(
            leaf.size * jnp.dtype(leaf.dtype).itemsize
            for n, leaf in enumerate(jax.tree.leaves(params))
            if n not in self.of_leaf
        )
        flags = 4 * (len(self.layers) + 1)
        return total + sent_bytes("mean", raw + flags + also, self.workers)

    def layer_bytes(self, number: int) -> float:
        """Return the bytes that a worker sends for all matrices of one layer."""
        layer, (compressor, setting) = self.layers[number], self.method(number)
        return layer.count * sent(compressor, layer, setting, self.workers)


def _joined(parts: list[jax.Array], shape: tuple[int, ...]) -> jax.Array:
    return (parts[0] if len(parts) == 1 else jnp.stack(parts)).reshape(shape)


def averager_of(
    sync: Sync,
    params: Any,
    *,
    axis: str,
    workers: int,
    stacked: Sequence[str] = (),
    shared: bool = False,
) -> Averager:
    """Return the averager of a tree of parameters, at the default settings."""
    matrices = layers_of(params, stacked=stacked, shared=shared, raw=sync.raw)
    layers = sync.compressed(matrices, workers)
    settings = tuple(sync.compressor.at(sync.compressor.setting, layer) for layer in layers)
    left_raw = tuple(layer for layer in matrices if workers > 1 and layer not in layers)
    fixed = bool(layers) and sync.is_fixed(layers)
    if fixed:
        sync = replace(sync, every=0, accumulate=0, beside=0)
    structure = jax.tree.structure(params)
    return Averager(
        sync, structure, layers, settings, axis, workers, left_raw=left_raw, fixed=fixed
    )
