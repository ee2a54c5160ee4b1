"""Train with your own script on many hosts: the lines that jaxoverlap needs are marked."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoverlap

LAYERS, BATCH, LENGTH, WIDTH, HIDDEN, STEPS = 2, 16, 64, 64, 256, 5

jax.distributed.initialize()  # reads SLURM's, Kubernetes' or MPI's variables
# Devices host by host, so that the last axis stays within a host (jax.make_mesh refuses several
# hosts). Automatic axes: explicit ones refuse with_sharding_constraint.
model = min(8, jax.local_device_count())
devices = np.array(jax.devices()).reshape(-1, model)
mesh = Mesh(devices, ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def on(*spec):
    return NamedSharding(mesh, P(*spec))


def loss(params, x):
    for up, down in zip(params["up"], params["down"], strict=True):
        hidden = jax.lax.with_sharding_constraint(x @ up, on("data", None, "model"))
        y = jax.nn.gelu(hidden) @ down
        x = x + jax.lax.with_sharding_constraint(y, on("data", "model", None))
    return jnp.mean(x**2)


@jaxoverlap.overlap  # jaxoverlap: around jax.jit
@jax.jit
def train_step(params, x):
    value, grads = jax.value_and_grad(loss)(params, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def weights(seed, shape, sharding):
    values = 0.02 * np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    return jax.make_array_from_callback(shape, sharding, lambda index: values[index])


up, down = (LAYERS, WIDTH, HIDDEN), (LAYERS, HIDDEN, WIDTH)
params = {
    "up": weights(0, up, on(None, None, "model")),
    "down": weights(1, down, on(None, "model", None)),
}
with jaxoverlap.lost_named():  # jaxoverlap: an error names the host that is gone
    for step in range(STEPS):
        x = weights(step, (BATCH, LENGTH, WIDTH), on("data", "model", None))
        params, value = train_step(params, x)
        if jax.process_index() == 0:
            print(f"step {step} loss {float(value):.6f}", flush=True)
