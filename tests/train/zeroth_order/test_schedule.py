"""The streamed step on a pod's schedule: blocks in host memory, copies under the matmuls."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

import jaxoverlap
from benchmarks.zeroth_order.steps import in_host_memory
from jaxoverlap import parse_cluster
from jaxoverlap.hardware.pods import compiler_options, devices
from jaxoverlap.simulation.host_copies import FROM_HOST, TO_HOST
from jaxoverlap.train import zeroth_order as zo
from tests.support.seeds import some
from tests.train.zeroth_order import problem

WIDTH = 512


def compiled(gpus: int, layers: int) -> jax.stages.Compiled:
    found = np.array(devices(parse_cluster(f"h100-sxm:1x{gpus}")), dtype=object)
    mesh = Mesh(found, ("pair",), axis_types=(AxisType.Auto,))
    model = zo.Blocks(
        lambda outer, batch: batch @ outer["w"],
        lambda layer, x: jnp.tanh(x @ layer["w"]),
        lambda outer, x, batch: (x.astype(jnp.float32) ** 2).mean(),
    )
    pair = "pair" if gpus > 1 else None
    step = zo.step(model, zo.mezo(eps=1e-3, lr=1e-6), mesh, perturb=pair, host=True, check=False)

    def of(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    params = dict(outer=dict(w=of(WIDTH, WIDTH)), blocks=dict(w=of(layers, WIDTH, WIDTH)))
    lowered = step.lower(step.abstract(params), of(4096, WIDTH))
    in_host_memory(lowered, [0])  # "blocks" comes before "outer"
    options = {"xla_gpu_enable_latency_hiding_scheduler": "True"}
    return lowered.compile(compiler_options() | options)


@pytest.mark.rotating
@pytest.mark.pods
@pytest.mark.parametrize("gpus", some(1, [1, 2]))
def test_copies_hide_and_memory_does_not_grow_with_depth(gpus):
    shallow, deep = (compiled(gpus, layers) for layers in (4, 12))
    audit = jaxoverlap.audit(deep)
    stages = 2 if gpus > 1 else 1  # before the loop: the first block, and its followers' slices
    assert all(c.covered for c in audit.host_copies if c.runs > 1)
    assert audit.host_coverage[FROM_HOST].count == 12 + stages
    assert (audit.host_coverage[TO_HOST].covered, audit.host_coverage[TO_HOST].count) == (12, 12)
    assert audit.host_coverage[TO_HOST].bytes_moved == 12 * 2 * WIDTH**2 // gpus
    memory = [one.memory_analysis() for one in (shallow, deep)]
    assert memory[0].temp_size_in_bytes == memory[1].temp_size_in_bytes
    assert memory[0].argument_size_in_bytes == memory[1].argument_size_in_bytes
    assert memory[1].host_argument_size_in_bytes == 12 * 2 * WIDTH**2 // gpus
    assert memory[1].host_temp_size_in_bytes == 0
    if gpus > 1:
        gathers = [c for c in audit.collectives if c.kind == "all-gather" and c.runs > 1]
        assert gathers and all(c.covered for c in gathers)


def test_a_wrong_argument_is_named():
    lowered = jax.jit(lambda x: x).lower(problem.params()["outer"]["norm"])
    with pytest.raises(ValueError, match="argument 3 of a step with 1"):
        in_host_memory(lowered, [3])
