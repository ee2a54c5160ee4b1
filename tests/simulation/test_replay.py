"""A module is replayed in time: seconds by hand."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxoverlap.simulation import hlo
from jaxoverlap.simulation.replay import UNKNOWN_TRIPS, replay
from jaxoverlap.simulation.timeline import NETWORK, NVLINK, Timeline
from tests.support.clock import clock
from tests.support.steps import (
    BODY,
    FAR,
    INNER,
    PAIRS,
    computation,
    copy,
    done,
    gemm,
    hop,
    loop,
    module,
    sync,
)


def times(*lines: str, before: str = "", **more) -> Timeline:
    return replay(module(*lines, before=before), clock(**more))


def near(got: Timeline, step: float, compute: float, communication: float, exposed: float) -> None:
    assert (got.step_s, got.compute_s, got.communication_s, got.exposed_s) == pytest.approx(
        (step, compute, communication, exposed)
    )


def test_kernels_run_one_after_the_other():
    near(times(gemm("a"), copy("c"), gemm("b")), 3, 3, 0, 0)


def test_a_collective_is_exposed_where_no_kernel_runs():
    near(times(hop("h"), done("h")), 1, 0, 1, 1)
    near(times(hop("h"), gemm("a"), done("h")), 1, 1, 1, 0)
    near(times(hop("h"), copy("c"), done("h")), 1, 1, 1, 0)  # any kernel hides, not matmuls only
    near(times(gemm("a"), hop("h"), done("h"), gemm("b")), 3, 2, 1, 1)


def test_what_a_kernel_does_not_cover_is_exposed():
    near(times(hop("h", 3), gemm("a"), done("h")), 3, 1, 3, 2)


def test_a_synchronous_collective_holds_the_kernels():
    near(times(sync("h"), gemm("a")), 2, 1, 1, 1)
    near(times(sync("h"), copy("c", of="h")), 2, 1, 1, 1)  # reads what was sent
    flag = 'backend_config={"collective_backend_config":{"is_sync":true}}'
    near(times(f"{hop('h')}, {flag}", gemm("a"), done("h")), 2, 1, 1, 1)


def test_devices_that_share_cores_wait_for_the_last_one():
    near(times(gemm("a"), sync("h"), gemm("b"), skew=0.5), 3.5, 2, 1.5, 1.5)
    near(times(gemm("a"), sync("h"), sync("i"), skew=0.5), 3.5, 1, 2.5, 2.5)  # once
    near(times(hop("h"), gemm("a"), done("h"), skew=0.5), 1, 1, 1, 0)  # nothing computed before


ATTENTION = (
    '%a = (bf16[1,1000,1,64]{3,1,2,0}, u8[0]{0}) custom-call(%q, %q, %q), custom_call_target="'
    '__cudnn$fmhaSoftmax", backend_config={"intermediate_tensor_shape":{"dimensions":["1","1",'
    '"1000","1000"]},"mask_type":"CAUSAL"}'
)


def test_attention_has_a_price_of_its_own_and_hides_a_hop():
    query = "%q = bf16[1,1000,1,64]{3,2,1,0} parameter(0)"
    near(times(query, hop("h"), ATTENTION, done("h")), 1, 0.5, 1, 0.5)
    near(times(query, hop("h"), ATTENTION, done("h"), sms=1), 1, 0.5, 1, 0)


def test_attention_that_the_cost_model_does_not_know_is_named():
    query = "%q = f8e4m3fn[1,1000,1,64]{3,2,1,0} parameter(0)"
    got = times(query, ATTENTION)
    assert got.unknown == {"attention of f8e4m3fn": 1}
    assert got.step_s > 0


def test_a_link_carries_one_collective_at_a_time():
    got = times(hop("h"), hop("i"), gemm("a"), done("h"), done("i"))
    near(got, 2, 1, 2, 1)
    assert got.link_s == {NVLINK: 2, NETWORK: 0}


def test_a_stream_runs_one_collective_at_a_time_on_whatever_link():
    got = times(hop("h"), hop("i", 0.25, FAR), gemm("a"), done("h"), done("i"))
    near(got, 2, 1, 2, 1)
    assert got.link_s == {NVLINK: 1, NETWORK: 1}
    assert {s.collective.name: s.exposed_s for s in got.spent} == {"i": 1, "h": 0}


def test_a_stream_for_nvlink_lets_both_links_run_at_once():
    got = times(hop("h", scale_up=True), hop("i", 0.25, FAR), gemm("a"), done("h"), done("i"))
    near(got, 1, 1, 2, 0)
    assert got.link_s == {NVLINK: 1, NETWORK: 1}
    assert got.bound_s == 1


def test_who_waits_for_one_stream_waits_for_what_runs_there_on_another_link():
    got = times(hop("i", 0.5, FAR), hop("h"), gemm("a"), done("h"), gemm("b"), done("i"))
    near(got, 4, 2, 3, 2)
    assert {s.collective.name: s.exposed_s for s in got.spent} == {"i": 1, "h": 1}


def test_a_synchronous_collective_waits_for_no_stream():
    """It runs on the stream of the kernels: beside a network collective that is on its way."""
    got = times(hop("i", 0.5, FAR), gemm("a"), sync("s"), gemm("b"), done("i"))
    near(got, 3, 2, 3, 1)
    assert {s.collective.name: s.exposed_s for s in got.spent} == {"s": 1, "i": 0}


def test_so_does_one_with_no_kernel_before_its_done():
    got = times(hop("i", 0.5, FAR), gemm("a"), hop("s"), done("s"), gemm("b"), done("i"))
    near(got, 3, 2, 3, 1)


def test_what_runs_on_the_link_is_exposed_and_not_who_is_waited_for():
    """The second is waited for first, while the first still holds the link."""
    got = times(hop("h", 2), hop("i"), done("i"), done("h"))
    near(got, 3, 0, 3, 3)
    assert {s.collective.name: s.exposed_s for s in got.spent} == {"h": 2, "i": 1}


def test_a_reduction_of_what_is_known():
    got = times(hop("h", 3), gemm("a"), done("h"), hop("i"), gemm("b"), done("i"))
    spent = {s.collective.name: (s.seconds, s.exposed_s) for s in got.spent}
    assert spent == {"h": (3, 2), "i": (1, 0)}
    assert [s.collective.name for s in got.spent] == ["h", "i"]  # longest exposed first


# -- contention -------------------------------------------------------------------------------------


def test_kernels_slow_down_only_while_a_collective_runs():
    # The matmul runs at half speed for a second beside the hop, then at full speed: 0.5 is left.
    got = times(hop("h"), gemm("a"), done("h"), sms=1)
    near(got, 1.5, 1, 1, 0)
    assert got.slowdown_s == pytest.approx(0.5)
    assert got.bound_s == 1


def test_two_collectives_take_more_than_one():
    # 1 s at a third, then 1 s at a half, and 1/6 alone.
    near_by = hop("h", scale_up=True)  # on a stream of its own
    got = times(near_by, hop("i", 0.5, FAR), gemm("a"), done("h"), done("i"), sms=1)
    near(got, 1 + 1 + 1 / 6, 1, 3, 0)


def test_a_collective_that_begins_under_a_kernel_slows_the_rest_of_it():
    # On the network, behind each other: 0.4 s each. At half speed for all 0.8 s: 0.6 is left.
    got = times(hop("h", 0.1, FAR), hop("i", 0.1, FAR), gemm("a"), done("h"), done("i"), sms=1)
    near(got, 1.4, 1, 0.8, 0)


def test_memory_bound_kernels_have_a_share_of_their_own():
    near(times(hop("h"), copy("c"), done("h"), sms=1), 1, 1, 1, 0)
    near(times(hop("h"), copy("c"), done("h"), memory=1), 1.5, 1, 1, 0)


# -- loops, calls, branches -------------------------------------------------------------------------


def test_a_loop_runs_by_its_trips():
    got = times(loop(5), before=BODY)
    near(got, 15, 10, 10, 5)
    (repeat,) = got.repeats
    assert (repeat.start_s, repeat.period_s, repeat.times) == (0, 3, 5)
    assert [got.events[i].name for i in range(*repeat.events)] == ["r", "a", "r", "b"]
    assert {e.runs for e in got.events} == {5}


def test_what_is_in_flight_around_a_loop_meets_its_first_iterations_only():
    """Four seconds of the network run beside kernels at half speed; NVLink's hop does the same."""
    far = hop("s", 1, FAR)
    got = times(far, loop(5, body="inner"), done("s"), before=INNER, sms=1)
    near(got, 2 * 2 + 3, 5, 4, 0)  # two iterations of 2 s, three of 1 s
    assert [e.runs for e in got.events if e.name == "z"] == [1, 1, 3]


def test_a_collective_longer_than_the_loop_is_waited_for_after_it():
    got = times(hop("s", 2, FAR), loop(5, body="inner"), done("s"), before=INNER)
    near(got, 8, 5, 8, 3)


def test_loops_in_loops():
    outer = computation("%outer", loop(3, body="inner"), sync("h"))
    got = times(loop(2, body="outer"), before=INNER + outer)
    near(got, 8, 6, 2, 2)
    assert [(r.computation, r.times) for r in got.repeats] == [("inner", 3), ("outer", 2)]
    assert {e.name: e.runs for e in got.events} == {"z": 6, "h": 2}


def test_a_loop_of_unknown_trips_runs_once_and_is_named():
    got = times(loop(None), before=BODY)
    near(got, 3, 2, 2, 1)
    assert got.unknown == {UNKNOWN_TRIPS: 1}


def test_a_call_runs_what_it_calls():
    near(times("%c = () call(%x), to_apply=%body", before=BODY), 3, 2, 2, 1)


def test_the_slowest_branch_runs():
    branches = "%c = () conditional(%x, %x), branch_computations={%inner, %body, %inner}"
    got = times(hop("s", 1, FAR), branches, done("s"), gemm("e"), before=BODY + INNER)
    near(got, 8, 3, 6, 5)  # the hop stands behind what was started before the branch
    assert [e.name for e in got.events] == ["s", "r", "a", "s", "r", "b", "e"]


@pytest.mark.parametrize(
    ("scope", "seconds"),
    [("runs_1_of_4", 3 + 3 * 1), ("runs_1_of_4_and_last", 3 + 3 * 1), ("runs_2_of_4", 2 * 3 + 2)],
)
def test_the_slowest_branch_runs_as_often_as_its_name_says(scope, seconds):
    branches = "%c = () conditional(%x, %x), branch_computations={%inner, %body}"
    named = f'{branches}, metadata={{op_name="jit(f)/while/body/{scope}/cond"}}'
    got = times(loop(4, body="outer"), before=BODY + INNER + computation("%outer", named))
    assert got.step_s == pytest.approx(seconds)


@pytest.mark.parametrize(("scope", "seconds"), [("runs_0_of_1", 1), ("runs_1_of_1", 3)])
def test_a_branch_outside_of_loops_runs_if_its_name_says_so(scope, seconds):
    branches = "%c = () conditional(%x, %x), branch_computations={%body, %inner}"
    named = f'{branches}, metadata={{op_name="jit(f)/{scope}/cond"}}'
    assert times(named, before=BODY + INNER).step_s == pytest.approx(seconds)


# -- what is not known, and mistakes ----------------------------------------------------------------


def test_unknown_ops_are_named_counted_and_cost_their_bytes():
    sort = "%s = s8[1000000]{0} sort(%m), dimensions={0}, to_apply=%less"
    mystery = '%y = s8[1000000]{0} custom-call(%m), custom_call_target="my_kernel"'
    got = times(loop(4, body="odd"), before=computation("%odd", sort, mystery))
    assert got.unknown == {"sort": 4, "my_kernel": 4}
    near(got, 8, 8, 0, 0)


def test_a_matmul_that_the_cost_model_does_not_know_is_named_and_costs_its_bytes():
    lhs, rhs = "%l = f64[500,500]{1,0} bitcast(%x)", "%r = f64[500,500]{1,0} bitcast(%x)"
    dot = "dot(%l, %r), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    got = times(lhs, rhs, f"%d = f64[500,500]{{1,0}} {dot}")
    assert got.unknown == {"matmul of f64": 1}
    near(got, 3, 3, 0, 0)  # three arrays of 2 MB


def test_a_cluster_of_another_size():
    with pytest.raises(
        ValueError, match=r"compiled for 16 devices, but cluster h100-sxm:1x8 has 8"
    ):
        times(gemm("a"), cluster="h100-sxm:1x8")


def test_two_orders_of_one_computation_compare():
    step = module(hop("h"), done("h"), gemm("a"))
    *head, wait, matmul, root = step.body("main")
    later = {**step.computations, "main": (*head, matmul, wait, root)}
    near(replay(step, clock()), 2, 1, 1, 1)
    near(replay(dataclasses.replace(step, computations=later), clock()), 1, 1, 1, 0)


# -- properties -------------------------------------------------------------------------------------


@st.composite
def schedules(draw: st.DrawFn, depth: int = 1) -> tuple[str, ...]:
    """Draw a legal schedule's lines: kernels, hops and dones in any order, a loop at times."""
    lines, open_hops = [], []
    kinds = ["gemm", "copy", "hop", "far", "sync", "done"] + ["loop"] * depth
    for position, kind in enumerate(draw(st.lists(st.sampled_from(kinds), max_size=12))):
        seconds = draw(st.sampled_from([0.25, 0.5, 1.0, 2.5]))
        if kind in ("hop", "far"):
            lines.append(hop(f"h{position}", seconds, FAR if kind == "far" else PAIRS))
            open_hops.append(f"h{position}")
        elif kind == "done" and open_hops:
            lines.append(done(open_hops.pop(draw(st.integers(0, len(open_hops) - 1)))))
        elif kind == "loop":
            lines.append(loop(draw(st.integers(1, 6)), f"l{position}"))
        elif kind != "done":
            lines.append({"gemm": gemm, "copy": copy, "sync": sync}[kind](f"k{position}"))
    return (*lines, *map(done, draw(st.permutations(open_hops))))


@st.composite
def modules(draw: st.DrawFn) -> hlo.Module:
    body = computation("%body", *draw(schedules(depth=0)))
    return module(*draw(schedules()), before=body)


@given(modules(), st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from([0.0, 1.0]))
@settings(deadline=None)
def test_a_step_is_compute_slowdown_and_exposed(step: hlo.Module, sms: float, memory: float):
    got = replay(step, clock(sms=sms, memory=memory))
    assert got.step_s == pytest.approx(got.compute_s + got.slowdown_s + got.exposed_s)
    assert got.slowdown_s >= -1e-9
    assert got.step_s >= got.bound_s - 1e-9
    assert got.exposed_s <= got.communication_s + 1e-9
    for s in got.spent:
        assert -1e-9 <= s.exposed_s <= s.seconds + 1e-9
    assert sum(s.exposed_s for s in got.spent) == pytest.approx(got.exposed_s)
    assert sum(s.seconds for s in got.spent) == pytest.approx(got.communication_s)


@given(modules())
@settings(deadline=None)
def test_a_repeat_is_what_running_every_iteration_gives(step: hlo.Module):
    """A loop of known trips takes as long as that many calls of its body, one after the other."""
    unrolled = {name: _unrolled(body) for name, body in step.computations.items()}
    flat = hlo.Module(step.name, step.entry, step.num_devices, unrolled, step.frames)
    for sms in (0.0, 1.0):
        got, want = replay(step, clock(sms=sms)), replay(flat, clock(sms=sms))
        near(got, want.step_s, want.compute_s, want.communication_s, want.exposed_s)


def _unrolled(body: tuple[hlo.Instruction, ...]) -> tuple[hlo.Instruction, ...]:
    return tuple(
        hlo.Instruction(i.name, "()", "call", (), "  %c = () call(), to_apply=%body")
        if i.opcode == "while"
        else i
        for i in body
        for _ in range(i.trip_count or 1 if i.opcode == "while" else 1)
    )


@given(modules(), st.sampled_from([1.5, 2.0, 8.0]))
@settings(deadline=None)
def test_faster_links_make_no_step_slower(step: hlo.Module, speedup: float):
    slow, fast = replay(step, clock()), replay(step, clock(speedup=speedup))
    assert fast.step_s <= slow.step_s + 1e-9
    assert fast.exposed_s <= slow.exposed_s + 1e-9


def test_a_module_of_100_000_instructions():
    lines = []
    for n in range(20_000):
        lines += [hop(f"h{n}"), gemm(f"a{n}"), copy(f"c{n}"), done(f"h{n}")]
    got = times(*lines)
    near(got, 40_000, 40_000, 20_000, 0)
    assert len(got.events) == 60_000
