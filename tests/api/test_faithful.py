"""Steps that overlap() once changed for their users now live as under jax.jit alone.

Three calls with outputs fed back. All is compared: values, shardings, what is donated, how often
the step is traced and compiled (tests/differential/compare.py has the list).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoverlap
from tests.differential.by_hand import differs, mesh_of
from tests.differential.training import Program, descend
from tests.differential.world import Leaf

GRID = {"data": 2, "model": 4}


def normal(seed: int, *shape: int) -> np.ndarray:
    values = np.random.default_rng(seed).standard_normal(shape) / np.sqrt(shape[-2])
    return values.astype(np.float32)


def descended(params, grads):
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


def scanned_weights():
    """Return two stacked layers of a residual MLP, split over model."""
    return {
        "w": Leaf(normal(1, 2, 16, 32), P(None, None, "model")),
        "v": Leaf(normal(2, 2, 32, 16), P(None, "model", None)),
    }


def scanned_loss(params, x):
    def block(x, p):
        return x + jax.nn.gelu(x @ p["w"]) @ p["v"], None

    return jnp.mean(jax.lax.scan(block, x, params)[0] ** 2)


def batch(n: int) -> list[Leaf]:
    return [Leaf(normal(10 + n, 8, 16), P("data"))]


# -- results whose shardings are open, and donation -----------------------------------------------


def fsdp_weights() -> dict[str, Leaf]:
    """Return three matrices, all split over data and one over model too."""
    specs = {"w": P("data", "model"), "a": P("data", None), "b": P(None, "data")}
    return {name: Leaf(normal(i, 32, 32), spec) for i, (name, spec) in enumerate(specs.items())}


def rows(n: int) -> list[Leaf]:
    """Return many rows, so that sums are small beside them and are wanted scattered."""
    return [Leaf(normal(20 + n, 64, 32), P("data"))]


def fsdp_loss(p, x):
    y = jnp.tanh(x @ p["w"])
    return jnp.mean((y + jax.nn.gelu(y @ p["a"]) @ p["b"]) ** 2)


def fsdp_update(p, x):
    return descended(p, jax.grad(fsdp_loss)(p, x))


def fsdp_parameters(mesh):
    return Program(fsdp_update, [fsdp_weights()], rows, 0)


def test_fsdp_parameters_stay_sharded_and_donated():
    assert differs(GRID, fsdp_parameters, donate_argnums=0) == []


@pytest.mark.parametrize("where", ["optimizer", "loss", "loss, by switch"])
def test_parameters_of_a_step_with_branches_stay_sharded(where: str):
    def branching(mesh):
        def loss(p, x, n):
            if where == "optimizer":
                return fsdp_loss(p, x)
            y = jnp.tanh(x @ p["w"])
            branches = [
                lambda y: y + jax.nn.gelu(y @ p["a"]) @ p["b"],
                lambda y: y * 2,
                lambda y: y @ p["w"],
            ]
            if where == "loss":
                return jnp.mean(jax.lax.cond(n % 2 == 0, *branches[:2], y) ** 2)
            return jnp.mean(jax.lax.switch(n % 3, branches, y) ** 2)

        def decayed(p, g):
            return jax.tree.map(lambda p: p * 0.9, descended(p, g))

        def update(p, n, x):
            grads = jax.grad(loss)(p, x, n)
            if where == "optimizer":
                return jax.lax.cond(n % 2 == 0, descended, decayed, p, grads), n + 1
            return descended(p, grads), n + 1

        return Program(update, [fsdp_weights(), Leaf(np.int32(0))], rows, (0, 1))

    assert differs(GRID, branching, donate_argnums=(0, 1)) == []


def test_parameters_updated_under_an_outer_jit_stay_sharded():
    mesh = mesh_of(GRID)
    specs = {name: NamedSharding(mesh, leaf.spec) for name, leaf in fsdp_weights().items()}
    step = jax.jit(fsdp_update, in_shardings=(specs, NamedSharding(mesh, P("data"))))
    overlapped = jaxoverlap.overlap(step)
    params = jax.tree.map(lambda leaf: leaf.placed(mesh), fsdp_weights())
    x = rows(0)[0].placed(mesh)
    plain = jax.jit(lambda p, x: step(p, x))(params, x)
    ours = jax.jit(lambda p, x: overlapped(p, x))(params, x)
    for name, value in plain.items():
        np.testing.assert_allclose(ours[name], value, rtol=1e-4, atol=1e-6)
        assert ours[name].sharding.is_equivalent_to(value.sharding, 2), name


def gradient_of_a_scan(mesh):
    return Program(jax.grad(scanned_loss), [scanned_weights()], batch, 0, apply=descend)


def test_gradients_of_a_scan_without_remat_lie_as_under_jit():
    assert differs(GRID, gradient_of_a_scan) == []


def jacobian_of_a_gradient(mesh):
    def step(params, x):
        def along(scales):
            return jax.grad(scanned_loss)(jax.tree.map(lambda p: p * scales.sum(), params), x)

        return jax.jacfwd(along)(jnp.full(2, 0.5))

    return Program(step, [], lambda n: [scanned_weights(), *batch(n)], None)


def test_the_jacobian_of_a_gradient_lies_as_under_jit():
    assert differs(GRID, jacobian_of_a_gradient) == []


# -- lookups in manual code -----------------------------------------------------------------------


def tokens(n: int) -> list[Leaf]:
    rng = np.random.default_rng(n)
    return [Leaf(rng.integers(0, 32, (8, 4)).astype(np.int32), P("data")) for _ in range(2)]


def language(seed: int = 0) -> dict[str, Leaf]:
    return {"embed": Leaf(normal(seed, 32, 16), P()), "out": Leaf(normal(seed + 1, 16, 32), P())}


def integer_labels(mesh):
    """Build a step, data-parallel by hand, with the loss that everybody imports."""

    def local(p, ids, labels):
        def loss(p):
            logits = jnp.tanh(p["embed"][ids]) @ p["out"]
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        value, grads = jax.value_and_grad(loss)(p)
        return descended(p, jax.lax.pmean(grads, "data")), jax.lax.pmean(value, "data")

    step = jax.shard_map(
        local, mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=P(), check_vma=False
    )
    return Program(lambda p, ids, labels: step(p, ids, labels), [language()], tokens, (0, None))


def test_integer_labels_in_a_data_parallel_shard_map():
    assert differs({"data": 4}, integer_labels, donate_argnums=0) == []


def split_vocabulary(mesh):
    """Build a step with a cross-entropy whose logits no device has whole."""

    def local(x, table, labels):
        logits = x @ table.T
        peak = jax.lax.pmax(jax.lax.stop_gradient(logits).max(-1), "model")
        total = jax.lax.psum(jnp.exp(logits - peak[..., None]).sum(-1), "model")
        at = labels - jax.lax.axis_index("model") * table.shape[0]
        own = (at >= 0) & (at < table.shape[0])
        at = jnp.where(own, at, 0)[..., None]
        right = jnp.where(own, jnp.take_along_axis(logits, at, -1)[..., 0], 0)
        return jnp.log(total) + peak - jax.lax.psum(right, "model")

    rows = P("data", None, None)
    entropy = jax.shard_map(
        local, mesh=mesh, in_specs=(rows, P("model"), P("data")), out_specs=P("data")
    )

    def update(p, x, labels):
        grads = jax.grad(lambda p: entropy(jnp.tanh(x @ p["w"]), p["table"], labels).mean())(p)
        return descended(p, grads)

    params = {"w": Leaf(normal(0, 16, 16), P()), "table": Leaf(normal(1, 32, 16), P("model"))}
    return Program(
        update, [params], lambda n: [Leaf(normal(n, 8, 4, 16), P("data")), tokens(n)[1]], 0
    )  # fmt: skip


def test_a_cross_entropy_over_a_split_vocabulary():
    assert differs(GRID, split_vocabulary, donate_argnums=0) == []


def taken(mesh):
    def local(p, ids, labels):
        wrong = (
            jnp.take(p["embed"], ids, axis=0) @ p["out"]
            - jnp.take(p["out"].T, labels, axis=0) @ p["out"]
        )
        return jax.lax.pmean(jnp.mean(wrong**2), "data")

    loss = jax.shard_map(local, mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=P())
    return Program(lambda p, *ids: jax.grad(loss)(p, *ids), [language()], tokens, 0, apply=descend)


def test_take_in_a_shard_map():
    assert differs({"data": 4}, taken) == []


# -- sums that two matmuls read -------------------------------------------------------------------


def linear_attention(mesh):
    rows = NamedSharding(mesh, P("data", None, None))

    def forward(p, x):
        k = jax.lax.with_sharding_constraint(x @ p["wk"], rows)
        x = x + jnp.einsum("bsd,bde->bse", x, jnp.einsum("bsd,bse->bde", k, x)) / 16
        return x + jnp.tanh(x @ p["w"]) @ p["u"]

    params = {
        "wk": Leaf(normal(0, 16, 16), P("model", None)),
        "w": Leaf(normal(1, 16, 32), P(None, "model")),
        "u": Leaf(normal(2, 32, 16), P("model", None)),
    }
    x = Leaf(normal(3, 8, 8, 16), P("data"))
    return Program(lambda x, p: forward(p, x), [x], lambda n: [params], 0)


def test_a_pinned_sum_that_two_matmuls_read():
    assert differs(GRID, linear_attention) == []


def split_stream(mesh):
    """Build a step of attention whose stream lies over model: each sum is read beside it."""

    def loss(p, x):
        x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(None, None, "model")))
        k = x @ p["wk"]
        held = jnp.einsum("bsd,bse->bde", k, x)
        x = x + jnp.tanh(jnp.einsum("bsd,bde->bse", k, held) / 256) @ p["u"]
        return jnp.mean(x**2)

    params = {"wk": Leaf(normal(0, 16, 16), P()), "u": Leaf(normal(1, 16, 16), P())}
    x = Leaf(normal(2, 16, 16, 16), P("data"))
    return Program(jax.grad(loss), [params], lambda n: [x], 0, apply=descend)


def test_a_sum_that_is_read_beside_what_it_is_of():
    assert differs({"data": 2, "model": 2}, split_stream) == []


def explicit_gradients(mesh):
    """Build a step with all over one axis, by turns: rings gather what has an explicit type."""
    rows = NamedSharding(mesh, P(None, "data"))

    def loss(p, x):
        return jnp.mean(jnp.tanh(jnp.einsum("ij,jk->ik", x, p, out_sharding=rows)) ** 2)

    x = Leaf(normal(0, 16, 32), P("data"))
    weights = Leaf(normal(1, 32, 8), P("data"))
    return Program(jax.grad(loss), [weights], lambda n: [x], 0, apply=descend)


def test_gradients_of_an_explicit_mesh():
    assert differs({"data": 2, "model": 2}, explicit_gradients, explicit=True) == []


def closed_over(mesh):
    """Build a step on an explicit mesh that closes over numbers of rows and a sharded table."""
    rows, table = np.arange(16)[::-1], Leaf(normal(2, 8, 16), P("model", None)).placed(mesh)
    x_at, out_at = NamedSharding(mesh, P("data", None)), NamedSharding(mesh, P(None, "model"))

    def loss(p, x):
        x = x.at[jnp.asarray(rows)].get(out_sharding=x_at)
        y = jnp.einsum("ij,jk->ik", x, p, out_sharding=out_at)
        return jnp.mean(jnp.einsum("ik,kl->il", y, table, out_sharding=x_at) ** 2)

    x = Leaf(normal(0, 16, 32), P("data"))
    weights = Leaf(normal(1, 32, 8), P("data"))
    return Program(jax.grad(loss), [weights], lambda n: [x], 0, apply=descend)


def test_constants_of_a_step_on_an_explicit_mesh():
    assert differs({"data": 2, "model": 2}, closed_over, explicit=True) == []


def without_results(mesh):
    """Build a step that returns nothing, so that XLA is given an empty program."""
    x, w = (Leaf(normal(i, 16, 16), P("data")) for i in range(2))
    return Program(lambda x, w: (x @ w, ())[1], [], lambda n: [x, w], ())


def test_a_step_without_results():
    assert differs({"data": 2, "model": 2}, without_results) == []


def constants(mesh):
    """Build a step whose results depend on no argument: XLA folds them, matmuls too."""
    x = Leaf(normal(0, 16, 16), P("data"))
    rows = np.arange(16)[::-1]

    def step(x):
        jnp.sum(x[jnp.asarray(rows)])  # reads a constant, and nobody reads it
        return 3, jnp.zeros(()), jnp.ones((4, 4)) @ jnp.ones((4, 4))

    return Program(step, [], lambda n: [x], ())


def test_a_step_of_constants():
    assert differs({"data": 2, "model": 2}, constants) == []


def accumulated(mesh):
    """Build a step of two microbatches, each over half of the batch's axis."""

    def update(p, x):
        pieces = x.reshape(2, -1, x.shape[-1])

        def add(i, total):
            grads = jax.grad(lambda p: jnp.mean(jnp.tanh(pieces[i] @ p["a"] @ p["b"]) ** 2))(p)
            return jax.tree.map(jnp.add, total, grads)

        zeros = jax.tree.map(jnp.zeros_like, p)
        return descended(p, jax.lax.fori_loop(0, 2, add, zeros))

    params = {"a": Leaf(normal(0, 16, 32), P()), "b": Leaf(normal(1, 32, 16), P())}
    return Program(update, [params], lambda n: [Leaf(normal(5 + n, 16, 16), P("data", None))], 0)


def test_gradients_of_microbatches():
    assert differs({"data": 4, "model": 2}, accumulated, donate_argnums=0) == []
