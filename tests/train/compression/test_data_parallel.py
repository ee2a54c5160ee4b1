"""The train step: bytes, the average in the backward scan, changes of settings, resuming, NaNs."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoverlap
from jaxoverlap.train import compression
from jaxoverlap.train.compression import lgreco, none, power_sgd, qsgd, top_k, uniform
from tests.train.compression.problem import loss, make_batch, make_params, mesh_of

ADAPTIVE = lgreco(power_sgd(2), every=6, accumulate=2, beside=2)


def make_step(sync, mesh=None, **options):
    options = dict(stacked=("layers",)) | options
    return compression.data_parallel(
        jax.value_and_grad(loss), optax.adam(1e-2), mesh or mesh_of(), sync=sync, **options
    )


def train(step, steps, state=None, begin=0):
    state = step.init(make_params()) if state is None else state
    losses = []
    for i in range(begin, steps):
        state, value = step(state, make_batch(i))
        losses.append(float(value))
    step.check()
    return state, losses


def same(a, b):
    a, b = jax.device_get((a, b))
    return all(
        np.array_equal(x, y, equal_nan=True)
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


def unsharded(steps):
    optimizer, params = optax.adam(1e-2), make_params()
    moments, losses = optimizer.init(params), []
    for i in range(steps):
        value, gradients = jax.value_and_grad(loss)(params, make_batch(i))
        updates, moments = optimizer.update(gradients, moments, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(value))
    return params, losses


def test_layers_share_two_sums_and_make_no_chain_of_them():
    step = make_step(uniform(power_sgd(2)))
    state = step.init(make_params())
    found = jaxoverlap.audit(step.lower(state, make_batch(0)).compile()).collectives
    assert [c.kind for c in found] == ["all-reduce"] * 2  # all P and what is raw, then all Q


@pytest.mark.parametrize("in_backward", (False, True))
def test_without_compression_it_is_the_plain_step_on_three_axes_too(in_backward):
    devices = jax.devices()[:8]
    mesh = jax.make_mesh(
        (2, 2, 2), ("data", "fsdp", "model"), (AxisType.Auto,) * 3, devices=devices
    )
    step = make_step(uniform(none()), mesh, in_backward=in_backward)
    params = make_params()
    at = NamedSharding(mesh, P(None, "fsdp", "model"))
    params["layers"]["up"] = jax.device_put(params["layers"]["up"], at)
    state, losses = train(step, 3, step.init(params))
    expected, plain = unsharded(3)
    np.testing.assert_allclose(losses, plain, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4), state.params, expected)
    assert state.params["layers"]["up"].sharding.spec == P(None, "fsdp", "model")


NIGHTLY = pytest.mark.nightly  # quantisation compiles slowly on a CPU


@pytest.mark.parametrize(
    ("compressor", "in_backward"),
    (
        (power_sgd(2), False),
        (power_sgd(2), True),
        (qsgd(3), False),
        pytest.param(qsgd(3), True, marks=NIGHTLY),
        (top_k(0.02), False),
        (top_k(0.02), True),
        (none(), False),
    ),
    ids=repr,
)
def test_bytes_in_the_compiled_program_are_the_closed_form(compressor, in_backward):
    step = make_step(uniform(compressor), in_backward=in_backward)
    state = step.abstract(make_params())
    batch = jax.tree.map(jnp.asarray, make_batch(0))
    audit = jaxoverlap.audit(step.lower(state, batch).compile())
    sent = sum(c.runs * c.bytes_moved for c in audit.collectives)
    assert sent == step.sent_bytes(state)


def test_an_average_in_the_backward_scan_is_the_one_after_it():
    """The same numbers, and inside the loop stand all but one layer's collectives."""
    after, inside = (make_step(uniform(power_sgd(2)), in_backward=b) for b in (False, True))
    # One setting a stack has another random start, so both begin with the same one.
    states = [step.init(make_params()) for step in (after, inside)]
    stacks = states[1].sync.shared  # head, down, up
    split = [stacks[0], *stacks[1], *stacks[2]]
    shared = tuple(jnp.asarray(np.asarray(s)) for s in split)
    at = jax.tree.map(lambda x: x.sharding, states[0].sync.shared)
    sync = jax.tree.map(lambda x: x, states[0].sync)
    states[0] = dataclasses.replace(
        states[0], sync=dataclasses.replace(sync, shared=jax.device_put(shared, at))
    )
    (one, losses), (two, others) = (
        train(s, 4, state) for s, state in zip((after, inside), states, strict=True)
    )
    np.testing.assert_allclose(losses, others, rtol=2e-4)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-3), one.params, two.params)
    text = inside.lower(two, jax.tree.map(jnp.asarray, make_batch(0))).compile()
    runs = [c.runs for c in jaxoverlap.audit(text).collectives]
    assert runs.count(2) >= 2  # P and Q of two of three layers, inside the loop


def test_a_gradient_that_no_scan_makes_is_named():
    def looped(params, batch):
        x, y = batch
        for i in range(3):
            w = jax.tree.map(lambda leaf, i=i: leaf[i], params["layers"])
            x = x + jnp.tanh((x * w["scale"]) @ w["up"]) @ w["down"]
        return jnp.mean((x @ params["head"] - y) ** 2)

    step = compression.data_parallel(
        jax.value_and_grad(looped), optax.sgd(0.1), mesh_of(), sync=uniform(power_sgd(2)),
        stacked=("layers",), in_backward=True,
    )  # fmt: skip
    with pytest.raises(
        ValueError, match=r"layers\.down: its gradient is made by .*in_backward=False"
    ):
        step(step.init(make_params()), make_batch(0))


@pytest.mark.parametrize("in_backward", (False, pytest.param(True, marks=NIGHTLY)))
def test_settings_change_with_fewer_bytes_at_no_more_error(in_backward):
    step = make_step(ADAPTIVE, in_backward=in_backward)
    state, losses = train(step, 20)
    control, first = state.control, step.abstract(make_params())
    assert losses[-1] < losses[0]
    uniform_bytes = step.sent_bytes(first)
    assert step.sent_bytes(state) <= uniform_bytes
    rows = np.arange(len(control.settings))
    budget = control.errors[rows, control.reference].sum()
    assert control.errors[rows, control.pending].sum() <= budget
    table = step.explain(state)
    assert "layers.up" in table and "of a budget of" in table and "1 of 4 leaves go raw" in table
    if not in_backward:
        assert len(set(control.settings.tolist())) > 1
        assert step.sent_bytes(state) < uniform_bytes


@pytest.mark.parametrize(
    "sync", (ADAPTIVE, pytest.param(uniform(qsgd(2)), marks=NIGHTLY)), ids=("lgreco", "qsgd")
)
def test_a_run_that_resumes_is_the_undisturbed_one_to_the_bit(sync, tmp_path):
    undisturbed = make_step(sync)
    whole, losses = train(undisturbed, 16)
    half, first = train(undisturbed, 13)  # a choice was made at 12 and comes into use at 14
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", half)
    step = make_step(sync)
    with ocp.StandardCheckpointer() as checkpointer:
        found = checkpointer.restore(tmp_path / "state", step.abstract(make_params()))
    rest, last = train(step, 16, found, begin=13)
    assert first + last == losses
    assert same(rest, whole)


def test_a_checkpoint_of_another_setting_is_named_and_lost_is_nothing():
    state, _ = train(make_step(uniform(power_sgd(2))), 1)
    with pytest.raises(ValueError, match="made for another synchronisation"):
        make_step(uniform(power_sgd(2), seed=1))(state, make_batch(1))
    train(make_step(uniform(power_sgd(2))), 2, state, begin=1)  # it is still there


@pytest.mark.parametrize("in_backward", (False, True))
def test_a_nan_gradient_is_named_and_its_step_changes_nothing(in_backward):
    step = make_step(uniform(power_sgd(2)), in_backward=in_backward)
    state, _ = train(step, 2)
    before = jax.device_get((state.params, state.optimizer, state.sync.error, state.sync.shared))
    x, y = make_batch(2)
    x[3, 0] = np.nan  # of the first worker alone
    state, _ = step(state, (x, y))
    with pytest.raises(compression.NonFiniteGradientError, match=r"step 2: .*layers\.up") as raised:
        step.check()
    assert "head" in raised.value.layers
    after = (state.params, state.optimizer, state.sync.error, state.sync.shared)
    assert same(before, after)
    train(step, 6, state, begin=3)  # it goes on, with the next batch


def test_a_nan_is_raised_two_steps_late_at_most_and_the_state_given_then_is_good():
    step = make_step(uniform(top_k(0.02)))
    state, _ = train(step, 1)
    x, y = make_batch(1)
    state, _ = step(state, (np.full_like(x, np.inf), y))
    with pytest.raises(compression.NonFiniteGradientError):
        for i in range(2, 5):
            state, _ = step(state, make_batch(i))
    train(step, 6, state, begin=5)


def test_it_composes_as_an_optax_transformation():
    params = make_params()
    mesh, sync = mesh_of(), uniform(power_sgd(2))
    averaged = compression.transform(sync, params, axis="data", workers=4, stacked=("layers",))
    optimizer = optax.chain(averaged, optax.adam(1e-2))

    def of_worker(params, state, batch):
        gradients = jax.grad(loss)(params, batch)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    step = jax.jit(
        jax.shard_map(
            of_worker, mesh=mesh, in_specs=(P(), P(), P("data")), out_specs=(P(), P()),
            axis_names={"data"}, check_vma=False,
        )
    )  # fmt: skip
    new, _ = step(params, optimizer.init(params), make_batch(0))
    own = make_step(sync)
    expected, _ = train(own, 1)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), new, expected.params)


@pytest.mark.parametrize(
    ("change", "says"),
    (
        (dict(axis="worker"), "axis='worker': the mesh has the axes data, model"),
        (dict(stacked=("layer",)), "no leaf of the parameters stands below layer"),
        (dict(sync=power_sgd(2)), "expected one such as lgreco"),
    ),
)
def test_bad_arguments_are_named(change, says):
    options = dict(sync=uniform(power_sgd(2))) | change
    with pytest.raises(ValueError, match=says):
        make_step(options.pop("sync"), **options).init(make_params())


def test_a_batch_that_workers_cannot_share_is_named():
    step = make_step(uniform(power_sgd(2)))
    with pytest.raises(ValueError, match="multiple of the 4 workers"):
        step(step.init(make_params()), make_batch(0, rows=30))
