"""Odd states, tokens and meshes are trained on as on one device, or refused in a sentence."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxoverlap.train import varlen
from jaxoverlap.train.varlen.rings import bounds_of
from tests.train.varlen.batches import COSTS

BOUNDS = bounds_of({1: 32}, tokens=32, sent=0, sequences=32)
PLANNER = varlen.Planner(COSTS, varlen.Nodes(1, 2), capacity=32, programs=[BOUNDS])
PLAN = PLANNER([20, 9, 5])
VALUES = np.random.default_rng(0).normal(size=PLAN.tokens).astype("f")


def mesh_of(kind: AxisType = AxisType.Auto) -> Mesh:
    places = np.array(jax.devices()[:2]).reshape(1, 2)
    return Mesh(places, ("node", "device"), axis_types=(kind,) * 2)


WHOLE = NamedSharding(mesh_of(), P())


def square(tree: Any) -> Any:
    """Return the sum of |x|^2 over a tree, of which all leaves have gradients."""
    return sum((jnp.abs(x.astype(_wide(x))) ** 2).sum() for x in jax.tree.leaves(tree)) + 1.0


def _wide(leaf: Any) -> Any:
    return jnp.promote_types(leaf.dtype, jnp.float32)


def model(params: Any, batch: Any, attend: Any) -> Any:
    return (batch["x"] * batch["weights"]).sum() * square(params)


def step_of(optimizer: Any = None, loss: Any = model, **how: Any) -> varlen.VarlenStep:
    return varlen.train_step(loss, optimizer or optax.sgd(0.1), mesh_of(), costs=COSTS, **how)


def state_of(params: Any, optimizer: Any = None, **others: Any) -> Any:
    inner = (optimizer or optax.sgd(0.1)).init(params)
    return jax.device_put(dict(params=params, optimizer=inner, step=np.int32(0), **others), WHOLE)


# -- steps that are not finite --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "parts"),
    [
        (np.nan, ["loss", "gradients", "optimizer's update"]),
        (1e30, ["optimizer's update"]),  # Adam's squares of finite gradients are infinite
    ],
)
def test_a_step_that_is_not_finite_is_left_out_and_named(bad, parts):
    optimizer = optax.adam(0.1)
    step = step_of(optimizer)
    state = state_of({"w": np.ones(3, "f")}, optimizer, ema={"w": np.full(3, 7.0, "f")})
    for number in range(4):
        before = jax.tree.map(np.array, state)
        values = np.full_like(VALUES, bad) if number == 1 else VALUES
        state, _ = step(state, PLAN, {"x": values})
        same = jax.tree.map(np.array_equal, before, jax.tree.map(np.array, state))
        assert same["params"] == {"w": number == 1}
        assert jax.tree.all(same["optimizer"]) == (number == 1)
        assert same["ema"] == {"w": True}
        assert state["step"] == number + 1
    with pytest.raises(varlen.NonFiniteStepError, match=r"step 1: .* left out") as caught:
        step(state, PLAN, {"x": VALUES})
    assert (caught.value.step, caught.value.parts) == (1, parts)
    step(state, PLAN, {"x": VALUES})  # the state of the call that raised is good
    step.check()


def test_check_names_the_last_step_at_once():
    step, state = step_of(), state_of({"w": np.ones(3, "f")})
    step(state, PLAN, {"x": np.full_like(VALUES, np.inf)})
    with pytest.raises(varlen.NonFiniteStepError, match="step 0: loss and gradients"):
        step.check()


def test_without_check_a_step_is_made_whatever_it_is():
    step, state = step_of(check=False), state_of({"w": np.ones(3, "f")})
    state, _ = step(state, PLAN, {"x": np.full_like(VALUES, np.nan)})
    step.check()
    assert np.isnan(state["params"]["w"]).all()


def test_a_mask_of_infinities_is_no_failure():
    masked = {"w": np.ones(3, "f"), "mask": np.array([0, -np.inf], "f")}

    def loss(params: Any, batch: Any, attend: Any) -> Any:
        weights = jax.nn.softmax(jax.lax.stop_gradient(params["mask"]))
        return (batch["x"] * batch["weights"]).sum() * (weights.sum() + square(params["w"]))

    step = step_of(loss=loss)
    state, _ = step(state_of(masked), PLAN, {"x": VALUES})
    step.check()
    np.testing.assert_array_equal(state["params"]["mask"], masked["mask"])
    assert (np.asarray(state["params"]["w"]) != 1).all()


# -- tokens, meshes, states -----------------------------------------------------------------------


def test_tokens_of_another_dtype_or_with_one_more_value_are_another_program():
    """Programs of `compile` were found by the plan's bounds alone."""
    step, state = step_of(), state_of({"w": np.ones(3, "f")})
    step.compile([PLAN.bounds], state, {"x": VALUES})
    for tokens in (
        {"x": VALUES},
        {"x": np.ones(PLAN.tokens, np.uint8)},
        {"x": VALUES, "more": np.ones((PLAN.tokens, 2))},
        {"x": VALUES.tolist()},
    ):
        expected = np.mean(tokens["x"]) * square(state["params"])
        state, metrics = step(state, PLAN, tokens)
        np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-4)
    assert len(step.compiled) == 3


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ({"x": np.float32(1)}, r"named 'x', of dtype float32 and shape \(\): expected numbers"),
        ({"x": np.array(["a"] * PLAN.tokens)}, "of dtype <U1"),
        ({1: VALUES}, "named 1, .* a string"),
        ({"x": {"y": VALUES}}, "of dtype object"),
        ({"x": VALUES[:-1]}, "33 tokens for a plan of 34"),
    ],
)
def test_tokens_that_are_no_numbers_are_refused(tokens, message):
    with pytest.raises(ValueError, match=message):
        step_of()(state_of({"w": np.ones(3, "f")}), PLAN, tokens)


def test_an_explicit_mesh_is_refused_with_what_to_do():
    with pytest.raises(ValueError, match=r"expected automatic axes; make it with jax\.make_mesh"):
        varlen.train_step(model, optax.sgd(0.1), mesh_of(AxisType.Explicit), costs=COSTS)
    state = state_of({"w": np.ones(3, "f")})
    placed = jax.device_put(state, NamedSharding(mesh_of(AxisType.Explicit), P()))
    with pytest.raises(ValueError, match="expected automatic axes"):
        step_of()(placed, PLAN, {"x": VALUES})


def twice() -> Any:
    state = state_of({"w": np.ones(3, "f")})
    return state | {"ema": state["params"]}


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (lambda: {}, r"a state of \[\]: expected a dict with params, optimizer, step"),
        (lambda: state_of({}) | {"step": jnp.float32(0)}, "at \\['step'\\] that is not on the 2"),
        (
            lambda: state_of({"w": np.ones(3, "f")}, optax.adam(1)),
            "None: no such entry",
        ),
        (twice, r"both \['ema'\]\['w'\] and \['params'\]\['w'\] .* copy"),
        (lambda: state_of({"w": np.arange(3)}), "a parameter of dtype int32 at"),
    ],
)
def test_states_that_a_step_cannot_take_are_refused(state, message):
    with pytest.raises(ValueError, match=message):
        step_of()(state(), PLAN, {"x": VALUES})


@pytest.mark.parametrize(
    ("loss", "has_aux"),
    [
        (lambda params, batch, attend: batch["x"], False),
        (lambda params, batch, attend: batch["weights"].sum().astype(int), False),
        (model, True),
        (lambda params, batch, attend: (model(params, batch, attend), 1), False),
    ],
)
def test_a_model_returns_one_sum(loss, has_aux):
    with pytest.raises(ValueError, match=r"the model returned .* expected"):
        step_of(loss=loss, has_aux=has_aux)(state_of({"w": np.ones(3, "f")}), PLAN, {"x": VALUES})


# -- odd trees ------------------------------------------------------------------------------------


class Pair(NamedTuple):
    one: Any
    other: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Dense:
    w: Any
    bias: Any = None


SHAPES = st.sampled_from([(), (0,), (3,), (2, 2)])
FLOATS = st.sampled_from(["float32", "bfloat16", "float16", "complex64"])
OTHERS = st.sampled_from(["int32", "uint8", "bool", "key", "a number"])


def leaf_of(shape: tuple[int, ...], dtype: str) -> Any:
    """Return an array, placed by itself so that it is no other's, or what is none."""
    if dtype == "a number":
        return 1.5
    if dtype == "key":
        return jax.device_put(jax.random.key(3), WHOLE)
    values = np.arange(1, 1 + np.prod(shape, dtype=int)).reshape(shape) / 4
    if dtype == "complex64":
        values = values + 1j
    return jax.device_put(jnp.asarray(values, dtype).copy(), WHOLE)


def trees(leaves: Any) -> Any:
    def more(inner: Any) -> Any:
        lists = st.lists(inner, max_size=2)
        return st.one_of(
            lists,
            lists.map(tuple),
            st.dictionaries(st.sampled_from("abc"), inner, max_size=2),
            st.builds(Pair, inner, inner),
            st.builds(Dense, inner),
        )

    return st.recursive(leaves, more, max_leaves=5)


GOOD = st.none() | st.builds(leaf_of, SHAPES, FLOATS)
ANY = st.none() | st.builds(leaf_of, SHAPES, FLOATS | OTHERS)
STATES = st.fixed_dictionaries(
    {"params": st.one_of(trees(GOOD), trees(GOOD), trees(ANY))}, optional={"ema": trees(ANY)}
)


def shared(tree: Any) -> bool:
    leaves = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]
    return len({id(x) for x in leaves}) < len(leaves)


def can_be_trained(drawn: Any) -> bool:
    if not all(isinstance(x, jax.Array) for x in jax.tree.leaves(drawn)):
        return False
    floats = all(jnp.issubdtype(x.dtype, jnp.inexact) for x in jax.tree.leaves(drawn["params"]))
    return floats and not shared(drawn)


def host(tree: Any) -> Any:
    """Return a copy that no step donates."""
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
    return jax.tree.map(lambda x: np.array(jax.random.key_data(x) if is_key(x) else x), tree)


def check_tree(drawn: Any, twice: bool) -> None:
    """Compare a step on two devices with plain JAX on one, or see it refused in a sentence."""
    if twice:
        drawn = drawn | {"ema": drawn["params"]}
    optimizer = optax.sgd(0.1, momentum=0.9)
    if not can_be_trained(drawn):
        inner, step = (), jax.device_put(jnp.int32(0), WHOLE)
        with pytest.raises(ValueError, match=r"expected|copy|place the state|only floats"):
            step_of(optimizer)(drawn | {"optimizer": inner, "step": step}, PLAN, {"x": VALUES})
        return
    params, others = host(drawn["params"]), host(drawn.get("ema"))
    inner = jax.device_put(optimizer.init(drawn["params"]), WHOLE)
    state = drawn | {"optimizer": inner, "step": jax.device_put(jnp.int32(0), WHOLE)}
    moments, step = optimizer.init(params), step_of(optimizer)
    for _ in range(2):
        state, metrics = step(state, PLAN, {"x": VALUES})
        loss, gradients = jax.value_and_grad(lambda p: VALUES.mean() * square(p))(params)
        gradients = jax.tree.map(jnp.conj, gradients)
        updates, moments = optimizer.update(gradients, moments, params)
        params = optax.apply_updates(params, updates)
        np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-4)
    step.check()
    assert jax.tree.structure(state["params"]) == jax.tree.structure(params)
    for got, wanted in zip(*map(jax.tree.leaves, (state["params"], params)), strict=True):
        assert got.dtype == wanted.dtype
        got, wanted = (np.asarray(x, np.promote_types(_wide(x), "f")) for x in (got, wanted))
        np.testing.assert_allclose(got, wanted, rtol=1e-2, atol=1e-3)
    assert ("ema" in state) == ("ema" in drawn)
    jax.tree.map(np.testing.assert_array_equal, host(state.get("ema")), others)


def options(count: int) -> settings:
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large]
    return settings(
        max_examples=count, deadline=None, derandomize=True, suppress_health_check=checks
    )


@options(8)
@given(STATES, st.sampled_from([False, False, True]))
def test_any_tree_is_trained_as_on_one_device_or_refused(drawn, twice):
    check_tree(drawn, twice)


@pytest.mark.nightly
@options(60)
@given(STATES, st.sampled_from([False, False, True]))
def test_more_trees_are_trained_as_on_one_device_or_refused(drawn, twice):
    check_tree(drawn, twice)
