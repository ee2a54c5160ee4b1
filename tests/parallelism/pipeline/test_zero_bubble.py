"""ZB-H1 gives the gradients of the whole model; its passes are parts of one backward pass."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxoverlap.parallelism.pipeline import value_and_grad, zb_h1
from jaxoverlap.parallelism.pipeline.split import split
from jaxoverlap.parallelism.pipeline.zero_bubble import tick_tables
from tests.parallelism.pipeline.test_execute import first, last, made, stage, whole
from tests.support.seeds import some

NONE = -1


@pytest.mark.parametrize(("p", "m"), [(1, 1), (1, 3), (2, 1), (2, 5), (4, 3), (4, 8), (8, 20)])
def test_slots_hold_what_each_pass_reads(p, m):
    """Replay the ticks with the numbers of micro-batches in the place of their values."""
    tables = tick_tables(p, m)
    names = ("saved", "kept", "x", "dy")
    buffers = [{name: [NONE] * tables.slots[name] for name in names} for _ in range(p)]
    done = {kind: [list[int]() for _ in range(p)] for kind in (1, 2, 3)}
    for tick in range(tables.kind.shape[1]):
        sent = {"F": [NONE] * p, "B": [NONE] * p}
        for s in range(p):
            kind, i, here = tables.kind[s, tick], tables.micro_batch[s, tick], buffers[s]
            if kind == 1:
                assert s == 0 or here["x"][tables.x[s, tick]] == i
                here["saved"][tables.saved[s, tick]] = i
                sent["F"][s] = i
            if kind == 2:
                assert here["saved"][tables.saved[s, tick]] == i
                assert here["dy"][tables.dy[s, tick]] == i
                here["kept"][tables.kept[s, tick]] = i
                sent["B"][s] = i
            if kind == 3:
                assert here["saved"][tables.saved[s, tick]] == i
                assert here["kept"][tables.kept[s, tick]] == i
            if kind:
                done[kind][s].append(i)
        for s in range(p):
            if (slot := tables.next_x[s, tick]) != NONE:
                buffers[s]["x"][slot] = sent["F"][s - 1]
            if (slot := tables.next_dy[s, tick]) != NONE:
                buffers[s]["dy"][slot] = sent["F"][s] if s == p - 1 else sent["B"][s + 1]
    assert all(sorted(of_stage) == [*range(m)] for kind in done.values() for of_stage in kind)
    assert tables.kind.shape[1] == zb_h1(p, m).step_s
    assert tables.slots["saved"] <= p  # 1F1B's memory on its first stage


@pytest.mark.rotating
@pytest.mark.parametrize(
    ("p", "m", "data"), some(2, [(2, 4, 2), (4, 3, 2), (4, 8, 1), (8, 3, 1), (1, 3, 1), (2, 1, 1)])
)
def test_loss_and_gradients_are_the_whole_models(p, m, data):
    mesh, _, (weights, shared, batch) = made(p, 1, m, data)
    run = value_and_grad(
        stage, first=first, last=last, mesh=mesh, micro_batches=m, data=["data"], order="ZB-H1"
    )
    wanted, (of_weights, of_shared) = jax.value_and_grad(whole, (0, 1))(weights, shared, batch)
    placed = jax.device_put(weights, NamedSharding(mesh, P("pipeline")))
    batch = jax.device_put(batch, NamedSharding(mesh, P(None, "data")))
    loss, (got_weights, got_shared) = jax.jit(run)(placed, shared, batch)
    np.testing.assert_allclose(loss, wanted, rtol=1e-6)
    np.testing.assert_allclose(got_weights, of_weights, rtol=2e-5, atol=1e-6)
    for name, leaf in of_shared.items():
        np.testing.assert_allclose(got_shared[name], leaf, rtol=2e-5, atol=1e-6)


def test_pieces_are_refused():
    mesh, _, _ = made(2, 1, 4)
    settings = dict(first=first, last=last, mesh=mesh, micro_batches=4)
    with pytest.raises(ValueError, match="pieces=2: its table has one piece"):
        value_and_grad(stage, pieces=2, order="ZB-H1", **settings)
    with pytest.raises(ValueError, match="order='GPipe': expected '1F1B' or 'ZB-H1'"):
        value_and_grad(stage, order="GPipe", **settings)


# -- the passes -----------------------------------------------------------------------------------


def layer(x, w):
    return x + jnp.tanh(x @ w), None


def looped(w, x):
    return jax.lax.scan(layer, x, w)[0]


def looped_of_checkpoints(w, x):
    return jax.lax.scan(jax.checkpoint(layer), x, w)[0]


def shared_in_loop(w, x):
    """The gradient of w[0] is carried through the loop, that of the others stacked."""

    def body(x, own):
        return x + jnp.tanh(x @ own) @ w[0], None

    return jax.lax.scan(body, x, w[1:])[0]


def unrolled(w, x):
    for one in w:
        x, _ = jax.jit(layer)(x, one)
    return x


@pytest.mark.parametrize(
    ("stage", "matmuls"),
    [  # of F, B and W, loops' bodies counted once
        (unrolled, (3, 3, 3)),
        (looped, (1, 1, 1)),
        (jax.checkpoint(looped), (1, 2, 1)),
        (looped_of_checkpoints, (1, 2, 1)),
        (shared_in_loop, (2, 2, 2)),
    ],
    ids=["unrolled", "loop", "checkpoint", "loop of checkpoints", "shared"],
)
def test_passes_are_the_backward_pass_in_parts(stage, matmuls):
    keys = jax.random.split(jax.random.key(0), 3)
    w = jax.random.normal(keys[0], (3, 8, 8)) / 3
    x, dy = (jax.random.normal(key, (4, 8)) for key in keys[1:])

    def backward(w, x, dy):
        y, pull = jax.vjp(stage, w, x)
        dw, dx = pull(dy)
        return y, dx, dw

    passes = split(backward, w, x, dy)
    y, saved = passes.forward(w, x)
    dx, kept = passes.inputs(w, saved, dy)
    dw = passes.weights(w, saved, kept)
    for found, wanted in zip((y, dx, dw), backward(w, x, dy), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)
    assert not any(leaf.shape == w.shape for leaf in (*saved, *kept))  # no copies of weights
    calls = (passes.forward, w, x), (passes.inputs, w, saved, dy), (passes.weights, w, saved, kept)
    found = tuple(str(jax.make_jaxpr(fn)(*args)).count("dot_general") for fn, *args in calls)
    assert found == matmuls
