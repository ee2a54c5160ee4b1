"""The cross-entropy by rules is optax's: masked vocabularies, empty shapes, derivatives in any mode."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoverlap

ours = jaxoverlap.softmax_cross_entropy_with_integer_labels
theirs = optax.losses.softmax_cross_entropy_with_integer_labels

LOGITS = np.random.default_rng(0).standard_normal((4, 16)).astype(np.float32)
LABELS = np.asarray([3, 0, 15, 8], np.int32)


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def both(mesh: Mesh, fn: Any, logits: Any = LOGITS) -> tuple[Any, Any]:
    """Return `fn` of each function and of the logits, ours with a sharded vocabulary."""
    sharded = jax.device_put(logits, NamedSharding(mesh, P("data", "model")))
    return jax.jit(lambda z: fn(ours, z))(sharded), jax.jit(lambda z: fn(theirs, z))(logits)


def same(pair: tuple[Any, Any], tolerance: float = 1e-6) -> None:
    for a, b in zip(*map(jax.tree.leaves, pair), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def loss_and_gradient(where: Any = None, labels: Any = LABELS) -> Any:
    def of(entropy: Any, z: Any) -> Any:
        loss, pull = jax.vjp(lambda z: entropy(z, labels, where=where), z)
        return loss, pull(jnp.arange(1.0, 5.0))

    return of


# -- masked vocabularies --------------------------------------------------------------------------

MASKS = {
    "label": np.arange(16) != LABELS[:, None],
    "some": np.random.default_rng(1).random((4, 16)) < 0.5,
    "one row alike": np.arange(16)[None] < 8,
    "all of a row": np.bool_([[1], [0], [1], [0]]) & np.ones((1, 16), bool),
    "rows": np.bool_([True, False, True, True]),
}


@pytest.mark.parametrize("where", MASKS.values(), ids=MASKS)
def test_a_masked_label_counts_as_in_optax(mesh: Mesh, where: Any):
    pair = both(mesh, loss_and_gradient(where))
    assert np.isfinite(pair[1][0]).all()
    same(pair)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("masked", [True, False])
def test_logits_that_are_not_finite_count_as_in_optax(mesh: Mesh, value: float, masked: bool):
    logits = LOGITS.copy()
    logits[0, 5] = value
    where = np.ones((4, 16), bool)
    where[0, 5] = False
    pair = both(mesh, loss_and_gradient(where if masked else None), logits)
    assert np.isfinite(pair[1][0]).all() or not masked
    same(pair)


def test_a_mask_of_numbers_is_refused():
    with pytest.raises(ValueError, match="where of dtype float32: expected bool"):
        ours(LOGITS, LABELS, where=np.ones((4, 16), np.float32))


# -- empty shapes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize(
    "shape, axis", [((0, 4), -1), ((2, 0), -1), ((0, 0), -1), ((2, 2, 0), (1, 2)), ((0, 4, 0), 2)]
)
def test_empty_shapes_are_optaxs(shape: tuple[int, ...], axis: Any, masked: bool):
    axes = {d % len(shape) for d in np.atleast_1d(axis)}
    labels = np.zeros([n for d, n in enumerate(shape) if d not in axes], np.int32)
    where = np.ones(shape, bool) if masked else None

    def of(entropy: Any) -> Any:
        loss, pull = jax.vjp(lambda z: entropy(z, labels, axis, where), jnp.zeros(shape))
        return loss, pull(jnp.ones(labels.shape))

    same((of(ours), of(theirs)))


def test_an_empty_batch_over_two_dims_has_no_loss():
    """Where optax divides by zero."""
    assert ours(np.zeros((0, 2, 2)), np.zeros(0, int), axis=(1, 2)).shape == (0,)


# -- derivatives in any mode ----------------------------------------------------------------------


def mapped(entropy: Any, z: Any, where: Any) -> Any:
    """Return losses by `vmap` over the batch."""
    return jax.vmap(lambda z, y: entropy(z, y, where=where))(z, LABELS)


def over_all(entropy: Any, z: Any, where: Any) -> Any:
    return entropy(z, LABELS, where=where)


MODES = {
    "jvp": lambda f, z: jax.jvp(f, (z,), (jnp.cos(z),)),
    "linearize": lambda f, z: jax.linearize(f, z)[1](jnp.cos(z)),
    "jacfwd": lambda f, z: jax.jacfwd(f)(z),
    "jacrev": lambda f, z: jax.jacrev(f)(z),
    "forward over reverse": lambda f, z: jax.hessian(lambda z: (f(z) ** 2).sum())(z),
    "reverse over forward": lambda f, z: jax.jacrev(jax.jacfwd(lambda z: (f(z) ** 2).sum()))(z),
    "forward over forward": lambda f, z: jax.jvp(
        lambda z: jax.jvp(f, (z,), (jnp.cos(z),))[1], (z,), (jnp.sin(z),)
    ),
    "grad of grad": lambda f, z: jax.grad(
        lambda z: (jax.grad(lambda z: (f(z) ** 2).sum())(z) ** 2).sum()
    )(z),
    "remat": lambda f, z: jax.jvp(jax.grad(lambda z: jax.checkpoint(f)(z).sum()), (z,), (z,)),
}


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("losses", [over_all, mapped])
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_derivatives_are_optaxs(mesh: Mesh, mode: Any, losses: Any, masked: bool):
    where = np.arange(16) % 3 != 0 if masked else None
    if masked and losses is over_all:
        where = np.broadcast_to(np.arange(16) % 3 != 0, (4, 16))
    same(both(mesh, lambda entropy, z: mode(lambda z: losses(entropy, z, where), z)), 2e-5)


def test_forward_mode_moves_no_logits(mesh: Mesh):
    logits = jax.device_put(jnp.zeros((8, 4096)), NamedSharding(mesh, P("data", "model")))
    labels = np.zeros(8, np.int32)
    step = jax.jit(lambda z: jax.jvp(lambda z: ours(z, labels), (z,), (z,)))
    moved = jaxoverlap.audit(step.lower(logits).compile()).collectives
    assert {c.kind for c in moved} == {"all-reduce"}
    assert max(c.bytes_moved for c in moved) <= 2 * 8 * 4 * 2
