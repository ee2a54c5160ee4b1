"""Values that a partitioned module has in the host's memory are found, and the link prices them."""

from __future__ import annotations

import pytest

from jaxoverlap.cost.find import cost_model
from jaxoverlap.hardware.cluster import parse_cluster
from jaxoverlap.passes.estimation.estimate import estimate
from jaxoverlap.passes.layouts.memory import estimated_peak_bytes
from jaxoverlap.simulation import hlo
from jaxoverlap.simulation.hlo_work import HOST_SPACE
from jaxoverlap.simulation.host_memory import with_host_memory

ROW, STACK = "f32[1024,1024]{1,0}", "f32[8,1024,1024]{2,1,0}"
LOOP = f"(s32[], {ROW}, {STACK}, {STACK})"
MODULE = f"""HloModule jit_step, num_partitions=1

%body (p: {LOOP}) -> {LOOP} {{
  %p = {LOOP} parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %zero = s32[] constant(0)
  %x = {ROW} get-tuple-element(%p), index=1
  %stack = {STACK} get-tuple-element(%p), index=2
  %other = {STACK} get-tuple-element(%p), index=3
  %y = {ROW} dot(%x, %x), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  %hosted = {ROW} custom-call(%x), custom_call_target="MoveToHost"
  %slice = f32[1,1024,1024]{{2,1,0}} reshape(%hosted)
  %updated = {STACK} dynamic-update-slice(%stack, %slice, %i, %zero, %zero)
  %kept = f32[1,1024,1024]{{2,1,0}} reshape(%y)
  %also = {STACK} dynamic-update-slice(%other, %kept, %i, %zero, %zero)
  ROOT %out = {LOOP} tuple(%next, %y, %updated, %also)
}}

%condition (q: {LOOP}) -> pred[] {{
  %q = {LOOP} parameter(0)
  %n = s32[] get-tuple-element(%q), index=0
  %eight = s32[] constant(8)
  ROOT %less = pred[] compare(%n, %eight), direction=LT
}}

ENTRY %main (x: {ROW}) -> {ROW} {{
  %x.1 = {ROW} parameter(0)
  %none = s32[] constant(0)
  %nil = f32[] constant(0)
  %empty = {STACK} broadcast(%nil), dimensions={{}}
  %start = {LOOP} tuple(%none, %x.1, %empty, %empty)
  %loop = {LOOP} while(%start), condition=%condition, body=%body
  %stored = {STACK} get-tuple-element(%loop), index=2
  %last = f32[1,1024,1024]{{2,1,0}} slice(%stored), slice={{[7:8], [0:1024], [0:1024]}}
  %row = {ROW} reshape(%last)
  ROOT %back = {ROW} custom-call(%row), custom_call_target="MoveToDevice"
}}
"""


def parsed() -> hlo.Module:
    return hlo.parse_partitioned(MODULE, 1)


def test_what_a_loop_stacks_there_is_there_and_nothing_else():
    module = with_host_memory(parsed())
    there = {i.name for body in module.computations.values() for i in body if HOST_SPACE in i.shape}
    tuples = {"p", "out", "q", "start", "loop"}
    arrays = {"stack", "hosted", "slice", "updated", "stored", "last", "row", "empty.host"}
    assert there == tuples | arrays
    assert all(module.body("main")[n].shape.count(HOST_SPACE) <= 1 for n in range(8))


def test_a_module_without_any_stays_as_it_is():
    module = hlo.parse_partitioned(MODULE.replace("MoveToHost", "Sharding"), 1)
    assert with_host_memory(module) is module


def test_it_takes_no_memory_of_the_device():
    row = 4 * 1024**2
    before, after = (estimated_peak_bytes(m) for m in (parsed(), with_host_memory(parsed())))
    assert before - after == 8 * row + row, "and the row that moves there"


def test_copies_take_the_links_time():
    cost = cost_model(parse_cluster("h100-sxm:1x1"))
    copy_s, _ = cost.host_copy(4 * 1024**2)
    found = estimate(with_host_memory(parsed()), cost)
    kernels = estimate(
        with_host_memory(hlo.parse_partitioned(MODULE.replace("MoveTo", "To"), 1)), cost
    )
    assert found.exposed_s > copy_s, "the last one has nothing to hide behind"
    assert found.step_s < kernels.step_s + 9 * copy_s, "the matmuls hide something of the others"
    assert found.waited_s["main", "back"] == pytest.approx(copy_s)
