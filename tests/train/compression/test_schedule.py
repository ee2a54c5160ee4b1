"""Steps compiled for a pod with a slow network: averages stand beside the backward pass."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoverlap
from jaxoverlap import parse_cluster, pod_mesh
from jaxoverlap.cost.find import cost_model
from jaxoverlap.hardware.pods import compiler_options
from jaxoverlap.train import compression
from tests.support import pods

pytestmark = pods.pytestmark

CLUSTER = "a100-sxm-80:2x8@80"
LAYERS, HIDDEN, MLP = 4, 2048, 8192


def loss(params, x):
    def layer(h, w):
        return h + jax.nn.gelu(h @ w["up"]) @ w["down"], None

    h, _ = jax.lax.scan(layer, x, params)
    return jnp.mean(h.astype(jnp.float32) ** 2)


def test_a_layer_s_average_hides_behind_the_layer_below():
    mesh = pod_mesh(CLUSTER, {"data": 16})

    def like(*shape, spec=()):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, P(*spec)))

    params = dict(up=like(LAYERS, HIDDEN, MLP), down=like(LAYERS, MLP, HIDDEN))
    step = compression.data_parallel(
        jax.value_and_grad(loss), optax.sgd(0.1), mesh,
        sync=compression.uniform(compression.power_sgd(4)),
        stacked=("up", "down"), in_backward=True, overlap={"cluster": CLUSTER},
    )  # fmt: skip
    state = step.abstract(params)
    batch = like(16 * 2, 1024, HIDDEN, spec=("data",))
    compiled = step.lower(state, batch).compile(compiler_options())
    found = [c for c in jaxoverlap.audit(compiled).collectives if c.kind == "all-reduce"]
    assert sum(c.runs * c.bytes_moved for c in found) == step.sent_bytes(state)
    inside = [c for c in found if c.runs == LAYERS - 1]
    assert len(inside) >= 2  # P and Q
    assert all(c.asynchronous and c.covered for c in inside)
    simulation = jaxoverlap.simulate(compiled.as_text(), parse_cluster(CLUSTER))
    assert simulation.exposed_s < 0.1 * simulation.step_s
    price = step.price(state, cost_model(CLUSTER))
    assert price.pays and price.raw_s > 3 * price.wire_s


def test_on_nvlink_compression_does_not_pay_by_price():
    cluster = "h100-sxm:1x8"
    mesh = pod_mesh(cluster, {"data": 8})
    at = NamedSharding(mesh, P())
    params = [jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=at)] * 8
    step = compression.data_parallel(
        jax.value_and_grad(lambda p, x: 0.0), optax.sgd(0.1), mesh,
        sync=compression.uniform(compression.power_sgd(4)),
    )  # fmt: skip
    state = step.abstract(params)
    assert not step.price(state, cost_model(cluster)).pays
    assert "compression does not pay" in step.explain(state, cost=cost_model(cluster))
