"""XLA:GPU hides the hops of rings, on schedules compiled for pods: no GPU is needed."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoverlap
from jaxoverlap._jax import inlining
from jaxoverlap.flags import options_for
from jaxoverlap.hardware import pods
from models.config import Config
from models.gpt import abstract_args, make_step
from tests.support.pods import pytestmark  # noqa: F401 - it marks the tests of this file

# The specs of a matmul's x [batch, sequence, in], w [in, out] and result on the mesh axis "x", by
# the ring that they make.
MATMULS = {
    "all_gather_matmul, free": (P(None, "x", None), P(None, "x"), P(None, None, "x")),
    "all_gather_matmul, contracted": (P("x", None, None), P("x", None), P("x", None, None)),
    "matmul_reduce_scatter": (P(None, None, "x"), P("x", None), P(None, "x", None)),
    "matmul_all_reduce": (P(None, None, "x"), P("x", None), P(None, None, None)),
}


def lower_matmul(mesh, lhs, rhs, out, *, dtype=jnp.bfloat16):
    """Lower an overlapped matmul of [8, 2048, 4096] and [4096, 4096]."""
    x = jax.ShapeDtypeStruct((8, 2048, 4096), dtype, sharding=NamedSharding(mesh, lhs))
    w = jax.ShapeDtypeStruct((4096, 4096), dtype, sharding=NamedSharding(mesh, rhs))
    matmul = jax.jit(lambda x, w: x @ w, out_shardings=NamedSharding(mesh, out))
    # Rings are asked for: by price a matmul alone is left as it is where its chunks are small.
    return jaxoverlap.overlap(matmul, granularity="one_way", never_slower=False).lower(x, w)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["bf16", "f32"])
@pytest.mark.parametrize("name", MATMULS)
def test_each_ring_hides_all_its_hops(name, dtype):
    mesh = jaxoverlap.pod_mesh("h100-sxm:1x8", {"x": 8})
    lowered = lower_matmul(mesh, *MATMULS[name], dtype=dtype)
    assert [d.kind for d in lowered.plan.decisions] == [name.split(",")[0]]
    hops = lowered.compile().audit().hops
    assert (hops.count, hops.covered, hops.synchronous) == (7, 7, 0)


def test_rings_in_manual_code_hide_their_hops():
    """Sequence and tensor parallelism by hand makes two rings forward and two backward."""
    mesh = jaxoverlap.pod_mesh("h100-sxm:1x8", {"x": 8})

    def layer(x, w, v):
        h = jnp.tanh(jax.lax.all_gather(x, "x", axis=1, tiled=True) @ w)
        return jax.lax.psum_scatter(h @ v, "x", scatter_dimension=1, tiled=True)

    specs = (P(None, "x"), P(None, "x"), P("x"))
    mapped = jax.shard_map(layer, mesh=mesh, in_specs=specs, out_specs=specs[0])
    shapes = ((8, 2048, 4096), (4096, 8192), (8192, 4096))
    args = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(shapes, specs, strict=True)
    ]
    step = jax.jit(jax.grad(lambda *a: jnp.sum(jnp.float32(mapped(*a)) ** 2), argnums=(0, 1, 2)))
    lowered = jaxoverlap.overlap(step, granularity="one_way", never_slower=False).lower(*args)
    assert len({d.ring for d in lowered.plan.decisions}) == 4
    hops = lowered.compile().audit().hops
    assert (hops.count, hops.covered, hops.synchronous) == (28, 28, 0)


@pytest.mark.parametrize("chip", [c.name for c in jaxoverlap.chips()])
def test_on_every_chip(chip):
    mesh = jaxoverlap.pod_mesh(f"{chip}:1x4", {"x": 4})
    hops = lower_matmul(mesh, *MATMULS["matmul_reduce_scatter"]).compile().audit().hops
    assert (hops.count, hops.covered, hops.synchronous) == (3, 3, 0)


def test_without_the_ties_xla_undoes_the_ring(monkeypatch):
    """XLA undoes an untied ring; if this fails, it has learnt not to, and the barriers may go."""
    from jaxoverlap.passes.rings import all_gather_matmul

    untied = type("lax", (), dict(vars(jax.lax)))
    untied.optimization_barrier = staticmethod(lambda operand: operand)
    untied.ppermute = staticmethod(jax.lax.ppermute)
    monkeypatch.setattr(all_gather_matmul, "lax", untied)
    monkeypatch.setattr(inlining, "_TRACES", type(inlining._TRACES)())  # of tied rings
    mesh = jaxoverlap.pod_mesh("h100-sxm:1x8", {"x": 8})
    hops = lower_matmul(mesh, *MATMULS["all_gather_matmul, free"]).compile().audit().hops
    assert hops.covered < hops.count == 7


@pytest.fixture(scope="module")
def gpt():
    """Compile a small GPT's train step for two hosts of eight, plain and overlapped."""
    config = Config.pod(data=2, model=8, layers=2, hidden=2048, heads=16, mlp=8192, sequence=2048)
    mesh = jaxoverlap.pod_mesh("h100-sxm:2x8", {"data": 2, "model": 8})
    step, args = make_step(config, mesh), abstract_args(config, mesh)
    plain = step.lower(*args).compile(compiler_options=pods.compiler_options())
    options = dict(granularity="one_way", never_slower=False)
    overlapped = jaxoverlap.overlap(step, cluster="h100-sxm:2x8", **options)
    return plain, overlapped.lower(*args).compile()


def test_a_train_step_hides_its_hops(gpt):
    _, overlapped = gpt
    audit = overlapped.audit()
    assert audit.hops.count > 100
    assert audit.hops.covered >= 0.9 * audit.hops.count
    assert audit.hops.synchronous == 0


def test_a_train_step_hides_more_than_the_plain_one(gpt):
    plain, overlapped = (jaxoverlap.audit(compiled.as_text()) for compiled in gpt)
    assert plain.hops.count == 0

    def exposed(audit):
        return audit.total.bytes_moved - audit.total.bytes_covered

    assert exposed(overlapped) < 0.25 * exposed(plain)


def test_a_train_step_needs_little_more_memory(gpt):
    plain, overlapped = (compiled.memory_analysis().temp_size_in_bytes for compiled in gpt)
    assert overlapped <= 1.15 * plain


def test_hops_name_the_users_line(gpt):
    _, overlapped = gpt
    hops = [c for c in overlapped.audit().collectives if c.ring]
    assert {c.source.split(":")[0] for c in hops} == {"models/gpt.py"}
    assert {c.ring for c in hops} <= {f"{d.kind}.{d.site}" for d in overlapped.plan.decisions}


def test_a_users_own_option_wins():
    mesh = jaxoverlap.pod_mesh("h100-sxm:1x2", {"x": 2})
    name = next(iter(options_for(mesh)))
    lowered = lower_matmul(mesh, *MATMULS["matmul_all_reduce"])
    with pytest.raises(Exception, match="not a number"):
        lowered.compile(compiler_options={name: "not a number"})
