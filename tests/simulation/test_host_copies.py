"""Copies from and to the host's memory: found, priced by the link, and hidden behind kernels."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jaxoverlap import audit, parse_cluster, simulate
from jaxoverlap.cost.find import cost_model
from jaxoverlap.simulation import hlo
from jaxoverlap.simulation.host_copies import FROM_HOST, TO_HOST, host_copies
from jaxoverlap.simulation.streams import apart

STACK, LAYER = "bf16[8,4096,4096]{2,1,0:S(5)}", "bf16[1,4096,4096]{2,1,0}"
BYTES = 2 * 4096 * 4096
MATMUL = (
    "(bf16[4096,4096]{1,0}, s8[64]{0}) custom-call(%x, %w), "
    'custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":'
    '{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"],'
    '"lhs_batch_dimensions":[],"rhs_batch_dimensions":[]}}}'
)
MODULE = f"""HloModule jit_step, is_scheduled=true, num_partitions=1

%read (p0: bf16[8,4096,4096], p1: s32[]) -> bf16[1,4096,4096] {{
  %p0 = {STACK} parameter(0)
  %p1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %slice = {LAYER} dynamic-slice(%p0, %p1, %zero, %zero), dynamic_slice_sizes={{1,4096,4096}}
}}

%written (q0: bf16[8,4096,4096], q1: bf16[1,4096,4096], q2: s32[]) -> bf16[8,4096,4096] {{
  %q0 = {STACK} parameter(0)
  %q1 = {LAYER} parameter(1)
  %q2 = s32[] parameter(2)
  %none = s32[] constant(0)
  ROOT %update = {STACK} dynamic-update-slice(%q0, %q1, %q2, %none, %none)
}}

ENTRY %main (stack: bf16[8,4096,4096], x: bf16[4096,4096], w: bf16[4096,4096], i: s32[]) -> bf16[] {{
  %stack = {STACK} parameter(0)
  %x = bf16[4096,4096]{{1,0}} parameter(1)
  %w = bf16[4096,4096]{{1,0}} parameter(2)
  %i = s32[] parameter(3)
  %up = (({STACK}, s32[]), {LAYER}, u32[]) fusion-start(%stack, %i), kind=kLoop, calls=%read
  %made = {MATMUL}
  %upped = {LAYER} fusion-done(%up)
  %whole = {STACK} custom-call(), custom_call_target="AllocateBuffer"
  %back = (({STACK}, {LAYER}, s32[]), {STACK}, u32[]) fusion-start(%whole, %upped, %i), kind=kLoop, calls=%written
  %backed = {STACK} fusion-done(%back)
  %bare = {LAYER} fusion(%stack, %i), kind=kLoop, calls=%read
  ROOT %out = bf16[] constant(0)
}}
"""


def test_copies_are_found_with_what_is_under_them():
    up, back, exposed = host_copies(hlo.parse(MODULE))
    assert [c.kind for c in (up, back, exposed)] == [FROM_HOST, TO_HOST, FROM_HOST]
    assert {c.bytes_moved for c in (up, back, exposed)} == {BYTES}
    assert up.covered and up.matmuls == ("made",)
    assert back.asynchronous and not back.covered
    assert not exposed.asynchronous


def test_audit_lists_them_apart_from_collectives():
    found = audit(MODULE)
    assert found.collectives == () and found.total.count == 0
    assert found.host_coverage[FROM_HOST].covered == 1
    assert "from host: 1 of 2 covered" in str(found)


def test_no_device_waits_for_another_in_them():
    """They may run beside collectives, whatever the devices that these are among."""
    copies = host_copies(hlo.parse(MODULE))
    gather = replace(copies[0], kind="all-gather", stream=0, groups="{{0,1,2,3}}", group_size=4)
    assert not apart([[gather], *([c] for c in copies)], num_devices=4)
    other = replace(gather, stream=3)
    assert apart([[gather], [other], [copies[0]]], num_devices=4) == {
        0: frozenset({1}),
        1: frozenset({0}),
    }


def test_they_take_the_links_time_and_hide_behind_kernels():
    cluster = parse_cluster("h100-sxm:1x1")
    step = simulate(MODULE, cluster)
    seconds, share = cost_model(cluster).host_copy(BYTES)
    link = cluster.chip.host_link
    assert seconds == pytest.approx(link.latency_s + BYTES / (0.82 * link.bandwidth_bytes_per_s))
    assert share.sms == 0 and share.memory_bytes_per_s == pytest.approx(BYTES / seconds)
    assert step.link_s[FROM_HOST] == pytest.approx(2 * seconds)
    assert step.link_s[TO_HOST] == pytest.approx(seconds)
    # The first is hidden for as long as the matmul runs; nothing is beside the others.
    assert step.exposed_s == pytest.approx(3 * seconds - step.compute_s - step.slowdown_s)
    assert not step.unknown


def test_pictures_have_lanes_for_them_only_where_there_are_some(tmp_path):
    simulate(MODULE, "h100-sxm:1x1").to_svg(tmp_path / "with.svg")
    nothing = MODULE.replace("S(5)", "S(0)").replace(":S(0)", "")
    simulate(nothing, "h100-sxm:1x1").to_svg(tmp_path / "without.svg")
    assert ">from host<" in (tmp_path / "with.svg").read_text()
    assert "host" not in (tmp_path / "without.svg").read_text()


def test_a_module_without_host_memory_has_none():
    nothing = MODULE.replace(":S(5)", "")
    assert host_copies(hlo.parse(nothing)) == ()
    assert simulate(nothing, "h100-sxm:1x1").link_s == {"NVLink": 0.0, "network": 0.0}
