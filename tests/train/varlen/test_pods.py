"""Attention compiled for GPUs that are not there: which kernels, and whether hops are covered."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoverlap
from jaxoverlap.hardware.pods import compiler_options, pod_mesh
from jaxoverlap.train import varlen
from tests.support.pods import needs_plugin

pytestmark = [pytest.mark.pods, needs_plugin]
HEADS, HEAD = 8, 128


@pytest.mark.parametrize(
    ("chip", "ringed", "kernels"),
    [
        ("h100-sxm", 8, 2 + 4),  # a ring of four
        pytest.param("h100-sxm", 0, 2, marks=pytest.mark.nightly),
        ("a100-sxm-80", 0, 0),
    ],
)
def test_the_kernel_is_taken_where_the_chip_has_it_and_hops_are_covered(chip, ringed, kernels):
    """Rings of four, groups of two that exchange heads, and single devices, on two nodes of two."""
    pod = f"{chip}:2x2"
    mesh = pod_mesh(pod, {"node": 2, "device": 2})
    costs = varlen.attention_costs(pod, heads=HEADS, head_size=HEAD)
    plan = varlen.Planner(costs, pod, capacity=4096)([9000, 700, 300, 900, 200])
    widths = ((4, 2560), (2, 1024), (1, 1024))
    bounds = dataclasses.replace(
        plan.bounds, widths=widths, tokens=4096, sent=0, exchanged=(2,), sequences=32, ringed=ringed
    )
    at = NamedSharding(mesh, P("node", "device"))
    x = jax.ShapeDtypeStruct((2, 2 * bounds.tokens, HEADS, HEAD), jnp.bfloat16, sharding=at)

    def like(shape, spec):
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=NamedSharding(mesh, spec))

    each, where = P(("node", "device")), like((4, bounds.slots), P())
    there, back = (
        type(plan.arrays.to_linear)(like((4, 4, 0), each), like((4, slots), each))
        for slots in (bounds.slots, bounds.tokens)
    )
    arrays = varlen.PlanArrays(where, where, there, back)

    @jax.jit
    def both(q, k, v, arrays, to_out):
        how = dict(mesh=mesh, bounds=bounds, costs=dataclasses.replace(costs, rails=1))
        out, gradients = jax.vjp(lambda *x: varlen.attention(*x, arrays, **how), q, k, v)
        return out, *gradients(to_out)

    options = compiler_options() | jaxoverlap.compiler_options(mesh)
    text = both.lower(x, x, x, arrays, x).compile(options).as_text()
    for call in ("__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"):
        assert text.count(f'custom_call_target="{call}"') == kernels
    assert bool(re.search(r"f32\[[^]]*1280,1280\]", text)) == (not ringed)  # no scores in memory
    hops = [c for c in jaxoverlap.audit(text).collectives if c.kind == "collective-permute"]
    exposed = [c for c in hops if not c.covered]
    assert len(hops) >= 6 and len(exposed) == (2 if ringed else 0), [str(c) for c in exposed]
    # The kernel has all gradients at the end: the last sums of keys and values go home exposed.
    assert all(c.computation == hops[-1].computation for c in exposed)
