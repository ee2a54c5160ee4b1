"""Rounds compiled for a pod with a slow network: their averages hide behind the steps."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxoverlap import pod_mesh
from jaxoverlap.hardware.pods import compiler_options
from jaxoverlap.train import LocalUpdates, co2, local_sgd, streaming_diloco
from tests.support import pods
from tests.support.seeds import some

pytestmark = pods.pytestmark

CLUSTER = "a100-sxm-80:2x8@80"
SIZES = (2, 2048, 8192)


def compiled(outer, **options):
    """Compile a round of a stack of matmuls, a worker a GPU."""
    mesh = pod_mesh(CLUSTER, {"data": 16})
    optimizer = optax.sgd(0.1)

    def loss(params, x):
        def layer(h, w):
            return h + jax.nn.gelu(h @ w["up"]) @ w["down"], None

        h, _ = jax.lax.scan(layer, x, params)
        return jnp.mean(h.astype(jnp.float32) ** 2)

    @jax.jit
    def step(state, x):
        value, gradients = jax.value_and_grad(loss)(state["params"], x)
        moves, inner = optimizer.update(gradients, state["optimizer"], state["params"])
        return dict(params=optax.apply_updates(state["params"], moves), optimizer=inner), value

    def like(shape, *spec):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, P(*spec)))

    layers, hidden, mlp = SIZES
    params = dict(up=like((layers, hidden, mlp)), down=like((layers, mlp, hidden)))
    state = dict(params=params, optimizer=jax.eval_shape(optimizer.init, params))
    updates = LocalUpdates(step, mesh, outer=outer, overlap={"cluster": CLUSTER}, **options)
    x = like((outer.every, 16 * 4, 1024, hidden), None, "data")
    return updates.lower(updates.abstract(state), x).compile(compiler_options())


def between(text: str, start: str, done: str) -> bool:
    """Return whether every start of a kind stands before a loop of the entry, its done after it.

    Reports of what was finite are float32, and may be anywhere.
    """
    entry = text[text.index("ENTRY ") :]
    lines = [line for line in entry.splitlines() if "while" in line or "bf16[" in line]
    names = [line.strip().partition(" = ")[0] for line in lines]
    loops = [at for at, name in enumerate(names) if name.startswith("%while")]
    starts = [at for at, name in enumerate(names) if name.startswith(f"%{start}")]
    dones = [at for at, name in enumerate(names) if name.startswith(f"%{done}")]
    assert starts and len(starts) == len(dones)
    return all(any(s < loop < d for loop in loops) for s, d in zip(starts, dones, strict=True))


@pytest.mark.rotating
@pytest.mark.parametrize(
    ("outer", "scattered", "kinds"),
    some(
        1,
        [
            (co2(every=6), False, {"all-reduce"}),
            (co2(every=6), True, {"reduce-scatter", "all-gather"}),
            (streaming_diloco(every=8, fragments=2, delay=4), False, {"all-reduce"}),
        ],
    ),
)
def test_every_collective_of_the_workers_is_outside_the_critical_path(outer, scattered, kinds):
    step = compiled(outer, shard_outer=scattered)
    large = [c for c in step.audit().collectives if c.bytes_moved > 2**20]
    assert {c.kind for c in large} == kinds
    assert all(c.asynchronous and c.covered for c in large)
    simulation = step.simulate()
    assert str(simulation.cluster) == CLUSTER
    assert simulation.exposed_s < 0.01 * simulation.step_s
    assert simulation.link_s["network"] > 0.1 * simulation.step_s  # there was some to hide
    text = step.as_text()
    for kind in kinds:
        assert between(text, f"{kind}-start", f"{kind}-done")


def test_an_average_at_the_round_s_end_is_exposed():
    simulation = compiled(local_sgd(every=6)).simulate()
    assert simulation.exposed_s > 0.5 * simulation.link_s["network"]
