"""Make any model's sharded training state, and its step as an ordinary jax.jit function.

None of this knows what the model is, or that there is such a thing as overlap.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from models.config import Mistake, Run

Batch = dict[str, Any]


class Model(Protocol):
    """A trainable model: it has a loss, and the shapes of its batch."""

    def __init__(self, config: Any, mesh: Mesh, rngs: nnx.Rngs): ...

    def loss(self, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Return the loss, and other metrics to show with it."""
        ...

    @classmethod
    def batch_like(cls, config: Any, mesh: Mesh) -> Batch:
        """Return a batch as shapes with shardings."""
        ...


@dataclass(frozen=True)
class Recipe:
    """A model, its configuration, and its training data.

    `batches(config)` gives a function of the number of a step, and of the rows wanted, to its batch
    as numpy arrays: of the seed and the step alone, so that a run that resumes sees the batches it
    would have seen, and each process makes its own part.
    `report(config, mesh, params)` is what there is to say after training.
    """

    config: type[Run]
    model: type[Model]
    batches: Callable[[Any], Callable[..., Batch]]
    report: Callable[[Any, Mesh, Any], str] | None = None

    def make_mesh(self, config: Run) -> Mesh:
        """Return a mesh of Auto axes over the first of JAX's devices."""
        sizes, names, devices = tuple(config.mesh.values()), config.AXES, jax.devices()
        if config.has_workers:
            sizes, names = (config.workers, *sizes), ("worker", *names)
        needed = config.devices
        if len(devices) < needed:
            named = " x ".join(f"{axis}={n}" for axis, n in zip(names, sizes, strict=True))
            raise Mistake(
                f"a mesh of {named} needs {needed} devices and JAX sees {len(devices)}; ask for a "
                "smaller mesh, or on a CPU for more devices (jax_num_cpu_devices)"
            )
        # Host by host, the last axis within hosts first. (jax.make_mesh refuses several hosts.)
        grid = np.array(devices[:needed]).reshape(sizes)
        return Mesh(grid, names, axis_types=(AxisType.Auto,) * len(names))

    def new_state(self, config: Run, mesh: Mesh, seed: int) -> dict[str, Any]:
        """Return a new state {"params", "optimizer", "step"}: plain dicts and tuples of arrays."""
        params = self.new_params(config, mesh, seed)
        return dict(params=params, optimizer=make_optimizer(config).init(params), step=jnp.int32(0))

    def new_params(self, config: Run, mesh: Mesh, seed: int) -> dict[str, Any]:
        """Return the model's new weights as plain dicts of arrays."""
        key = jax.random.key(seed, impl="rbg")  # compiles on a CPU in a tenth of the default's time
        return nnx.to_pure_dict(nnx.state(self.model(config, mesh, nnx.Rngs(key)), nnx.Param))

    def init_state(self, config: Run, mesh: Mesh, seed: int) -> dict[str, Any]:
        """Return a new state, sharded over the mesh; its values are the same on every mesh."""
        out = self.state_shardings(config, mesh)
        return jax.jit(lambda: self.new_state(config, mesh, seed), out_shardings=out)()

    def state_shardings(self, config: Run, mesh: Mesh) -> dict[str, Any]:
        """Return a NamedSharding for every leaf of the state; moments have their weights'."""
        model = nnx.eval_shape(lambda: self.model(config, mesh, nnx.Rngs(0)))

        def place(_, variable: Any) -> NamedSharding:
            stacked = (None,) * (variable.ndim - len(variable.spec))  # the scan's layer dim
            return NamedSharding(mesh, P(*stacked, *variable.spec))

        params = nnx.to_pure_dict(nnx.map_state(place, nnx.state(model, nnx.Param)))
        replicated = NamedSharding(mesh, P())
        optimizer = optax.tree.map_params(
            make_optimizer(config),
            lambda _, sharding: sharding,
            jax.eval_shape(lambda: self.new_state(config, mesh, 0))["optimizer"],
            params,
            transform_non_params=lambda _: replicated,
        )
        return dict(params=params, optimizer=optimizer, step=replicated)

    def abstract_args(self, config: Run, mesh: Mesh) -> tuple[dict[str, Any], Batch]:
        """Return (state, batch) as shapes with shardings, for lowering on any kind of mesh."""
        shapes = jax.eval_shape(lambda: self.new_state(config, mesh, 0))

        def place(leaf, sharding):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

        state = jax.tree.map(place, shapes, self.state_shardings(config, mesh))
        return state, self.model.batch_like(config, mesh)

    def build(self, mesh: Mesh) -> tuple[jax.stages.Wrapped, tuple[dict[str, Any], Batch]]:
        """Return (step, arguments as shapes) at a pod's sizes, as a target of `jaxoverlap`."""
        if tuple(mesh.shape) != self.config.AXES:
            raise Mistake(
                f"a mesh of {', '.join(mesh.shape)}: this trainer's axes are "
                f"{', '.join(self.config.AXES)}, in that order"
            )
        config = self.config.pod(**mesh.shape)  # type: ignore[attr-defined]  # all but Run have it
        return self.make_step(config, mesh), self.abstract_args(config, mesh)

    def model_flops(self, config: Run, mesh: Mesh) -> float:
        """Return a step's FLOPs: 6 per weight and token (Kaplan et al., arXiv:2001.08361).

        Matrices alone, and not what remat or attention's scores add.
        """
        leaves = jax.tree.leaves_with_path(self.abstract_args(config, mesh)[0]["params"])
        used = (
            leaf.size * config.used(jax.tree_util.keystr(shardings)) for shardings, leaf in leaves
        )
        return 6.0 * config.tokens * sum(used)

    def make_loss(self, config: Run, mesh: Mesh) -> Callable:
        """Return loss(params, batch) -> (loss, other metrics)."""
        definition, _ = nnx.split(nnx.eval_shape(lambda: self.model(config, mesh, nnx.Rngs(0))))
        return lambda params, batch: nnx.merge(definition, params).loss(batch)

    def make_step(self, config: Run, mesh: Mesh, *, donate: bool = True) -> jax.stages.Wrapped:
        """Return a jitted train_step(state, batch) -> (state, metrics), which donates the state.

        The metrics are {"loss", "grad_norm"} and what else the model's loss gives.
        """
        loss, optimizer = self.make_loss(config, mesh), make_optimizer(config)
        shardings, replicated = self.state_shardings(config, mesh), NamedSharding(mesh, P())

        def train_step(state, batch):
            value_and_grad = jax.value_and_grad(loss, has_aux=True)
            (value, others), gradients = value_and_grad(state["params"], batch)
            gradients = self.placed_gradients(config, mesh, gradients)
            updates, moments = optimizer.update(gradients, state["optimizer"], state["params"])
            params = optax.apply_updates(state["params"], updates)
            state = dict(params=params, optimizer=moments, step=state["step"] + 1)
            return state, dict(loss=value, grad_norm=optax.tree.norm(gradients), **others)

        return jax.jit(
            train_step,
            in_shardings=(shardings, self.batch_shardings(config, mesh)),
            out_shardings=(shardings, replicated),
            donate_argnums=0 if donate else (),
        )

    def placed_gradients(self, config: Run, mesh: Mesh, gradients: Any) -> Any:
        """Return the gradients with the optimizer's sharding: here the weights'."""
        return gradients

    def make_grads(self, config: Run, mesh: Mesh) -> jax.stages.Wrapped:
        """Return a jitted grads(params, batch) -> (loss, gradients), sharded as the params."""
        shardings, replicated = (
            self.state_shardings(config, mesh)["params"],
            NamedSharding(mesh, P()),
        )
        loss = self.make_loss(config, mesh)
        return jax.jit(
            jax.value_and_grad(lambda params, batch: loss(params, batch)[0]),
            in_shardings=(shardings, self.batch_shardings(config, mesh)),
            out_shardings=(replicated, shardings),
        )

    def batch_shardings(self, config: Run, mesh: Mesh) -> Batch:
        """Return the sharding of each array of a batch."""
        return {name: leaf.sharding for name, leaf in self.model.batch_like(config, mesh).items()}


def make_optimizer(config: Run) -> optax.GradientTransformation:
    """Return AdamW with a warm-up; it does not depend on the run's number of steps."""
    peak = config.learning_rate
    rate = optax.linear_schedule(peak / 10, peak, config.warmup)
    return optax.adamw(rate, b1=0.9, b2=0.95, weight_decay=config.weight_decay)
