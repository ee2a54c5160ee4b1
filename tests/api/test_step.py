"""Each matmul of whole train steps gets its decision, and gradients agree with float64."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoverlap
from jaxoverlap._jax import inlining
from jaxoverlap.passes.rewriting import rewrite
from models.config import Config
from models.gpt import (
    abstract_args,
    init_state,
    make_grads,
    make_mesh,
    make_step,
    state_shardings,
)
from models.text import load_text, make_batch

CONFIG = Config(layers=2, hidden=32, heads=4, mlp=64, sequence=16, batch=4, warmup=2)
BATCH = make_batch(load_text(sequence=CONFIG.sequence), CONFIG, 0)


# -- gradients of the GPT -------------------------------------------------------------------------


def worse(plain: Any, overlapped: Any, exact: Any) -> list[str]:
    """List the leaves whose error is more than twice the plain one's.

    Errors are Frobenius norms relative to the exact leaf's. Half a float32 rounding of every
    element is allowed beside that: a plain leaf may come out exact by luck.
    """
    floor = float(np.finfo(np.float32).eps) / 2

    def error(got: Any, exact: np.ndarray) -> float:
        return float(np.linalg.norm(np.float64(got) - exact) / np.linalg.norm(exact))

    leaves = zip(
        jax.tree.leaves_with_path(exact),
        jax.tree.leaves(plain),
        jax.tree.leaves(overlapped),
        strict=True,
    )
    return [
        jax.tree_util.keystr(path)
        for (path, exact), plain, overlapped in leaves
        if not error(overlapped, exact) <= 2 * error(plain, exact) + floor
    ]


@pytest.fixture(scope="module")
def params():
    return init_state(CONFIG, make_mesh(CONFIG), seed=0)["params"]


@pytest.fixture(scope="module")
def plain(params):
    """Return (loss, gradients) of the step as it is written."""
    return jax.device_get(make_grads(CONFIG, make_mesh(CONFIG))(params, BATCH))


@pytest.fixture(scope="module")
def exact(params):
    """Return (loss, gradients) of the same parameters, computed in float64."""
    with jax.enable_x64(True):
        config = dataclasses.replace(CONFIG, dtype="float64", param_dtype="float64")
        wide = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
        loss_and_gradients = jax.device_get(make_grads(config, make_mesh(config))(wide, BATCH))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(loss_and_gradients)} == {"float64"}
    return loss_and_gradients


def test_every_gradient_is_as_exact_as_the_plain_one(params, plain, exact):
    step = jaxoverlap.overlap(make_grads(CONFIG, make_mesh(CONFIG)))
    kinds = Counter(d.kind for d in step.explain(params, BATCH).decisions)
    assert set(kinds) >= {"all_gather_matmul", "matmul_reduce_scatter"}
    assert sum(kinds.values()) >= 20, kinds
    overlapped = jax.device_get(step(params, BATCH))
    assert not worse(plain, overlapped, exact)
    assert any(
        (a != b).any() for a, b in zip(*map(jax.tree.leaves, (plain, overlapped)), strict=True)
    ), "not one sum was taken in another order: was there a ring?"


def test_one_wrong_ring_shows_in_the_gradients(params, plain, exact, monkeypatch):
    """The comparison above can fail: here one ring of many gives three quarters of its result."""
    ringed, calls = rewrite.ringed, itertools.count()

    def wrong(*args):
        ring, scale = ringed(*args), 0.75 if next(calls) == 7 else 1
        return lambda *operands: [result * scale for result in ring(*operands)]

    monkeypatch.setattr(rewrite, "ringed", wrong)
    monkeypatch.setattr(inlining, "_TRACES", type(inlining._TRACES)())  # of rings that are right
    step = jaxoverlap.overlap(make_grads(CONFIG, make_mesh(CONFIG)))
    assert worse(plain, jax.device_get(step(params, BATCH)), exact)


def test_five_steps_of_training_agree():
    mesh = make_mesh(CONFIG)
    text = load_text(sequence=CONFIG.sequence)
    plain_step = make_step(CONFIG, mesh)
    start = jax.device_get(init_state(CONFIG, mesh, seed=0))
    losses = []
    for step in (plain_step, jaxoverlap.overlap(plain_step)):
        state = jax.device_put(start, state_shardings(CONFIG, mesh))
        rows = []
        for index in range(5):
            state, metrics = step(state, make_batch(text, CONFIG, index))
            rows.append(float(metrics["loss"]))
        losses.append(rows)
    plain, overlapped = losses
    assert plain[-1] < plain[0], "it learns"
    np.testing.assert_allclose(overlapped, plain, rtol=1e-4)


def test_the_gpts_plan_has_every_matmul_once():
    mesh = make_mesh(CONFIG)
    step, args = make_step(CONFIG, mesh), abstract_args(CONFIG, mesh)
    plan = jaxoverlap.overlap(step).explain(*args)
    assert len(plan.entries) == sum(1 for _ in matmuls(step.trace(*args).jaxpr))
    assert {e.source.split(":")[0] for e in plan.entries} == {"models/gpt.py"}


# -- a step of our own: every site, and its source line -------------------------------------------

MESH = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
VOCAB, HIDDEN, INNER, LAYERS, CHUNKS = 64, 32, 64, 3, 2


def place(x, *spec):
    return lax.with_sharding_constraint(x, NamedSharding(MESH, P(*spec)))


def small_loss(params, tokens):
    """Compute a loss by two scans (layers; chunks of the sequence), remat, and a tied embedding."""
    x = place(jax.nn.one_hot(tokens, VOCAB), "data", "model")
    x = place(x @ params["table"], "data", "model")  # site: abc,cd->abd

    @jax.checkpoint
    def layer(x, weights):
        inner = jnp.sin(place(x @ weights["up"], "data", None, "model"))  # site: abc,cd->abd
        return place(x + inner @ weights["down"], "data", "model"), None  # site: abc,cd->abd

    x, _ = lax.scan(layer, x, {"up": params["up"], "down": params["down"]})

    def chunk(total, part):
        x, wanted = part
        logits = place(jnp.einsum("bsd,vd->bsv", x, params["table"]), "data")  # site: abc,dc->abd
        return total + jnp.sum(jax.nn.logsumexp(logits, -1) - jnp.sum(logits * wanted, -1)), None

    def chunks(x):
        split = x.reshape(x.shape[0], CHUNKS, -1, x.shape[-1])
        return jnp.moveaxis(place(split, "data"), 1, 0)

    wanted = jax.nn.one_hot(tokens, VOCAB)
    total, _ = lax.scan(chunk, 0.0, (chunks(x), chunks(wanted)))
    return total / tokens.size


def small_step(params, moments, tokens):
    loss, gradients = jax.value_and_grad(small_loss)(params, tokens)
    moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, gradients)
    # Not an optimizer that anyone uses: this one has a matmul of its own.
    square = moments["table"].T @ moments["table"]  # site: ab,bc->ac
    update = {**moments, "table": moments["table"] / (1 + jnp.trace(square))}
    return jax.tree.map(lambda p, m: p - 0.1 * m, params, update), moments, loss


def small_args() -> tuple[Any, Any, Any]:
    shapes = {
        "table": ((VOCAB, HIDDEN), P(("data", "model"))),
        "up": ((LAYERS, HIDDEN, INNER), P(None, "data", "model")),
        "down": ((LAYERS, INNER, HIDDEN), P(None, "model", "data")),
    }
    rng = np.random.default_rng(0)

    def array(shape, spec):
        value = rng.standard_normal(shape).astype(np.float32) * 0.1
        return jax.device_put(value, NamedSharding(MESH, spec))

    params = {name: array(*of) for name, of in shapes.items()}
    moments = jax.tree.map(jnp.zeros_like, params)
    tokens = rng.integers(0, VOCAB, (4, 16)).astype(np.int32)
    return params, moments, jax.device_put(tokens, NamedSharding(MESH, P("data", "model")))


def matmuls(jaxpr: Any, runs: int = 1) -> Iterator[tuple[Any, int]]:
    """Yield every dot_general and how often it runs, counted apart from the package's own walk."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            yield eqn, runs
        inner = runs * eqn.params.get("length", 1) if eqn.primitive.name == "scan" else runs
        for value in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda v: hasattr(v, "eqns")
        ):
            if hasattr(value, "eqns"):
                yield from matmuls(value, inner)


def sites_written_here() -> dict[int, str]:
    """Return the einsums that this file's comments give for the forward pass, by line."""
    lines = enumerate(Path(__file__).read_text().splitlines(), 1)
    einsums = {
        i: m.group(1) for i, line in lines if (m := re.search("  # site: ([a-z,>-]+)$", line))
    }
    assert len(einsums) == 5
    return einsums


@pytest.fixture(scope="module")
def small():
    """Return (the step's jaxpr, its plan)."""
    jitted = jax.jit(small_step)
    args = small_args()
    return jitted.trace(*args).jaxpr, jaxoverlap.overlap(jitted).explain(*args)


def test_every_matmul_is_explained_once(small):
    jaxpr, plan = small
    expected = Counter(runs for _, runs in matmuls(jaxpr))
    assert len(plan.decisions) + len(plan.skips) == len(plan.entries) == expected.total() > 12
    assert [e.site for e in plan.entries] == list(range(len(plan.entries)))
    assert Counter(e.runs for e in plan.entries) == expected
    assert set(expected) == {1, CHUNKS, LAYERS}
    for eqn, entry in zip((eqn for eqn, _ in matmuls(jaxpr)), plan.entries, strict=True):
        dims = [len(v.aval.shape) for v in (*eqn.invars, *eqn.outvars)]
        left, right = entry.einsum.split("->")
        assert [len(letters) for letters in (*left.split(","), right)] == dims


def test_every_source_line_is_the_one_that_wrote_the_matmul(small):
    _, plan = small
    written = sites_written_here()
    lines = [int(e.source.removeprefix("api/test_step.py:")) for e in plan.entries]
    # A matmul of the model has two more in its backward pass, and a remat repeats the first.
    assert set(lines) == set(written)
    by_line = {
        line: [e.einsum for e in plan.entries if e.source.endswith(f":{line}")] for line in written
    }
    for line, einsum in written.items():
        assert einsum in by_line[line]
        assert len(by_line[line]) in ((1,) if einsum == "ab,bc->ac" else (2, 3, 4)), by_line


def test_the_printed_plan_shows_every_matmul(small):
    _, plan = small
    text = str(plan)
    assert text.startswith("small_step on data 2 x model 4: ")
    idle = [s for s in plan.skips if s.idle]
    waiting = len(plan.skips) - len(idle)
    rings = [d for d in plan.decisions if d.num_chunks > 1]
    assert f"{len(plan.entries)} matmuls: {len(rings)} ringed" in text
    assert f"{waiting} skipped, {len(idle)} without a collective" in text
    for entry in plan.decisions:
        assert entry.source in text
    assert type(plan).from_json(plan.to_json()) == plan


def test_the_small_step_computes_what_it_computed(small):
    _, plan = small
    assert {d.kind for d in plan.decisions} >= {"all_gather_matmul", "matmul_reduce_scatter"}
    jitted, args = jax.jit(small_step), small_args()
    for got, expected in zip(
        jax.tree.leaves(jaxoverlap.overlap(jitted)(*args)),
        jax.tree.leaves(jitted(*args)),
        strict=True,
    ):
        np.testing.assert_allclose(got, expected, rtol=2e-5, atol=1e-6)


# -- matmuls at random ----------------------------------------------------------------------------

MESHES = [
    jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(shape))
    for shape, names in (((2, 4), ("d", "m")), ((2, 2, 2), ("d", "f", "m")), ((8,), ("m",)))
]


def random_matmul(rng: random.Random):
    """Draw (sides, sizes, specs of the sides, mesh, dimension numbers): anything that jit takes."""
    mesh = rng.choice(MESHES)
    letters = iter("abcdefgh")
    groups = [
        [next(letters) for _ in range(rng.choice(n))]
        for n in ([0, 0, 1], [1, 1, 2], [1, 2], [0, 1, 1])
    ]
    batch, contracted, left, right = groups
    sizes = {c: rng.choice([4, 5, 8, 12, 16, 24, 32]) for group in groups for c in group}
    lhs, rhs = batch + contracted + left, batch + contracted + right
    rng.shuffle(lhs), rng.shuffle(rhs)
    out = batch + [c for c in lhs if c in left] + [c for c in rhs if c in right]
    specs = [random_spec(rng, mesh, [sizes[c] for c in side]) for side in (lhs, rhs, out)]
    dims = tuple(tuple(tuple(map(s.index, cs)) for s in (lhs, rhs)) for cs in (contracted, batch))
    return [lhs, rhs, out], sizes, specs, mesh, dims


def random_spec(rng: random.Random, mesh, shape: list[int]) -> P:
    axes = list(mesh.axis_names)
    rng.shuffle(axes)
    dims: list[list[str]] = [[] for _ in shape]
    for axis in axes:
        dim = rng.randrange(len(shape))
        parts = math.prod(mesh.shape[a] for a in (*dims[dim], axis))
        if rng.random() < 0.8 and shape[dim] % parts == 0:
            dims[dim].append(axis)
    return P(*(tuple(d) or None for d in dims))


@pytest.mark.filterwarnings("ignore:overlap.. rewrites nothing")
def test_whatever_the_shardings_the_product_is_right():
    ringed = 0
    for seed in range(60):
        (lhs, rhs, out), sizes, specs, mesh, dims = random_matmul(random.Random(seed))
        at = [NamedSharding(mesh, spec) for spec in specs]
        plain = jax.jit(
            lambda x, y, dims=dims: lax.dot_general(x, y, dims),
            in_shardings=(at[0], at[1]),
            out_shardings=at[2],
        )
        rng = np.random.default_rng(seed)
        x, y = (rng.standard_normal([sizes[c] for c in s]).astype(np.float32) for s in (lhs, rhs))
        step = jaxoverlap.overlap(plain)
        if not step.explain(x, y).decisions:
            continue
        ringed += 1
        exact = np.einsum(
            f"{''.join(lhs)},{''.join(rhs)}->{''.join(out)}", np.float64(x), np.float64(y)
        )
        got = step(x, y)
        assert got.sharding.is_equivalent_to(at[2], got.ndim)
        assert np.linalg.norm(got - exact) < 1e-6 * np.linalg.norm(exact), (
            seed,
            step.explain(x, y),
        )
    assert ringed >= 10
