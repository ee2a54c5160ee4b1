"""Parts stay apart through scans and the backward pass of a step."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxoverlap._jax import compat
from jaxoverlap.passes.analysis.jaxprs import dots
from jaxoverlap.passes.halves import own_names
from jaxoverlap.passes.halves.body import HostMemoryError
from jaxoverlap.passes.halves.halve import Halved
from tests.support.halves import (
    CUT,
    OFFLOADS_INNER,
    B,
    D,
    L,
    S,
    arguments,
    assert_same,
    computed,
    halved,
    loss_of,
    step,
    values,
)


@jax.jit
def accumulating(params, tokens, key):
    """Add the gradients of two micro-batches, which a scan runs one after the other."""
    some = tokens.reshape(2, B, S)

    def one(total, tokens):
        return jax.tree.map(jnp.add, total, jax.grad(loss_of)(params, tokens, key)), None

    return lax.scan(one, jax.tree.map(jnp.zeros_like, params), some)[0]


def pairs_of(jaxpr: Any, done: Halved, args: Any) -> list[tuple[Any, Any]]:
    leaves = jax.tree.leaves(args)
    evaluated = (computed(j, leaves) for j in (done.jaxpr, jaxpr))
    return list(zip(*evaluated, strict=True))


def test_a_train_step_runs_in_parts_but_for_the_gradient_of_its_lookup():
    jaxpr, done = halved(step, arguments(), (B, S))
    assert_same(pairs_of(jaxpr, done, arguments()))
    assert [eqn.primitive.name for eqn in done.mixing] == ["scatter-add"]
    assert len(dots(done.jaxpr)) == 2 * len(dots(jaxpr))


def test_parts_cross_from_one_scan_to_the_next_without_being_joined():
    jaxpr, done = halved(step, arguments(), (B, S))
    scans, cut = ([e for e in j.eqns if e.primitive.name == "scan"] for j in (jaxpr, done.jaxpr))
    stacked = [sum(v.aval.ndim > 3 for v in e.outvars) for e in scans]
    assert [sum(v.aval.ndim > 3 for v in e.outvars) for e in cut] == [2 * n for n in stacked]
    after = done.jaxpr.eqns[done.jaxpr.eqns.index(cut[0]) :]
    joined = [e for e in after if e.primitive.name == "concatenate" and e.outvars[0].aval.ndim > 5]
    assert not joined, "residuals are stacked, and stay in parts"


def test_scans_are_unrolled_where_their_length_allows_it():
    jaxpr, done = halved(step, arguments(), (B, S), unroll=2)
    assert_same(pairs_of(jaxpr, done, arguments()))
    assert [e.params["unroll"] for e in done.jaxpr.eqns if e.primitive.name == "scan"] == [2, 2]
    _, done = halved(step, arguments(), (B, S), unroll=3)
    assert [e.params["unroll"] for e in done.jaxpr.eqns if e.primitive.name == "scan"] == [1, 1]


def test_each_step_of_an_unrolled_scan_reads_rows_by_a_name_of_its_own():
    """XLA would make one kernel of what all steps of a body first do with a stacked value."""
    _, done = halved(step, arguments(), (B, S), unroll=2)
    _, backward = (e for e in done.jaxpr.eqns if e.primitive.name == "scan")
    body = backward.params["jaxpr"]
    rows = [v for v in body.invars if v.aval.ndim > 2 and v.aval.shape[1] == S]
    carry = sum(compat.scan_counts(backward))
    scanned = [v for v in rows if v in body.invars[carry:]]
    readers = [{e.primitive.name for e in body.eqns if v in e.invars} for v in scanned]
    assert scanned and all(names == {"optimization_barrier"} for names in readers)


@pytest.mark.parametrize("wrapped", [lambda body: body, jax.checkpoint])
def test_what_waits_for_the_carry_keeps_its_name(wrapped: Any):
    def body(carry, kept):
        saved, recomputed = kept
        return carry * saved + jnp.tanh(recomputed), None

    stacked = jnp.ones((4, 3))
    traced = jax.make_jaxpr(lambda c, *kept: lax.scan(wrapped(body), c, kept))(
        jnp.ones(3), stacked, stacked
    )
    (scan,) = traced.jaxpr.eqns
    inner = own_names.own_slices(scan.params["jaxpr"], [True, True], scan)
    named = [e.invars for e in inner.eqns if e.primitive.name == "optimization_barrier"]
    assert named == [[inner.invars[-1]]]


def test_the_rows_of_micro_batches_are_cut_inside_their_scan():
    args = arguments(2 * B)
    jaxpr, done = halved(accumulating, args, (B, S))
    assert_same(pairs_of(jaxpr, done, args))
    assert len(dots(done.jaxpr)) == 2 * len(dots(jaxpr))


def test_parts_share_no_small_value_that_xla_could_fuse_them_by():
    """XLA makes one kernel of two that read one scale, and it would wait for both parts."""

    def fn(x, scale, w):
        return jnp.einsum("bsd,d->bsd", x, scale) @ w

    args = values(8, 3, 4), values(4, seed=2), values(4, 4, seed=3)
    jaxpr, done = halved(jax.jit(fn), args, (8, 3, 4))
    assert_same(pairs_of(jaxpr, done, args))
    _, scale, w = done.jaxpr.invars
    (barrier,) = (e for e in done.jaxpr.eqns if e.primitive.name == "optimization_barrier")
    assert barrier.invars == [scale]
    read = [scale, *barrier.outvars, w]
    products = [e for e in done.jaxpr.eqns if e.primitive.name == "dot_general"]
    assert [sum(v in e.invars for e in products) for v in read] == [1, 1, 2]


def masked(x):
    """Mask by ones like the scores, whose rows are all the same, as Gemma 3 does."""
    return jnp.where(jnp.tril(jnp.ones_like(x, bool)), x, 0.0)


def test_parts_share_no_mask(monkeypatch):
    """A kernel of both parts would read it, and wait for both."""
    monkeypatch.setattr(own_names, "_SMALL", 4)
    args = (values(8, 3, 3),)
    jaxpr, done = halved(jax.jit(masked), args, (8, 3, 3))
    assert_same(pairs_of(jaxpr, done, args))
    last = [e for e in done.jaxpr.eqns if e.primitive.name == "select_n"][-2:]
    first, second = (made_of(done.jaxpr, e.outvars[0]) for e in last)
    assert {v for v in first & second if v.aval.size > 1} <= made_of(done.jaxpr, *cut_of(done))


def cut_of(done: Halved) -> list[Any]:
    """Return the variables that are made of the argument alone: the argument, reshaped."""
    known = list(done.jaxpr.invars)
    for eqn in done.jaxpr.eqns:
        if eqn.invars and all(v in known for v in eqn.invars):
            known += eqn.outvars
    return known


def made_of(jaxpr: Any, *outvars: Any) -> set[Any]:
    """Return the variables that some are made of, as far as the next barrier."""
    makers = {v: e for e in jaxpr.eqns for v in e.outvars}
    found, left = set[Any](), [v for v in outvars if not compat.is_literal(v)]
    while left:
        if (var := left.pop()) not in found:
            found.add(var)
            maker = makers.get(var)
            if maker and maker.primitive.name != "optimization_barrier":
                left += [v for v in maker.invars if not compat.is_literal(v)]
    return found


def offloaded(weights, x):
    """Run layers whose inner values wait for the backward pass in the host's memory."""

    def layer(x, w):
        return x + checkpoint_name(jnp.tanh(x @ w), "inner") @ w.T, None

    return jnp.square(lax.scan(jax.checkpoint(layer, policy=OFFLOADS_INNER), x, weights)[0]).sum()


def on_host(jaxpr: Any) -> list[Any]:
    inner = [
        eqn for body in map(compat.jaxprs_in, jaxpr.eqns) for one in body for eqn in on_host(one)
    ]
    return [*(e for e in jaxpr.eqns if any(map(compat.in_host_memory, e.outvars))), *inner]


def test_parts_of_an_offloaded_value_are_offloaded_each_and_its_scan_is_not_unrolled():
    fn = jax.jit(jax.grad(offloaded))
    args = values(L, D, 2 * D, seed=2), values(B, S, D)
    jaxpr, done = halved(fn, args, (B, S, D), unroll=2)
    assert done.unroll == 1
    assert [e.primitive.name for e in done.mixing] == []
    moved = {e.primitive.name for e in on_host(done.jaxpr)}
    assert moved <= {"device_put", "scan", "remat2", "checkpoint"} and "device_put" in moved
    assert len(on_host(done.jaxpr)) == len(on_host(jaxpr)) + 1  # a device_put for each part


def test_what_would_split_a_value_on_the_host_is_refused():
    with pytest.raises(HostMemoryError, match="in host memory would be joined for"):
        halved(jax.jit(lambda x, w: (jax.device_put(x @ w, jax.memory.Space.Host),)),
               (values(B, D), values(D, D)), (B, D))  # fmt: skip


def test_a_carry_that_begins_whole_is_cut_before_the_scan():
    def fn(x):
        return lax.scan(lambda c, w: (c * w + x, c.sum(1)), jnp.zeros_like(x), jnp.arange(3.0))

    jaxpr, done = halved(jax.jit(fn), (values(8, 3),), (8, 3))
    assert_same(pairs_of(jaxpr, done, (values(8, 3),)))
    assert not done.mixing


def test_a_step_without_such_rows_stays_as_it_is():
    jaxpr = step.trace(*arguments()).jaxpr
    done = Halved(jaxpr, lambda var: None, CUT)
    assert done.jaxpr.eqns == list(jaxpr.eqns)
