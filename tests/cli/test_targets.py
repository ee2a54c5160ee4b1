"""Steps that a reader of docs/start.md writes: on explicit axes, in flax's linen and nnx."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.docs.blocks import ROOT, blocks
from tests.support.command import run_json
from tests.support.pods import needs_plugin

_mesh = contextlib.ExitStack()  # what `jax.set_mesh` set, for the test to undo


def of_the_page(name: str) -> Any:
    """Return a function of the page, as it is written there."""
    texts = [block.text for block in blocks(ROOT / "docs" / "start.md")]
    (text,) = (text for text in texts if f"def {name}(" in text)
    names: dict[str, Any] = {"jax": jax, "NamedSharding": NamedSharding}
    exec(text, names)
    return names[name]


@pytest.fixture
def mesh() -> Mesh:
    kinds = (jax.sharding.AxisType.Auto,) * 2
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=kinds)


@pytest.fixture
def unset_mesh() -> Iterator[None]:
    yield
    _mesh.close()


def explicit_step(mesh: Mesh) -> Any:
    mesh = of_the_page("explicit")(mesh)
    _mesh.enter_context(jax.set_mesh(mesh))

    @jax.jit
    def step(x, up, down):
        inner = jnp.einsum("sd,df->sf", x, up, out_sharding=P(None, "tp"))
        return jnp.einsum("sf,fd->sd", inner, down, out_sharding=P("tp", None))

    def like(shape: tuple[int, int], *spec: str | None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, P(*spec)))

    weights = like((4096, 16384), None, "tp"), like((16384, 4096), "tp", None)
    return step, (like((8192, 4096), "tp", None), *weights)


@needs_plugin
@pytest.mark.pods
@pytest.mark.usefixtures("unset_mesh")
def test_a_target_may_make_its_axes_explicit():
    pod = ("--pod", "h100-sxm:1x4", "--mesh", "tp=4")
    plan = run_json("explain", "tests.cli.test_targets:explicit_step", *pod)
    assert [entry["type"] for entry in plan["entries"]] == ["ring", "ring"]


class _Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
        return nn.Dense(16, use_bias=False, kernel_init=init, name="up")(x)


def test_a_linen_state_gets_its_modules_shardings(mesh: Mesh):
    """The kernels have theirs, and the optimizer's moments have the kernels'."""
    net = _Linen()

    def make_state() -> TrainState:
        params = net.init(jax.random.key(0), jnp.ones((4, 8)))["params"]
        return TrainState.create(apply_fn=net.apply, params=params, tx=optax.adam(1e-3))

    state = of_the_page("state_on_mesh")(make_state, mesh)
    split = NamedSharding(mesh, P(None, "model"))
    for leaf in (state.params, state.opt_state[0].mu, state.opt_state[0].nu):
        assert leaf["up"]["kernel"].sharding == split
    assert state.step.sharding == NamedSharding(mesh, P())
    lowered = jax.jit(lambda state: state.apply_gradients(grads=state.params)).lower(state)
    assert "sharding" in lowered.as_text()


def test_an_nnx_module_gets_its_own_shardings(mesh: Mesh):
    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "model"))

    def make() -> nnx.Linear:
        return nnx.Linear(8, 16, use_bias=False, kernel_init=init, rngs=nnx.Rngs(0))

    with jax.set_mesh(mesh):
        shapes = nnx.eval_shape(make)
    module = of_the_page("on_mesh")(shapes, mesh)
    assert module.kernel.get_value().sharding == NamedSharding(mesh, P(None, "model"))
