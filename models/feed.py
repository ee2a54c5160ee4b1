"""Prefetch sharded batches; each process makes its own part."""

from collections.abc import Iterator
from typing import Any

import grain
import jax
import numpy as np
from jax.sharding import Mesh

from models.config import Run
from models.recipe import Batch, Recipe

AHEAD = 2  # batches that are made before the step that takes them


def feed(recipe: Recipe, config: Run, mesh: Mesh, start: int) -> Iterator[Batch]:
    """Return a run's batches from a given step on, sharded over the mesh.

    A batch is a function of seed and step, so a checkpoint of four processes is one for two.
    """
    like = recipe.model.batch_like(config, mesh)
    batches = grain.MapDataset.source(_Batches(recipe, config, like)).map(_placed_batch)
    ahead = grain.ReadOptions(num_threads=AHEAD, prefetch_buffer_size=AHEAD)
    iterator = iter(batches.to_iter_dataset(ahead))
    iterator.set_state({"next_index": start})
    return iterator


class _Batches:
    """A run's batches by step: this process's slice of dim 0 of each array, from `low` on."""

    def __init__(self, recipe: Recipe, config: Run, like: Batch):
        self._batch_of, self._steps, self._like = recipe.batches(config), config.steps, like
        spans = [_rows(leaf) for leaf in like.values()]
        self._low, self._high = min(low for low, _ in spans), max(high for _, high in spans)

    def __len__(self) -> int:
        return self._steps

    def __getitem__(self, index: int) -> dict[str, tuple[np.ndarray, int, Any]]:
        batch = self._batch_of(index, slice(self._low, self._high))
        return {name: (array, self._low, self._like[name]) for name, array in batch.items()}


def _rows(like: jax.ShapeDtypeStruct) -> tuple[int, int]:
    """Return the range [first, last) of batch elements on this process's devices."""
    assert like.sharding is not None
    indices = like.sharding.addressable_devices_indices_map(like.shape).values()
    spans = [index[0].indices(like.shape[0]) for index in indices if index is not None]
    return min(low for low, _, _ in spans), max(high for _, high, _ in spans)


def _placed_batch(batch: dict[str, tuple[np.ndarray, int, Any]]) -> Batch:
    return {name: _placed(*part) for name, part in batch.items()}


def _placed(rows: np.ndarray, low: int, like: jax.ShapeDtypeStruct) -> jax.Array:
    def part(index: Any) -> np.ndarray:
        first, last, _ = index[0].indices(like.shape[0])
        return rows[(slice(first - low, last - low), *index[1:])]

    assert like.sharding is not None
    return jax.make_array_from_callback(like.shape, like.sharding, part)
