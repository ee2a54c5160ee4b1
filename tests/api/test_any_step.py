"""Steps in the shape of public ones compile for pods: convolutions, groups, offload, maps, meshes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoverlap
from jaxoverlap.step.options import Options
from tests.support.halves import OFFLOADS_INNER
from tests.support.pods import pytestmark as pods

POD, AXES = "h100-sxm:1x8", {"data": 4, "model": 2}
D, F = 64, 128


def trained(loss: Callable[..., Any]) -> Any:
    """Return a jitted step of gradient descent."""

    def step(params, *batch):
        grads = jax.grad(loss)(params, *batch)
        return jax.tree.map(lambda p, g: (p - 0.1 * g).astype(p.dtype), params, grads)

    return jax.jit(step)


def patches(params, x):
    """Convolve images [b, 16, 16, 3] to tokens, then an MLP, as a ViT does."""
    numbers = ("NHWC", "HWIO", "NHWC")
    kernel = lax.stop_gradient(params["kernel"])
    x = lax.conv_general_dilated(x, kernel, (4, 4), "VALID", dimension_numbers=numbers)
    x = x.reshape(x.shape[0], -1, D)
    return jnp.mean(jnp.square(x + jax.nn.gelu(x @ params["up"]) @ params["down"]))


def depthwise(params, x):
    """Convolve each feature of [b, s, d] over time between two matmuls, as Mamba does."""
    h = lax.conv_general_dilated(
        x @ params["up"], params["kernel"], (1,), [(3, 0)],
        dimension_numbers=("NWC", "WIO", "NWC"), feature_group_count=F,
    )  # fmt: skip
    return jnp.mean(jnp.square(x + jax.nn.silu(h) @ params["down"]))


def groups(params, x):
    """Multiply sorted tokens of [b, s, d] in two groups behind a dense layer."""
    x = x + jax.nn.gelu(x @ params["up"]) @ params["down"]
    tokens = x.reshape(-1, D)
    order = jnp.argsort(jnp.arange(len(tokens)) % 2)
    sizes = jnp.full(2, len(tokens) // 2, jnp.int32)
    made = lax.ragged_dot(tokens[order], params["kernel"], sizes)
    return jnp.mean(jnp.square(jnp.zeros_like(tokens).at[order].set(made) + tokens))


STEPS: dict[str, tuple[Callable[..., Any], tuple[int, ...], tuple[int, ...]]] = {
    "patches": (patches, (4, 4, 3, D), (16, 16, 16, 3)),
    "depthwise": (depthwise, (4, 1, F), (16, 8, D)),
    "groups": (groups, (2, D, D), (16, 8, D)),
}


def arguments(mesh: Mesh, kernel: tuple[int, ...], x: tuple[int, ...], make: Callable) -> Any:
    def at(shape, *spec):
        return make(shape, NamedSharding(mesh, P(*spec)))

    params = {"up": at((D, F), "data", "model"), "down": at((F, D), "model", "data")}
    return {**params, "kernel": at(kernel)}, at(x, "data")


def shaped(shape: tuple[int, ...], sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)


def drawn(shape: tuple[int, ...], sharding: NamedSharding) -> jax.Array:
    values = np.random.default_rng(len(shape)).standard_normal(shape) / 8
    return jax.device_put(values.astype(np.float32), sharding)


@pytest.mark.parametrize("name", STEPS)
def test_halves_of_other_matmuls_compute_what_the_step_does(name: str):
    loss, *shapes = STEPS[name]
    mesh = jax.make_mesh(tuple(AXES.values()), tuple(AXES), axis_types=(AxisType.Auto,) * 2)
    args, step = arguments(mesh, *shapes, drawn), trained(loss)
    overlapped = jaxoverlap.overlap(step, halves=2)
    assert overlapped.explain(*args).split
    wanted = jax.tree.map(np.asarray, step(*args))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), overlapped(*args), wanted
    )


class TestPods:
    pytestmark = pods

    @pytest.mark.parametrize("name", STEPS)
    def test_other_matmuls_compile_in_halves(self, name: str):
        loss, *shapes = STEPS[name]
        args = arguments(jaxoverlap.pod_mesh(POD, AXES), *shapes, shaped)
        step = jaxoverlap.Overlapped(trained(loss), Options(halves=2, never_slower=False))
        compiled = step.lower(*args).compile()
        assert compiled.plan.split and compiled.simulate().step_s > 0

    @pytest.mark.parametrize("unroll", [1, 2])
    def test_residuals_that_are_offloaded_compile_in_halves(self, unroll: int):
        mesh = jaxoverlap.pod_mesh(POD, AXES)

        def loss(params, x):
            def layer(x, w):
                return x + checkpoint_name(jnp.tanh(x @ w["up"]), "inner") @ w["down"], None

            return jnp.square(
                lax.scan(jax.checkpoint(layer, policy=OFFLOADS_INNER), x, params)[0]
            ).mean()

        def at(shape, *spec):
            return shaped(shape, NamedSharding(mesh, P(*spec)))

        params = {"up": at((4, D, F), None, None, "model"), "down": at((4, F, D), None, "model")}
        options = Options(halves=2, unroll=unroll, never_slower=False)
        step = jaxoverlap.Overlapped(trained(loss), options)
        compiled = step.lower(params, at((16, 8, D), "data")).compile()
        assert compiled.plan.split.parts == 2
        assert not any("scans unrolled" in note for note in compiled.plan.notes)
        assert compiled.memory_analysis().host_temp_size_in_bytes > 0

    def test_a_step_on_two_meshes_of_one_pod_is_simulated_on_it(self):
        one, other = (jaxoverlap.pod_mesh(POD, axes) for axes in ({"all": 8}, {"x": 2, "y": 4}))
        x = shaped((D, D), NamedSharding(one, P("all")))
        w = shaped((D, D), NamedSharding(other, P(None, "y")))
        step = jaxoverlap.overlap(jax.jit(lambda x, w: jnp.tanh(x @ w) @ w))
        with pytest.warns(UserWarning, match="uses 2 meshes"):
            compiled = step.lower(x, w).compile()
        assert compiled.plan is None
        assert str(compiled.simulate().cluster) == POD

    def test_under_vmap_the_batch_of_each_replica_is_split(self):
        mesh = jaxoverlap.pod_mesh(POD, {"replica": 2, "data": 2, "model": 2})

        def at(shape, *spec):
            return shaped(shape, NamedSharding(mesh, P("replica", *spec)))

        def loss(params, x):
            return jnp.mean(jnp.square(x + jax.nn.gelu(x @ params["up"]) @ params["down"]))

        params = {"up": at((2, D, F), "data", "model"), "down": at((2, F, D), "model", "data")}
        mapped = jax.jit(jax.vmap(trained(loss), spmd_axis_name="replica"))
        plan = jaxoverlap.overlap(mapped, halves=2).explain(params, at((2, 8, 8, D), "data"))
        assert plan.split
        split = "The batch is split in 2 parts: dim 1 of argument 2"
        assert any(note.startswith(split) for note in plan.notes), plan.notes


@pytest.mark.parametrize("explicit", [False, True], ids=["automatic", "explicit"])
@pytest.mark.parametrize("closes_over", [False, True], ids=["argument", "closed over"])
def test_a_step_with_a_mutable_array_runs_as_it_is(explicit, closes_over):
    kind = AxisType.Explicit if explicit else AxisType.Auto
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind, kind))

    def put(x, *spec):
        return jax.device_put(x, NamedSharding(mesh, P(*spec)))

    x, w = put(jnp.ones((8, D)), "data"), put(jnp.ones((D, F)), None, "model")

    def told(overlapped: bool):
        count = jax.new_ref(put(jnp.zeros(())))

        def step(count, w, x):
            y = jnp.tanh(x @ w)
            count[...] += y.mean()
            return y

        fn = jax.jit((lambda w, x: step(count, w, x)) if closes_over else step)
        fn = jaxoverlap.overlap(fn) if overlapped else fn
        results = [fn(*(() if closes_over else (count,)), w, x) for _ in range(2)]
        return [*map(np.asarray, results), float(count[...])]

    want = told(False)
    with pytest.warns(UserWarning, match="reads or writes mutable arrays"):
        got = told(True)
    assert all(map(np.array_equal, got, want))
