"""Fourier transforms of each device's own rows are those of the whole."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxoverlap.passes.analysis.errors import UserError
from jaxoverlap.passes.apply import apply
from jaxoverlap.passes.rewriting import per_shard
from jaxoverlap.plan.edits import Pin
from tests.support.edited import edited_of, mesh_of
from tests.support.evaluated import evaluated_of

B, S, D = 8, 16, 8


def mixing(w, x):
    """Return the gradients of FNet's mixing, in a scan."""

    def loss(w, x):
        def layer(x, w):
            return x + jnp.real(jnp.fft.fft2(x @ w, axes=(1, 2))), None

        return jnp.mean(lax.scan(layer, x, w)[0] ** 2)

    return jax.grad(loss, (0, 1))(w, x)


def operator(w, x):
    """Return the gradients of a Fourier operator along the sequence, by real transforms."""

    def loss(w, x):
        modes = jnp.fft.rfft(x, axis=1)
        return jnp.mean((jnp.fft.irfft(modes * w[0, 0], n=S, axis=1) @ w[1]) ** 2)

    return jax.grad(loss, (0, 1))(w, x)


@pytest.mark.parametrize("step", [mixing, operator])
@pytest.mark.parametrize(
    ("axes", "spec"),
    [({"data": 8}, ("data",)), ({"data": 2, "sp": 4}, ("data", "sp")),
     ({"data": 2, "sp": 2, "tp": 2}, ("data", "sp", "tp"))],
)  # fmt: skip
def test_numbers_are_those_without_devices(step, axes, spec):
    mesh = mesh_of(axes)
    rng = np.random.default_rng(0)
    w = jnp.asarray(rng.standard_normal((2, D, D)) / 9, jnp.float32)
    x = jnp.asarray(rng.standard_normal((B, S, D)), jnp.float32)
    args = (
        jax.device_put(w, NamedSharding(mesh, P())),
        jax.device_put(x, NamedSharding(mesh, P(*spec))),
    )
    edited = edited_of(step, args, mesh)
    (proposal,) = per_shard.propose(evaluated_of(edited))
    assert len(proposal.edits) == (1 if step is mixing else 2), "one for each line"
    assert all("data" in edit.spec[0] for edit in proposal.edits)
    assert "transform each device's shard at" in str(proposal.edits[0])
    jaxpr = apply(edited, proposal.edits).jaxpr
    run = jax.jit(lambda *xs: jax.core.eval_jaxpr(jaxpr, (), *xs))
    for one, theirs in zip(run(*args), jax.jit(step)(w, x), strict=True):
        np.testing.assert_allclose(one, theirs, rtol=1e-4, atol=1e-4)
    if len(axes) > 1:  # other operations than transforms may gather there
        return
    gathered = re.findall(r"c64\[(\d+),\S* all-gather\(", run.lower(*args).compile().as_text())
    assert not gathered


def test_what_cannot_be_sharded_is_refused():
    mesh = mesh_of({"data": 8})
    x = jax.device_put(jnp.ones((B, S, D)), NamedSharding(mesh, P("data")))
    edited = edited_of(lambda x: jnp.fft.fft(x * 2), (x,), mesh)
    (proposal,) = per_shard.propose(evaluated_of(edited))
    (edit,) = proposal.edits
    for changes, said in (
        ({"source": "steps/other.py:1"}, "no such Fourier transform is there"),
        ({"lengths": (S,)}, "no such Fourier transform is there"),
        ({"spec": ((), ())}, "no such Fourier transform is there"),
        ({"spec": (("data",), ("model",), ())}, "'model' is no axis"),
        ({"spec": ((), (), ("data",))}, "a dim that is transformed cannot be sharded"),
    ):
        with pytest.raises(UserError, match=re.escape(said)):
            apply(edited, [msgspec.structs.replace(edit, **changes)])
    with pytest.raises(UserError, match="two edits are of the same transforms"):
        apply(edited, [edit, msgspec.structs.replace(edit, spec=((), ("data",), ()))])


def test_transforms_are_found_again_among_other_edits():
    """In parts of a batch and behind pins, by their line; the search takes them before these."""
    mesh = mesh_of({"data": 8})
    x = jax.device_put(jnp.ones((B, S, D)), NamedSharding(mesh, P("data")))
    w = jax.device_put(jnp.ones((2, D, D)), NamedSharding(mesh, P()))
    edited = edited_of(mixing, (w, x), mesh)
    (proposal,) = per_shard.propose(evaluated_of(edited))
    pinned = apply(edited, [Pin(site=0, spec=(("data",), (), ())), *proposal.edits])
    assert str(pinned.jaxpr).count("shard_map[") == 2
    assert [*per_shard.propose(evaluated_of(pinned))] == [], "the same once more"


def test_transforms_in_a_shard_map_stay():
    mesh = mesh_of({"data": 8})
    x = jax.device_put(jnp.ones((B, S, D)), NamedSharding(mesh, P("data")))
    own = jax.shard_map(jnp.fft.fft, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    edited = edited_of(lambda x: own(x * 2), (x,), mesh)
    assert [*per_shard.propose(evaluated_of(edited))] == []


def test_a_step_without_transforms_gets_no_proposal():
    mesh = mesh_of({"data": 8})
    x = jax.device_put(jnp.ones((B, D)), NamedSharding(mesh, P("data")))
    edited = edited_of(lambda x: x @ x.T, (x,), mesh)
    assert [*per_shard.propose(evaluated_of(edited))] == []
