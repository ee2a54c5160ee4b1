"""The yardstick's seconds are those by hand, for modules cut down as in simulation/test_audit.py."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks import yardstick as y
from benchmarks.yardstick import Seconds, seconds_row, yardstick

HEAD = "HloModule jit_step, is_scheduled=true, num_partitions=16"
ADD = """%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}
"""
X = "%x = bf16[4096,4096]{1,0} parameter(0)"
FLOPS, BYTES = 2 * 4096**3, 2 * 4096**2

HOST, NETWORK = "replica_groups=[2,8]<=[16]", "replica_groups=[8,2]<=[2,8]T(1,0)"


def gemm(name: str, call: str = "custom-call") -> str:
    return (
        f"%{name} = (bf16[4096,4096]{{1,0}}, s8[1024]{{0}}) {call}(%x, %x), "
        'custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":{'
        '"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],'
        '"rhs_contracting_dimensions":["0"]}}}'
    )


def start(name: str, groups: str = HOST) -> str:
    return f"%{name} = (bf16[4096,4096]{{1,0}}, bf16[4096,4096]{{1,0}}) all-reduce-start(%x), {groups}, to_apply=%add"


def done(name: str) -> str:
    return f"%{name}.done = bf16[4096,4096]{{1,0}} all-reduce-done(%{name})"


def body(*lines: str) -> str:
    return "\n".join(f"  {line}" for line in (X, *lines, "ROOT %end = () tuple()"))


def module(*lines: str, before: str = ADD) -> str:
    return f"{HEAD}\n\n{before}\nENTRY %main (x: bf16[4096,4096]) -> () {{\n{body(*lines)}\n}}\n"


def seconds(*lines: str, before: str = ADD) -> Seconds:
    return yardstick(module(*lines, before=before), 8).seconds


MATMUL = FLOPS / 650e12  # 211 us
REDUCE = 15e-6 + 2 * BYTES * 7 // 8 / 317e9  # 200 us: within a host
SLOW = 15e-6 + BYTES / 45e9  # 761 us: 2 devices, each on another host


def near(got: Seconds, matmul: float, collective: float, exposed: float) -> None:
    assert dataclasses.astuple(got) == pytest.approx((matmul, collective, exposed), abs=1e-12)


def test_a_matmul_takes_its_operations_at_the_rate():
    assert pytest.approx(211.4e-6, rel=1e-3) == MATMUL
    near(seconds(gemm("a"), gemm("b")), 2 * MATMUL, 0, 0)


def test_a_plain_dot_and_one_in_a_fusion_count_too():
    dot = "dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    fused = (
        "%fused (x: bf16[4096,4096]) -> bf16[4096,4096] {\n"
        f"  {X}\n  ROOT %d = bf16[4096,4096]{{1,0}} {dot}\n}}\n"
    )
    lines = (
        f"%d = bf16[4096,4096]{{1,0}} {dot}",
        "%f = bf16[4096,4096]{1,0} fusion(%x), kind=kLoop, calls=%fused",
    )
    near(seconds(*lines, before=ADD + fused), 2 * MATMUL, 0, 0)


def test_batches_multiply():
    lhs = "%l = bf16[32,64,128]{2,1,0} bitcast(%x)"
    rhs = "%r = bf16[32,128,16]{2,1,0} bitcast(%x)"
    dims = (
        "lhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_batch_dims={0}, rhs_contracting_dims={1}"
    )
    got = seconds(lhs, rhs, f"%d = bf16[32,64,16]{{2,1,0}} dot(%l, %r), {dims}")
    near(got, 2 * 32 * 64 * 128 * 16 / 650e12, 0, 0)


def test_a_collective_is_exposed_where_no_matmul_runs():
    near(seconds(start("r"), done("r")), 0, REDUCE, REDUCE)
    near(seconds(start("r"), gemm("a"), done("r")), MATMUL, REDUCE, 0)
    near(seconds(gemm("a"), start("r"), done("r")), MATMUL, REDUCE, REDUCE)


def test_what_a_matmul_does_not_cover_is_exposed():
    near(seconds(start("r", NETWORK), gemm("a"), done("r")), MATMUL, SLOW, SLOW - MATMUL)


def test_a_synchronous_collective_is_all_exposed():
    sync = f"%r = bf16[4096,4096]{{1,0}} all-reduce(%x), {HOST}, to_apply=%add"
    near(seconds(sync, gemm("a")), MATMUL, REDUCE, REDUCE)


def test_a_link_carries_one_collective_at_a_time():
    got = seconds(start("r"), start("s"), gemm("a"), done("r"), done("s"))
    near(got, MATMUL, 2 * REDUCE, 2 * REDUCE - MATMUL)


def test_the_links_within_hosts_and_between_them_are_two():
    got = seconds(start("r"), start("s", NETWORK), gemm("a"), done("r"), done("s"))
    near(got, MATMUL, REDUCE + SLOW, SLOW - MATMUL)


def test_one_matmul_hides_one_collective_once():
    """Both have the matmul under them, and yet the second waits."""
    lines = (start("r"), gemm("a"), done("r"), start("s"), done("s"))
    near(seconds(*lines), MATMUL, 2 * REDUCE, REDUCE)


def test_a_permute_has_less_latency_and_sends_what_it_has():
    hop = "%p = (bf16[4096,4096]{1,0}, bf16[4096,4096]{1,0}) collective-permute-start(%x), source_target_pairs={{0,1},{1,0}}"
    wait = "%p.done = bf16[4096,4096]{1,0} collective-permute-done(%p)"
    near(seconds(hop, wait), 0, 8e-6 + BYTES / 317e9, 8e-6 + BYTES / 317e9)
    far = hop.replace("{{0,1},{1,0}}", "{{0,8},{8,0}}")
    near(seconds(far, wait), 0, 8e-6 + BYTES / 45e9, 8e-6 + BYTES / 45e9)


LOOP = (
    "%body (x: bf16[4096,4096]) -> () {\n" + body(start("r"), done("r"), gemm("a")) + "\n}\n"
    "%condition (x: bf16[4096,4096]) -> pred[] {\n  ROOT %t = pred[] constant(true)\n}\n"
)
WHILE = '%loop = () while(%x), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"5"}}'


def test_a_loop_counts_by_its_trips():
    near(seconds(WHILE, before=ADD + LOOP), 5 * MATMUL, 5 * REDUCE, 5 * REDUCE)


def test_a_loop_hides_what_is_in_flight_around_it():
    got = seconds(start("s", NETWORK), WHILE, done("s"), before=ADD + LOOP)
    near(got, 5 * MATMUL, 5 * REDUCE + SLOW, 5 * REDUCE)


def test_each_collective_says_for_how_long_it_is_exposed():
    text = module(start("s", NETWORK), gemm("a"), done("s"), WHILE, before=ADD + LOOP)
    measured = yardstick(text, 8)
    by_name = {c.name: seconds for c, seconds in measured.exposed.items()}
    assert by_name == pytest.approx({"s": SLOW - MATMUL, "r": 5 * REDUCE})
    row = seconds_row(measured)
    assert [(e["devices"], e["runs"]) for e in row["exposed"]] == [(8, 5), (2, 1)]
    assert row["exposed_s"] == pytest.approx(sum(by_name.values()), abs=1e-4)
    assert len(seconds_row(measured, most=1)["exposed"]) == 1


def test_seconds_add_and_scale():
    assert Seconds(1, 2, 3) + Seconds(1, 1, 1) * 2 == Seconds(3, 4, 5)
    assert Seconds(1, 2, 3).total == 4


def test_a_matmul_of_unknown_size_is_an_error_and_not_nothing():
    mystery = '%m = bf16[4096,4096]{1,0} custom-call(%x), custom_call_target="my_matmul"'
    with pytest.raises(ValueError, match="matmuls of unknown size: m"):
        yardstick(module(start("r"), mystery, done("r")), 8)


def test_the_rates():
    """The committed rows were measured with these rates."""
    rates = (y.MATMUL_FLOPS, y.HOST_BYTES_PER_S, y.NETWORK_BYTES_PER_S)
    assert rates == (650e12, 317e9, 45e9)
    assert (y.HOP_S, y.COLLECTIVE_S) == (8e-6, 15e-6)
