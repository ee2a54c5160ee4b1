"""Scanned weights are gathered one step of the scan ahead."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoverlap
from jaxoverlap._jax import compat
from jaxoverlap._util.text import human_bytes
from jaxoverlap.flags.required import MOST_GATHERED
from jaxoverlap.step.options import Options
from tests.support.pods import marked
from tests.support.pods import pytestmark as pods

LAYERS, B, D, F = 3, 16, 32, 64
MESH = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
UP, DOWN = P(None, "data", None), P(None, None, "data")


def at(spec: P) -> NamedSharding:
    return NamedSharding(MESH, spec)


def layer(x, weights):
    up, down = weights
    return x + jnp.tanh(x @ up) @ down, jnp.sum(x)


def by_hand(x, weights):
    """The layer with its weights gathered by constraints, as FSDP is often written."""
    return layer(x, [jax.lax.with_sharding_constraint(w, at(P())) for w in weights])


def loss(weights, x, layer=layer):
    x, sums = jax.lax.scan(jax.checkpoint(layer), x, weights)
    return jnp.mean(x**2) + jnp.mean(sums) / 1e3


def arguments(layers: int = LAYERS) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)

    def array(spec, *shape):
        return jax.device_put(rng.standard_normal(shape).astype(np.float32) / 6, at(spec))

    return (array(UP, layers, D, F), array(DOWN, layers, F, D)), array(P("data"), B, D)


def step_of(fn):
    return jax.jit(fn, out_shardings=(None, (at(UP), at(DOWN))))


def scans(jaxpr: Any) -> list[Any]:
    outermost = [e for e in jaxpr.eqns if e.primitive.name == "scan"]
    return outermost + [
        s for e in jaxpr.eqns for inner in compat.jaxprs_in(e) for s in scans(inner)
    ]


def gathers_in(jaxpr: Any) -> int:
    """Count the gathers in a body, and in what it calls."""
    here = sum(
        e.primitive.name == "sharding_constraint" and "all_gather_over" in str(e.source_info.name_stack)
        for e in jaxpr.eqns
    )  # fmt: skip
    return here + sum(gathers_in(inner) for e in jaxpr.eqns for inner in compat.jaxprs_in(e))


def gathers_ahead(plan: jaxoverlap.Plan) -> int:
    """Return how many gathers a plan says to run ahead."""
    lines = [line for line in plan.applied if " run one step of their scan ahead" in line]
    return int(lines[0].split()[0]) if lines else 0


def compare(fn, arrays, **options) -> jaxoverlap.Plan:
    plain, overlapped = step_of(fn), jaxoverlap.overlap(step_of(fn), **options)
    got, wanted = overlapped(*arrays), plain(*arrays)
    for mine, theirs in zip(*map(jax.tree.leaves, (got, wanted)), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)
    return overlapped.explain(*arrays)


@pytest.mark.parametrize("fsdp", ["prefetch", "ring"])
def test_both_ways_give_the_plain_numbers(fsdp: Any):
    plan = compare(jax.value_and_grad(loss), arguments(), fsdp=fsdp)
    assert not [s for s in plan.skips if not s.idle]
    gathered = [d for d in plan.decisions if d.kind == "all_gather_matmul"]
    if fsdp == "ring":
        assert gathers_ahead(plan) == 0
        assert max(d.num_chunks for d in gathered) == 8
    else:
        assert gathers_ahead(plan) == 1 + 1  # up, which each body reads first; down hides behind it
        assert {d.num_chunks for d in gathered} == {1}
        assert plan.applied[0] in str(plan)


def test_a_body_gathers_what_the_next_step_reads():
    step = jaxoverlap.overlap(step_of(jax.value_and_grad(loss)))
    forward, backward = scans(step.trace(*arguments()).jaxpr)
    for scan, reverse in ((forward, False), (backward, True)):
        assert scan.params["reverse"] == reverse
        body = scan.params["jaxpr"]
        num_consts, num_carry = compat.scan_counts(scan)
        carry = body.invars[num_consts : num_consts + num_carry]
        shapes = [v.aval.shape for v in carry]
        assert shapes == [(), (D, F), (B, D)]  # the step, what is gathered, the residual stream
        assert gathers_in(body) == 2, "up for the next step, and down for this one"


LAYERS_AHEAD = Options(layers_ahead=True, rings=False, layouts=None, halves=None)


@pytest.mark.parametrize("layer", [layer, by_hand], ids=["by matmuls", "by hand"])
def test_whole_layers_are_gathered_ahead_with_the_plain_numbers(layer):
    fn, arrays = jax.value_and_grad(functools.partial(loss, layer=layer)), arguments()
    step = jaxoverlap.Overlapped(step_of(fn), LAYERS_AHEAD)
    pairs = zip(*map(jax.tree.leaves, (step(*arrays), step_of(fn)(*arrays))), strict=True)
    for mine, theirs in pairs:
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)
    plan = step.explain(*arrays)
    assert gathers_ahead(plan) == 4
    assert f"all of a layer's in one ({human_bytes(2 * D * F * 4)})" in str(plan)  # in f32
    for scan in scans(step.trace(*arrays).jaxpr):
        body = scan.params["jaxpr"]
        num_consts, num_carry = compat.scan_counts(scan)
        carry = [v.aval.shape for v in body.invars[num_consts : num_consts + num_carry]]
        assert sorted(carry) == sorted([(), (D, F), (F, D), (B, D)])
        assert gathers_in(body) == 2, "both for the next step"
    followed = jaxoverlap.overlap(step_of(fn), plan=plan)
    assert followed.explain(*arrays).applied == plan.applied


@marked(pods)
def test_a_layer_that_is_gathered_ahead_is_one_all_gather_in_each_iteration():
    mesh = jaxoverlap.pod_mesh("h100-sxm:8x8", {"data": 64})
    layers, rows, width, hidden = 8, 256, 4096, 11008

    def array(spec, *shape):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))

    weights = array(UP, layers, width, hidden), array(DOWN, layers, hidden, width)
    x = array(P("data"), 64 * rows * 16, width)
    outs = None, tuple(w.sharding for w in weights)
    step = jaxoverlap.Overlapped(
        jax.jit(jax.value_and_grad(loss), out_shardings=outs), LAYERS_AHEAD
    )
    compiled = step.lower(weights, x).compile()
    plan = compiled.plan
    joined = str(2 * width * hidden * 2)
    assert plan.xla_options[MOST_GATHERED] == joined and not plan.split
    spent = [s.collective for s in compiled.simulate().spent]
    gathers = [c for c in spent if c.kind == "all-gather"]
    sent = 2 * width * hidden * 2 * 63 // 64
    assert {c.bytes_moved for c in gathers} == {sent}
    # One for each layer, and one more in each of the two loops.
    assert sum(c.runs for c in gathers) == 2 * (layers + 1)


def test_one_layer_has_none_ahead():
    plan = compare(jax.value_and_grad(loss), arguments(layers=1))
    assert gathers_ahead(plan) == 0


def test_a_weight_that_is_read_as_it_is_too():
    def fn(weights, x):
        def step(x, w):
            up, down = w
            return jnp.tanh(x @ up) @ down + jnp.sum(up * 1e-3), None

        x, _ = jax.lax.scan(step, x, weights)
        return jnp.mean(x**2)

    assert gathers_ahead(compare(jax.value_and_grad(fn), arguments())) >= 1


def test_gradient_accumulation_around_the_layers():
    def fn(weights, x):
        def microbatch(total, part):
            value, grads = jax.value_and_grad(loss)(weights, part)
            return jax.tree.map(jnp.add, total, (value, grads)), None

        zero = (jnp.float32(0), jax.tree.map(jnp.zeros_like, weights))
        parts = jax.lax.with_sharding_constraint(jnp.stack([x, x * 0.5]), at(P(None, "data")))
        return jax.lax.scan(microbatch, zero, parts)[0]

    assert gathers_ahead(compare(fn, arguments())) == 2


def test_activations_are_not_gathered_ahead():
    """Values that a forward scan stores for the backward one are no weights: rings gather them."""

    def fn(weights, x):
        x, _ = jax.lax.scan(layer, x, weights)  # no remat: tanh's result is stored
        return jnp.mean(x**2)

    compare(jax.value_and_grad(fn), arguments())


def test_an_unknown_choice():
    with pytest.raises(ValueError, match="fsdp='never': expected 'prefetch', 'ring' or None"):
        jaxoverlap.overlap(lambda x: x, fsdp="never")  # type: ignore[call-overload]
