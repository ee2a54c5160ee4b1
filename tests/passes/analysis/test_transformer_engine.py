"""Transformer Engine's attention is followed by its dims, and split along the batch."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoverlap
from jaxoverlap.passes.analysis.sharding_rules import partitions_itself, rule_of
from tests.support.halves import B, D, S, assert_same, computed, halved, values
from tests.support.transformer_engine import EXACT, Config, attention

HEADS = 2


def loss_of(w: Any, x: Any, config: Config = EXACT) -> Any:
    q, k, v = ((x @ w[n]).reshape(*x.shape[:2], HEADS, -1) for n in "qkv")
    x = x + attention(q, k, v, config).reshape(x.shape) @ w["o"]
    return jnp.mean(jnp.square(x))


def weights() -> dict[str, Any]:
    return {name: values(D, D, seed=i) / 4 for i, name in enumerate("qkvo")}


def attentions(config: Config = EXACT) -> list[Any]:
    step = jax.grad(lambda w, x: loss_of(w, x, config))
    equations = jax.make_jaxpr(step)(weights(), values(B, S, D)).eqns
    return [e for e in equations if partitions_itself(e)]


def test_both_primitives_have_their_dims():
    forward, backward = map(rule_of, attentions())
    q, k, v = ("b", "t", "n", "h"), ("b", "s", "n", "h"), ("b", "s", "n", "w")
    assert forward.operands[:5] == (q, k, v, (), ())
    assert [names[:1] for names in forward.operands[6:8]] == [("b",)] * 2
    assert forward.results[0] == ("b", "t", "n", "w")
    assert forward.results[1][:3] == ("b", "n", "t")
    assert "b" not in forward.results[2]
    assert backward.operands[7] == backward.operands[8] == ("b", "t", "n", "w")
    assert backward.results == (q, k, v, (), ())


@pytest.mark.parametrize(("q", "k"), [((B, S, 3, 4, 8), (0,)), ((B, S, 4, 8), (B, S, 2, 2, 8))])
def test_packed_operands_are_known(q: tuple, k: tuple):
    forward, _ = attentions()
    avals = [jax.core.ShapedArray(shape, jnp.float32) for shape in (q, k, (0,))]
    variables = [type(v)(aval) for v, aval in zip(forward.invars, avals, strict=False)]
    rule = rule_of(forward.replace(invars=[*variables, *forward.invars[3:]]))
    assert [len(names) for names in rule.operands[:3]] == [len(q), len(k) if k != (0,) else 0, 0]
    assert all(names[0] == "b" for names in rule.operands[:2] if names)


def test_other_operands_are_not_guessed():
    forward, _ = attentions()
    assert rule_of(forward.replace(invars=forward.invars[:-1])) is None


def test_the_batch_is_split_through_it():
    step = jax.jit(jax.value_and_grad(loss_of))
    args = weights(), values(B, S, D, seed=9)
    jaxpr, done = halved(step, args, (B, S, D))
    assert not done.mixing
    assert [partitions_itself(e) for e in done.jaxpr.eqns].count(True) == 4
    leaves = jax.tree.leaves(args)
    assert_same(list(zip(*(computed(j, leaves) for j in (done.jaxpr, jaxpr)), strict=True)))


def test_dropout_joins_the_parts():
    config = Config(dropout_probability=0.1)
    step = jax.jit(jax.value_and_grad(lambda w, x: loss_of(w, x, config)))
    _, done = halved(step, (weights(), values(B, S, D)), (B, S, D))
    assert [e.primitive.name[:13] for e in done.mixing] == ["te_fused_attn"] * 2


def test_an_overlapped_step_has_plains_numbers():
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    def at(x: Any, *spec: Any) -> Any:
        return jax.device_put(x, NamedSharding(mesh, P(*spec)))

    w = {n: at(x) for n, x in weights().items()}
    step, x = jax.jit(jax.value_and_grad(loss_of)), at(values(8, S, D, seed=9), "data")
    overlapped = jaxoverlap.overlap(step, halves=2)
    got = overlapped(w, x)
    assert overlapped.explain(w, x).split
    for ours, plain in zip(*map(jax.tree.leaves, (got, step(w, x))), strict=True):
        np.testing.assert_allclose(ours, plain, rtol=1e-4, atol=1e-6)
