"""A step's time is estimated from its partitioned module: what is fused, what waits."""

from __future__ import annotations

import pytest

from jaxoverlap.cost.find import cost_model
from jaxoverlap.cost.groups import Group
from jaxoverlap.hardware.cluster import parse_cluster
from jaxoverlap.passes.estimation.estimate import estimate
from jaxoverlap.simulation import hlo

COST = cost_model(parse_cluster("h100-sxm:1x8"))
SUM = """%sum (a: bf16[], b: bf16[]) -> bf16[] {
  %a = bf16[] parameter(0)
  %b = bf16[] parameter(1)
  ROOT %c = bf16[] add(%a, %b)
}
"""
X, W = "bf16[4096,4096]{1,0}", "bf16[4096,4096]{1,0}"
DOT = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"
MATMUL_S = COST.matmul_s(4096, 4096, 4096)
BYTES = 4096 * 4096 * 2


def estimated(*lines: str, joined_bytes: int = 0):
    body = "\n".join(f"  {line}" for line in lines)
    text = f"HloModule jit_step\n\n{SUM}\nENTRY %main (x: {X}, w: {W}) -> {X} {{\n{body}\n}}\n"
    return estimate(hlo.parse_partitioned(text, 8), COST, joined_bytes=joined_bytes)


ARGUMENTS = (f"%x = {X} parameter(0)", f"%w = {W} parameter(1)")


def test_a_matmul():
    step_estimate = estimated(*ARGUMENTS, f"ROOT %y = {X} dot(%x, %w), {DOT}")
    assert step_estimate.step_s == step_estimate.compute_s == MATMUL_S


@pytest.mark.parametrize(("scope", "matmuls"), [("update", 1), ("runs_1_of_8", 1 / 8)])
def test_a_conditional_takes_its_slowest_branch_as_often_as_its_name_says(scope, matmuls):
    branches = f"""%dot (x: {X}) -> {X} {{
  %x = {X} parameter(0)
  ROOT %y = {X} dot(%x, %x), {DOT}
}}
%same (x: {X}) -> {X} {{
  ROOT %x = {X} parameter(0)
}}
"""
    name = f'metadata={{op_name="jit(step)/while/body/{scope}/cond"}}'
    cond = f"conditional(%i, %x, %x), branch_computations={{%same, %dot}}, {name}"
    lines = f"  %i = s32[] parameter(0)\n  %x = {X} parameter(1)\n  ROOT %y = {X} {cond}"
    text = (
        f"HloModule jit_step\n\n{branches}ENTRY %main (i: s32[], x: {X}) -> {X} {{\n{lines}\n}}\n"
    )
    found = estimate(hlo.parse_partitioned(text, 8), COST)
    assert found.step_s == pytest.approx(matmuls * MATMUL_S)


def test_what_reads_element_by_element_is_one_kernel():
    step_estimate = estimated(
        *ARGUMENTS,
        f"%a = {X} tanh(%x)",
        f"%b = {X} multiply(%a, %w)",
        f"%c = {X} add(%b, %b)",
        f"ROOT %y = {X} dot(%c, %w), {DOT}",
    )
    assert step_estimate.step_s == pytest.approx(MATMUL_S + COST.memory_s(3 * BYTES))


@pytest.mark.parametrize("named, kernels", [("opt-barrier", 2), ("reshape", 1)])
def test_a_barrier_of_one_value_ends_a_kernel(named: str, kernels: int):
    step_estimate = estimated(
        *ARGUMENTS,
        f"%a = {X} tanh(%x)",
        f"%n = {X} {named}(%a)",
        f"%b = {X} add(%n, %n)",
        f"ROOT %y = {X} dot(%b, %w), {DOT}",
    )
    assert step_estimate.step_s == pytest.approx(MATMUL_S + kernels * COST.memory_s(2 * BYTES))


def test_what_cublas_adds_takes_no_time():
    step_estimate = estimated(
        *ARGUMENTS, f"%y = {X} dot(%x, %w), {DOT}", f"ROOT %z = {X} add(%y, %w)"
    )
    assert step_estimate.step_s == MATMUL_S


ROWS, REPEATED = "bf16[4096]{0}", "dimensions={0}"


def softmax(axis: int, after: str) -> tuple[str, ...]:
    """Subtract the sum along an axis, which is repeated over `after`."""
    return (
        *ARGUMENTS,
        "%zero = bf16[] constant(0)",
        f"%e = {X} exponential(%x)",
        f"%r = {ROWS} reduce(%e, %zero), dimensions={{{axis}}}, to_apply=%sum",
        f"%b = {X} broadcast(%r), {after}",
        f"%d = {X} divide(%e, %b)",
        f"ROOT %y = {X} dot(%d, %w), {DOT}",
    )


def test_a_softmax_along_rows_is_one_kernel():
    once_s = COST.memory_s(2 * BYTES)
    assert estimated(*softmax(1, REPEATED)).step_s == pytest.approx(MATMUL_S + once_s)


def test_a_softmax_along_columns_reads_its_operand_again():
    twice_s = COST.memory_s(BYTES + 4096 * 2) + COST.memory_s(2 * BYTES + 4096 * 2)
    estimate_s = estimated(*softmax(0, "dimensions={1}")).step_s
    assert estimate_s == pytest.approx(MATMUL_S + twice_s)


GATHER_S = COST.collective_s("all-gather", 7 * BYTES // 8, Group(8))


SHARDS = {0: "bf16[512,4096]", 1: "bf16[4096,512]"}


def gathered(dim: int, *reader: str) -> tuple[str, ...]:
    """Gather x along a dim, before those that read it."""
    return (
        f"%x = {SHARDS[dim]}{{1,0}} parameter(0)",
        f"%w = {W} parameter(1)",
        f"%g = {X} all-gather(%x), replica_groups={{}}, dimensions={{{dim}}}",
        *reader,
    )


@pytest.mark.parametrize("dim", [0, 1])
def test_a_gather_is_waited_for_and_a_matmul_reads_it_turned(dim: int):
    step_estimate = estimated(*gathered(dim, f"ROOT %y = {X} dot(%g, %w), {DOT}"))
    assert step_estimate.step_s == pytest.approx(GATHER_S + MATMUL_S)
    assert step_estimate.waited_s == {("main", "g"): pytest.approx(GATHER_S)}
    assert step_estimate.bytes_moved == {"NVLink": 7 * BYTES // 8}


@pytest.mark.parametrize("dim", [0, 1])
def test_a_gather_is_turned_for_another_reader_where_its_blocks_lie_apart(dim: int):
    step_estimate = estimated(*gathered(dim, f"ROOT %y = {X} tanh(%g)"))
    turned_s = COST.memory_s(2 * BYTES) if dim else 0.0
    assert step_estimate.step_s == pytest.approx(GATHER_S + turned_s + COST.memory_s(2 * BYTES))


TURNED = "bf16[4096,8,512]{2,1,0}"


@pytest.mark.parametrize(("order", "free"), [("2,0,1", True), ("2,1,0", False)])
def test_a_matmul_reads_a_transposed_value_as_it_lies(order: str, free: bool):
    """cuBLAS takes columns for rows; but not rows in another order."""
    sizes = {"2,0,1": "8,512,4096", "2,1,0": "512,8,4096"}[order]
    seconds = estimated(
        f"%x = bf16[{sizes}]{{2,1,0}} parameter(0)",
        f"%w = {W} parameter(1)",
        f"%t = {TURNED} transpose(%x), dimensions={{{order}}}",
        f"%r = {X} reshape(%t)",
        f"ROOT %y = {X} dot(%r, %w), {DOT}",
    ).step_s
    assert seconds == pytest.approx(MATMUL_S + (0 if free else COST.memory_s(2 * BYTES)))


def test_a_gather_hides_behind_a_matmul_that_does_not_read_it():
    step_estimate = estimated(
        "%s = bf16[512,4096]{1,0} parameter(2)",
        *ARGUMENTS,
        f"%g = {X} all-gather(%s), replica_groups={{}}, dimensions={{0}}",
        f"%y = {X} dot(%x, %w), {DOT}",
        f"ROOT %z = {X} dot(%g, %y), {DOT}",
    )
    waits_s = max(GATHER_S - MATMUL_S, 0.0)
    assert step_estimate.waited_s == {("main", "g"): pytest.approx(waits_s)}
    assert step_estimate.step_s >= 2 * MATMUL_S + waits_s


REDUCE = "replica_groups={}, to_apply=%sum"
SUM_S = COST.collective_s("all-reduce", 7 * BYTES // 4, Group(8))


def test_two_sums_that_are_added_are_sent_once():
    """XLA adds the partial sums first; a sum that somebody else reads too is sent by itself."""
    sums = (
        *ARGUMENTS,
        f"%p = {X} dot(%x, %w), {DOT}",
        f"%q = {X} dot(%w, %x), {DOT}",
        f"%r = {X} all-reduce(%p), {REDUCE}",
        f"%s = {X} all-reduce(%q), {REDUCE}",
    )
    step_estimate = estimated(*sums, f"ROOT %z = {X} add(%r, %s)")
    assert step_estimate.communication_s == {"NVLink": pytest.approx(SUM_S)}
    read = estimated(*sums, f"%z = {X} add(%r, %s)", f"ROOT %y = {X} dot(%r, %z), {DOT}")
    assert read.communication_s == {"NVLink": pytest.approx(2 * SUM_S)}


def test_sums_that_were_sums_before_are_joined_twice():
    def summed(name: str, of: str, groups: str) -> str:
        return f"%{name} = {X} all-reduce(%{of}), replica_groups={{{groups}}}, to_apply=%sum"

    pairs, fours = "{0,1},{2,3},{4,5},{6,7}", "{0,2,4,6},{1,3,5,7}"
    one = (summed("a", "x", pairs), summed("b", "a", fours))
    other = (summed("c", "w", pairs), summed("d", "c", fours))
    added = f"ROOT %y = {X} add(%b, %d)"
    alone = estimated(*ARGUMENTS, *one, f"ROOT %y = {X} tanh(%b)").bytes_moved
    assert estimated(*ARGUMENTS, *one, *other, added).bytes_moved == alone


def test_sums_over_other_devices_are_not_joined():
    step_estimate = estimated(
        *ARGUMENTS,
        f"%r = {X} all-reduce(%x), replica_groups={{{{0,1}},{{2,3}},{{4,5}},{{6,7}}}}, to_apply=%sum",
        f"%s = {X} all-reduce(%w), {REDUCE}",
        f"ROOT %z = {X} add(%r, %s)",
    )
    assert step_estimate.bytes_moved == {"NVLink": BYTES + 7 * BYTES // 4}


def test_a_buffer_is_written_before_chunks_are_put_into_it():
    half = "bf16[2048,4096]{1,0}"
    step_estimate = estimated(
        f"%h = {half} parameter(2)",
        "%zero = bf16[] constant(0)",
        "%at = s32[] constant(0)",
        f"%b = {X} broadcast(%zero), dimensions={{}}",
        f"ROOT %u = {X} dynamic-update-slice(%b, %h, %at, %at)",
    )
    assert step_estimate.step_s == pytest.approx(COST.memory_s(BYTES) + COST.memory_s(BYTES))


def test_a_fixed_layout_is_no_kernel():
    step_estimate = estimated(
        *ARGUMENTS,
        f'%f = {X} custom-call(%x), custom_call_target="LayoutConstraint"',
        f"ROOT %y = {X} dot(%f, %w), {DOT}",
    )
    assert step_estimate.step_s == MATMUL_S


PART = "bf16[512,4096]{1,0}"
GATHER = "channel_id=1, replica_groups=[1,8]<=[8], dimensions={0}, use_global_device_ids=true"
TWO_GATHERS = (
    f"%x = {X} parameter(0)",
    f"%w = {W} parameter(1)",
    f"%y = {X} dot(%x, %x), {DOT}",
    f"%a = {PART} slice(%w), slice={{[0:512], [0:4096]}}",
    f"%one = {X} all-gather(%a), {GATHER}",
    f"%z = {X} dot(%y, %one), {DOT}",
    f"%b = {PART} slice(%w), slice={{[512:1024], [0:4096]}}",
    f"%other = {X} all-gather(%b), {GATHER}",
    f"%late = {PART} slice(%z), slice={{[0:512], [0:4096]}}",
    f"%third = {X} all-gather(%late), {GATHER}",
    f"%u = {X} dot(%z, %other), {DOT}",
    f"ROOT %v = {X} dot(%u, %third), {DOT}",
)


@pytest.mark.parametrize("most", [0, BYTES, 2 * BYTES])
def test_gathers_that_wait_for_nothing_are_one(most: int):
    """And the third, which waits for a matmul, is another."""
    group, sent = Group(8, 1), BYTES * 7 // 8
    sizes = [2 * sent, sent] if most == 2 * BYTES else [sent, sent, sent]
    found = estimated(*TWO_GATHERS, joined_bytes=most)
    wanted = sum(COST.collective_s("all-gather", size, group) for size in sizes)
    assert found.communication_s["NVLink"] == pytest.approx(wanted)
    assert found.bytes_moved["NVLink"] == 3 * sent


SCATTER = f"{GATHER}, to_apply=%sum"
LOOP = f"""HloModule jit_step

{SUM}
%body (t: (s32[], {X}, {PART}, {PART})) -> (s32[], {X}, {PART}, {PART}) {{
  %t = (s32[], {X}, {PART}, {PART}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %x = {X} get-tuple-element(%t), index=1
  %y = {X} dot(%x, %x), {DOT}
  %one = {PART} reduce-scatter(%y), {SCATTER}
  %z = {X} dot(%y, %y), {DOT}
  %other = {PART} reduce-scatter(%z), {SCATTER}
  ROOT %r = (s32[], {X}, {PART}, {PART}) tuple(%i, %z, %one, %other)
}}
%condition (t: (s32[], {X}, {PART}, {PART})) -> pred[] {{
  %t = (s32[], {X}, {PART}, {PART}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %n = s32[] constant(4)
  ROOT %c = pred[] compare(%i, %n), direction=LT
}}
ENTRY %main (t: (s32[], {X}, {PART}, {PART})) -> (s32[], {X}, {PART}, {PART}) {{
  %t = (s32[], {X}, {PART}, {PART}) parameter(0)
  ROOT %l = (s32[], {X}, {PART}, {PART}) while(%t), condition=%condition, body=%body, backend_config={{"known_trip_count":{{"n":"4"}}}}
}}
"""


@pytest.mark.parametrize("most", [0, BYTES])
def test_scatters_that_nothing_waits_for_are_one_under_the_next_iteration(most: int):
    group, sent = Group(8, 1), BYTES // 8 * 7
    found = estimate(hlo.parse_partitioned(LOOP, 8), COST, joined_bytes=most)
    one_s = COST.collective_s("reduce-scatter", sent, group)
    both_s = COST.collective_s("reduce-scatter", 2 * sent, group)
    assert found.communication_s["NVLink"] == pytest.approx(4 * (both_s if most else 2 * one_s))
    # The second one has nothing to hide behind but the next iteration.
    assert found.exposed_s == (pytest.approx(0, abs=1e-9) if most else pytest.approx(4 * one_s))
