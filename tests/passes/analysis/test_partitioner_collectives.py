"""The estimate counts the bytes that XLA moves after it has changed the partitioner's collectives."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoverlap
from jaxoverlap.passes.analysis.partitioner_collectives import moved
from jaxoverlap.simulation import hlo
from tests.support.pods import needs_plugin

POD = "h100-sxm:1x8"


def text(*lines: str) -> hlo.Module:
    body = "\n".join(f"  {line}" for line in lines)
    return hlo.parse_partitioned(f"HloModule m\n\nENTRY main {{\n{body}\n}}\n", 8)


GATHER = "all-gather({}), replica_groups=[1,8]<=[8], dimensions={{0}}"


@pytest.mark.parametrize(
    ("lines", "itemsize"),
    [
        (("%c = f32[8,8] convert(%p)", f"ROOT %g = f32[64,8] {GATHER.format('%c')}"), 2),
        (
            (
                "%c = f32[8,8] convert(%p)",
                "%t = f32[8,8] transpose(%c), dimensions={1,0}",
                f"ROOT %g = f32[64,8] {GATHER.format('%t')}",
            ),
            2,
        ),
        ((f"%g = bf16[64,8] {GATHER.format('%p')}", "ROOT %c = f32[64,8] convert(%g)"), 2),
        ((f"%g = bf16[64,8] {GATHER.format('%p')}", "ROOT %c = f8e4m3fn[64,8] convert(%g)"), 1),
        (
            (
                f"%g = bf16[64,8] {GATHER.format('%p')}",
                "%c = f8e4m3fn[64,8] convert(%g)",
                "ROOT %r = (bf16[64,8], f8e4m3fn[64,8]) tuple(%g, %c)",
            ),
            2,
        ),
        (("%c = f8e4m3fn[8,8] convert(%p)", f"ROOT %g = f8e4m3fn[64,8] {GATHER.format('%c')}"), 1),
    ],
    ids=["widened", "widened and viewed", "to be widened", "narrowed", "read as it is", "narrow"],
)
def test_a_converted_value_travels_in_the_narrower_dtype(lines, itemsize):
    (gather,) = moved(text("%p = bf16[8,8] parameter(0)", *lines))
    assert gather.bytes_moved == 64 * 8 * itemsize * 7 // 8


def test_nothing_is_divided_for_an_empty_value():
    """Its conversion has no bytes before it and none after it."""
    empty = f"ROOT %g = f32[0,8] {GATHER.format('%c')}"
    (gather,) = moved(text("%p = bf16[0,8] parameter(0)", "%c = f32[0,8] convert(%p)", empty))
    assert gather.bytes_moved == 0


@needs_plugin
@pytest.mark.pods
def test_bytes_are_those_of_the_compiled_step():
    """A row of a sharded activation is added up in float32; XLA gathers it in bfloat16."""
    mesh = jaxoverlap.pod_mesh(POD, {"tp": 8})

    def on(*spec):
        return NamedSharding(mesh, P(*spec))

    @jax.jit
    def step(x, y, w):
        wide = jax.lax.with_sharding_constraint(x.astype(jnp.float32), on())
        return jnp.cumsum(wide, axis=-1), y @ w

    x = jax.ShapeDtypeStruct((4096, 8192), jnp.bfloat16, sharding=on(None, "tp"))
    w = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16, sharding=on())
    compiled = jaxoverlap.audit(step.lower(x, w, w).compile())
    with pytest.warns(UserWarning, match="rewrites nothing"):
        (gather,) = jaxoverlap.overlap(step).explain(x, w, w).remaining
    assert gather.kind == "all_gather"
    assert gather.bytes_moved == compiled.total.bytes_moved == 4096 * 8192 * 2 * 7 // 8
