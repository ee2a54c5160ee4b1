"""overlap() pins results where XLA's own layout costs more, by price."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoverlap
from jaxoverlap.hardware.pods import compiler_options
from jaxoverlap.passes.analysis.errors import RewriteError
from jaxoverlap.step import context as step_context
from tests.support.pods import pytestmark  # noqa: F401 - marks every test of this file

POD, AXES = "h100-sxm:2x4", {"fsdp": 2, "tp": 4}
"""Two hosts: what goes over fsdp goes over the network."""

B, S, D, N, H = 8, 1024, 1024, 16, 64


def attention(x, q, k, v, out):
    q, k, v = (jnp.einsum("bsd,de->bse", x, w).reshape(B, S, N, H) for w in (q, k, v))
    scores = jnp.einsum("bqnh,bknh->bnqk", q, k).astype(jnp.float32)
    attended = jnp.einsum("bnqk,bknh->bqnh", jax.nn.softmax(scores).astype(x.dtype), v)
    return jnp.einsum("bse,ed->bsd", attended.reshape(B, S, N * H), out)


def loss_of(weights, x):
    def layer(x, w):
        return x + attention(x, *w), None

    x = jax.lax.scan(jax.checkpoint(layer), x, weights)[0]
    return jnp.mean(jnp.square(x.astype(jnp.float32)))


def step(weights, x):
    """Train weights that are sharded over both axes, without a single constraint."""
    loss, gradients = jax.value_and_grad(loss_of)(weights, x)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), loss


@pytest.fixture(scope="module")
def mesh():
    return jaxoverlap.pod_mesh(POD, AXES)


@pytest.fixture(scope="module")
def args(mesh):
    def shape(*dims, spec):
        return jax.ShapeDtypeStruct(dims, jnp.bfloat16, sharding=NamedSharding(mesh, spec))

    into, back = P(None, "fsdp", "tp"), P(None, "tp", "fsdp")
    weights = tuple(shape(4, D, N * H, spec=into) for _ in range(3))
    return (*weights, shape(4, N * H, D, spec=back)), shape(B, S, D, spec=P("fsdp", "tp"))


@pytest.fixture(scope="module")
def plan(args):
    return jaxoverlap.overlap(jax.jit(step), cluster=POD).explain(*args)


def test_a_step_without_constraints_is_repaired(plan):
    assert plan.price.saved_s["layouts"] > 0.1 * plan.price.plain_s
    assert f"{len(plan.pins)} results are pinned" in str(plan)
    scores = [note for note in plan.notes if f"{N},{S},{S}] at " in note]
    assert scores, str(plan)
    assert all(" to (fsdp, tp, None, None)" in note for note in scores)


def test_advice_is_what_a_plan_pins(plan, args):
    layouts = jaxoverlap.overlap(jax.jit(step), cluster=POD).advise(*args)
    assert layouts and len(layouts.pins) == len(plan.pins)
    assert layouts.step_s < 0.9 * layouts.plain_s
    assert layouts.peak_bytes <= 1.05 * layouts.plain_peak_bytes


def test_a_plan_keeps_the_layouts_and_is_followed_without_a_search(plan, args, monkeypatch):
    again = jaxoverlap.Plan.from_json(plan.to_json())
    assert again.pins == plan.pins and again.notes == plan.notes
    monkeypatch.setattr("jaxoverlap.search.found.search", pytest.fail)
    followed = jaxoverlap.overlap(jax.jit(step), plan=again, cluster=POD).explain(*args)
    assert followed.pins == plan.pins and followed.notes == plan.notes


def test_a_layout_that_xla_refuses_is_not_taken(args, monkeypatch):
    partitioned = step_context.partitioned

    def refusing(traced, jaxpr, mesh, *, ask=True):
        asked.append(jaxpr)
        if len(asked) > 1:  # the first is the step as it is
            raise RewriteError("XLA's partitioner gave no answer")
        return partitioned(traced, jaxpr, mesh, ask=ask)

    asked: list[object] = []
    monkeypatch.setattr("jaxoverlap.step.context.partitioned", refusing)
    fresh = jax.jit(lambda *given: step(*given))  # what was found for another is remembered
    layouts = jaxoverlap.overlap(fresh, cluster=POD).advise(*args)
    assert layouts and layouts.pins == ()
    assert layouts.questions > 0


def test_layouts_can_be_left_to_xla(args):
    left = jaxoverlap.overlap(jax.jit(step), cluster=POD, layouts=None)
    assert left.advise(*args) is None and not left.explain(*args).pins


def test_results_lie_as_in_the_plain_step(args):
    plain = jax.jit(step).lower(*args)
    ours = jaxoverlap.overlap(jax.jit(step), cluster=POD, never_slower=False).lower(*args)
    options = compiler_options()
    theirs = plain.compile(compiler_options=options).output_shardings
    same = jax.tree.map(
        lambda a, b, aval: a.is_equivalent_to(b, len(aval.shape)),
        ours.compile().output_shardings,
        theirs,
        jax.eval_shape(step, *args),
    )
    assert all(jax.tree.leaves(same))


@pytest.mark.parametrize("layouts", ["fix", True, 3])
def test_other_layouts_are_refused(layouts):
    with pytest.raises(ValueError, match=re.escape("expected 'repair', 'complete' or None")):
        jaxoverlap.overlap(step, layouts=layouts)


def test_a_plan_says_the_layouts_already(plan):
    with pytest.raises(ValueError, match="layouts beside plan="):
        jaxoverlap.overlap(jax.jit(step), plan=plan, layouts=None)


@pytest.mark.parametrize(("groups", "asks"), [(4, False), (64, True)])
def test_no_layout_is_asked_about_where_xla_would_end_the_process(mesh, groups: int, asks: bool):
    """The groups of a convolution are fewer than the devices that may hold a shard of each."""

    def loss(weights, x):
        kernel, dense = weights
        y = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", feature_group_count=groups)
        y = jax.nn.gelu(y.reshape(x.shape[0], -1, dense.shape[0]) @ dense)
        return jnp.mean(jnp.square(y.astype(jnp.float32)))

    def step(weights, x):
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights, x))

    def shape(*dims, spec):
        return jax.ShapeDtypeStruct(dims, jnp.bfloat16, sharding=NamedSharding(mesh, spec))

    weights = (
        shape(64, 64 // groups, 3, 3, spec=P()),
        shape(1024, 4096, spec=P("fsdp", "tp")),
    )
    x = shape(16, 64, 32, 32, spec=P("fsdp"))
    layouts = jaxoverlap.overlap(step, cluster=POD).advise(weights, x)
    assert layouts and (layouts.questions > 0) == asks
    assert ("no layout was tried" in str(layouts.lines)) != asks


def test_weights_that_every_device_stores_are_named():
    """What is stored outside of a step no layout changes, so the user is told."""
    mesh = jaxoverlap.pod_mesh("h100-sxm:1x8", {"data": 8})

    def shape(*dims, spec):
        return jax.ShapeDtypeStruct(dims, jnp.float32, sharding=NamedSharding(mesh, spec))

    @jax.jit
    def step(w, x):
        return w - jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)

    for spec, told in ((P(), True), (P("data"), False)):
        args = shape(2**16, 2**16, spec=spec), shape(8, 2**16, spec=P("data"))
        text = str(jaxoverlap.overlap(step).explain(*args))
        said = "Every device stores 17.2 GB of weights and optimizer state, "
        assert (said in text) == told
        assert ("over data it would be 2.1 GB" in text) == told
