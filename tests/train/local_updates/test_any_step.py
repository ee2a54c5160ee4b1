"""Steps and states that users bring: what works, and a sentence for what does not."""

from __future__ import annotations

import warnings
from collections import OrderedDict

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxoverlap.train import LocalUpdates, co2, local_sgd
from jaxoverlap.train.compression import power_sgd, uniform
from tests.train.local_updates.problem import make_data, make_state, make_step, mesh_of

MESH = mesh_of(2, 2)
BATCHES = np.ones((2, 4, 4), np.float32)


def adds(make):
    """Return local updates whose step adds to its parameters what `make` gives of them."""

    def step(state, batch):
        return dict(params=state["params"] + make(state["params"], batch)), batch.mean()

    return LocalUpdates(step, MESH, outer=local_sgd(every=2), overlap=False)


def mapped(body, **options):
    given = dict(mesh=MESH, in_specs=P(None, "model"), out_specs=P(), check_vma=False)
    return lambda params, batch: jax.shard_map(body, **(given | options))(batch)


def constrained(*spec):
    def make(params, batch):
        return lax.with_sharding_constraint(batch, NamedSharding(MESH, P(*spec))).mean(0)

    return make


def total(x):
    return lax.psum(x.sum(), "model") * jnp.ones(4)


@pytest.mark.parametrize(
    ("make", "says"),
    (
        (lambda p, b: lax.pmean(b.mean(0), "data"), "collective over 'data', the workers' axis"),
        (mapped(total, axis_names={"model"}), r"shard_map over \['model'\] alone.*axis_names"),
        (
            mapped(lambda x: lax.pmean(x.mean(0), "data"), in_specs=P("data")),
            "shard_map whose specs name 'data'",
        ),
        (constrained("data"), r"constrains a value to P.*'data'.*name the other axes alone"),
        (
            lambda p, b: jax.jit(lambda b: b.mean(0), in_shardings=NamedSharding(MESH, P("data")))(
                b
            ),
            "constrains a value to P.*'data'",
        ),
        (lambda p, b: lax.map(lambda row: constrained("data")(p, b), b)[0], "constrains a value"),
    ),
    ids=("pmean", "partial", "shard_map", "constraint", "in_shardings", "nested"),
)
def test_a_step_that_cannot_be_mapped_is_refused_in_words(make, says):
    updates = adds(make)
    state = updates.init(dict(params=jnp.ones(4)))
    with pytest.raises(ValueError, match=f"the train step .*{says}"):
        updates.round(state, BATCHES)
    with pytest.raises(ValueError, match=says):
        updates.lower(state, BATCHES)


@pytest.mark.parametrize("make", (mapped(total), constrained(None, "model")))
def test_shard_maps_over_all_axes_and_constraints_on_others_work(make):
    updates = adds(make)
    state, _ = updates.round(updates.init(dict(params=jnp.ones(4))), BATCHES)
    assert np.isfinite(np.asarray(updates.params(state))).all()


@pytest.mark.parametrize(
    ("step", "says"),
    (
        (lambda s, b: s, r"returned a dict: expected \(state, metrics\)"),
        (
            lambda s, b: (s["params"], b),
            r"the train step returned has nothing at \['params'\]: expected float32\[4\]",
        ),
        (lambda s, b: (OrderedDict(s), b), "in containers of other types"),
        (
            lambda s, b: (dict(params=s["params"].astype(jnp.bfloat16)), b),
            r"changed the state's \['params'\] from float32\[4\] to bfloat16\[4\]",
        ),
    ),
)
def test_a_step_that_gives_something_else_is_refused_in_words(step, says):
    updates = LocalUpdates(step, MESH, outer=local_sgd(every=2), overlap=False)
    with pytest.raises(ValueError, match=says):
        updates.round(updates.init(dict(params=jnp.ones(4))), BATCHES)


@pytest.mark.filterwarnings("ignore:.*compresses 0 of 0")  # the problem is as small as that
@pytest.mark.parametrize("sync", (None, uniform(power_sgd(1))))
def test_states_that_are_not_of_these_updates_are_refused_in_words(sync):
    updates = LocalUpdates(make_step(), mesh_of(4), outer=co2(every=4), overlap=False, sync=sync)
    x, y = make_data(4, 4)
    state = updates.init(make_state())
    for call in (lambda s: updates.round(s, (x, y)), updates.params):
        with pytest.raises(ValueError, match=r"type dict: expected a LocalState.*init\(\)"):
            call(make_state())
        with pytest.raises(ValueError, match="has a ndarray of shape"):
            call(jax.device_get(state))
        with pytest.raises(ValueError, match=r"inside jax\.jit"):
            jax.jit(call)(state)
    fewer = LocalUpdates(make_step(), mesh_of(2), outer=co2(every=4), overlap=False, sync=sync)
    with pytest.raises(ValueError, match=r"of 4 workers, and the mesh has 2: .*consolidate\(\)"):
        fewer.round(state, (x, y))
    if sync is not None:
        plain = LocalUpdates(make_step(), mesh_of(4), outer=co2(every=4), overlap=False)
        with pytest.raises(ValueError, match="with sync=, or without"):
            plain.round(state, (x, y))


def test_parameters_that_are_committed_to_one_device_are_placed():
    state = jax.device_put(make_state(), jax.devices()[3])
    updates = LocalUpdates(make_step(), mesh_of(2), outer=co2(every=4), overlap=False)
    local, _ = updates.round(updates.init(state), make_data(4, 2))
    assert local.worker["params"]["w"].sharding.mesh == updates.mesh


def test_tensor_parallelism_stays_when_the_number_of_workers_changes():
    def step(state, batch):
        return dict(params=state["params"] * 0.9), batch.mean()

    weights = jax.device_put(jnp.ones((4, 8)), NamedSharding(MESH, P(None, "model")))
    old = LocalUpdates(step, MESH, outer=co2(every=2), overlap=False)
    state, _ = old.round(old.init(dict(params=weights)), BATCHES)
    new = LocalUpdates(step, mesh_of(4, 2), outer=co2(every=2), overlap=False)
    spread = new.spread(new.consolidate(state))
    assert spread.worker["params"].sharding.spec == P("data", None, "model")
    new.round(spread, np.ones((2, 8, 4), np.float32))


def test_raw_keys_are_warned_of():
    updates = LocalUpdates(
        lambda s, b: (s, b.mean()), mesh_of(2), outer=local_sgd(every=2), overlap=False
    )
    with pytest.warns(UserWarning, match=r"uint32\[2\] at \['key'\].*jax\.random\.key"):
        updates.init(dict(params=jnp.ones(4), key=jax.random.PRNGKey(0)))


@pytest.mark.parametrize(("inside", "warns"), [(1, False), (2, True)])
def test_a_warning_that_nothing_is_overlapped_is_for_those_who_could_overlap(inside, warns):
    """Workers of one CPU device each were told so too, which can change nothing about it."""
    step = lambda state, batch: (jax.tree.map(lambda p: p * batch.mean(), state), batch.mean())  # noqa: E731
    updates = LocalUpdates(step, mesh_of(4, inside), outer=local_sgd(every=2), params=None)
    state = updates.init({"w": np.ones(4, "f")})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        updates.round(state, np.ones((2, 8), "f"))
    assert any("overlap() rewrites nothing" in str(w.message) for w in caught) == warns
