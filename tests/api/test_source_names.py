"""A matmul is named by the user's line and by its module, also where flax's layers write it."""

from __future__ import annotations

import re
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoverlap

HERE, WIDTH, HIDDEN = Path(__file__).name, 32, 64


class UpDown(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        h = nn.gelu(nn.Dense(HIDDEN, use_bias=False, name="up")(x))
        return x + nn.Dense(WIDTH, use_bias=False, name="down")(h), None


class Linen(nn.Module):
    """Two layers, as a scan over one remat or one after the other."""

    scanned: bool

    @nn.compact
    def __call__(self, x):
        if self.scanned:
            split = {"params": True}
            scan = nn.scan(
                nn.remat(UpDown), variable_axes={"params": 0}, split_rngs=split, length=2
            )
            return scan(name="layers")(x, None)[0]
        for n in range(2):
            x, _ = UpDown(name=f"layers_{n}")(x)
        return x


class Nnx(nnx.Module):
    def __init__(self):
        self.up = nnx.Linear(WIDTH, HIDDEN, use_bias=False, rngs=nnx.Rngs(0))
        self.down = nnx.Linear(HIDDEN, WIDTH, use_bias=False, rngs=nnx.Rngs(1))

    def __call__(self, x):
        h = jax.nn.gelu(self.up(x))
        return self.down(h)


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def sharded(mesh, tree):
    """Shard `up` by columns and `down` by rows, and the rest not."""

    def put(path, leaf):
        dim = {"up": leaf.ndim - 1, "down": leaf.ndim - 2}
        names = [d for name, d in dim.items() if name in jax.tree_util.keystr(path)]
        spec = P(*("model" if d in names else None for d in range(leaf.ndim)))
        return jax.device_put(leaf, NamedSharding(mesh, spec))

    return jax.tree_util.tree_map_with_path(put, tree)


def step_of(mesh, model):
    """Return a train step of a linen model and its arguments."""
    x = jnp.ones((4, 8, WIDTH))
    params = sharded(mesh, model.init(jax.random.key(0), x))

    @jax.jit
    def step(params, x):
        return jax.grad(lambda params: jnp.mean(model.apply(params, x) ** 2))(params)

    return step, (params, jax.device_put(x, NamedSharding(mesh, P("data", "model"))))


def line_with(text: str) -> str:
    """Return the "file:line" of the only line of this file that begins so."""
    lines = Path(__file__).read_text().splitlines()
    (number,) = (n for n, line in enumerate(lines, 1) if line.strip().startswith(text))
    return f"{HERE}:{number}"


@pytest.mark.parametrize(
    ("scanned", "modules"),
    [
        (True, {"Linen.layers.up", "Linen.layers.down"}),
        (False, {f"Linen.layers_{n}.{name}" for n in range(2) for name in ("up", "down")}),
    ],
)
def test_linens_modules_are_named_forward_and_backward(mesh, scanned: bool, modules: set[str]):
    step, args = step_of(mesh, Linen(scanned))
    entries = jaxoverlap.overlap(step).explain(*args).entries
    assert {e.module for e in entries} == modules
    lines = {line_with("h = nn.gelu(nn.Dense"), line_with("return x + nn.Dense")}
    assert {e.source.split("/")[-1] for e in entries} == lines


def test_layers_that_do_the_same_are_one_row_with_a_pattern_to_paste(mesh):
    step, args = step_of(mesh, Linen(False))
    text = str(jaxoverlap.overlap(step).explain(*args))
    assert len(re.findall(r"Linen\.layers_\*\.up", text)) > 0 and "layers_0" not in text
    plan = jaxoverlap.overlap(step, skip=("Linen.layers_*.up",)).explain(*args)
    skipped = {e.module for e in plan.skips if e.reason == "skipped: by skip="}
    assert skipped == {"Linen.layers_0.up", "Linen.layers_1.up"}


@pytest.mark.parametrize(
    ("pattern", "skipped"),
    [
        ("up", {"Linen.layers_0.up", "Linen.layers_1.up"}),
        ("layers_1.*", {"Linen.layers_1.up", "Linen.layers_1.down"}),
        ("layers_?.down", {"Linen.layers_0.down", "Linen.layers_1.down"}),
        (f"{HERE}:*", {f"Linen.layers_{n}.{name}" for n in range(2) for name in ("up", "down")}),
    ],
)
def test_skip_and_granularity_match_modules_and_lines_by_pattern(mesh, pattern: str, skipped):
    step, args = step_of(mesh, Linen(False))
    plan = jaxoverlap.overlap(step, skip=(pattern,)).explain(*args)
    assert {e.module for e in plan.skips if e.reason == "skipped: by skip="} == skipped
    plan = jaxoverlap.overlap(step, granularity={pattern: "plain"}).explain(*args)
    plain = {e.module for e in plan.skips if e.reason == "not ringed: by granularity="}
    assert plain == skipped


@pytest.mark.parametrize("pattern", ["p", "layers_0", "other.up", "yers_0.up", "*.py"])
def test_a_pattern_that_matches_nothing_is_refused_with_the_names(mesh, pattern: str):
    step, args = step_of(mesh, Linen(False))
    with pytest.raises(ValueError, match=r"names no line and no module.*\(Linen\.layers_0\.up, "):
        jaxoverlap.overlap(step, skip=(pattern,)).explain(*args)


def test_nnxs_layers_are_named_by_the_lines_that_call_them(mesh):
    graph, params = nnx.split(Nnx())

    @jax.jit
    def step(params, x):
        return jax.grad(lambda p: jnp.mean(nnx.merge(graph, p)(x) ** 2))(params)

    x = jax.device_put(jnp.ones((4, 8, WIDTH)), NamedSharding(mesh, P("data", "model")))
    overlapped, args = jaxoverlap.overlap(step), (sharded(mesh, params), x)
    lines = {line_with("h = jax.nn.gelu(self.up"), line_with("return self.down(h)")}
    assert {e.source.split("/")[-1] for e in overlapped.explain(*args).entries} == lines
    compiled = overlapped.lower(*args).compile().audit().collectives
    assert compiled and all(HERE in c.source or not c.source for c in compiled)
    assert any(c.source for c in compiled)


def test_the_gradient_of_a_lookup_is_named_by_its_line(mesh):
    table = jax.device_put(jnp.ones((64, WIDTH)), NamedSharding(mesh, P("model", "data")))
    tokens = jax.device_put(jnp.zeros((8, 8), jnp.int32), NamedSharding(mesh, P("data")))
    rows = NamedSharding(mesh, P("data", "model", None))

    def loss(table, tokens):
        x = jnp.take(table, tokens, axis=0)
        return jnp.mean(jax.lax.with_sharding_constraint(x, rows) ** 2)

    step = jax.jit(jax.grad(loss), out_shardings=table.sharding)
    plan = jaxoverlap.overlap(step).explain(table, tokens)
    here = line_with("x = jnp.take(table, tokens")
    (scattered,) = plan.applied
    assert f"/{here} is scattered over " in scattered
