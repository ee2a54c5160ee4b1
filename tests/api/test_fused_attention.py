"""Steps with cuDNN's attention, compiled for pods: on automatic and on explicit meshes."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, reshard
from jax.sharding import PartitionSpec as P

import jaxoverlap
from jaxoverlap import Plan
from tests.support.pods import pytestmark as pods

pytestmark = [*pods, pytest.mark.filterwarnings("ignore:overlap.. changes nothing")]

HIDDEN, HEADS, LAYERS = 2048, 16, 2


def shaped(mesh: Mesh, shape: tuple[int, ...], *spec: Any, dtype: Any = jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))


def attended(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")


# -- automatic axes -------------------------------------------------------------------------------


def tensor_parallel(mesh: Mesh):
    """Scanned layers with their stream scattered along the sequence, and their heads over tp."""

    def at(x, *spec):
        return lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))

    def layer(x, w):
        q, k, v = (at(jnp.einsum("bsd,dnh->bsnh", x, w[n]), "data", None, "model") for n in "qkv")
        x = x + jnp.einsum("bsnh,nhd->bsd", attended(q, k, v), w["o"])
        x = at(x, "data", "model")
        x = x + at(jax.nn.gelu(x @ w["up"]), "data", None, "model") @ w["down"]
        return at(x, "data", "model"), None

    def loss(w, x):
        return jnp.mean(jnp.square(lax.scan(jax.checkpoint(layer), x, w)[0].astype(jnp.float32)))

    @functools.partial(jax.jit, donate_argnums=0)
    def step(w, x):
        value, gradients = jax.value_and_grad(loss)(w, x)
        return jax.tree.map(lambda p, g: p - 1e-3 * g, w, gradients), value

    heads = (LAYERS, HIDDEN, HEADS, HIDDEN // HEADS)
    w = {n: shaped(mesh, heads, None, None, "model") for n in "qkv"}
    w["o"] = shaped(mesh, (LAYERS, HEADS, HIDDEN // HEADS, HIDDEN), None, "model")
    w["up"] = shaped(mesh, (LAYERS, HIDDEN, 4 * HIDDEN), None, None, "model")
    w["down"] = shaped(mesh, (LAYERS, 4 * HIDDEN, HIDDEN), None, "model")
    return step, (w, shaped(mesh, (16, 4096, HIDDEN), "data", "model"))


@pytest.fixture(scope="module")
def compiled():
    mesh = jaxoverlap.pod_mesh("h100-sxm:2x4", {"data": 2, "model": 4})
    step, args = tensor_parallel(mesh)
    return jaxoverlap.overlap(step).lower(*args).compile()


def test_a_step_is_compared_with_plain_and_all_of_it_is_priced(compiled):
    assert compiled.speedup.plain_s is not None, str(compiled.speedup)
    assert compiled.simulate().unknown == {}


def test_rows_are_cut_through_the_attention(compiled):
    assert compiled.plan.cut, str(compiled.plan)
    assert not any("attention" in name for name in compiled.plan.cut.mixing)


def test_the_attention_is_named_and_left_alone(compiled):
    names = " ".join(compiled.plan.partitioning)
    assert "dot_product_attention_fwd_wrapper (api/test_fused_attention.py:" in names
    assert "dot_product_attention_bwd_wrapper" in names


def test_its_plan_is_followed_to_the_same_program(compiled):
    mesh = jaxoverlap.pod_mesh("h100-sxm:2x4", {"data": 2, "model": 4})
    step, args = tensor_parallel(mesh)
    plan = Plan.from_json(compiled.plan.to_json())
    again = jaxoverlap.overlap(step, plan=plan).lower(*args)
    assert again.plan.entries == plan.entries
    assert again.plan.cut == plan.cut


# -- explicit axes --------------------------------------------------------------------------------


def fully_sharded(mesh: Mesh):
    """Unrolled layers of attention, their weights gathered by hand, as equinox models are trained.

    All axes shard the batch, and the weights along both dims.
    """
    batch = P(tuple(mesh.axis_names))

    def layer(x, w):
        def whole(name):
            return reshard(w[name], P(None, None))

        q, k, v = (
            jnp.einsum("bsd,de->bse", x, whole(n), out_sharding=batch).reshape(
                *x.shape[:2], HEADS, -1
            )
            for n in "qkv"
        )
        y = attended(q, k, v).reshape(x.shape)
        return x + jnp.einsum("bsd,de->bse", y, whole("o"), out_sharding=batch)

    def loss(layers, x):
        for w in layers:
            x = jax.checkpoint(layer)(x, w)
        return jnp.mean(jnp.square(x.astype(jnp.float32)))

    @functools.partial(jax.jit, donate_argnums=0)
    def step(layers, x):
        value, gradients = jax.value_and_grad(loss)(layers, x)
        return jax.tree.map(lambda p, g: (p - 1e-3 * g).astype(p.dtype), layers, gradients), value

    weights = {n: shaped(mesh, (HIDDEN, HIDDEN), "data", "model") for n in "qkvo"}
    return step, ([weights] * LAYERS, shaped(mesh, (mesh.size, 2048, HIDDEN), mesh.axis_names))


def explicit(pod: str, axes: dict[str, int]) -> Mesh:
    mesh = jaxoverlap.pod_mesh(pod, axes)
    kinds = (AxisType.Explicit,) * len(axes)
    return Mesh(mesh.devices, mesh.axis_names, axis_types=kinds)


@pytest.mark.parametrize("options", [{}, {"granularity": "one_way"}])
def test_a_step_on_an_explicit_mesh_is_overlapped(options):
    """With an operation that partitions itself JAX wants one mesh of devices in the whole step."""
    mesh = explicit("gb200:2x4", {"data": 4, "model": 2})
    step, args = fully_sharded(mesh)
    with jax.set_mesh(mesh):
        lowered = jaxoverlap.overlap(step, **options).lower(*args)
        compiled = lowered.compile()
    assert bool(lowered.plan.decisions) or not options
    assert compiled.speedup.plain_s is not None, str(compiled.speedup)
    assert compiled.speedup.step_s <= compiled.speedup.plain_s
