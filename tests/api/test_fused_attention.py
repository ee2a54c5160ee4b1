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

pytestmark = [*pods, pytest.mark.filterwarnings("ignore:overlap.. rewrites nothing")]

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
    assert compiled.plan.split, str(compiled.plan)
    joined = [note for note in compiled.plan.notes if "Parts are joined for" in note]
    assert not any("attention" in note for note in joined)


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
    assert again.plan.split == plan.split


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


# -- one key head for all query heads -------------------------------------------------------------


def one_key_head(mesh: Mesh, heads: str):
    """One layer whose query heads are sharded, with one key head, and how attention meets it.

    Args:
        mesh: the mesh, of automatic axes.
        heads: "sharded" as they come; the key head "repeated"; attention "mapped" over devices; or
            query heads "gathered".
    """

    def at(x, *spec):
        return lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))

    def met(q, k, v):
        if heads == "mapped":
            specs = P("data", None, "model"), P("data"), P("data")
            return jax.shard_map(
                attended, mesh=mesh, in_specs=specs, out_specs=specs[0], check_vma=False
            )(q, k, v)
        k, v = (jnp.repeat(x, 8, 2) if heads == "repeated" else x for x in (k, v))
        if heads == "gathered":
            return at(attended(*(at(x, "data") for x in (q, k, v))), "data")
        q = at(q, "data", None, "model")
        if heads == "repeated":
            k, v = (at(x, "data", None, "model") for x in (k, v))
        return attended(q, k, v)

    def loss(w, x):
        y = met(*(jnp.einsum("bsd,dnh->bsnh", x, w[n]) for n in "qkv"))
        y = at(jnp.einsum("bsnh,nhd->bsd", y, w["o"]), "data", "model")
        return jnp.mean(jnp.square(y.astype(jnp.float32)))

    w = {n: shaped(mesh, (1024, 1, 128)) for n in "kv"}
    w |= {"q": shaped(mesh, (1024, 8, 128), None, "model")}
    w |= {"o": shaped(mesh, (8, 128, 1024), "model")}
    return jax.jit(jax.value_and_grad(loss)), (w, shaped(mesh, (4, 1024, 1024), "data", "model"))


def test_where_jax_refuses_sharded_heads_of_one_key_the_error_is_its_own():
    """JAX's rule wants queries and keys sharded alike: plain does not compile either."""
    step, args = one_key_head(
        jaxoverlap.pod_mesh("h100-sxm:1x8", {"data": 2, "model": 4}), "sharded"
    )
    reason = "ValueError: Query, key and value should have same sharding."
    with pytest.raises(jax.errors.JaxRuntimeError, match=reason):
        step.lower(*args).compile()
    overlapped = jaxoverlap.overlap(step)
    for call in (overlapped.explain, lambda *args: overlapped.lower(*args).compile()):
        with pytest.raises(jax.errors.JaxRuntimeError, match=reason):
            call(*args)


@pytest.mark.parametrize("heads", ["repeated", "mapped", "gathered"])
def test_one_key_head_is_explained_where_plain_compiles(heads: str):
    step, args = one_key_head(jaxoverlap.pod_mesh("h100-sxm:1x8", {"data": 2, "model": 4}), heads)
    step.lower(*args).compile()
    plan = jaxoverlap.overlap(step).explain(*args)
    assert len(plan.entries) >= 8  # four matmuls and their gradients
