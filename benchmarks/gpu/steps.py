"""The steps of the race on four devices: tensor, FSDP, both, a mixture, long context, Muon.

Four are of one transformer with the usual constraints; the mixture and the long context are the
trainers' own (`models/`). Nothing is donated, so that a step can run again.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

DEVICES = 4


@dataclass(frozen=True)
class Size:
    """The size of a step.

    Attributes:
        layers, hidden, heads, mlp, batch, sequence: of the model and the batch of all devices.
        vocab: of the trainers' models.
    """

    layers: int
    hidden: int
    heads: int
    mlp: int
    batch: int
    sequence: int
    vocab: int = 4096

    def narrow(self) -> Size:
        """Return half the width: exact matmuls and sockets take ten times as long and more."""
        half = dict(hidden=self.hidden // 2, heads=self.heads // 2, mlp=self.mlp // 2)
        return replace(self, **half)


@dataclass(frozen=True)
class Built:
    """A jitted step and its arguments; its first result is the state after the step."""

    step: Any
    args: tuple[Any, ...]


# -- the transformer ------------------------------------------------------------------------------


def transformer(size: Size, dtype: str, *, data: int, model: int, muon: bool = False) -> Built:
    """Return a transformer's step: "data" splits batch and weights, "model" as Megatron does.

    The state is (params, optimizer's state), params in float32; a sum of gradients is in it as it
    is, so that two programs can be compared without the rounding of an update.
    """
    mesh = _mesh({"data": data, "model": model})
    optimizer = optax.contrib.muon(1e-3) if muon else optax.sgd(1e-2, momentum=0.9)
    shapes, specs = _weights(size, split=data > 1)
    shardings = [{name: NamedSharding(mesh, specs[name]) for name in specs}] * size.layers

    params = []
    for layer in range(size.layers):
        named = enumerate(shapes.items(), layer * len(shapes))
        params.append(
            {
                name: random(
                    shape, "float32", shardings[layer][name], number, 0.5 * shape[0] ** -0.5
                )
                if len(shape) > 1
                else jax.device_put(np.ones(shape, np.float32), shardings[layer][name])
                for number, (name, shape) in named
            }
        )
    like = jax.eval_shape(optimizer.init, params)
    state_shardings = _as_params(like, shardings[0], NamedSharding(mesh, P()))
    state = jax.jit(optimizer.init, out_shardings=state_shardings)(params)
    rows = NamedSharding(mesh, P("data", "model", None))
    shape = (size.batch, size.sequence, size.hidden)
    batch = random(shape, dtype, rows, 1000, 1.0), random(shape, dtype, rows, 1001, 1.0)

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        for weights in params:
            x = _layer(size, mesh, dtype, x, weights)
        return jnp.mean((x.astype(jnp.float32) - y.astype(jnp.float32)) ** 2)

    def step(params: Any, state: Any, batch: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, *batch)
        updates, state = optimizer.update(gradients, state, params)
        return (optax.apply_updates(params, updates), state), value

    out = ((shardings, state_shardings), NamedSharding(mesh, P()))
    inside = (shardings, state_shardings, (rows, rows))
    jitted = jax.jit(step, in_shardings=inside, out_shardings=out)
    return Built(jitted, (params, state, batch))


def random(
    shape: tuple[int, ...], dtype: str, sharding: NamedSharding, seed: int, scale: float
) -> jax.Array:
    """Return uniform values of this standard deviation; each process makes its own part.

    They depend on how the array is sharded.
    """

    def part(index: Any) -> np.ndarray:
        starts = [dim.indices(n)[0] for dim, n in zip(index, shape, strict=True)]
        sizes = [len(range(*dim.indices(n))) for dim, n in zip(index, shape, strict=True)]
        values = np.random.default_rng([seed, *starts]).random(sizes, np.float32)
        return ((values - 0.5) * (12**0.5 * scale)).astype(jnp.dtype(dtype))

    return jax.make_array_from_callback(shape, sharding, part)


def _weights(size: Size, *, split: bool) -> tuple[dict[str, tuple[int, ...]], dict[str, P]]:
    d, f, whole = size.hidden, size.mlp, "data" if split else None
    shapes = dict(q=(d, d), k=(d, d), v=(d, d), out=(d, d), gate=(d, f), up=(d, f), down=(f, d))
    specs = {name: P(whole, "model") for name in ("q", "k", "v", "gate", "up")}
    specs |= {name: P("model", whole) for name in ("out", "down")}
    norms = ("attention_norm", "mlp_norm")
    return shapes | {n: (d,) for n in norms}, specs | {n: P(None) for n in norms}


def _as_params(state: Any, shardings: dict[str, NamedSharding], other: NamedSharding) -> Any:
    """Return a sharding for each leaf of an optimizer's state: its weight's, by its name."""

    def of(path: Any, leaf: Any) -> NamedSharding:
        name = getattr(path[-1], "key", None)
        return shardings[name] if leaf.ndim and name in shardings else other

    return jax.tree.map_with_path(of, state)


def _layer(size: Size, mesh: Mesh, dtype: str, x: jax.Array, weights: Any) -> jax.Array:
    def at(value: jax.Array, *spec: str | None) -> jax.Array:
        return lax.with_sharding_constraint(value, NamedSharding(mesh, P("data", *spec)))

    w = {n: v.astype(dtype) if v.ndim > 1 else v for n, v in weights.items()}
    y = at(_norm(x, w["attention_norm"]), "model", None)
    heads = (*x.shape[:2], size.heads, size.hidden // size.heads)
    q, k, v = (at((y @ w[n]).reshape(heads), None, "model", None) for n in "qkv")
    fused = "cudnn" if dtype == "bfloat16" and _on_gpu(mesh) else "xla"
    attended = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=fused)
    x = at(x + attended.reshape(x.shape) @ w["out"], "model", None)
    y = at(_norm(x, w["mlp_norm"]), "model", None)
    inner = jax.nn.silu(at(y @ w["gate"], None, "model")) * at(y @ w["up"], None, "model")
    return at(x + inner @ w["down"], "model", None)


def _norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    wide *= lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)
    return (wide * scale).astype(x.dtype)


def _mesh(axes: dict[str, int]) -> Mesh:
    devices = np.array(jax.devices(), dtype=object).reshape(tuple(axes.values()))
    return Mesh(devices, tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def _on_gpu(mesh: Mesh) -> bool:
    return mesh.devices.flat[0].platform != "cpu"


# -- the trainers' models -------------------------------------------------------------------------


def trainer(size: Size, dtype: str, *, model: str, **config: Any) -> Built:
    """Return a step of models/, on random tokens."""
    module = importlib.import_module(f"models.{model}")
    recipe, sizes = module.RECIPE, vars(size)
    config = recipe.config(**sizes, **config, dtype=dtype)
    mesh = recipe.make_mesh(config)

    def tokens(like: jax.ShapeDtypeStruct) -> jax.Array:
        drawn = np.random.default_rng(0).integers(0, 256, like.shape).astype(like.dtype)
        return jax.make_array_from_callback(like.shape, like.sharding, lambda index: drawn[index])

    batch = jax.tree.map(tokens, recipe.model.batch_like(config, mesh))
    step = recipe.make_step(config, mesh, donate=False)
    return Built(step, (recipe.init_state(config, mesh, 0), batch))


Build = Callable[[Size, str], Built]  # of a size and a dtype
_LARGE = Size(layers=2, hidden=4096, heads=32, mlp=14336, batch=8, sequence=1024)
_MIDDLE = Size(layers=2, hidden=2048, heads=16, mlp=8192, batch=8, sequence=1024)
_LONG = replace(_MIDDLE, batch=2, sequence=8192)
_SMALL = Size(layers=1, hidden=32, heads=4, mlp=64, batch=4, sequence=64, vocab=256)
_MIXTURE: dict[str, Any] = dict(model="moe", data=1, expert=DEVICES, experts=8)

# By name: how it is built, at which size on a GPU, and at which in a rehearsal on CPU devices.
STEPS: dict[str, tuple[Build, Size, Size]] = {
    "tensor": (partial(transformer, data=1, model=4), _LARGE, _SMALL),
    "FSDP": (partial(transformer, data=4, model=1), replace(_LARGE, batch=16), _SMALL),
    "both": (partial(transformer, data=2, model=2), _LARGE, _SMALL),
    "mixture": (partial(trainer, **_MIXTURE), replace(_MIDDLE, batch=16), _SMALL),
    "long context": (
        partial(trainer, model="long_context", data=1, context=DEVICES),
        _LONG,
        _SMALL,
    ),
    "Muon": (partial(transformer, data=4, model=1, muon=True), _MIDDLE, _SMALL),
}
