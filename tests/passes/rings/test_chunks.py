"""Chunks and pieces lie where numpy's reshape puts them."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxoverlap.passes.rings import chunks
from jaxoverlap.passes.rings.chunks import Chunking
from tests.support.engine import AXIS, normal, per_device, shards

cuts = st.builds(Chunking, st.integers(1, 3), st.integers(1, 3), st.integers(1, 2))
SIZE = 2


def view(array: np.ndarray, dim: int, cut: Chunking) -> np.ndarray:
    sizes = (cut.outer, cut.chunks, cut.pieces, SIZE)
    return array.reshape(*array.shape[:dim], *sizes, *array.shape[dim + 1 :])


@settings(deadline=None, max_examples=30)
@given(cuts, st.integers(0, 2), st.data())
def test_take_and_put(cut: Chunking, dim: int, data):
    """A piece of one chunk, or of all of them, is read from and written to the same place."""
    shape = [3, 4, 5]
    shape[dim] = cut.outer * cut.chunks * cut.pieces * SIZE
    array = np.arange(np.prod(shape)).reshape(shape)
    chunk = data.draw(st.none() | st.integers(0, cut.chunks - 1))
    piece = data.draw(st.integers(0, cut.pieces - 1))
    where = [slice(None)] * (array.ndim + 3)
    where[dim + 1] = slice(None) if chunk is None else slice(chunk, chunk + 1)
    where[dim + 2] = slice(piece, piece + 1)
    expected = view(array, dim, cut)[tuple(where)]
    got = chunks.take(jnp.asarray(array), dim, cut, chunk, piece)
    np.testing.assert_array_equal(got, expected.reshape(got.shape))
    assert got.size == expected.size

    empty = chunks.room(got, dim, cut, chunk)
    assert empty.shape == array.shape
    written = np.array(chunks.put(empty, got, dim, cut, chunk, piece))
    wanted = np.zeros_like(array)
    view(wanted, dim, cut)[tuple(where)] = expected
    np.testing.assert_array_equal(written, wanted)


@settings(deadline=None, max_examples=15)
@given(cuts, st.integers(0, 1))
def test_pieces_join_to_their_chunk(cut: Chunking, dim: int):
    shape = [3, 4]
    shape[dim] = cut.outer * cut.pieces * SIZE
    array = np.arange(np.prod(shape)).reshape(shape)
    pieces = [chunks.take(jnp.asarray(array), dim, cut.shard(), piece=j) for j in range(cut.pieces)]
    np.testing.assert_array_equal(chunks.join(pieces, dim, cut.shard()), array)


@pytest.mark.parametrize("outer", [1, 2])
def test_whole_collectives(outer: int):
    n = 4
    whole = normal(3, 8 * n, 2, seed=1)
    cut = Chunking(n, outer=outer)
    gathered = per_device(n, lambda x: chunks.gather(x, 1, AXIS, cut), shards(whole, 1, n, outer))
    np.testing.assert_array_equal(gathered, np.stack([whole] * n))
    parts = normal(n, 3, 8 * n, 2)
    scattered = per_device(n, lambda x: chunks.scatter(x, 1, AXIS, cut), parts)
    np.testing.assert_allclose(scattered, shards(parts.sum(0), 1, n, outer), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dims", [(0, 2), (2, 0), (0, 1), (1, 0)])
@pytest.mark.parametrize("outers", [(1, 1), (2, 1), (1, 2), (2, 4)])
def test_an_exchange_of_any_two_dims(dims: tuple[int, int], outers: tuple[int, int]):
    n = 4
    whole = normal(*(8 * n for _ in range(3)))
    (dim, wanted), (outer, wanted_outer) = dims, outers

    def body(x):
        return chunks.exchange(
            x, dim, Chunking(n, outer=outer), wanted, Chunking(n, outer=wanted_outer), AXIS
        )

    got = per_device(n, body, shards(whole, dim, n, outer))
    np.testing.assert_array_equal(got, shards(whole, wanted, n, wanted_outer))


def test_what_does_not_divide_is_refused():
    for cut, parts in (
        (Chunking(4, 3), "4 chunks of 3 pieces.*12"),
        (Chunking(4, 1, 3), "3 x 4 chunks of 1"),
    ):
        with pytest.raises(ValueError, match=f"size 8 does not divide into {parts}"):
            chunks.take(jnp.zeros((8,)), 0, cut, 1)


def test_a_room_is_made_once_its_first_part_is_there():
    """XLA would otherwise make all rooms of a shape at any time before, as one buffer."""
    part = jnp.ones((4, 3))
    room = functools.partial(chunks.room, dim=0, cut=Chunking(2), chunk=0)
    barrier, fill = jax.make_jaxpr(room)(part).eqns[-2:]
    assert barrier.primitive.name == "optimization_barrier" and len(barrier.invars) == 2
    assert fill.primitive.name == "broadcast_in_dim" and fill.invars == barrier.outvars[:1]
    np.testing.assert_array_equal(room(part), np.zeros((8, 3)))
