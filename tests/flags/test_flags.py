"""Flags, variables and presets agree with each other, and with the compiler that is here."""

from __future__ import annotations

import subprocess
from importlib import metadata
from typing import Any

import jax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoverlap
from jaxoverlap.flags import DEAD, FLAGS, PRESETS, VARIABLES, options_for, preset
from jaxoverlap.flags.compiler import ask
from jaxoverlap.flags.required import BY_COPY, RINGS
from jaxoverlap.flags.variables import PLUGINS, nccl_names
from jaxoverlap.flags.xla import versions
from jaxoverlap.hardware.cluster import chips, parse_cluster
from jaxoverlap.simulation.replay import group_of
from tests.support.pods import needs_plugin

ALL = pytest.mark.parametrize("name", PRESETS)


# -- the data ---------------------------------------------------------------------------------------


@ALL
def test_a_preset_is_of_known_names_each_with_reason_and_source(name: str):
    for s in PRESETS[name].settings:
        assert s.name in FLAGS or s.name in VARIABLES, s.name
        assert s.reason and s.source and s.value, s
    names = [s.name for s in PRESETS[name].settings]
    assert len(names) == len(set(names))


def compiler_options() -> Any:
    """Return the newest version's `jax.jit(compiler_options=)`; XLA_FLAGS takes more."""
    return [asked.options for asked in versions().values() if asked.options][-1]


@ALL
def test_a_presets_options_are_in_all_supported_versions_and_compiler_options(name: str):
    for option in PRESETS[name].options:
        flag = FLAGS[option]
        assert {"0.11.2", "0.12.0.1"} <= set(flag.defaults)
        assert flag.until == ""
        assert option in compiler_options()


@ALL
def test_conflicts_say_who_says_what_and_take_what_the_preset_has(name: str):
    chip_preset = PRESETS[name]
    values = {s.name: s.value for s in chip_preset.settings}
    assert chip_preset.conflicts
    for c in chip_preset.conflicts:
        assert c.why and all(value and source for value, source in c.said)
        if c.name in VARIABLES or c.name in FLAGS:
            assert values.get(c.name, "") == c.ours


def test_values_are_of_their_kinds():
    for p in PRESETS.values():
        for name, value in p.options.items():
            kind = FLAGS[name].kind
            if kind == "bool":
                assert value in ("True", "False")
            if kind == "int":
                assert value.isdecimal()
            if kind == "enum":
                assert value in FLAGS[name].short
        for name, value in p.variables.items():
            if VARIABLES[name].kind in ("bool", "int"):
                assert value.isdecimal(), name


def test_rings_are_in_every_preset():
    for p in PRESETS.values():
        assert {s.name: s.value for s in RINGS}.items() <= p.options.items()


def test_flags_know_when_they_came_and_went():
    assert FLAGS["xla_gpu_collective_permute_mode"].since == "0.10.2"
    assert FLAGS["xla_gpu_enable_triton_gemm"].since == "0.4.30"
    assert DEAD["xla_gpu_graph_level"].until == "0.6.2"
    assert (
        DEAD["xla_gpu_all_reduce_contiguous"].until == ""
    )  # gone before the oldest that was asked
    fused = FLAGS["xla_gpu_experimental_gemm_fusion_v2"].defaults
    assert (fused["0.11.2"], fused["0.12.0.1"]) == ("false", "true")
    assert "xla_gpu_analytical_latency_estimator_options" not in compiler_options()


def test_variables_are_nccls_a_plugins_or_somebody_elses():
    for v in VARIABLES.values():
        if v.reader == "NCCL":
            assert v.name in nccl_names(), v.name
        elif v.name.startswith("NCCL_"):
            assert v.name.startswith(PLUGINS) or v.name not in nccl_names(), v.name


# -- which preset -----------------------------------------------------------------------------------


def test_every_chip_has_a_preset():
    for chip in chips():
        chip_preset = preset(f"{chip.name}:2x4")
        assert chip_preset.chip.split("-")[0] == chip.name.split("-")[0]
    assert preset("gb200:18x4").name == "gb200-nvl72"
    assert preset("gcp-a3-mega").chip == "h100-sxm"


@pytest.mark.parametrize(
    ("pod", "says"),
    [
        ("a3-mega", "did you mean gcp-a3-mega"),
        ("h100", "unknown preset 'h100'"),
        ("v100:1x8", "unknown chip 'v100'"),
        ("h100-sxm:8by8", "cannot read"),
    ],
)
def test_what_is_no_preset_says_what_is(pod: str, says: str):
    with pytest.raises(ValueError, match=says):
        preset(pod)


def test_blackwell_has_no_single_queue_and_hopper_has():
    for p in PRESETS.values():
        assert ("CUDA_DEVICE_MAX_CONNECTIONS" in p.variables) == ("b200" not in p.chip)


# -- how it is written ------------------------------------------------------------------------------


def test_an_enum_has_other_values_in_xla_flags():
    flag = FLAGS["xla_gpu_collective_permute_mode"]
    assert flag.in_xla_flags("COLLECTIVES_PEER_MEMORY") == "peer"
    with pytest.raises(ValueError, match="expected one of COLLECTIVES_PRIVATE_MEMORY"):
        flag.in_xla_flags("peer")


@ALL
def test_a_shell_reads_the_env_file(name: str):
    chip_preset = PRESETS[name]
    script = f"{chip_preset.env_file}env -0"
    done = subprocess.run(
        ["bash", "-ec", script], capture_output=True, text=True, check=True, env={}
    )
    got = dict(line.split("=", 1) for line in done.stdout.split("\0") if line)
    assert {"XLA_FLAGS": chip_preset.xla_flags, **chip_preset.variables}.items() <= got.items()


# -- the compiler that is here ----------------------------------------------------------------------


def test_the_table_is_what_the_installed_jaxlib_says():
    version = metadata.version("jaxlib")
    if version not in versions():
        pytest.skip(f"jaxlib {version} is not in xla.json: python -m benchmarks.flag_table")
    (plain,) = ask([""])
    assert plain.fields is not None
    for name, value in versions()[version].defaults.items():
        assert ",".join(plain.fields.get(name, ())) == value


def test_xla_flags_set_what_options_say():
    lines = {p.xla_flags: p.options for p in PRESETS.values()}
    for got, options in zip(ask([*lines]), lines.values(), strict=True):
        assert got.fields is not None, got.reason
        for name, value in options.items():
            wanted = value.lower() if FLAGS[name].kind == "bool" else value
            assert sorted(got.fields[name]) == sorted(wanted.split(",")), name


@needs_plugin
@pytest.mark.pods
@pytest.mark.parametrize("chip", dict.fromkeys(p.chip for p in PRESETS.values()))
def test_every_option_compiles_for_its_pod(chip: str):
    sets = {tuple(p.options.items()) for p in PRESETS.values() if p.chip == chip}
    mesh = jaxoverlap.pod_mesh(f"{chip}:1x4", {"x": 4})
    rows = jax.ShapeDtypeStruct((64, 64), "bfloat16", sharding=NamedSharding(mesh, P("x")))

    @jax.shard_map(mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    def hop(x):
        return jax.lax.ppermute(x, "x", [(i, (i + 1) % 4) for i in range(4)])

    for options in sets:
        compiled = jax.jit(hop).lower(rows).compile({**options_for(mesh), **dict(options)})
        assert '"collectives_mode":"COLLECTIVES_PEER_MEMORY"' in (compiled.as_text() or "")


@needs_plugin
@pytest.mark.pods
def test_permutes_in_symmetric_memory_have_a_memory_space_of_their_own():
    """So XLA compiles them between processes too, where its runtime sends by NCCL all the same."""
    mesh = jaxoverlap.pod_mesh("h100-sxm:1x4/4", {"x": 4})
    rows = jax.ShapeDtypeStruct((64, 64), "bfloat16", sharding=NamedSharding(mesh, P("x")))

    @jax.shard_map(mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    def hop(x):
        return jax.lax.ppermute(x, "x", [(i, (i + 1) % 4) for i in range(4)])

    assert BY_COPY not in options_for(mesh)
    options = {**options_for(mesh), BY_COPY: "COLLECTIVES_SYMMETRIC_MEMORY"}
    text = jax.jit(hop).lower(rows).compile(options).as_text() or ""
    (permute,) = (line for line in text.splitlines() if " collective-permute" in line)
    assert '"collectives_mode":"COLLECTIVES_SYMMETRIC_MEMORY"' in permute
    assert ":S(7)" in permute
    assert "collective-permute(%copy" in permute  # of an argument, which is elsewhere
    (moved,) = jaxoverlap.audit(text).collectives
    assert moved.by_copy
    assert not group_of(moved, 4, parse_cluster("h100-sxm:1x4/4")).by_copy


@needs_plugin
def test_parts_are_compiled_with_sums_of_their_own():
    """Two sums of parts together are larger than what XLA may join."""
    mesh = jaxoverlap.pod_mesh("h100-sxm:1x8", {"x": 8})
    plain = options_for(mesh, rings=False)
    parts = options_for(mesh, rings=False, parts=True)
    added = parts.keys() - plain.keys()
    assert added and not any("permute" in name for name in added)
    assert BY_COPY in plain, "XLA's partitioner adds permutes of its own, and they are priced so"
    assert added < options_for(mesh).keys()
    joined = "xla_gpu_all_reduce_combine_threshold_bytes"
    assert joined not in parts
    limits = {
        least: options_for(mesh, rings=False, parts=True, least_sum=least)[joined]
        for least in (1000, 1 << 30)
    }
    assert limits == {1000: "1999", 1 << 30: str(30 << 20)}


@needs_plugin
def test_small_matmuls_of_parts_are_not_merged():
    """XLA merges matmuls of which one is below its threshold: that of parts is not."""
    mesh = jaxoverlap.pod_mesh("h100-sxm:1x8", {"x": 8})
    merged = "xla_gpu_dot_merger_threshold_mb"
    at_most = {
        least: options_for(mesh, rings=False, parts=True, least_matmul=least).get(merged)
        for least in (None, 0, 1 << 20, (5 << 20) + 1, 64 << 20)
    }
    assert at_most == {None: None, 0: "0", 1 << 20: "0", (5 << 20) + 1: "5", 64 << 20: None}
