"""An equinox train step for jaxoverlap, to be replaced by yours.

jaxoverlap simulate FILE --pod h100-sxm:8x8 --mesh data=16,model=4 --plain --html step.html
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

LAYERS, BATCH, LENGTH, WIDTH, HIDDEN = 4, 64, 4096, 4096, 16384


class Block(eqx.Module):
    up: jax.Array
    down: jax.Array

    def __init__(self, key):
        up, down = jax.random.split(key)
        self.up = 0.02 * jax.random.normal(up, (WIDTH, HIDDEN), jnp.bfloat16)
        self.down = 0.02 * jax.random.normal(down, (HIDDEN, WIDTH), jnp.bfloat16)

    def __call__(self, x, sharded):
        hidden = sharded(x @ self.up, "data", None, "model")  # tensor parallel
        y = jax.nn.gelu(hidden) @ self.down
        return x + sharded(y, "data", "model", None)  # sequence parallel


class Model(eqx.Module):
    blocks: list[Block]

    def __init__(self, key):
        self.blocks = [Block(one) for one in jax.random.split(key, LAYERS)]

    def __call__(self, x, sharded):
        for block in self.blocks:
            x = block(x, sharded)
        return x


def spec(path):
    """Return how a parameter, or an optimizer state of it, is sharded, by its path."""
    name = jax.tree_util.keystr(path)
    if name.endswith(".up"):
        return P(None, "model")
    return P("model", None) if name.endswith(".down") else P()


def build(mesh):
    """Return the step and its arguments, as shapes with shardings on this mesh."""
    optimizer = optax.adamw(1e-4)

    def constrain(x, *spec):
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))

    @eqx.filter_jit
    def train_step(model, state, x):
        def loss(model):
            return jnp.mean(model(x, constrain).astype(jnp.float32) ** 2)

        grads = eqx.filter_grad(loss)(model)
        updates, state = optimizer.update(grads, state, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), state

    def init():
        model = Model(jax.random.key(0))
        return model, optimizer.init(eqx.filter(model, eqx.is_array))

    def sharded(path, leaf):
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf  # an activation function, a number
        sharding = NamedSharding(mesh, spec(path))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    shapes = eqx.filter_eval_shape(init)  # no memory is allocated
    model, state = jax.tree_util.tree_map_with_path(sharded, shapes)
    rows = NamedSharding(mesh, P("data", "model", None))
    x = jax.ShapeDtypeStruct((BATCH, LENGTH, WIDTH), jnp.bfloat16, sharding=rows)
    return train_step, (model, state, x)
