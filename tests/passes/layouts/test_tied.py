"""A tied embedding table is gathered once, for its lookup and its matmul, and nothing else moves."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoverlap
from jaxoverlap.hardware.pods import compiler_options
from jaxoverlap.passes.analysis.flatten import flatten
from jaxoverlap.passes.layouts import tied
from jaxoverlap.passes.layouts.tied import tied_tables, with_tables_gathered
from jaxoverlap.plan.edits import GatherTable, in_order
from tests.support.pods import pytestmark as pods

V, D, B, S = 64, 32, 8, 4
TABLES = {
    "rows": (("fsdp",), ()),
    "columns": (("tp",), ("fsdp",)),
    "both": (("fsdp", "tp"), ()),
}


def loss_of(params, ids, dtype=jnp.float32):
    x = jnp.take(params["embed"].astype(dtype), ids, axis=0)
    x = jnp.tanh(x @ params["w"].astype(dtype))
    logits = x @ params["embed"].astype(dtype).T
    return jnp.mean(jnp.square(logits.astype(jnp.float32)))


def step_of(dtype=jnp.float32):
    def step(params, ids):
        loss, gradients = jax.value_and_grad(loss_of)(params, ids, dtype)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), loss

    return jax.jit(step, donate_argnums=0)


def traced(step, *args):
    return flatten(step.trace(*args).jaxpr)


@pytest.fixture
def mesh():
    return jax.make_mesh((4, 2), ("fsdp", "tp"), axis_types=(AxisType.Auto,) * 2)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(tied, "_LEAST_BYTES", 0)


def arguments(mesh, spec):
    rng = np.random.default_rng(0)
    embed, w = (rng.standard_normal(shape).astype(np.float32) for shape in ((V, D), (D, D)))
    params = {
        "embed": jax.device_put(embed, NamedSharding(mesh, spec)),
        "w": jax.device_put(w, NamedSharding(mesh, P())),
    }
    ids = rng.integers(0, V, (B, S)).astype(np.int32)
    return params, jax.device_put(ids, NamedSharding(mesh, P("fsdp")))


@pytest.mark.parametrize("halves", [None, 2])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("name", TABLES)
def test_numbers_shardings_and_donation_are_the_plain_steps(mesh, name, dtype, halves):
    specs = (TABLES[name], ((), ()), (("fsdp",), ()))
    step = step_of(dtype)
    jaxpr = traced(step, *arguments(mesh, P(*TABLES[name])))
    (table,) = tied_tables(jaxpr, specs, mesh.shape)
    assert (table.argument, table.dtype) == (0, jnp.dtype(dtype).name)
    assert "fsdp" not in [a for axes in table.spec for a in axes]
    given, other = arguments(mesh, P(*TABLES[name])), arguments(mesh, P(*TABLES[name]))
    without = jaxoverlap.overlap(step, halves=halves).explain(*given)
    edits = in_order([table, *without.edits])  # results stay where they are all the same
    plan = msgspec.structs.replace(without, edits=tuple(edits))
    overlapped = jaxoverlap.overlap(step, plan=plan)
    (params, loss), (plain, plain_loss) = overlapped(*given), step(*other)
    tolerance = 1e-5 if dtype == jnp.float32 else 2e-2
    np.testing.assert_allclose(loss, plain_loss, rtol=tolerance)
    for key in plain:
        np.testing.assert_allclose(params[key], plain[key], rtol=tolerance, atol=tolerance)
        assert params[key].sharding == plain[key].sharding
        assert given[0][key].is_deleted() == other[0][key].is_deleted()


def test_a_table_of_which_only_one_use_is_known_is_left_alone(mesh):
    params, ids = arguments(mesh, P("fsdp"))
    specs = ((("fsdp",), ()), ((), ()), (("fsdp",), ()))

    def untied(params, ids):
        x = jnp.take(params["embed"], ids, axis=0) @ params["w"]
        return jax.tree.map(jnp.copy, params), x.sum() + params["embed"].sum()

    assert not list(tied_tables(traced(jax.jit(untied), params, ids), specs, mesh.shape))
    replicated = (((), ()), ((), ()), (("fsdp",), ()))
    assert not list(tied_tables(traced(step_of(), params, ids), replicated, mesh.shape))


def test_every_reader_reads_one_value_and_the_optimizer_its_own(mesh):
    params, ids = arguments(mesh, P("fsdp"))
    jaxpr = traced(step_of(jnp.bfloat16), params, ids)
    table = GatherTable(argument=0, name="embed", dtype="bfloat16", spec=((), ()))
    after = with_tables_gathered(jaxpr, [table], mesh)
    (pin,) = [e for e in after.eqns if e.primitive.name == "sharding_constraint"]
    readers = [e for e in after.eqns if pin.outvars[0] in e.invars]
    assert [e.params.get("name", e.primitive.name) for e in readers] == ["_take", "transpose"]
    assert after.invars == jaxpr.invars and after.outvars == jaxpr.outvars


class TestOnAPod:
    pytestmark = pods

    def test_the_table_is_gathered_once_where_that_is_faster(self):
        mesh = jaxoverlap.pod_mesh("h100-sxm:8x8", {"fsdp": 64})

        at = NamedSharding(mesh, P("fsdp"))

        def shape(*dims, dtype=jnp.bfloat16):
            return jax.ShapeDtypeStruct(dims, dtype, sharding=at)

        params = {"embed": shape(65536, 2048), "w": shape(2048, 2048)}
        args = params, shape(64, 4096, dtype=jnp.int32)
        step = step_of(jnp.bfloat16)
        options = dict(cluster="h100-sxm:8x8", never_slower=False, halves=None)
        lowered = jaxoverlap.overlap(step, **options).lower(*args)
        (table,) = (e for e in lowered.plan.edits if isinstance(e, GatherTable))
        assert table.name == "params['embed']" and table.spec == ((), ())
        assert "gather params['embed'] once as bfloat16" in str(lowered.plan)
        plain = step.lower(*args).compile(compiler_options=compiler_options())
        once = lowered.compile()
        assert once.simulate().step_s < jaxoverlap.simulate(plain, "h100-sxm:8x8").step_s
        followed = jaxoverlap.overlap(step, plan=lowered.plan, cluster=options["cluster"]).lower(
            *args
        )
        assert followed.plan == lowered.plan
