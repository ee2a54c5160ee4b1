"""A child partitions what partitions itself by Python as the process does that has the Python."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.custom_partitioning import SdyShardingRule, custom_partitioning
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoverlap
from jaxoverlap._jax import custom_partitioners, jobs
from jaxoverlap._jax.kernel_cache import KnownKernels
from jaxoverlap.passes.analysis.sharding_rules import partitions_itself, rule_of
from tests.support.pods import needs_plugin

MESH = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


@custom_partitioning
def normalized(x):
    """A user's own operation: each row over its norm; rows may be sharded, features may not."""
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


def _rows(mesh, args):
    spec = args[0].sharding.spec
    return NamedSharding(mesh, P(*spec[:-1], None))


def _partition(mesh, args, result):
    rows = _rows(mesh, args)
    return mesh, lambda x: normalized.fun(x), rows, (rows,)


normalized.def_partition(
    partition=_partition,
    infer_sharding_from_operands=lambda mesh, args, result: _rows(mesh, args),
    sharding_rule="... f -> ... f",
    need_replication_factors=("f",),
)


def step(x, w):
    return normalized(x @ w) @ w.T


def arguments(mesh=MESH):
    def at(*spec):
        return NamedSharding(mesh, P(*spec))

    x = np.random.default_rng(0).standard_normal((16, 32)).astype("f")
    w = np.random.default_rng(1).standard_normal((32, 64)).astype("f")
    return jax.device_put(x, at("data", "model")), jax.device_put(w, at("model", None))


def job_in(process: str) -> str:
    """Make the job of the step in a process of its own; return its hash there."""
    program = (
        "import hashlib, jax; jax.config.update('jax_num_cpu_devices', 8);"
        "from tests._jax import test_custom_partitioners as t;"
        "job = t.jobs.job_of(jax.jit(t.step).lower(*t.arguments()));"
        "print(hashlib.sha256(repr(job).encode()).hexdigest())"
    )
    environment = os.environ | {"PYTHONHASHSEED": process}
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True, text=True, check=True, env=environment, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    return done.stdout.strip()


def test_a_job_has_the_answers_and_is_the_same_in_every_process():
    job = jobs.job_of(jax.jit(step).lower(*arguments()))
    (answers,) = job.answers.values()
    (answer,) = answers.values()
    assert len(answer.operands) == 1
    assert job_in("1") == job_in("2")


def test_a_step_without_such_operations_is_not_partitioned_for_its_job(monkeypatch):
    monkeypatch.setattr(jobs.partitioner, "let_answer", lambda lowered: pytest.fail("it was"))
    assert jobs.job_of(jax.jit(lambda x, w: x @ w).lower(*arguments())).answers == {}


def test_a_process_without_the_python_compiles_the_job(tmp_path):
    """The keys of the job are none of this process's, so that only the answers can serve."""
    lowered = jax.jit(step).lower(*arguments())
    job = jobs.job_of(lowered)
    with KnownKernels().lent() as loan:
        compiled = jobs.compile_job(job, jax.devices()[:8], loan.file)
    assert "CustomSPMDPartitioning" not in compiled.text
    plain = lowered.compile().as_text()
    assert compiled.text.count("all-reduce") == plain.count("all-reduce")


def test_an_answer_that_was_not_recorded_is_an_error(monkeypatch):
    job = jobs.job_of(jax.jit(step).lower(*arguments()))
    monkeypatch.setattr(custom_partitioners, "_given", {"operation 0": {}})
    monkeypatch.setattr(custom_partitioners, "give", lambda answers: None)
    with KnownKernels().lent() as loan, pytest.raises(jax.errors.JaxRuntimeError, match="KeyError"):
        jobs.compile_job(job, jax.devices()[:8], loan.file)


def test_the_rule_of_an_operation_names_its_dims():
    (eqn,) = [e for e in jax.make_jaxpr(step)(*arguments()).eqns if partitions_itself(e)]
    rule = rule_of(eqn)
    assert rule.operands == rule.results == (("\u202600", "f"),)
    compound = eqn.replace(
        params=eqn.params | {"sharding_rule": SdyShardingRule((("r", "f"),), (("r", "f"),))}
    )
    assert rule_of(compound).operands == (("r", "f"),)
    made = eqn.replace(params=eqn.params | {"sharding_rule": lambda *_: "r f -> r f"})
    assert rule_of(made) is None


def test_a_step_with_a_users_own_operation_runs_and_names_it():
    x, w = arguments()
    overlapped = jaxoverlap.overlap(jax.jit(step))
    np.testing.assert_allclose(overlapped(x, w), jax.jit(step)(x, w), rtol=1e-4, atol=1e-5)
    plan = overlapped.explain(x, w)
    assert plan.decisions
    assert "custom_partitioning (_jax/test_custom_partitioners.py:" in str(plan)


@needs_plugin
def test_a_step_with_a_users_own_operation_is_compared_with_plain():
    mesh = jaxoverlap.pod_mesh("h100-sxm:1x8", {"data": 2, "model": 4})

    def shaped(shape, *spec):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, P(*spec)))

    x, w = shaped((4096, 4096), "data", "model"), shaped((4096, 8192), "model", None)
    compiled = jaxoverlap.overlap(jax.jit(step)).lower(x, w).compile()
    assert compiled.speedup.plain_s is not None, str(compiled.speedup)
