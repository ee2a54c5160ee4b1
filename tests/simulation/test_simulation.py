"""`simulate` takes what people have: a text, a compiled step, a step that `overlap` made."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoverlap
from jaxoverlap.hardware import pods
from tests.support.clock import clock
from tests.support.steps import HEAD, computation, gemm, sync

EXCHANGE = (
    "%v = f32[8,512,4096]{2,1,0} bitcast(%x)",
    "%e = f32[8,512,4096]{2,1,0} all-to-all(%v), replica_groups=[2,8]<=[16], dimensions={0}, "
    'metadata={op_name="jit(step)/transpose(jvp())/while/body/checkpoint/mul" '
    'source_file="/a/models/gpt.py" source_line=80}',
)
SUM = (
    "%r = f32[8,512,4096]{2,1,0} all-reduce(%v), replica_groups=[2,8]<=[16], to_apply=%add, "
    'metadata={op_name="jit(step)/psum" source_file="/a/models/gpt.py" source_line=9}'
)


def text(*lines: str) -> str:
    return f"{HEAD}\n\n{computation('ENTRY %main', *lines)}"


# -- strays -----------------------------------------------------------------------------------------


def test_strays_are_named_with_what_would_remove_them():
    got = jaxoverlap.simulate(text(*EXCHANGE, SUM, sync("h"), gemm("a")), clock())
    assert [(s.kind, s.source, s.backward) for s in got.strays] == [
        ("all-reduce", "models/gpt.py:9", False),
        ("all-to-all", "models/gpt.py:80", True),
        ("collective-permute", "", False),
    ]
    size = 4 * 8 * 512 * 4096
    sums, exchange, hop = got.strays
    assert exchange.bytes_moved == size * 7 // 8
    assert exchange.exposed_s == exchange.seconds == pytest.approx(size * 7 // 8 / 1e6)
    assert exchange.advice.startswith(
        "backward of models/gpt.py:80 (checkpoint/mul): f32[8,512,4096] changes from one"
    )
    assert "with_sharding_constraint" in exchange.advice
    assert "reduce-scatter" in sums.advice
    assert hop.advice == ""
    assert exchange.advice in str(got)


def test_hops_of_a_ring_are_no_strays():
    ring = sync("h") + ', metadata={op_name="jit(step)/all_gather_matmul.3/shard_map/ppermute"}'
    got = jaxoverlap.simulate(text(ring), clock())
    assert got.strays == ()
    assert got.spent[0].collective.ring == "all_gather_matmul.3"


# -- what is printed, and mistakes ------------------------------------------------------------------


def test_a_printed_simulation_says_what_it_does_not_know():
    mystery = '%y = s8[1000000]{0} custom-call(%m), custom_call_target="my_kernel"'
    shown = str(jaxoverlap.simulate(text(gemm("a"), mystery, sync("h")), clock()))
    assert shown.startswith("jit_step on h100-sxm:2x8: step 3000.0 ms = compute 2000.0 + ")
    assert "not known, counted by their bytes: my_kernel (1x)" in shown
    assert "exposed 1000.0" in shown


def test_what_is_refused():
    with pytest.raises(ValueError, match="compiled for 16 devices, but cluster h100-sxm:1x8 has 8"):
        jaxoverlap.simulate(text(gemm("a")), "h100-sxm:1x8")
    with pytest.raises(ValueError, match="cannot read 'h100'"):
        jaxoverlap.simulate(text(gemm("a")), "h100")
    with pytest.raises(ValueError, match="starts with 'HloModule'"):
        jaxoverlap.simulate("not HLO", "h100-sxm:2x8")


# -- compiled steps ---------------------------------------------------------------------------------

has_plugin = importlib.util.find_spec("jax_plugins") and any(
    importlib.util.find_spec(f"jax_plugins.xla_cuda{version}") for version in (12, 13)
)
for_pods = [
    pytest.mark.pods,
    pytest.mark.skipif(not has_plugin, reason="JAX's CUDA plugin is not installed (pods extra)"),
]


@pytest.fixture(scope="module")
def mlp():
    """Compile a scanned tensor-parallel MLP's gradient for eight H100s, plain and overlapped."""
    mesh = jaxoverlap.pod_mesh("h100-sxm:1x8", {"x": 8})

    def loss(ws, x):
        def layer(x, w):
            h = jnp.tanh(x @ w[0])
            y = jax.lax.with_sharding_constraint(h @ w[1], NamedSharding(mesh, P(None, "x")))
            return y, None

        return jnp.sum(jnp.float32(jax.lax.scan(layer, x, ws)[0]) ** 2)

    def array(shape, *spec):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, P(*spec)))

    up = array((4, 4096, 16384), None, None, "x")
    down = array((4, 16384, 4096), None, "x", None)
    args = ((up, down), array((4, 2048, 4096), None, "x", None))
    step = jax.jit(jax.grad(loss), out_shardings=tuple(a.sharding for a in args[0]))
    plain = step.lower(*args).compile(pods.compiler_options())
    rings = {"granularity": "one_way", "never_slower": False}  # by price most matmuls have none
    overlapped = jaxoverlap.overlap(step, cluster="h100-sxm:1x8", **rings)
    return plain, overlapped.lower(*args).compile()


class TestCompiled:
    pytestmark = for_pods

    def test_a_compiled_step_in_time(self, mlp):
        plain, overlapped = mlp
        for compiled, got in (
            (plain, jaxoverlap.simulate(plain, "h100-sxm:1x8")),
            (overlapped, overlapped.simulate()),
        ):
            assert got.unknown == {}
            assert got.step_s == pytest.approx(got.compute_s + got.slowdown_s + got.exposed_s)
            assert got.step_s >= got.bound_s
            total = jaxoverlap.audit(compiled).total
            assert sum(s.runs for s in got.spent) == total.count
            sent = sum(s.runs * s.collective.bytes_moved for s in got.spent)
            assert sent == total.bytes_moved
            assert {r.times for r in got.repeats} <= {2, 3, 4} and got.repeats

    def test_the_matmuls_of_the_step_are_all_there(self, mlp):
        """Each layer has six matmuls, chunked or not, of 2 x 8192 x 4096 x 16384 / 8 operations."""
        want = 4 * 6 * 2 * 8192 * 4096 * 16384 / 8
        for compiled in mlp:
            got = jaxoverlap.simulate(compiled.as_text(), "h100-sxm:1x8")
            flops = sum(m.flops * e.runs for e in got.events for m in e.work.matmuls)
            assert flops == want

    def test_overlapping_exposes_less(self, mlp):
        plain, overlapped = mlp
        cost = clock("h100-sxm:1x8", speedup=4)  # a hop takes a quarter of the chunk above it
        before, after = jaxoverlap.simulate(plain, cost), overlapped.simulate(cost)
        assert after.exposed_s < before.exposed_s / 4

    def test_pictures_of_both(self, mlp, tmp_path: Path):
        plain, overlapped = mlp
        got, before = overlapped.simulate(), jaxoverlap.simulate(plain, "h100-sxm:1x8")
        got.to_html(tmp_path / "a.html", plain=before)
        got.to_svg(tmp_path / "a.svg")
        got.to_perfetto(tmp_path / "a.json")
        assert {p.name for p in tmp_path.iterdir()} == {"a.html", "a.svg", "a.json"}
        assert "plain: step" in (tmp_path / "a.html").read_text()

    def test_without_a_cluster(self, mlp):
        _, overlapped = mlp
        exposed = jaxoverlap.Compiled(
            overlapped._compiled, None, overlapped._wrapped_jit, None, None
        )
        with pytest.raises(ValueError, match=r"simulate\(\) knows no cluster: name the GPUs"):
            exposed.simulate()


@pytest.mark.pods
@for_pods[1]
def test_collectives_inside_xlas_own_kernels_are_seen():
    """By XLA's defaults a small sum is a fusion; an option makes it a collective."""
    mesh = jaxoverlap.pod_mesh("h100-sxm:1x8", {"x": 8})

    def array(shape, *spec):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, P(*spec)))

    def layers(x, weights):
        for up, down in weights:
            x += jax.lax.with_sharding_constraint(jnp.tanh(x @ up) @ down, NamedSharding(mesh, P()))
        return x

    weights = [(array((1024, 8192), None, "x"), array((8192, 1024), "x"))] * 2
    step = jax.jit(layers).lower(array((512, 1024)), weights)
    options = pods.compiler_options()
    whole = step.compile({**options, "xla_gpu_experimental_use_collective_kernels": ""})
    fused = step.compile(options)
    assert "__triton_collective" in fused.as_text()
    for text in (fused, whole):
        assert jaxoverlap.audit(text).total.count == 2
    one, other = (jaxoverlap.simulate(step, "h100-sxm:1x8") for step in (fused, whole))
    assert one.link_s == pytest.approx(other.link_s)
    assert one.compute_s == pytest.approx(other.compute_s)
