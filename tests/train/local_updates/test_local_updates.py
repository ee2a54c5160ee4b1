"""Rounds of all kinds of train steps; states that go on with other workers; clear errors."""

from __future__ import annotations

import itertools

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoverlap
from jaxoverlap.train import (
    LocalUpdates,
    Outer,
    bmuf,
    co2,
    diloco,
    eager_diloco,
    local_sgd,
    overlap_local_sgd,
    slowmo,
    streaming_diloco,
)
from jaxoverlap.train.local_updates import second_device
from jaxoverlap.train.local_updates.state import fragments_of
from tests.train.local_updates.problem import (
    FEATURES,
    OUT,
    flat,
    make_data,
    make_state,
    make_step,
    mesh_of,
    train,
)

EVERY, WORKERS = 4, 4
DATA = make_data(EVERY * 6, WORKERS)


def make(outer: Outer, workers: int = WORKERS, optimizer=None, **options) -> LocalUpdates:
    return LocalUpdates(
        make_step(optimizer), mesh_of(workers), outer=outer, overlap=False, **options
    )


def host(tree):
    return jax.tree.map(np.asarray, tree)


def close(one, other):
    """Compare to the last bits: two programs of the same numbers may fuse, and round, otherwise."""
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), host(one), host(other)
    )


def same_bits(one, other):
    jax.tree.map(np.testing.assert_array_equal, host(one), host(other))


# -- where a round runs ---------------------------------------------------------------------------


@pytest.mark.parametrize("scattered", (False, True))
@pytest.mark.parametrize(
    "outer",
    (co2(every=EVERY), eager_diloco(every=EVERY), overlap_local_sgd(every=EVERY)),
    ids=lambda outer: outer.name,
)
def test_the_average_on_second_devices_gives_the_same_numbers(outer, scattered, monkeypatch):
    if outer.eager and scattered:
        pytest.skip("eager state differs between workers")
    updates = make(outer, shard_outer=scattered)
    found = train(updates, 4, DATA)
    assert any(isinstance(p, second_device.Runner) for p in updates._programs._made.values())
    with monkeypatch.context() as patch:
        patch.setattr(second_device, "mesh_beside", lambda mesh: None)
        close(found, train(make(outer, shard_outer=scattered), 4, DATA))


def test_second_devices_are_others_of_the_same_processes():
    beside = second_device.mesh_beside(mesh_of(4))
    assert beside is not None
    assert not set(beside.devices.flat) & set(mesh_of(4).devices.flat)
    assert second_device.mesh_beside(mesh_of(8)) is None  # none are left


# -- what is trained ------------------------------------------------------------------------------


def test_metrics_are_of_every_step_and_worker():
    updates = make(co2(every=EVERY))
    batches = tuple(d[:EVERY] for d in DATA)
    _, metrics = updates.round(updates.init(make_state()), batches)
    x, y = batches
    p = make_state()["params"]
    rows = x.shape[1] // WORKERS
    first = [
        np.mean((x[0, i : i + rows] @ p["w"] + p["b"] - y[0, i : i + rows]) ** 2)
        for i in range(0, x.shape[1], rows)
    ]
    assert metrics["loss"].shape == (EVERY, WORKERS)
    np.testing.assert_allclose(metrics["loss"][0], first, rtol=1e-5)


def test_what_is_random_differs_between_workers_and_the_same_run_gives_the_same_numbers():
    @jax.jit
    def step(state, batch):
        key, use = jax.random.split(state["key"])
        noise = jax.random.normal(use)
        return dict(params=state["params"] + noise, key=key), noise

    def run():
        updates = LocalUpdates(step, mesh_of(8), outer=local_sgd(every=3), overlap=False)
        state = updates.init(dict(params=jnp.zeros(()), key=jax.random.key(7)))
        seen = []
        for _ in range(2):
            state, noise = updates.round(state, np.zeros((3, 8), "f"))
            seen.append(np.asarray(noise))
        return np.concatenate(seen)

    noise = run()
    assert noise.shape == (6, 8) and len(np.unique(noise)) == noise.size
    np.testing.assert_array_equal(noise, run())


def test_a_train_state_of_flax_linen():
    model = flax.linen.Dense(OUT)
    x, y = DATA
    params = model.init(jax.random.key(0), x[0])
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(1e-2))

    @jax.jit
    def step(state, batch):
        def loss(params):
            return jnp.mean((state.apply_fn(params, batch[0]) - batch[1]) ** 2)

        value, gradients = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=gradients), value

    updates = LocalUpdates(step, mesh_of(8), outer=co2(every=EVERY), overlap=False)
    local, losses = updates.init(state), []
    for t in range(6):
        local, loss = updates.round(local, (x[t * 4 : t * 4 + 4, :8], y[t * 4 : t * 4 + 4, :8]))
        losses.append(float(loss.mean()))
    assert losses[-1] < losses[0]
    assert jax.tree.structure(updates.params(local)) == jax.tree.structure(params)
    assert isinstance(local.worker, TrainState) and int(local.worker.step[0]) == 24


def test_a_module_of_flax_nnx():
    model = nnx.Linear(FEATURES, OUT, rngs=nnx.Rngs(0))
    optimizer = optax.adam(1e-2)
    graph, params = nnx.split(model, nnx.Param)
    state = dict(params=params, optimizer=optimizer.init(params))

    @jax.jit
    def step(state, batch):
        def loss(params):
            return jnp.mean((nnx.merge(graph, params)(batch[0]) - batch[1]) ** 2)

        value, gradients = jax.value_and_grad(loss)(state["params"])
        moves, inner = optimizer.update(gradients, state["optimizer"])
        return dict(params=optax.apply_updates(state["params"], moves), optimizer=inner), value

    updates = LocalUpdates(step, mesh_of(4), outer=diloco(every=EVERY, delay=1), overlap=False)
    local, first = updates.round(updates.init(state), tuple(d[:EVERY] for d in DATA))
    for t in range(1, 6):
        local, last = updates.round(local, tuple(d[t * 4 : t * 4 + 4] for d in DATA))
    assert float(last.mean()) < float(first.mean())
    nnx.merge(graph, updates.params(local))


def matmuls(mesh):
    """Return a step of two matmuls, tensor parallel over "model", with AdamW, and its state."""
    optimizer = optax.adamw(1e-2)

    def at(*spec):
        return NamedSharding(mesh, P(*spec))

    def loss(params, x):
        inner = jax.lax.with_sharding_constraint(x @ params["up"], at(None, "model"))
        out = jax.lax.with_sharding_constraint(jnp.tanh(inner) @ params["down"], at("model", None))
        return jnp.mean((out - jnp.sin(x)) ** 2)

    @jax.jit
    def step(state, x):
        value, gradients = jax.value_and_grad(loss)(state["params"], x)
        moves, inner = optimizer.update(gradients, state["optimizer"], state["params"])
        return dict(params=optax.apply_updates(state["params"], moves), optimizer=inner), value

    rng = np.random.default_rng(3)
    params = dict(
        up=jax.device_put(rng.normal(size=(16, 32)).astype("f") / 4, at(None, "model")),
        down=jax.device_put(rng.normal(size=(32, 16)).astype("f") / 4, at("model", None)),
    )
    x = rng.normal(size=(8, 32, 16)).astype("f")
    return step, dict(params=params, optimizer=optimizer.init(params)), x


def three_axes(data, model):
    return jax.make_mesh((2, data, model), ("worker", "data", "model"), (AxisType.Auto,) * 3)


@pytest.mark.parametrize("overlapped", ("not", "around", "inside"))
@pytest.mark.parametrize("scattered", (False, True))
def test_tensor_parallelism_inside_a_worker_changes_nothing(scattered, overlapped):
    """On a mesh of three axes, held against workers of one device each."""

    def run(mesh, overlap, inside=lambda step: step):
        step, state, x = matmuls(mesh)
        updates = LocalUpdates(
            inside(step),
            mesh,
            axis="worker",
            outer=co2(every=2, momentum=0.5),
            shard_outer=scattered,
            overlap=overlap,
        )
        local = updates.init(state)
        for t in range(4):
            local, _ = updates.round(local, x[t * 2 : t * 2 + 2])
        return host(updates.params(local)), local

    devices = np.array(jax.devices()[:2]).reshape(2, 1, 1)
    small = jax.sharding.Mesh(devices, ("worker", "data", "model"), axis_types=(AxisType.Auto,) * 3)
    expected, _ = run(small, False)
    inside = jaxoverlap.overlap if overlapped == "inside" else lambda step: step
    found, local = run(three_axes(2, 2), overlapped == "around", inside)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), found, expected
    )
    assert "model" in jax.tree.leaves(tuple(local.worker["params"]["up"].sharding.spec))


def test_rings_stand_inside_a_round_of_overlapped_workers():
    mesh = three_axes(1, 4)
    step, state, x = matmuls(mesh)
    updates = LocalUpdates(step, mesh, axis="worker", outer=co2(every=2))
    lowered = updates.lower(updates.abstract(state), x[:2])
    assert lowered.plan is not None and lowered.plan.edits
    assert "collective_permute" in lowered.as_text()


# -- states ---------------------------------------------------------------------------------------

OUTERS = (
    local_sgd(every=EVERY),
    slowmo(every=EVERY, inner_learning_rate=0.1),
    bmuf(every=EVERY),
    diloco(every=EVERY),
    diloco(every=EVERY, delay=1),
    eager_diloco(every=EVERY),
    overlap_local_sgd(every=EVERY),
    streaming_diloco(every=EVERY, fragments=2, delay=1),
    co2(every=EVERY),
)


@pytest.mark.parametrize("outer", OUTERS, ids=lambda outer: f"{outer.name}-{outer.delay}")
def test_a_run_that_resumes_goes_on_to_the_same_bits(outer, tmp_path):
    import orbax.checkpoint as ocp

    updates = make(outer, optimizer=optax.adam(1e-2))
    begun = updates.init(make_state(optax.adam(1e-2)))
    half = train(updates, 2, DATA, begun)
    with ocp.StandardCheckpointer() as saver:
        saver.save(tmp_path / "half", half)
    rest = tuple(d[2 * EVERY :] for d in DATA)
    expected = train(updates, 2, rest, half)
    fresh = make(outer, optimizer=optax.adam(1e-2))
    like = fresh.abstract(make_state(optax.adam(1e-2)))
    with ocp.StandardCheckpointer() as saver:
        restored = saver.restore(tmp_path / "half", like)
    same_bits(train(fresh, 2, rest, restored), expected)


@pytest.mark.parametrize("outer", OUTERS, ids=lambda outer: f"{outer.name}-{outer.delay}")
@pytest.mark.parametrize("workers", (1, 2, 8))
def test_a_run_goes_on_with_another_number_of_workers(outer, workers):
    updates = make(outer)
    state = train(updates, 3, DATA)
    before = flat(updates.params(state))
    others = make(outer, workers)
    whole = others.consolidate(state)  # of another mesh
    spread = others.spread(whole)
    # One eager worker has nothing under way: what was is applied, and not once more by params().
    if outer.eager and workers == 1:
        after = jax.tree.map(lambda x: x[0], spread.begin)
    else:
        after = others.params(spread)
    np.testing.assert_allclose(flat(after), before, rtol=1e-5, atol=1e-6)
    same_bits(others.spread(host(whole)), spread)
    for leaf in jax.tree.leaves((spread.worker, spread.sent)):
        leaf = np.asarray(leaf)
        assert leaf.shape[0] == workers
        np.testing.assert_array_equal(leaf, np.broadcast_to(leaf[:1], leaf.shape))
    if not (outer.eager and workers == 1):
        close(others.consolidate(spread).begin, whole.begin)
    data = make_data(EVERY, workers)
    assert np.isfinite(flat(others.params(train(others, 1, data, spread)))).all()


def test_a_round_of_one_worker_is_its_steps():
    updates = make(local_sgd(every=EVERY), workers=1)
    data = make_data(EVERY, 1)
    found = flat(updates.params(train(updates, 1, data)))
    step, state = make_step(), make_state()
    for x, y in zip(*data, strict=True):
        state, _ = step(state, (x, y))
    np.testing.assert_allclose(found, flat(state["params"]), rtol=1e-6, atol=1e-7)


def test_fragments_are_whole_leaves_in_order_and_each_once():
    tree = dict(a=jnp.ones(5), b=jnp.ones(100), c=jnp.ones(3), d=jnp.ones(90))
    parts = [take(tree) for take in fragments_of(tree, 3)]
    names = [[k for k, v in part.items() if v is not None] for part in parts]
    assert list(itertools.chain(*names)) == ["a", "b", "c", "d"] and all(names)


@pytest.mark.parametrize("scattered", (False, True))
@pytest.mark.parametrize("outer", (local_sgd(every=EVERY), co2(every=EVERY)), ids=lambda o: o.name)
def test_a_short_last_round_is_the_round_of_so_many_steps(outer, scattered):
    updates, short = make(outer, shard_outer=scattered), type(outer).shortened(outer, 3)
    state = train(updates, 2, DATA)
    batches = tuple(d[2 * EVERY : 2 * EVERY + 3] for d in DATA)
    other = make(short, shard_outer=scattered)
    expected, _ = other.round(train(updates, 2, DATA), batches)
    found, metrics = updates.round(state, batches, steps=3)
    assert metrics["loss"].shape == (3, WORKERS)
    close(found, expected)
    with pytest.raises(ValueError, match="every=3"):
        updates.round(found, tuple(d[:2] for d in DATA), steps=3)
    with pytest.raises(ValueError, match=f"steps=9: expected a whole number, 1 to {EVERY}"):
        updates.round(found, batches, steps=9)


def test_fragments_need_whole_rounds():
    updates = make(streaming_diloco(every=EVERY, fragments=2, delay=1))
    with pytest.raises(ValueError, match=r"steps=2 with fragments=2 .*give all every=4"):
        updates.round(updates.init(make_state()), tuple(d[:2] for d in DATA), steps=2)


@pytest.mark.parametrize(
    "outer",
    # Each compiles two rounds. The schedules share the code that keeps float32; by night all run.
    (co2(every=2, learning_rate=1e-3), *(pytest.param(outer, marks=pytest.mark.nightly) for outer in (
        diloco(every=2, learning_rate=1e-3, momentum=0.0), overlap_local_sgd(every=2),
        streaming_diloco(every=2, fragments=2, delay=1), eager_diloco(every=2),
    ))),
    ids=lambda outer: outer.name,
)  # fmt: skip
def test_outer_state_in_float32_keeps_steps_that_bfloat16_loses(outer):
    def step(state, batch):
        params = jax.tree.map(lambda p: p - jnp.asarray(0.0625, p.dtype), state["params"])
        return dict(params=params), batch.mean()

    params = dict(a=jnp.full((8, 4), 8.0, jnp.bfloat16), b=jnp.full(4, 8.0, jnp.bfloat16))
    moved = {}
    for dtype in (None, jnp.float32):
        updates = LocalUpdates(step, mesh_of(4), outer=outer, overlap=False, outer_dtype=dtype)
        state = updates.init(dict(params=params))
        for _ in range(12):
            state, _ = updates.round(state, np.ones((2, 4), np.float32))
        assert state.worker["params"]["a"].dtype == jnp.bfloat16
        assert updates.params(state)["a"].dtype == jnp.bfloat16
        assert state.begin["a"].dtype == (dtype or jnp.bfloat16)
        assert jax.tree.map(lambda x: x.dtype, state) == jax.tree.map(
            lambda x: x.dtype, updates.abstract(dict(params=params))
        )
        moved[dtype] = 8 - float(np.asarray(state.begin["a"], np.float64).mean())
    if outer.name in ("diloco", "co2"):  # whose steps are below half a last bit of 8
        assert moved[None] == 0 < moved[jnp.float32]


# -- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outer", "says"),
    (
        (lambda: co2(every=0), "every=0"),
        (lambda: co2(every=2.5), "every=2.5"),
        (lambda: co2(every=4, momentum=-0.1), "momentum=-0.1"),
        (lambda: co2(every=4, momentum=1.0), "momentum=1.0"),
        (lambda: diloco(every=4, momentum=1.5), "momentum=1.5"),
        (lambda: bmuf(every=4, momentum=-1), "momentum=-1"),
        (lambda: slowmo(every=4, inner_learning_rate=0.0), "inner_learning_rate=0.0"),
        (lambda: co2(every=4, clip=0), "clip=0"),
        (lambda: co2(every=4, staleness=0.5), "staleness=0.5"),
        (lambda: co2(every=4, staleness="linear"), "staleness='linear'"),
        (lambda: co2(every=4, delay=2), "delay=2"),
        (lambda: overlap_local_sgd(every=4, pullback=0), "pullback=0"),
        (lambda: streaming_diloco(every=4, fragments=3, delay=1), "multiple of fragments"),
        (lambda: streaming_diloco(every=4, fragments=2, delay=3), "delay=3"),
        (lambda: streaming_diloco(every=4, fragments=2, delay=1, alpha=1.5), "alpha=1.5"),
    ),
)
def test_settings_that_cannot_be_are_refused(outer, says):
    with pytest.raises(ValueError, match=says):
        outer()


def test_a_mesh_without_the_axis_is_refused():
    with pytest.raises(ValueError, match=r"'workers'.*data, model"):
        LocalUpdates(make_step(), mesh_of(4), axis="workers", outer=co2(every=4))


def test_a_mesh_of_explicit_axes_is_refused():
    mesh = jax.make_mesh((8,), ("data",), (AxisType.Explicit,))
    with pytest.raises(ValueError, match="automatic axes"):
        LocalUpdates(make_step(), mesh, outer=co2(every=4))


def test_eager_outer_state_cannot_be_scattered():
    with pytest.raises(ValueError, match="differs between"):
        make(eager_diloco(every=4), shard_outer=True)


@pytest.mark.parametrize("shape", ((3, 16, 2), (3,), (5, 16)))
def test_batches_of_the_wrong_leading_size_are_refused(shape):
    updates = make(co2(every=4))
    with pytest.raises(ValueError, match=r"every=4"):
        updates.round(updates.init(make_state()), np.zeros(shape))


def test_a_global_batch_that_workers_cannot_share_is_refused():
    updates = make(co2(every=4))
    with pytest.raises(ValueError, match="not a multiple of the 4 workers"):
        updates.round(updates.init(make_state()), np.zeros((4, 6, 2)))


def test_a_state_without_parameters_there_is_refused():
    updates = LocalUpdates(make_step(), mesh_of(4), outer=co2(every=4), params="weights")
    with pytest.raises(ValueError, match="no parameters at 'weights'"):
        updates.init(make_state())


@pytest.mark.parametrize("leaf", [jnp.int32(1), jax.random.key(0)], ids=["count", "key"])
def test_parameters_that_have_no_average_are_refused(leaf):
    state = make_state()
    with pytest.raises(ValueError, match=r"a parameter of dtype .* at \['other'\]: only floats"):
        make(co2(every=4)).init({**state, "params": {**state["params"], "other": leaf}})


@pytest.mark.parametrize("scattered", [False, True])
def test_bfloat16_is_averaged_beside_other_axes(scattered):
    mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "model"), (AxisType.Auto,) * 3)
    at = NamedSharding(mesh, P("fsdp", "model"))
    weights = jax.device_put(jnp.ones((4, 4), jnp.bfloat16), at)

    def step(state, batch):
        return {"params": state["params"] + batch.mean().astype(jnp.bfloat16)}, None

    updates = LocalUpdates(
        step, mesh, outer=local_sgd(every=2), shard_outer=scattered, overlap=False
    )
    state, _ = updates.round(updates.init({"params": weights}), np.ones((2, 4), np.float32))
    np.testing.assert_array_equal(updates.params(state), 3.0)


def test_a_state_that_is_sharded_over_the_workers_is_refused():
    updates = make(co2(every=4))
    at = NamedSharding(updates.mesh, P("data"))
    state = jax.tree.map(lambda x: jax.device_put(x, at), make_state())
    with pytest.raises(ValueError, match="workers' axis"):
        updates.init(state)


def test_more_fragments_than_leaves_are_refused():
    updates = make(streaming_diloco(every=6, fragments=3, delay=1))
    with pytest.raises(ValueError, match="fragments=3 of parameters with 2 leaves"):
        updates.init(make_state())
