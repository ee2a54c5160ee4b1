"""Exchanges of a user's `shard_map` go in chunks of columns, and the step computes what it did."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoverlap
from jaxoverlap import overlap
from jaxoverlap.passes.analysis.flatten import flatten
from jaxoverlap.passes.analysis.jaxprs import equations
from jaxoverlap.passes.edited import EditedStep
from jaxoverlap.passes.halves.split_exchange import run, split_exchanges
from jaxoverlap.plan.edits import SplitExchange
from tests.support.pods import marked
from tests.support.pods import pytestmark as pods
from tests.support.ragged import arrays, mixture_step, on_cpu
from tests.support.seeds import some


def mesh_of(kind=AxisType.Auto):
    return jax.make_mesh((2, 4), ("data", "expert"), axis_types=(kind,) * 2)


def edited_of(step, *args, mesh=None) -> EditedStep:
    jaxpr = flatten(step.trace(*args).jaxpr)
    return EditedStep(jaxpr, mesh or mesh_of(), (None,) * len(jaxpr.invars))


def names_in(jaxpr) -> list[str]:
    return [eqn.primitive.name for eqn, _ in equations(jaxpr)]


def with_chunks(step, args, parts: int):
    """Return a step with all its exchanges in chunks, and no other edit."""
    plan = overlap(step, halves=None, layouts=None).explain(*args)
    edits = tuple(split_exchanges(edited_of(step, *args), parts))
    assert edits
    return overlap(step, plan=msgspec.structs.replace(plan, edits=edits))


ROUTES = {  # what the router's weights are multiplied by, and the room of a device's buffer
    "even": (0.1, None),
    "skewed: most tokens to one device": (30.0, None),
    "no more room than an even load needs": (0.1, 2.0),
}


@pytest.mark.rotating
@pytest.mark.parametrize("parts", some(1, [2, 4]))
@pytest.mark.parametrize("route", ROUTES)
def test_numbers_shardings_and_donation_are_the_plain_steps(route, parts):
    on_cpu()
    factor, room = ROUTES[route]
    step, shapes, x = mixture_step(mesh_of(), room=room)

    def args():
        p = arrays(shapes, scale=0.3)
        p["router"] = p["router"] * factor
        p["router"] = jax.device_put(p["router"], shapes["router"].sharding)
        return p, arrays(x)

    mine, theirs = args(), args()
    chunked = with_chunks(step, args(), parts)
    for one, other in zip(*map(jax.tree.leaves, (chunked(*mine), step(*theirs))), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
        assert one.sharding.is_equivalent_to(other.sharding, one.ndim)
    assert mine[0]["up"].is_deleted() and theirs[0]["up"].is_deleted()


@pytest.mark.parametrize("remat", [True, False])
def test_each_exchange_of_tokens_goes_in_chunks_forward_and_backward(remat):
    step, shapes, x = mixture_step(mesh_of(), remat=remat)
    edited = edited_of(step, shapes, x)
    edits = list(split_exchanges(edited, 4))
    before, after = (names_in(e.jaxpr) for e in (edited, run(edited, edits)))
    assert after.count("ragged_all_to_all") == 4 * before.count("ragged_all_to_all")
    assert after.count("all_gather") == before.count("all_gather"), "sizes have no columns"
    assert after.count("sort") == before.count("sort"), "tokens are sorted once"


def capacity_experts(mesh, *, check_vma: bool = True):
    """Experts with a fixed number of slots: `all_to_all`, as in GShard."""

    def body(x, up, down):
        there = lax.all_to_all(x, "expert", 0, 1, tiled=True)  # [own experts, slots, width]
        inner = jnp.tanh(jnp.einsum("esd,edf->esf", there, up))
        answer = jnp.einsum("esf,efd->esd", inner, down)
        return lax.all_to_all(answer, "expert", 1, 0, tiled=True)

    rows = P(("data", "expert"))
    mapped = jax.shard_map(
        body, mesh=mesh, in_specs=(rows, P("expert"), P("expert")), out_specs=rows, check_vma=check_vma,
    )  # fmt: skip

    def loss(w, x):
        return jnp.mean(mapped(x, *w) ** 2)

    def array(spec, *shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))

    w = array(P("expert"), 8, 16, 24), array(P("expert"), 8, 24, 16)
    return jax.jit(jax.value_and_grad(loss)), w, array(rows, 64, 6, 16)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_exchanges_of_equal_sizes_go_in_chunks_too(kind, check_vma):
    step, *shapes = capacity_experts(mesh_of(kind), check_vma=check_vma)
    args = arrays(tuple(shapes))
    chunked = with_chunks(step, args, 2)
    for one, other in zip(*map(jax.tree.leaves, (chunked(*args), step(*args))), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
        assert one.sharding.is_equivalent_to(other.sharding, one.ndim)


def test_an_exchange_without_a_matmul_on_its_columns_stays():
    def body(x):
        return lax.all_to_all(jnp.tanh(x), "expert", 0, 1, tiled=True)

    mapped = jax.shard_map(body, mesh=mesh_of(), in_specs=P("expert"), out_specs=P("expert"))
    x = jax.ShapeDtypeStruct((16, 4, 8), jnp.float32)
    assert not list(split_exchanges(edited_of(jax.jit(mapped), x), 2))


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (SplitExchange(shard_map=7, parts=2), "the step has [1-3] shard_maps, counted from 0"),
        (SplitExchange(shard_map=0, parts=3), "no exchange in that shard_map has columns"),
    ],
)
def test_an_edit_that_does_not_fit_is_refused(edit, said):
    step, *shapes = capacity_experts(mesh_of())
    with pytest.raises(ValueError, match=said):
        run(edited_of(step, *shapes), [edit])


@marked(pods)
def test_exchanges_go_in_chunks_where_the_estimate_is_faster_and_explain_says_so():
    mesh = jaxoverlap.pod_mesh("h100-sxm:2x8", {"data": 1, "expert": 16})
    step, shapes, x = mixture_step(
        mesh, room=2, choices=8, layers=2, width=7168, mlp=2048, count=64, sequence=2048,
        dtype=jnp.bfloat16, attention=8,
    )  # fmt: skip
    plan = overlap(step, halves=None, layouts=None).lower(shapes, x).plan
    assert plan is not None
    chunked = [edit for edit in plan.edits if isinstance(edit, SplitExchange)]
    assert len(chunked) == 3, "forward, again in the backward pass, and its gradient"
    assert "3 shard_maps send what is exchanged in" in str(plan)
