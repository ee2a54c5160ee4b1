"""Overlapped steps run under jit and in other contexts, and plain where they do not belong."""

import importlib.util
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoverlap

MESH = jax.make_mesh((2, 4), ("data", "model"), (AxisType.Auto,) * 2)
X = jax.device_put(np.ones((16, 32), np.float32), NamedSharding(MESH, P("data", "model")))
W = jax.device_put(np.ones((32, 64), np.float32), NamedSharding(MESH, P("model", None)))


def test_traced_arguments_without_a_sharding_run_plain_and_say_so():
    step = jaxoverlap.overlap(lambda x, w: x @ w)
    with pytest.warns(UserWarning, match="called under jit, grad or vmap"):
        np.testing.assert_allclose(jax.jit(lambda x, w: step(x, w))(X, W), X @ W)


def summed(x, w):
    x = jax.lax.with_sharding_constraint(x, NamedSharding(MESH, P("model")))
    y = jax.lax.with_sharding_constraint(x @ w, NamedSharding(MESH, P(None, "model")))
    return jnp.sum(y**2)


@pytest.mark.parametrize(
    "around", [jax.jit, lambda f: jax.jit(jax.grad(f)), jax.grad], ids=["jit", "jit grad", "grad"]
)
def test_inside_another_transformation_it_says_once_what_it_loses(around):
    step = jaxoverlap.overlap(jax.jit(summed))
    with pytest.warns(UserWarning, match="inside another transformation") as caught:
        got = around(lambda x, w: step(x, w))(X, W)
        jax.block_until_ready(around(lambda x, w: step(x, w) * 2)(X, W))
    assert len(caught) == 1 and caught[0].filename == __file__
    np.testing.assert_allclose(got, around(summed)(X, W), rtol=1e-5)


@pytest.mark.parametrize("ask", [jax.eval_shape, lambda f, *args: jax.make_jaxpr(f)(*args)])
def test_who_asks_for_shapes_alone_is_told_nothing(ask):
    step = jaxoverlap.overlap(jax.jit(summed))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ask(step, X, W)
        step(X, W)


def test_a_step_follows_the_mesh_of_its_context():
    """One jaxpr is called in two contexts: the devices are those of the second."""

    def product(x, w):
        x = jax.lax.with_sharding_constraint(x, P("model", None))
        return jax.lax.with_sharding_constraint(x @ w, P(None, "model"))

    step = jaxoverlap.overlap(jax.jit(product))
    x, w = np.ones((16, 32), np.float32), np.ones((32, 64), np.float32)
    for devices in (jax.devices()[:4], jax.devices()[4:]):
        with jax.set_mesh(Mesh(np.array(devices), ("model",), axis_types=(AxisType.Auto,))):
            assert step(x, w).devices() == set(devices)


def test_disable_jit_runs_the_users_own_python():
    seen = []

    def product(x, w):
        seen.append(x)
        return x @ w

    step = jaxoverlap.overlap(product)
    with jax.disable_jit():
        np.testing.assert_allclose(step(X, W), X @ W)
    assert not isinstance(seen[0], jax.core.Tracer)


def test_a_nan_is_reported_as_jit_reports_it():
    step = jaxoverlap.overlap(jax.jit(lambda x, w: jnp.log(-(x @ w))))
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="nan"):
        step(X, W)


def test_a_sum_over_two_axes_counts_what_is_sent():
    """A hybrid-FSDP weight gradient is summed over data and scattered over fsdp."""
    mesh = jax.make_mesh((4, 2), ("data", "fsdp"), (AxisType.Auto,) * 2)
    batch, weight = NamedSharding(mesh, P(("data", "fsdp"))), NamedSharding(mesh, P("fsdp"))
    gradient = jax.jit(lambda x, dy: x.T @ dy, out_shardings=weight)
    x = jax.ShapeDtypeStruct((64, 128), jnp.float32, sharding=batch)
    compiled = jaxoverlap.overlap(gradient).lower(x, x).compile()
    (decision,) = compiled.plan.decisions
    # The sum is scattered over fsdp first (32 kB of 64); what is left is summed over data whole.
    assert (decision.axis, decision.kind) == ("fsdp", "matmul_reduce_scatter")
    hops = compiled.audit().hops
    assert hops.bytes_moved == decision.bytes_moved == 128 * 128 * 4 // 2


@pytest.mark.pods
@pytest.mark.skipif(
    not (
        importlib.util.find_spec("jax_plugins")
        and any(importlib.util.find_spec(f"jax_plugins.xla_cuda{n}") for n in (12, 13))
    ),
    reason="JAX's CUDA plugin is not installed (the pods extra)",
)
def test_on_a_gpu_a_step_may_be_called_inside_another_jit():
    """Only the outermost jit may have compiler options, and ours are not the user's doing."""
    mesh = jaxoverlap.pod_mesh("h100-sxm:1x4", {"model": 4})
    out = NamedSharding(mesh, P(None, "model"))
    step = jaxoverlap.overlap(jax.jit(lambda x, w: x @ w, in_shardings=(
        NamedSharding(mesh, P("model", None)), out), out_shardings=out),
        granularity="one_way")  # fmt: skip
    x = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16)
    lowered = jax.jit(lambda x, w: step(x, w) + 1).lower(x, x)
    assert "collective_permute" in lowered.as_text()
