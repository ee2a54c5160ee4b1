"""Average a tree of gradients over workers: compressed layers, and the rest in one all-reduce."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxoverlap.train.compression.compressors.compressor import Averaged, Setting, Worker, sent
from jaxoverlap.train.compression.layers import Layer, layers_of
from jaxoverlap.train.compression.state import SyncState
from jaxoverlap.train.compression.sync import RAW, Sync, raw_bytes
from jaxoverlap.train.compression.wire import Average, mean_of, sent_bytes, together


class LeafState(NamedTuple):
    """What belongs to one leaf, or to one matrix of a stacked leaf.

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


@dataclass(frozen=True)
class Averager:
    """The functions of a synchronisation, for one tree of parameters and fixed settings.

    They run where the workers' axis is manual, and see one worker's arrays.

    Attributes:
        sync: the compressor, and whether gradients are measured.
        layers: those that are compressed.
        settings: one for each layer; None for a layer that goes raw for now.
        axis: the mesh axis of the workers.
        workers: its size.
        accumulate: whether gradients are added up for a measurement.
        left_raw: matrices that go raw, as the default setting does not halve their bytes.
        fixed: whether `sync` was to choose settings and has nothing to choose (`Sync.is_fixed`);
            it then never measures.
    """

    sync: Sync
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
            finite=jnp.ones(len(self.layers) + 1),
        )

    def _shared(self, number: int) -> Any:
        layer, key = self.layers[number], jax.random.fold_in(jax.random.key(self.sync.seed), number)
        settings = self.sync.candidates(layer)
        if not layer.stack:
            return self.sync.compressor.init(layer, key, settings)
        keys = jax.random.split(key, layer.stack)
        each = [self.sync.compressor.init(layer, k, settings) for k in keys]
        return jax.tree.map(lambda *parts: jnp.stack(parts), *each)

    # -- one leaf ---------------------------------------------------------------------------------

    def leaf_states(self, state: SyncState) -> dict[int, LeafState]:
        """Return what belongs to each compressed leaf."""
        return {
            leaf: LeafState(
                state.error.get(str(leaf)),
                state.accumulated.get(str(leaf)),
                tuple(state.shared[n] for n in numbers),
                tuple(jnp.ones(()) for _ in numbers),
            )
            for leaf, numbers in self.of_leaf.items()
        }

    def compensated(self, gradient: jax.Array, state: LeafState) -> tuple[jax.Array, LeafState]:
        """Return the gradient and what was held back, float32, and the state with it added up."""
        whole = gradient.astype(jnp.float32)
        if state.error is not None:
            whole = whole + self.sync.error_decay * state.error
        if self.accumulate:
            assert state.accumulated is not None
            state = state._replace(accumulated=state.accumulated + whole)
        return whole, state

    def averages(
        self, leaf: int, whole: jax.Array, state: LeafState, count: Any
    ) -> list[Generator[Any, Any, Averaged]]:
        """Return what averages the matrices of a leaf, in order."""
        found = []
        for number, shared in zip(self.of_leaf[leaf], state.shared, strict=True):
            layer = self.layers[number]
            for at, matrix in enumerate(layer.matrices(whole)):
                own = jax.tree.map(lambda x, at=at: x[at], shared) if layer.stack else shared
                found.append(self._average(number, matrix, own, count, at))
        return found

    def _average(
        self, number: int, matrix: jax.Array, shared: Any, count: Any, position: Any
    ) -> Generator[Any, Any, Averaged]:
        worker = lax.axis_index(self.axis)
        key = jax.random.key(self.sync.seed, impl="rbg")  # many bits at little cost
        for part in (count, number, position, worker):
            key = jax.random.fold_in(key, part)
        at = Worker(self.workers, worker, key)
        layer, setting = self.layers[number], self.settings[number]
        if setting is None:
            return _raw(matrix, shared, layer, self.sync.compressor.error_feedback)
        return self.sync.compressor.average(matrix, shared, layer=layer, setting=setting, at=at)

    def put_together(
        self, leaf: int, gradient: jax.Array, done: list[Averaged], old: LeafState
    ) -> Reduced:
        """Put a leaf together from the averages of its matrices."""
        shared, at = list[Any](), 0
        for number in self.of_leaf[leaf]:
            layer = self.layers[number]
            parts = [one.state for one in done[at : at + layer.count]]
            stacked = jax.tree.map(lambda *p: jnp.stack(p), *parts) if layer.stack else parts[0]
            shared.append(stacked)
            at += layer.count
        mean = _joined([one.mean for one in done], gradient.shape).astype(gradient.dtype)
        error = old.error
        if error is not None:
            error = _joined([one.kept for one in done if one.kept is not None], gradient.shape)
        return Reduced(mean, LeafState(error, old.accumulated, tuple(shared), old.finite))

    # -- one matrix of each of several stacked leaves, inside a scan -------------------------------

    def reduce_slices(
        self,
        gradients: Mapping[int, jax.Array],
        states: Mapping[int, LeafState],
        count: Any,
        position: Any,
    ) -> dict[int, Reduced]:
        """Average one matrix of each leaf; arrays lack the stack's dim.

        Args:
            gradients: by the number of the leaf.
            states: the same; `shared` and `error` of this position.
            count: averages so far.
            position: in the stack.
        """
        given, averages = dict[int, Any](), list[Any]()
        for leaf, gradient in gradients.items():
            whole, state = self.compensated(gradient, states[leaf])
            (number,) = self.of_leaf[leaf]
            layer = self.layers[number]
            matrix = whole.reshape(layer.rows, layer.cols)
            averages.append(self._average(number, matrix, state.shared[0], count, position))
            given[leaf] = gradient, whole, state
        done = together(averages, axis=self.axis, workers=self.workers)
        found = dict[int, Reduced]()
        for (leaf, (gradient, whole, state)), one in zip(given.items(), done, strict=True):
            error = None if state.error is None else one.kept.reshape(gradient.shape)
            finite = (jnp.isfinite(whole).all().astype(jnp.float32),)
            new = LeafState(error, state.accumulated, (one.state,), finite)
            mean = one.mean.reshape(gradient.shape).astype(gradient.dtype)
            found[leaf] = Reduced(mean, new)
        return found

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
            also: more arrays to average, in the same all-reduce as the raw leaves.

        Returns:
            The means, the state, and the means of `also`.
        """
        leaves, treedef = jax.tree.flatten(gradients, is_leaf=lambda leaf: leaf is None)
        done, states = dict(reduced or {}), self.leaf_states(state)
        waiting, averages = list[Any](), list[Any]()
        for leaf in self.of_leaf:
            if leaf in done or leaves[leaf] is None:
                continue
            whole, own = self.compensated(leaves[leaf], states[leaf])
            several = self.averages(leaf, whole, own, state.count)
            averages += several
            waiting.append((leaf, whole, own, len(several)))
        raw = [n for n, leaf in enumerate(leaves) if leaf is not None and n not in self.of_leaf]
        given = {leaf: whole for leaf, whole, _, _ in waiting}
        finite = self._finite(given, [leaves[n] for n in raw], done)
        averages += [mean_of(leaves[n]) for n in raw]
        averages += [mean_of(value) for value in (*also, finite)]
        results = together(averages, axis=self.axis, workers=self.workers)
        at = 0
        for leaf, _, own, count in waiting:
            part = results[at : at + count]
            done[leaf] = self.put_together(leaf, leaves[leaf], part, own)
            at += count
        means = list(leaves)
        for leaf, one in done.items():
            means[leaf] = one.mean
        means = [results[at + raw.index(n)] if n in raw else mean for n, mean in enumerate(means)]
        others = results[at + len(raw) : -1]
        new = self._with(state, {**states, **{leaf: one.state for leaf, one in done.items()}})
        # Finite gradients may have a mean that is not: sums of 16 bits are soon too large.
        after = self._finite({leaf: means[leaf] for leaf in done}, [means[n] for n in raw])
        new = replace(new, finite=(results[-1] == 1).astype(jnp.float32) * after)
        return jax.tree.unflatten(treedef, means), new, others

    def _finite(
        self,
        compressed: Mapping[int, jax.Array],
        raw: Sequence[jax.Array],
        done: Mapping[int, Reduced] | None = None,
    ) -> jax.Array:
        """Return 1 for each layer whose values are finite here, and last for uncompressed leaves.

        Flags of the leaves that are `done` are known already.
        """
        flags = [jnp.ones(()) for _ in self.layers]
        for leaf, whole in compressed.items():
            for number in self.of_leaf[leaf]:
                part = self.layers[number].part
                own = whole if part is None else whole[part]
                flags[number] = jnp.isfinite(own).all().astype(jnp.float32)
        for leaf, one in (done or {}).items():
            for number, flag in zip(self.of_leaf[leaf], one.state.finite, strict=True):
                flags[number] = flag.min()
        rest = jnp.array(True)
        for value in raw:
            rest &= jnp.isfinite(value).all()
        return jnp.stack([*flags, rest.astype(jnp.float32)])

    def _with(self, state: SyncState, leaves: Mapping[int, LeafState]) -> SyncState:
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
            row, norm = jnp.zeros(len(settings)), jnp.zeros(())
            for at, matrix in enumerate(layer.matrices(summed)):
                own = jax.tree.map(lambda x, at=at: x[at], shared) if layer.stack else shared
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
            also: bytes of what else is averaged with the raw leaves.
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
        layer, setting = self.layers[number], self.settings[number]
        if setting is None:
            return layer.count * raw_bytes(layer, self.workers)
        return layer.count * sent(self.sync.compressor, layer, setting, self.workers)


def _raw(matrix: jax.Array, state: Any, layer: Layer, feeds: bool) -> Average:
    """Average a matrix without compression."""
    mean = yield from mean_of(matrix.astype(layer.dtype))
    return Averaged(mean.astype(jnp.float32), jnp.zeros_like(matrix) if feeds else None, state)


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
    return Averager(sync, layers, settings, axis, workers, left_raw=left_raw, fixed=fixed)
