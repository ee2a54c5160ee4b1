"""What decisions rest on is what XLA's partitioner does: each matmul's work, step by step."""

from __future__ import annotations

import importlib.util
import math

import pytest

import jaxoverlap
from benchmarks.pods.suite import STEPS
from jaxoverlap import _compat
from jaxoverlap.passes.decide import matmul_of
from jaxoverlap.passes.flatten import flatten
from jaxoverlap.passes.jaxprs import dots
from jaxoverlap.passes.partitioned import partitioned
from jaxoverlap.passes.sites import Matmul, Refusal
from jaxoverlap.passes.worth import local_sizes

pytestmark = [
    pytest.mark.pods,
    pytest.mark.skipif(
        importlib.util.find_spec("jax_plugins.xla_cuda12") is None,
        reason="JAX's CUDA plugin is not installed (the pods extra)",
    ),
]

# Patches have few features: XLA splits their gradient over a second axis too, and gathers the rest.
SPLIT_OTHERWISE = {"vit-a100-64": 1}


@pytest.mark.parametrize("name", STEPS)
def test_each_matmul_does_the_work_that_its_shardings_say(name: str):
    step = STEPS[name]
    mesh = jaxoverlap.pod_mesh(step.pod, step.axes)
    function, args = step.build("overlapped", mesh)
    traced = function.trace(*args)
    jaxpr = flatten(_compat.traced_params(traced)["jaxpr"])
    found, same, otherwise = partitioned(traced, jaxpr, mesh).shardings, 0, 0
    for dot in dots(jaxpr):
        matmul = matmul_of(dot, found[dot.index], dict(mesh.shape))
        assert isinstance(matmul, Matmul)
        assert not any(isinstance(split, Refusal) for split in matmul.splits)
        products = found[dot.index].products
        if products is None:  # XLA has joined it with one that reads the same value
            continue
        expected = math.prod(local_sizes(matmul).values())
        same, otherwise = same + (products == expected), otherwise + (products < expected)
        assert products <= expected
    assert otherwise == SPLIT_OTHERWISE.get(name, 0)
    assert same > 20
