"""What an operation answers goes by the options of the compilation that asks it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoverlap
from jaxoverlap import Decision, Skip
from jaxoverlap._jax.operations.options import compiler_option
from jaxoverlap.flags.required import BY_COPY
from jaxoverlap.hardware.pods import compiler_options
from jaxoverlap.ops import partition


def test_options_are_those_of_xla_flags_outside_a_compilation(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_one=1 --xla_two=a=b")
    assert compiler_option("xla_two") == "a=b"
    assert compiler_option("xla_three") is None


@pytest.mark.parametrize(
    ("value", "copies"), [("peer", True), ("symmetric", True), ("private", False), (None, False)]
)
def test_permutes_are_copies_in_two_modes(value, copies, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XLA_FLAGS", f"--{BY_COPY}={value}" if value else "")
    assert partition._permutes_are_copies() == copies


@pytest.mark.pods
def test_a_ring_is_made_only_where_its_permutes_are_copies():
    mesh = jaxoverlap.pod_mesh("h100-sxm:1x8", {"data": 1, "model": 8})

    def at(*axes: str | None) -> NamedSharding:
        return NamedSharding(mesh, P(*axes))

    x = jax.ShapeDtypeStruct((32768, 4096), jnp.bfloat16, sharding=at("model", None))
    w = jax.ShapeDtypeStruct((4096, 16384), jnp.bfloat16, sharding=at(None, "model"))
    lowered = jax.jit(jaxoverlap.matmul, out_shardings=at(None, "model")).lower(x, w)
    (with_options,) = jaxoverlap.decisions(lowered.compile(jaxoverlap.compiler_options(mesh)))
    assert BY_COPY in jaxoverlap.compiler_options(mesh)
    assert isinstance(with_options, Decision)
    assert with_options.variant == jaxoverlap.Variant("one_way")
    (without,) = jaxoverlap.decisions(lowered.compile(compiler_options()))
    reason = without.reason if isinstance(without, Skip) else without.why
    assert "more than matmul and all_gather" in reason
