"""XLA:GPU hides the hops of each variant, on schedules compiled for pods: no GPU is needed."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoverlap
from jaxoverlap import ring
from jaxoverlap.flags import options_for
from jaxoverlap.passes.rings.all_gather_matmul import Reader, all_gather_matmul
from tests.support.engine import AXIS, dot, einsum
from tests.support.pods import pytestmark as pytestmark

N, ROWS, INNER = 4, 2048, 4096
SHAPES = {  # of x and w on a device
    "all_gather_matmul": ((ROWS, INNER), (INNER, INNER)),
    "matmul_reduce_scatter": ((ROWS * N, INNER), (INNER, INNER)),
    "matmul_all_reduce": ((ROWS * N, INNER), (INNER, INNER)),
    "all_to_all_matmul": ((ROWS * N, INNER), (INNER * N, INNER)),
    "matmul_all_to_all": ((ROWS * N, INNER), (INNER, INNER)),
}
CASES = [
    *(
        (name, v)
        for name in list(SHAPES)[:2]
        for v in ("one_way", "two_way", "direct", "two_way x 2")
    ),
    *((name, "direct") for name in list(SHAPES)[2:]),
]


def compiled(body: Callable, *shapes: tuple[int, ...], n: int = N, pod: str = ""):
    """Compile a body of each device's bfloat16 operands, for a host of H100s if not told."""
    mesh = jaxoverlap.pod_mesh(pod or f"h100-sxm:1x{n}", {AXIS: n})

    def on_device(*args):
        return jax.tree.map(lambda out: out[None], body(*args))

    mapped = jax.shard_map(
        on_device, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS), check_vma=False
    )
    args = [
        jax.ShapeDtypeStruct(
            (n * s[0], *s[1:]), jnp.bfloat16, sharding=NamedSharding(mesh, P(AXIS))
        )
        for s in shapes
    ]
    # A Triton matmul adds the product before its own, and XLA then starts the exchange of a slice
    # only behind the matmul of the slice before.
    options = options_for(mesh) | {"xla_gpu_enable_triton_gemm": "False"}
    return jax.jit(mapped, compiler_options=options).lower(*args).compile()


def coverage(body: Callable, *shapes: tuple[int, ...]) -> list[bool]:
    """Say of each permute, or of each collective if there is none, whether a matmul hides it."""
    collectives = jaxoverlap.audit(compiled(body, *shapes).as_text()).collectives
    hops = [c for c in collectives if c.kind == "collective-permute"]
    assert all(c.asynchronous for c in hops)
    return [c.covered for c in hops or collectives]


@pytest.mark.parametrize(("name", "variant"), CASES)
def test_every_hop_is_covered_there_and_back(name: str, variant: str):
    def body(x, w):
        y, transpose = jax.vjp(lambda x, w: getattr(ring, name)(x, w, AXIS, variant=variant), x, w)
        return transpose(y)

    covered = coverage(body, *SHAPES[name])
    # XLA sends the first piece of x once for both rings that read it.
    assert len(covered) >= 2 * (N - 1)
    assert all(covered)


@pytest.mark.parametrize("name", SHAPES)
def test_only_the_last_slice_is_bare(name: str):
    def body(x, w):
        return getattr(ring, name)(x, w, AXIS, variant="sliced x 4")

    covered = coverage(body, *SHAPES[name])
    exposed = 2 if name == "matmul_all_reduce" else 1  # and the gather after the slices
    assert covered.count(False) == exposed
    assert covered.count(True) == 3


@pytest.mark.parametrize("variant", ["one_way", "two_way x 2"])
def test_attention_hides_every_hop_there_and_back(variant: str):
    def body(q, k, v):
        attention = lambda *a: ring.ring_attention(*a, AXIS, variant=variant)  # noqa: E731
        y, transpose = jax.vjp(attention, q, k, v)
        return transpose(y)

    covered = coverage(body, *[(1, 1024, 16, 128)] * 3)
    slices = 2 if "x 2" in variant else 1
    assert len(covered) == 6 * (N - 1) * slices
    assert all(covered)


@pytest.mark.parametrize("variant", ["one_way", "direct"])
def test_query_split_hides_every_hop_there_and_back(variant: str):
    heads, wo, rows = (1, 1024 * N, 4, 128), (4, 128, 2048), (1, 1024, 2048)

    def forward(q, k, v, wo):
        return ring.query_split_attention(q, k, v, wo, AXIS, variant=variant)

    def backward(q, k, v, wo, dy):
        return jax.vjp(forward, q, k, v, wo)[1](dy)

    for body, shapes in ((forward, (heads,) * 3 + (wo,)), (backward, (heads,) * 3 + (wo, rows))):
        assert coverage(body, *shapes) == [True] * (N - 1)


def test_query_split_starts_a_hop_of_a_slow_link_earlier():
    """On NVLink XLA takes the projection for long enough; between hosts it wants the values too."""

    def body(q, k, v, wo):
        return ring.query_split_attention(q, k, v, wo, AXIS)

    shapes = *[(1, 1024 * N, 4, 128)] * 3, (4, 128, 2048)
    hops = jaxoverlap.audit(compiled(body, *shapes, pod=f"h100-sxm:{N}x1").as_text()).collectives
    assert [len(hop.matmuls) >= 2 for hop in hops] == [True] * (N - 1)


def test_chunks_of_the_other_operand_are_cut_when_they_are_wanted():
    """XLA would cut all of them before the first matmul: as many bytes as the operand."""

    def body(x, w, dy):
        readers = [
            Reader(other, einsum(spec), "lhs", dot(spec), jnp.bfloat16)
            for other, spec in ((w, "sd,df->sf"), (dy, "sd,sf->df"))
        ]
        return all_gather_matmul(x, readers, dim=0, axis=AXIS, axis_size=N)[0]

    shapes = (ROWS, 1024), (1024, 8192), (N * ROWS, 8192)
    operand = 2 * N * ROWS * 8192
    assert compiled(body, *shapes).memory_analysis().temp_size_in_bytes < operand


def test_direct_sums_are_added_as_they_come():
    """XLA would put the sums off, and hold what every device has sent."""

    n = 8

    def temp(variant: str) -> int:
        def body(x, w):
            return ring.matmul_reduce_scatter(x, w, AXIS, variant=variant)

        shapes = (ROWS * n, 1024), (1024, 4096)
        return compiled(body, *shapes, n=n).memory_analysis().temp_size_in_bytes

    chunk = 2 * ROWS * 4096
    assert temp("direct") <= temp("one_way") + 4 * chunk  # a sum and a product in float32
