"""Attention on rings of several sizes equals dense attention, forward and backward."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh

from jaxoverlap._jax import fused_attention
from jaxoverlap.train import varlen
from jaxoverlap.train.varlen.device import blocks, fused
from jaxoverlap.train.varlen.packing import Packing, packing_prices
from jaxoverlap.train.varlen.rings import bounds_of
from tests.support.attention import packed_stand_in, packed_stand_in_backward
from tests.train.varlen.batches import COSTS, dense, random_plan

HEADS, KV_HEADS, HEAD = 4, 2, 8
# Multiples of an eighth of the capacity, to which a planner rounds.
BOUNDS = bounds_of({8: 24, 4: 24, 2: 24, 1: 40}, tokens=56, sent=64, sequences=64)
NODES = [(1, 8), (2, 4)]
LOWEST = np.finfo(np.float32).min


@functools.cache
def programs(count, devices, dtype, heads=(HEADS, KV_HEADS), bounds=BOUNDS, fused=False, tensor=1):
    """Compile attention with its gradients, on the mesh and on one device, once for all batches."""
    kv_heads = heads[1]
    sizes = (count, devices, tensor)[: 2 + (tensor > 1)]
    axes = ("node", "device", "tensor")[: len(sizes)]
    at = np.array(jax.devices()[: count * devices * tensor]).reshape(sizes)
    mesh = Mesh(at, axes, axis_types=(AxisType.Auto,) * len(axes))
    planner = varlen.Planner(
        COSTS, varlen.Nodes(count, devices), capacity=bounds.slots, programs=[bounds]
    )

    @jax.jit
    def ours(arrays, q, k, v, to_out):
        how = dict(mesh=mesh, bounds=bounds, costs=COSTS, fused=fused)
        out, back = jax.vjp(lambda *x: varlen.attention(*x, arrays, **how), q, k, v)
        return out, *back(to_out)

    @jax.jit
    def plain(segment, q, k, v, to_out):
        longest = len(segment)
        same = (segment[:, None] == segment) & jnp.tri(longest, dtype=bool)

        def dot(spec, x, y):
            return jnp.einsum(spec, x, y, preferred_element_type=jnp.float32)

        # As `jaxoverlap.attention` on one device: both operands of every matmul are bfloat16.
        q, to_out = (x.reshape(longest, kv_heads, -1, HEAD) for x in (q, to_out))
        p = jax.nn.softmax(jnp.where(same, dot("qhgd,khd->hgqk", q, k) * HEAD**-0.5, LOWEST))
        out = dot("hgqk,khd->qhgd", p.astype(q.dtype), v).astype(q.dtype)
        delta = dot("qhgd,qhgd->hgq", to_out.astype("f"), out.astype("f"))
        to_p = dot("qhgd,khd->hgqk", to_out, v)
        to_scores = (p * (to_p - delta[..., None]) * HEAD**-0.5).astype(q.dtype)
        to_q = dot("hgqk,khd->qhgd", to_scores, k)
        to_k = dot("hgqk,qhgd->khd", to_scores, q)
        to_v = dot("hgqk,qhgd->khd", p.astype(q.dtype), to_out)
        whole = (longest, heads[0], HEAD)
        results = out.reshape(whole), to_q.reshape(whole), to_k, to_v
        return [x.astype(q.dtype) for x in results]

    return planner, ours, plain, jnp.dtype(dtype)


def values(plan, rng, dtype, heads=(HEADS, KV_HEADS)):
    shapes = [(plan.tokens, h, HEAD) for h in (heads[0], heads[1], heads[1], heads[0])]
    return [rng.normal(size=shape).astype(dtype) for shape in shapes]


def on_mesh(program, plan, given_values):
    """Run on the mesh; return results by token."""
    count = plan.nodes.count
    placed = [plan.laid_out(x) for x in given_values]
    placed = [x.reshape(count, -1, *x.shape[2:]) for x in placed]
    found = program(plan.arrays, *placed)
    where = plan.linear.ravel()
    results = []
    for x in found:
        x = np.asarray(x).reshape(-1, *x.shape[2:])
        assert np.isfinite(x[where >= 0].astype(np.float32)).all()
        rows = np.zeros((plan.tokens, *x.shape[1:]), x.dtype)
        rows[where[where >= 0]] = x[where >= 0]
        results.append(rows)
    return results


def error(got, want):
    return float(np.abs(np.asarray(got, np.float64) - want).max() / max(np.abs(want).max(), 1.0))


def check_float32(program, seed, **heads):
    planner, ours, _, dtype = program
    rng = np.random.default_rng(seed)
    plan = random_plan(planner, rng)
    given_values = values(plan, rng, dtype, **heads)
    for got, want in zip(
        on_mesh(ours, plan, given_values), dense(plan.lengths, *given_values), strict=True
    ):
        assert error(got, want) < 1e-5
    assert ours._cache_size() == 1, "a batch of other lengths was compiled again"


@pytest.mark.parametrize(
    ("count", "devices"), [*NODES, pytest.param(4, 2, marks=pytest.mark.nightly)]
)
@settings(max_examples=25, deadline=None, phases=[Phase.generate], derandomize=True)
@given(seed=st.integers(0, 2**32 - 1))
def test_float32(count, devices, seed):
    check_float32(programs(count, devices, "float32"), seed)


@settings(max_examples=15, deadline=None, phases=[Phase.generate], derandomize=True)
@given(seed=st.integers(0, 2**32 - 1))
def test_groups_that_exchange_heads_beside_rings(seed):
    """Groups of 8 and of 2 exchange heads; rings of 4 do not."""
    bounds, heads = dataclasses.replace(BOUNDS, exchanged=(8, 2)), (16, 8)
    check_float32(programs(2, 4, "float32", heads, bounds), seed, heads=heads)


@pytest.mark.parametrize("tile", (pytest.param(4, marks=pytest.mark.nightly), 7))
def test_tiles_that_no_mask_lets_through_are_skipped_and_nothing_else(tile, monkeypatch):
    """Whole sequences in tiles smaller than they are, the last of them not full."""
    monkeypatch.setattr(blocks, "TILE", tile)
    bounds, heads = dataclasses.replace(BOUNDS, exchanged=(8, 2)), (16, 8)
    program = programs.__wrapped__(2, 4, "float32", heads, bounds)
    for seed in range(12):
        check_float32(program, seed, heads=heads)


def test_a_batch_of_local_documents_makes_no_hop_and_no_exchange():
    """What no sequence is on is skipped: counted by the trips of loops and branches."""
    bounds = dataclasses.replace(BOUNDS, exchanged=(8,))
    planner, ours, _, dtype = programs(2, 4, "float32", (16, 8), bounds)
    lengths, costs = np.array([9, 30, 4]), dataclasses.replace(COSTS, exchanged=(8,))
    price = packing_prices(lengths, planner.nodes, costs)
    packing = Packing(lengths, planner.nodes, costs, price, bounds=bounds)
    packing.put(np.arange(3), 0, np.array([0, 3, 7]))
    assert not packing.shares()[3].any()
    for at, size in ((1, 2), (2, 4), (3, 8)):  # the price has no hop either
        assert not packing.ring_seconds(at).any(), size
    plan = planner.plan_of(packing)
    given_values = values(plan, np.random.default_rng(0), dtype, heads=(16, 8))
    wanted = dense(plan.lengths, *given_values)
    for got, want in zip(on_mesh(ours, plan, given_values), wanted, strict=True):
        assert error(got, want) < 1e-5


def emulated(query, key, value, lengths, starts, *, scale):
    """Compute what cuDNN's kernel does of packed sequences, by its description in JAX."""
    group, slots = query.shape[2] // key.shape[2], jnp.arange(query.shape[1])
    first = jnp.where(lengths[0] < 0, slots.size, starts[0, :-1])
    run = jnp.sum(slots[:, None] >= first, axis=1)
    seen = (run[:, None] == run) & (slots[:, None] >= slots)
    key, value = (jnp.repeat(x, group, axis=2) for x in (key, value))
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) * scale
    p = jax.nn.softmax(jnp.where(seen, scores, LOWEST))
    return jnp.einsum("bhqk,bkhd->bqhd", p, value)


@settings(max_examples=10, deadline=None, phases=[Phase.generate], derandomize=True)
@given(seed=st.integers(0, 2**32 - 1))
def test_a_fused_kernel_sees_whole_sequences(seed):
    """The kernel itself needs a GPU; what it is told of sequences and their order does not."""
    bounds, heads = dataclasses.replace(BOUNDS, exchanged=(8, 2)), (16, 8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused_attention, "packed_causal", emulated)
        patch.setattr(fused, "fits", lambda q: True)
        program = programs(2, 4, "float32", heads, bounds, True)
        check_float32(program, seed, heads=heads)


@pytest.mark.parametrize("kernel", (True, False))
@pytest.mark.parametrize(
    ("count", "devices"), [(2, 4), pytest.param(1, 8, marks=pytest.mark.nightly)]
)
def test_rings_of_the_fused_kernel(count, devices, kernel, monkeypatch):
    """Blocks are merged by the log of sums; what the kernel leaves unwritten is never read.

    Without the kernel the same program has matmuls.
    """
    monkeypatch.setattr(fused_attention, "packed_causal", emulated)
    monkeypatch.setattr(fused_attention, "packed_forward", packed_stand_in)
    monkeypatch.setattr(fused_attention, "packed_backward", packed_stand_in_backward)
    monkeypatch.setattr(fused, "fits", lambda q: True)
    bounds = dataclasses.replace(BOUNDS, ringed=16)
    program = programs.__wrapped__(count, devices, "float32", (HEADS, KV_HEADS), bounds, kernel)
    for seed in range(15):
        check_float32(program, seed)


@pytest.mark.parametrize("kernel", (True, False))
def test_tensor_parallel_devices_share_heads(kernel, monkeypatch):
    """A mesh of three axes: rings of four, exchanges of two in one part, two devices for heads."""
    monkeypatch.setattr(fused_attention, "packed_causal", emulated)
    monkeypatch.setattr(fused_attention, "packed_forward", packed_stand_in)
    monkeypatch.setattr(fused_attention, "packed_backward", packed_stand_in_backward)
    monkeypatch.setattr(fused, "fits", lambda q: True)
    bounds = bounds_of(
        {4: 24, 2: 24, 1: 40}, tokens=56, sent=64, exchanged=(2,), sequences=64, ringed=16, parts=1
    )
    heads = (8, 4)
    program = programs.__wrapped__(2, 2, "float32", heads, bounds, kernel, 2)
    for seed in range(8):
        check_float32(program, seed, heads=heads)


@pytest.mark.parametrize("off", ("", "output", "dq"))
def test_a_kernel_that_computes_something_else_is_refused(off, monkeypatch):
    """The comparison that a GPU is put to, here while something else is traced."""

    def wide(*arrays):
        return [x.astype("f") for x in arrays]

    def kernel(query, key, value, lengths, starts, *, scale):
        shift = off == "output"  # keys of the token before: a mask that is off by one
        values = wide(query, jnp.roll(key, shift, axis=1), value)
        return emulated(*values, lengths, starts, scale=scale).astype(query.dtype)

    def forward(q, k, v, runs, **how):
        return packed_stand_in(*wide(q, k, v), runs, **how)

    def backward(*operands, **how):
        *arrays, runs = operands
        to_q, *to_keys = packed_stand_in_backward(*wide(*arrays), runs, **how)
        return to_q * (2 if off == "dq" else 1), *to_keys

    def compared(x):
        with jax.ensure_compile_time_eval():
            fused.check.__wrapped__()
        return x

    monkeypatch.setattr(fused_attention, "packed_causal", kernel)
    monkeypatch.setattr(fused_attention, "packed_forward", forward)
    monkeypatch.setattr(fused_attention, "packed_backward", backward)
    if off:
        with pytest.raises(RuntimeError, match="pass fused=False"):
            jax.jit(compared)(1.0)
    else:
        jax.jit(compared)(1.0)


def test_where_the_kernel_is_taken():
    cpus = Mesh(np.array(jax.devices()[:2]).reshape(1, 2), ("node", "device"))
    assert not fused.has_kernel(cpus)
    q = jnp.zeros((1, 8, 2, 1, 64), jnp.bfloat16)
    assert fused.fits(q) and not fused.fits(q.astype("f")) and not fused.fits(q[..., :63])
    lengths, starts = fused.runs(jnp.array([4, 4, 7, 9, 9, 9]), 4)
    assert lengths.tolist() == [[2, 1, 3, -1]] and starts.tolist() == [[0, 2, 3, -1, -1]]


@pytest.mark.parametrize(
    ("count", "devices"),
    [(2, 4), *(pytest.param(*n, marks=pytest.mark.nightly) for n in ((1, 8), (4, 2)))],
)
@settings(max_examples=25, deadline=None, phases=[Phase.generate], derandomize=True)
@given(seed=st.integers(0, 2**32 - 1))
def test_bfloat16_errs_as_plain(count, devices, seed):
    planner, ours, plain, dtype = programs(count, devices, "bfloat16")
    rng = np.random.default_rng(seed)
    plan = random_plan(planner, rng)
    given_values = values(plan, rng, dtype)
    want = dense(plan.lengths, *given_values)
    longest = planner.nodes.total * BOUNDS.tokens
    segment = np.full(longest, -1)
    segment[: plan.tokens] = np.repeat(np.arange(len(plan.lengths)), plan.lengths)
    padded = [np.pad(x, [(0, longest - plan.tokens), (0, 0), (0, 0)]) for x in given_values]
    usual = [np.asarray(x)[: plan.tokens] for x in plain(segment, *padded)]
    for got, other, exact in zip(on_mesh(ours, plan, given_values), usual, want, strict=True):
        size, usual_off, off = (
            np.linalg.norm(np.asarray(x, np.float64)) for x in (exact, other - exact, got - exact)
        )
        # A sequence of one token has no error in plain, and float32's in sums of another order.
        assert off <= 2 * usual_off + 1e-5 * max(size, 1.0)
