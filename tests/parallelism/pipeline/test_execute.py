"""A pipeline gives the gradients of the whole model, and sends what its closed forms say."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoverlap
from jaxoverlap.hardware.pods import compiler_options
from jaxoverlap.parallelism.pipeline import (
    PipelineSchedule,
    accumulated,
    stage_order,
    value_and_grad,
)
from tests.support.pods import marked
from tests.support.pods import pytestmark as pods

HIDDEN, BATCH, VOCAB = 8, 4, 5


def first(shared, batch):
    return shared["table"][batch["tokens"]]


def stage(weights, x):
    return x + jnp.tanh(x @ weights)


def last(shared, y, batch):
    logits = y @ shared["head"]
    at_target = jnp.take_along_axis(logits, batch["tokens"][:, None], 1)[:, 0]
    return jnp.mean(jax.nn.logsumexp(logits, -1) - at_target)


def whole(weights, shared, batch):
    """The mean loss without a pipeline."""

    def one(micro_batch):
        x = first(shared, micro_batch)
        for w in weights:
            x = stage(w, x)
        return last(shared, x, micro_batch)

    return jnp.mean(jax.vmap(one)(batch))


def made(p, v, m, data=1):
    mesh = jax.make_mesh(
        (p, data), ("pipeline", "data"), (AxisType.Auto,) * 2, devices=jax.devices()[: p * data]
    )
    keys = jax.random.split(jax.random.key(0), 4)
    weights = jax.random.normal(keys[0], (p * v, HIDDEN, HIDDEN), jnp.float32) / 3
    shared = {
        "table": jax.random.normal(keys[1], (VOCAB, HIDDEN)),
        "head": jax.random.normal(keys[2], (HIDDEN, VOCAB)),
    }
    batch = {"tokens": jax.random.randint(keys[3], (m, BATCH), 0, VOCAB)}
    run = value_and_grad(stage, first=first, last=last, mesh=mesh, micro_batches=m, pieces=v)
    return mesh, run, (weights, shared, batch)


@pytest.mark.parametrize(
    ("p", "v", "m", "data"),
    [
        (2, 1, 4, 2),
        (4, 1, 3, 2),
        (8, 1, 2, 1),
        (2, 2, 4, 2),
        (4, 2, 8, 2),
        (2, 3, 2, 1),
        (1, 1, 3, 1),
    ],
)
def test_loss_and_gradients_are_the_whole_models(p, v, m, data):
    mesh, run, (weights, shared, batch) = made(p, v, m, data)
    order = np.array(stage_order(p, v))
    wanted, (of_weights, of_shared) = jax.value_and_grad(whole, (0, 1))(weights, shared, batch)
    placed = jax.device_put(weights[order], NamedSharding(mesh, P("pipeline")))
    batch = jax.device_put(batch, NamedSharding(mesh, P(None, "data")))
    loss, (got_weights, got_shared) = jax.jit(run)(placed, shared, batch)
    np.testing.assert_allclose(loss, wanted, rtol=1e-6)
    np.testing.assert_allclose(got_weights, of_weights[order], rtol=2e-5, atol=1e-6)
    for name, leaf in of_shared.items():
        np.testing.assert_allclose(got_shared[name], leaf, rtol=2e-5, atol=1e-6)


def equations(jaxpr, name, runs=1):
    """Yield (times it runs, bytes of a device) of each equation of a name in a jaxpr."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name.startswith(name):
            yield runs, sum(v.aval.size * v.aval.dtype.itemsize for v in eqn.invars)
        times = runs * eqn.params["length"] if eqn.primitive.name == "scan" else runs
        for inner in jax.tree.leaves(tuple(eqn.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(inner):
                yield from equations(getattr(inner, "jaxpr", inner), name, times)


def _is_jaxpr(x):
    return hasattr(x, "eqns") or hasattr(x, "jaxpr")


@pytest.mark.parametrize(("p", "v", "m"), [(2, 1, 4), (4, 1, 8), (4, 2, 8)])
def test_a_jaxpr_sends_what_the_closed_form_says(p, v, m):
    _, run, args = made(p, v, m)
    sent = list(equations(jax.make_jaxpr(run)(*args).jaxpr, "ppermute"))
    schedule = PipelineSchedule(p, m, v)
    assert sum(runs for runs, _ in sent) == 2 * schedule.sends() == 2 * (m * v + p - 1)
    assert {size for _, size in sent} == {BATCH * HIDDEN * 4}


def test_inputs_in_flight_are_all_that_is_kept():
    p, m = 4, 8
    _, run, args = made(p, 1, m)
    text = str(jax.make_jaxpr(run)(*args))
    slots = PipelineSchedule(p, m).live_pieces(0)
    assert slots == 2 * p - 1
    assert f"f32[{slots},{BATCH},{HIDDEN}]" in text  # the buffer
    assert f"f32[{m},{BATCH},{HIDDEN}]" not in text  # no micro-batch's activations beside it


def test_mistakes_are_told():
    mesh, run, (weights, shared, batch) = made(2, 1, 4)
    with pytest.raises(ValueError, match="1 pieces for each of 2 stages"):
        run(weights[:1], shared, batch)
    with pytest.raises(ValueError, match="first dim of micro-batches, 4"):
        run(weights, shared, {"tokens": batch["tokens"][:2]})
    with pytest.raises(ValueError, match="no axis 'stage'"):
        value_and_grad(stage, first=first, last=last, mesh=mesh, micro_batches=4, axis="stage")
    with pytest.raises(ValueError, match="weights of dtype int32: expected floats"):
        run(weights.astype(int), shared, batch)
    settings = dict(mesh=mesh, micro_batches=4)
    changing = value_and_grad(lambda w, x: x[:, :2], first=first, last=last, **settings)
    with pytest.raises(ValueError, match=r"makes float32\[4, 2\] of an x of float32\[4, 8\]"):
        changing(weights, shared, batch)
    many = value_and_grad(stage, first=first, last=lambda shared, y, batch: y, **settings)
    with pytest.raises(ValueError, match="expected a scalar, the mean loss"):
        many(weights, shared, batch)


def test_bfloat16_beside_another_axis():
    _, run, (weights, shared, batch) = made(2, 1, 4, data=2)
    narrow = jax.tree.map(lambda a: a.astype(jnp.bfloat16), (weights, shared))
    loss, gradients = jax.jit(run)(*narrow, batch)
    wanted, whole_gradients = jax.value_and_grad(whole, (0, 1))(weights, shared, batch)
    assert loss.dtype == jnp.float32
    np.testing.assert_allclose(loss, wanted, rtol=2e-2)
    for ours, theirs in zip(
        jax.tree.leaves(gradients), jax.tree.leaves(whole_gradients), strict=True
    ):
        np.testing.assert_allclose(ours.astype(jnp.float32), theirs, atol=3e-2)


def test_gradients_stay_finite_where_a_stage_has_none_at_zero():
    mesh, _, (weights, shared, batch) = made(4, 1, 3)

    def normed(weights, x):
        return x / jnp.linalg.norm(x, axis=-1, keepdims=True) @ weights  # no derivative at x = 0

    run = value_and_grad(normed, first=first, last=last, mesh=mesh, micro_batches=3)
    _, (of_weights, _) = jax.jit(run)(weights, shared, batch)

    def loss(weights):
        def one(micro_batch):
            x = first(shared, micro_batch)
            for w in weights:
                x = normed(w, x)
            return last(shared, x, micro_batch)

        return jnp.mean(jax.vmap(one)(batch))

    np.testing.assert_allclose(of_weights, jax.grad(loss)(weights), rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("order", ["1F1B", "ZB-H1"])
def test_masks_and_keys_travel_with_x(order):
    mesh, _, (weights, shared, batch) = made(2, 1, 3)
    batch = {**batch, "key": jax.random.split(jax.random.key(1), 3)}

    def begin(shared, batch):
        return {"h": first(shared, batch), "kept": batch["tokens"] > 1, "key": batch["key"]}

    def dropped(weights, x):
        key, now = jax.random.split(x["key"])
        kept = x["kept"][:, None] * jax.random.bernoulli(now, 0.5, x["h"].shape)
        return {**x, "h": x["h"] + kept * jnp.tanh(x["h"] @ weights), "key": key}

    def end(shared, y, batch):
        return last(shared, y["h"], batch)

    def loss(weights):
        losses = []
        for i in range(3):
            micro_batch = jax.tree.map(lambda a, i=i: a[i], batch)
            x = begin(shared, micro_batch)
            for w in weights:
                x = dropped(w, x)
            losses.append(end(shared, x, micro_batch))
        return sum(losses) / 3

    run = value_and_grad(dropped, first=begin, last=end, mesh=mesh, micro_batches=3, order=order)
    got, (of_weights, _) = jax.jit(run)(weights, shared, batch)
    wanted, gradients = jax.value_and_grad(loss)(weights)
    np.testing.assert_allclose(got, wanted, rtol=1e-6)
    np.testing.assert_allclose(of_weights, gradients, rtol=2e-5, atol=1e-6)


@marked(pods)
def test_on_a_pod_sends_hide_under_matmuls():
    """Eight H100s, four stages of two: bytes by the closed form, steady sends covered."""
    p, m, hidden, rows = 4, 8, 2048, 4096
    mesh = jaxoverlap.pod_mesh("h100-sxm:1x8", {"pipeline": p, "data": 2})

    def big_stage(weights, x):
        for i in range(2):
            inner = jax.nn.gelu(x @ weights["up"][i])
            x = jax.lax.with_sharding_constraint(x + inner @ weights["down"][i], P("data"))
        return x

    def like(spec, *shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    run = value_and_grad(
        big_stage,
        first=lambda shared, batch: jax.lax.with_sharding_constraint(batch["x"], P("data")),
        last=lambda shared, y, batch: jnp.mean(y.astype(jnp.float32) ** 2),
        mesh=mesh,
        micro_batches=m,
    )
    stages = {
        "up": like(P("pipeline"), p, 2, hidden, 4 * hidden),
        "down": like(P("pipeline"), p, 2, 4 * hidden, hidden),
    }
    batch = {"x": like(P(None, "data"), m, rows, hidden)}
    compiled = jax.jit(run).lower(stages, {}, batch).compile(compiler_options())
    sends = [c for c in jaxoverlap.audit(compiled).collectives if c.kind == "collective-permute"]
    schedule = PipelineSchedule(p, m)
    assert sum(c.runs for c in sends) == 2 * schedule.sends()
    assert {c.bytes_moved for c in sends} == {rows // 2 * hidden * 2}
    steady = [c for c in sends if c.runs == m]
    assert len(steady) == 2
    assert all(c.covered for c in steady)


@pytest.mark.parametrize("pipelined", [True, False], ids=["pipeline", "accumulated"])
def test_many_micro_batches_lose_nothing_to_bfloat16(pipelined):
    """Sums of 512 losses or gradients in bfloat16 are off by 2 or 8%; they are in float32."""
    m = 512
    mesh, _, (weights, shared, _) = made(2, 1, 4)
    narrow = jax.tree.map(lambda a: a.astype(jnp.bfloat16), (weights, shared))
    batch = {"tokens": jax.random.randint(jax.random.key(7), (m, BATCH), 0, VOCAB)}
    if pipelined:
        run = value_and_grad(stage, first=first, last=last, mesh=mesh, micro_batches=m)
        value, (_, got) = jax.jit(run)(*narrow, batch)
    else:

        def loss(params, micro_batch):
            return whole(*params, jax.tree.map(lambda a: a[None], micro_batch))

        value, (_, got) = jax.jit(accumulated(loss, mesh=mesh))(narrow, batch)
    wanted_value, (_, wanted) = jax.value_and_grad(whole, (0, 1))(
        *jax.tree.map(lambda a: a.astype(jnp.float32), narrow), batch
    )
    np.testing.assert_allclose(value, wanted_value, rtol=5e-3)  # a loss itself is in bfloat16
    for name, leaf in wanted.items():
        off = got[name].astype(jnp.float32) - leaf
        assert got[name].dtype == jnp.bfloat16
        assert jnp.linalg.norm(off) < 0.01 * jnp.linalg.norm(leaf)


@pytest.mark.parametrize("p", [1, 2])
def test_gradients_are_summed_over_data_once_a_step(p):
    m = 4
    mesh, _, (weights, shared, batch) = made(2, 1, m, data=2)
    placed = jax.device_put(batch, NamedSharding(mesh, P(None, "data")))
    wanted, gradients = jax.value_and_grad(whole, (0, 1))(weights, shared, batch)
    if p == 1:

        def loss(params, micro_batch):
            return whole(*params, jax.tree.map(lambda a: a[None], micro_batch))

        call = accumulated(loss, mesh=mesh, data=["data"])

        def run(weights, shared, batch):
            return call((weights, shared), batch)
    else:
        run = value_and_grad(
            stage, first=first, last=last, mesh=mesh, micro_batches=m, data=["data"]
        )
    loss_, got = jax.jit(run)(weights, shared, placed)
    np.testing.assert_allclose(loss_, wanted, rtol=1e-6)
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(gradients), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=1e-6)
    sums = list(equations(jax.make_jaxpr(run)(weights, shared, placed).jaxpr, "psum"))
    assert sums
    assert all(runs == 1 for runs, _ in sums)
    with pytest.raises(ValueError, match="no such axes"):
        accumulated(whole, mesh=mesh, data=["rows"])


def test_shared_gradients_are_added_where_they_are_made():
    """Neither the table nor the head is touched in a tick but inside the ends' conditions."""
    _, run, args = made(4, 1, 8)
    jaxpr = jax.make_jaxpr(run)(*args).jaxpr
    shapes = {leaf.shape for leaf in jax.tree.leaves(args[1])}

    def outside(jaxpr, in_tick=False):
        for eqn in jaxpr.eqns:
            if in_tick and eqn.primitive.name not in ("cond", "pjit", "jit"):
                yield from (eqn for v in eqn.outvars if v.aval.shape in shapes)
            if eqn.primitive.name == "cond":
                continue
            inside = in_tick or eqn.primitive.name == "scan"
            for inner in jax.tree.leaves(tuple(eqn.params.values()), is_leaf=_is_jaxpr):
                if _is_jaxpr(inner):
                    yield from outside(getattr(inner, "jaxpr", inner), inside)

    assert not list(outside(jaxpr))
