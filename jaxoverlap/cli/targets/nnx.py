"""A flax nnx train step for jaxoverlap, to be replaced by yours.

jaxoverlap simulate FILE --pod h100-sxm:8x8 --mesh data=16,model=4 --plain --html step.html
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

LAYERS, BATCH, LENGTH, WIDTH, HIDDEN = 4, 32, 4096, 8192, 28672  # of Llama-3-70B


class Block(nnx.Module):
    def __init__(self, mesh, rngs):
        sizes = {"use_bias": False, "dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, HIDDEN, rngs=rngs, **sizes)
        self.down = nnx.Linear(HIDDEN, WIDTH, rngs=rngs, **sizes)
        self.mesh = mesh

    def __call__(self, x):
        hidden = self.up(self.norm(x).astype(jnp.bfloat16))
        hidden = self.sharded(hidden, "data", None, "model")  # tensor parallel
        y = self.down(jax.nn.gelu(hidden))
        return x + self.sharded(y, "data", "model", None)  # sequence parallel

    def sharded(self, x, *spec):
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, P(*spec)))


class Model(nnx.Module):
    def __init__(self, mesh, rngs):
        self.blocks = nnx.List([Block(mesh, rngs) for _ in range(LAYERS)])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def spec(path):
    """Return how a parameter, or an optimizer state of it, is sharded, by its path."""
    name = jax.tree_util.keystr(path)
    if "up" in name:
        return P(None, "model")
    return P("model", None) if "down" in name else P()


def build(mesh):
    """Return the step and its arguments, as shapes with shardings on this mesh."""
    model = nnx.eval_shape(lambda: Model(mesh, nnx.Rngs(0)))  # no memory is allocated
    graph, params = nnx.split(model)
    optimizer = optax.adamw(1e-4)

    @jax.jit
    def train_step(params, state, x):
        def loss(params):
            return jnp.mean(nnx.merge(graph, params)(x).astype(jnp.float32) ** 2)

        updates, state = optimizer.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    def sharded(path, leaf):
        sharding = NamedSharding(mesh, spec(path))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    state = jax.eval_shape(optimizer.init, params)
    params, state = jax.tree_util.tree_map_with_path(sharded, (params, state))
    rows = NamedSharding(mesh, P("data", "model", None))
    x = jax.ShapeDtypeStruct((BATCH, LENGTH, WIDTH), jnp.bfloat16, sharding=rows)
    return train_step, (params, state, x)
