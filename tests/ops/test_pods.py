"""Steps by rules alone, compiled for pods: what hides, what moves, and what it costs to compile."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import jax
import pytest
from flax import nnx
from jax import lax
from jax import numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoverlap
from jaxoverlap.flags import options_for
from jaxoverlap.hardware.pods import compiler_options
from models import gpt, moe, vit

pytestmark = pytest.mark.pods
MODELS = {"gpt": gpt, "moe": moe, "vit": vit}
LEAST = {("moe", "h100-sxm:1x8"): 0.98}  # hops covered; the others: all
PODS = {"h100-sxm:1x8": (1, 8), "h100-sxm:8x8": (8, 8)}


class Compiled(NamedTuple):
    step: Any
    audit: jaxoverlap.Audit
    step_s: float
    cpu_s: float


def compiled(name: str, pod: str, *, ops: bool) -> Compiled:
    recipe = MODELS[name].RECIPE
    mesh = jaxoverlap.pod_mesh(pod, dict(zip(recipe.config.AXES, PODS[pod], strict=True)))
    config = recipe.config.pod(**mesh.shape, ops=ops)
    options = options_for(mesh) if ops else compiler_options()
    began = time.process_time()
    step = recipe.make_step(config, mesh).lower(*recipe.abstract_args(config, mesh))
    step = step.compile(options)
    cpu_s = time.process_time() - began
    return Compiled(step, jaxoverlap.audit(step), jaxoverlap.simulate(step, pod).step_s, cpu_s)


def check(name: str, pod: str) -> None:
    ours, plain = (compiled(name, pod, ops=ops) for ops in (True, False))
    hops = ours.audit.hops
    print(name, pod, hops, ours.step_s, plain.step_s, ours.cpu_s / plain.cpu_s)
    assert hops.covered >= LEAST.get((name, pod), 1.0) * hops.count > 0
    assert ours.step_s <= plain.step_s
    assert ours.audit.total.bytes_moved <= plain.audit.total.bytes_moved * 1.001


@pytest.mark.nightly
def test_every_hop_of_a_gpt_is_covered():
    check("gpt", "h100-sxm:1x8")


@pytest.mark.nightly
@pytest.mark.parametrize("pod", PODS)
@pytest.mark.parametrize("name", MODELS)
def test_every_hop_is_covered(name: str, pod: str):
    check(name, pod)


def test_hops_of_unmodified_layers_are_covered():
    mesh = jaxoverlap.pod_mesh("h100-sxm:1x8", {"data": 1, "model": 8})

    def at(*axes: Any) -> NamedSharding:
        return NamedSharding(mesh, P(*axes))

    def make() -> nnx.MultiHeadAttention:
        own = dict.fromkeys(("qkv_dot_general", "out_dot_general"), jaxoverlap.dot_general)
        return nnx.MultiHeadAttention(
            32, 4096, deterministic=True, decode=False, dtype=jnp.bfloat16, rngs=nnx.Rngs(0), **own
        )

    definition, state = nnx.split(nnx.eval_shape(make))
    heads = {
        (4096, 32, 128): at(None, "model"),
        (32, 128): at("model"),
        (32, 128, 4096): at("model"),
    }
    state = jax.tree.map(
        lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=heads.get(v.shape, at())), state
    )
    stream = at(None, "model", None)
    x = jax.ShapeDtypeStruct((4, 4096, 4096), jnp.bfloat16, sharding=stream)

    def loss(state: Any, x: Any) -> Any:
        y = nnx.merge(definition, state)(x)
        return jnp.mean(lax.with_sharding_constraint(y, stream).astype(jnp.float32) ** 2)

    step = jax.jit(jax.value_and_grad(loss)).lower(state, x).compile(options_for(mesh))
    hops = jaxoverlap.audit(step).hops
    assert hops.count >= 7 * 3
    assert hops.covered == hops.count
