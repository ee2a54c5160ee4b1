"""A flax linen train step for jaxoverlap, to be replaced by yours.

jaxoverlap simulate FILE --pod h100-sxm:8x8 --mesh data=16,model=4 --plain --html step.html
"""

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

LAYERS, BATCH, LENGTH, WIDTH, HIDDEN = 4, 64, 4096, 4096, 16384


class Block(nn.Module):
    mesh: jax.sharding.Mesh

    @nn.compact
    def __call__(self, x):
        hidden = self.dense(HIDDEN, "up", None, "model")(x)
        hidden = self.sharded(hidden, "data", None, "model")  # tensor parallel
        y = self.dense(WIDTH, "down", "model", None)(jax.nn.gelu(hidden))
        return x + self.sharded(y, "data", "model", None)  # sequence parallel

    def dense(self, width, name, *axes):
        init = nn.with_partitioning(nn.initializers.lecun_normal(), axes)  # shards the kernel
        sizes = {"use_bias": False, "dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}
        return nn.Dense(width, kernel_init=init, name=name, **sizes)

    def sharded(self, x, *spec):
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, P(*spec)))


class Model(nn.Module):
    mesh: jax.sharding.Mesh

    @nn.compact
    def __call__(self, x):
        for _ in range(LAYERS):
            x = Block(self.mesh)(x)
        return x


def build(mesh):
    """Return the step and its arguments, as shapes with shardings on this mesh."""
    model = Model(mesh)

    @jax.jit
    def train_step(state, x):
        def loss(params):
            return jnp.mean(state.apply_fn(params, x).astype(jnp.float32) ** 2)

        return state.apply_gradients(grads=jax.grad(loss)(state.params))

    def make_state(x):
        params = model.init(jax.random.key(0), x)
        return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(1e-4))

    def sharded(leaf, spec):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    rows = NamedSharding(mesh, P("data", "model", None))
    x = jax.ShapeDtypeStruct((BATCH, LENGTH, WIDTH), jnp.bfloat16, sharding=rows)
    state = jax.eval_shape(make_state, x)  # no memory is allocated
    state = jax.tree.map(sharded, nn.unbox(state), nn.get_partition_spec(state))
    return train_step, (state, x)
