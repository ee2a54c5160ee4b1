"""The estimator beside MeZO written in numpy, and what directions must be."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxoverlap.train import zeroth_order as zo
from jaxoverlap.train.zeroth_order.directions import Draw, direction, in_12_bits, new_key
from jaxoverlap.train.zeroth_order.estimator import decays
from tests.train.zeroth_order import problem


def numpy_loss(params: dict[str, Any], tokens: np.ndarray) -> float:
    """The problem's loss, written again in numpy and float64."""
    outer, blocks = params["outer"], params["blocks"]
    x = outer["embedding"][tokens[:, :-1]]
    for layer in range(problem.LAYERS):
        h = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * blocks["norm"][layer]
        h = np.tanh(h @ blocks["up"][layer] + blocks["bias"][layer])
        x = x + h @ blocks["down"][layer]
    logits = (x * outer["norm"]) @ outer["embedding"].T
    logits = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return -np.take_along_axis(logits, tokens[:, 1:, None], -1).mean()


@functools.partial(jax.jit, static_argnums=(3, 4))
def drawn_of(key: Any, step: int, which: int, number: int, shape: tuple[int, ...]) -> jax.Array:
    return direction(Draw(key, step, which), number, shape)


def numpy_mezo(steps: int, eps: float, rates: Any, decay: float, directions: int) -> Any:
    """MeZO as its trainer has it: parameters are moved in place by +eps, -2 eps, +eps."""
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), problem.params())
    leaves, treedef = jax.tree.flatten(params)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(params)]
    decayed = [any(w in path for w in ("embedding", "up", "down")) for path in paths]
    key, scalars = new_key(0), []
    for step in range(steps):
        tokens = problem.batch(step)["tokens"]
        drawn = [
            [
                np.asarray(drawn_of(key, step, k, n, leaf.shape), np.float64)
                for n, leaf in enumerate(leaves)
            ]
            for k in range(directions)
        ]
        found = []
        for zs in drawn:

            def move(by: float, zs: Any = zs) -> None:
                for leaf, z in zip(leaves, zs, strict=True):
                    leaf += by * z

            move(eps)
            above = numpy_loss(jax.tree.unflatten(treedef, leaves), tokens)
            move(-2 * eps)
            below = numpy_loss(jax.tree.unflatten(treedef, leaves), tokens)
            move(eps)
            found.append((above - below) / (2 * eps))
        for n, leaf in enumerate(leaves):
            estimate = sum(g * zs[n] for g, zs in zip(found, drawn, strict=True)) / directions
            leaf -= rates(step) * (estimate + (decay if decayed[n] else 0.0) * leaf)
        scalars.append(found)
    return jax.tree.unflatten(treedef, leaves), np.array(scalars)


@pytest.mark.parametrize("directions, deferred", [(1, False), (3, True)])
def test_mezo_is_that_of_numpy(directions, deferred):
    rates = optax.linear_schedule(1e-2, 2e-3, 6)
    transform = zo.mezo(eps=1e-2, lr=rates, directions=directions, weight_decay=0.3)
    step = zo.step(problem.MODEL, transform, deferred=deferred)
    state, scalars = step.init(problem.params()), []
    for number in range(6):
        state, metrics = step(state, problem.batch(number))
        scalars.append(np.asarray(metrics["scalars"]))
    params, expected = numpy_mezo(6, 1e-2, lambda n: float(rates(n)), 0.3, directions)
    # A loss of 3 is right to 1 in 2^23, and is divided by 2 eps.
    np.testing.assert_allclose(scalars, expected, rtol=3e-3, atol=3e-4)
    for got, want in zip(jax.tree.leaves(step.params(state)), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(got, want, atol=2e-5)


def test_the_estimate_is_the_gradient_on_average():
    params = dict(w=jnp.arange(1.0, 4.0))
    transform = zo.mezo(eps=1e-2, lr=1.0, directions=400)
    step = zo.step(lambda p, batch: (p["w"] ** 2).sum(), transform)
    state, _ = step(step.init(params), jnp.zeros(1))
    np.testing.assert_allclose(params["w"] - state.params["w"], 2 * params["w"], rtol=0.35)


@given(st.integers(0, 2**31 - 1), st.integers(0, 5), st.integers(1, 5), st.integers(1, 7))
@settings(max_examples=20, deadline=None)
def test_a_row_is_drawn_alone_as_in_its_parameter(step, number, rows, width):
    draw = Draw(new_key(3), jnp.int32(step))
    whole = direction(draw, number, (rows, width))
    for row in range(rows):
        np.testing.assert_array_equal(whole[row], direction(draw, number, (width,), row))


def test_directions_are_normal_and_differ_by_step_number_and_parameter():
    draw = Draw(new_key(0), jnp.int32(1))
    z = np.asarray(direction(draw, 0, (200, 300)))
    assert abs(z.mean()) < 0.02 and abs(z.std() - 1) < 0.02
    others = [
        direction(Draw(draw.key, jnp.int32(2)), 0, (200, 300)),
        direction(draw._replace(number=1), 0, (200, 300)),
        direction(draw, 1, (200, 300)),
        direction(draw._replace(key=new_key(1)), 0, (200, 300)),
    ]
    for other in others:
        assert abs(np.corrcoef(z.ravel(), np.asarray(other).ravel())[0, 1]) < 0.02


def test_products_with_a_direction_are_exact():
    z = np.asarray(direction(Draw(new_key(0), jnp.int32(0)), 0, (1000,)))
    by = np.float32(in_12_bits(jnp.float32(0.1234567)))
    assert np.all((by * z).astype(np.float64) == float(by) * z.astype(np.float64))
    np.testing.assert_allclose(by, 0.1234567, rtol=2**-12)


@pytest.mark.parametrize(
    "path, shape, wanted",
    [
        ("['blocks']['up']['weight']", (4, 8, 8), True),
        ("['blocks']['up']['bias']", (4, 8), False),
        ("['blocks']['ln_1']['weight']", (4, 8), False),
        ("['norm']['scale']", (8,), False),
        ("['kernel']", (8, 8), True),
        ("['vector']", (8,), False),
    ],
)
def test_biases_and_norms_do_not_decay(path, shape, wanted):
    assert decays(path, jax.ShapeDtypeStruct(shape, jnp.float32)) is wanted


def test_a_tied_parameter_is_perturbed_once():
    """The embedding is read by `begin` and `end`: both see the same moved table."""
    transform = zo.mezo(eps=0.5, lr=1.0)
    table = problem.params()["outer"]["embedding"]
    moved = transform.perturbed(dict(t=table), Draw(new_key(0), jnp.int32(0)), 1.0)["t"]

    def loss(params: Any, batch: Any) -> jax.Array:
        return params["t"].sum() + 10 * params["t"].sum()

    step = zo.step(loss, transform)
    _, metrics = step(step.init(dict(t=table)), jnp.zeros(1))
    np.testing.assert_allclose(metrics["losses"][0, 0], 11 * moved.sum(), rtol=1e-5)


def test_update_is_optax_shaped():
    transform = zo.mezo(eps=1e-3, lr=0.5)
    params = dict(w=jnp.ones((2, 3)))
    state = transform.init(params, seed=4)
    updates, after = transform.update(jnp.array([2.0]), state, params)
    z = direction(Draw(state.key, state.step), 0, (2, 3))
    np.testing.assert_allclose(optax.apply_updates(params, updates)["w"], 1 - z, rtol=1e-6)
    assert int(after.step) == 1


@pytest.mark.parametrize(
    "given, named",
    [
        (dict(eps=0), "eps=0"),
        (dict(eps=-1e-3), "eps=-0.001"),
        (dict(eps=float("nan")), "eps=nan"),
        (dict(lr=0), "lr=0"),
        (dict(directions=0), "directions=0"),
        (dict(weight_decay=-1), "weight_decay=-1"),
    ],
)
def test_bad_settings_are_named(given, named):
    with pytest.raises(ValueError, match=named):
        zo.mezo(**(dict(eps=1e-3, lr=1e-6) | given))
