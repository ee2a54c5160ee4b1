"""A train step for jaxoverlap, to be replaced by yours.

jaxoverlap simulate FILE --pod h100-sxm:8x8 --mesh data=16,model=4 --plain --html step.html
"""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

LAYERS, BATCH, LENGTH, WIDTH, HIDDEN = 4, 32, 4096, 8192, 28672  # of Llama-3-70B


def build(mesh):
    """Return the step and its arguments, as shapes with shardings on this mesh."""

    def on(*spec):
        return NamedSharding(mesh, P(*spec))

    def loss(params, x):
        for layer in params:
            hidden = jax.lax.with_sharding_constraint(x @ layer["up"], on("data", None, "model"))
            y = jax.nn.gelu(hidden) @ layer["down"]
            x = x + jax.lax.with_sharding_constraint(y, on("data", "model", None))
        return jnp.mean(x.astype(jnp.float32) ** 2)

    @jax.jit
    def train_step(params, x):
        grads = jax.grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - 0.001 * g, params, grads)

    def shape(sharding, *sizes):
        return jax.ShapeDtypeStruct(sizes, jnp.bfloat16, sharding=sharding)

    layer = {
        "up": shape(on(None, "model"), WIDTH, HIDDEN),
        "down": shape(on("model", None), HIDDEN, WIDTH),
    }
    return train_step, ([layer] * LAYERS, shape(on("data", "model", None), BATCH, LENGTH, WIDTH))
