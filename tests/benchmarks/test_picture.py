"""Decisions rest on what XLA's partitioner does: each matmul's work and collectives.

`python -m benchmarks.strangers --what picture` compares them for published trainers.
"""

from __future__ import annotations

import importlib

import jax
import pytest

import jaxoverlap
from benchmarks.picture import agreement
from benchmarks.pods.suite import STEPS
from tests.support.pods import pytestmark  # noqa: F401 - the marks of tests that compile for pods

# Patches have few features: XLA splits the gradients of two of their matmuls over a second axis too,
# gathers the rest, and exchanges what the third one reads.
OTHERWISE = {"vit-a100-64": 3, "vit": 3}
TRAINERS = {"gpt": (2, 4), "moe": (2, 4), "vit": (2, 4), "long_context": (2, 4)}


def traced_for(
    pod: str, axes: dict[str, int], build
) -> tuple[jax.stages.Traced, jax.sharding.Mesh]:
    mesh = jaxoverlap.pod_mesh(pod, axes)
    step, args = build(mesh)
    return step.trace(*args), mesh


@pytest.mark.parametrize("name", STEPS)
def test_of_the_suites_steps(name: str):
    step = STEPS[name]
    agreed = agreement(*traced_for(step.pod, step.axes, lambda mesh: step.build("plain", mesh)))
    assert len(agreed.otherwise) == OTHERWISE.get(name, 0), agreed.otherwise
    assert agreed.same > 20 and not agreed.unread


@pytest.mark.parametrize("name", TRAINERS)
def test_of_the_trainers(name: str):
    recipe = importlib.import_module(f"models.{name}").RECIPE
    axes = dict(zip(recipe.config.AXES, TRAINERS[name], strict=True))
    agreed = agreement(*traced_for("h100-sxm:1x8", axes, recipe.build))
    assert len(agreed.otherwise) == OTHERWISE.get(name, 0), agreed.otherwise
    assert agreed.same > 20 and not agreed.unread
