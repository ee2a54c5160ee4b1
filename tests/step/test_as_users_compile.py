"""Plain is the user's own compile, and a step is simulated by the prices that decided it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoverlap
from jaxoverlap.calibrate import calibrate
from jaxoverlap.cost import tables as measured
from tests.support.pods import pytestmark  # noqa: F401 - marks every test of this file

POD = "h100-sxm:1x8"


@pytest.fixture(scope="module")
def layer() -> Any:
    """A layer whose activation XLA's Triton kernels compute with the matmul before it."""
    mesh = jaxoverlap.pod_mesh(POD, {"tp": 8})

    def on(*spec):
        return NamedSharding(mesh, P(*spec))

    def step(x, up, down):
        hidden = jax.nn.gelu(jax.lax.with_sharding_constraint(x @ up, on(None, "tp")))
        return jax.lax.with_sharding_constraint(hidden @ down, on("tp")).astype(jnp.float32).sum()

    def array(*shape, spec=()):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=on(*spec))

    weights = array(4096, 16384, spec=(None, "tp")), array(16384, 4096, spec=("tp",))
    return jax.jit(step), (array(8192, 4096, spec=("tp",)), *weights)


def test_plain_takes_the_seconds_of_the_users_own_compile(layer: Any):
    step, args = layer
    own = step.lower(*args).compile()
    assert "__triton_nested_gemm_fusion" in own.as_text(), "XLA's default, without our options"
    speedup = jaxoverlap.overlap(step).lower(*args).compile().speedup
    assert speedup is not None
    assert speedup.plain_s == jaxoverlap.simulate(own, POD).step_s


@pytest.mark.parametrize("first", ["gather", "conversion"])
def test_a_gather_behind_a_conversion_is_no_matmul_without_a_collective(first):
    mesh = jaxoverlap.pod_mesh(POD, {"fsdp": 8})
    whole, sharded = NamedSharding(mesh, P()), NamedSharding(mesh, P("fsdp"))

    @jax.jit
    def step(x, w):
        if first == "gather":
            w = jax.lax.with_sharding_constraint(w, whole).astype(jnp.float32)
        else:
            w = jax.lax.with_sharding_constraint(w.astype(jnp.float32), whole)
        y = x @ w
        return y, x @ jnp.ones((8192, 8))

    x = jax.ShapeDtypeStruct((2048, 8192), jnp.float32, sharding=sharded)
    w = jax.ShapeDtypeStruct((8192, 8192), jnp.bfloat16, sharding=sharded)
    plan = jaxoverlap.overlap(step).explain(x, w)
    assert [(skip.why.code, skip.idle) for skip in plan.skips] == [
        ("no ring", False),
        ("no collective", True),
    ]
    assert plan.skips[0].reason == (
        "a conversion to another dtype is between it and its all-gather: no ring sees through it"
    )


def test_a_step_that_a_price_file_decided_is_simulated_by_it(layer: Any, tmp_path):
    step, args = layer
    tables = measured.packaged("h100-sxm")
    assert tables is not None
    slow = msgspec.structs.replace(tables.scaled({"matmul": 3.0}), profiled=(POD, {}))
    calibrate.write(slow, tmp_path / "prices.json")
    compiled = jaxoverlap.overlap(step, prices=tmp_path / "prices.json").lower(*args).compile()
    simulated, usual = compiled.simulate(), compiled.simulate(POD)
    assert simulated.step_s == compiled.speedup.step_s > 1.5 * usual.step_s
    assert simulated.speedup == compiled.speedup
    assert usual.speedup is None, "that is of other prices"
    again = jaxoverlap.overlap(step).lower(*args).compile()
    assert again.simulate(POD).speedup == again.simulate().speedup == again.speedup
