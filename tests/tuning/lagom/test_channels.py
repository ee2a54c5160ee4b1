"""Channels of a schedule's collectives are searched, held against NCCL's, and named as there."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxoverlap.cost.find import cost_model
from jaxoverlap.cost.groups import Group
from jaxoverlap.cost.model import Channels, CostModel
from jaxoverlap.flags.nccl_tuner import ChannelRow, tuner_csv
from jaxoverlap.simulation.audit import audit
from jaxoverlap.simulation.simulation import simulate
from jaxoverlap.tuning.lagom.channels import co_tune, nccl_bytes

MIB = 1 << 20
HOST = cost_model("h100-sxm:1x8")
START = (
    "%g = (bf16[{part}]{{0}}, bf16[{whole}]{{0}}) all-gather-start(%w), dimensions={{0}}, "
    "replica_groups={groups}"
)
DONE = "%g.done = bf16[{whole}]{{0}} all-gather-done(%g)"
MATMUL = (
    "%a = bf16[8192,8192]{{1,0}} dot(%x, %x), lhs_contracting_dims={{1}}, "
    "rhs_contracting_dims={{0}}"
)


def module(*lines: str, devices: int = 8, groups: str = "[1,8]<=[8]", ranks: int = 8) -> str:
    """Return a module that gathers 64 MiB among some ranks."""
    sizes = {"part": 32 * MIB // ranks, "whole": 32 * MIB, "groups": groups}
    body = "\n  ".join(lines).format(**sizes)
    return f"""HloModule jit_step, is_scheduled=true, num_partitions={devices}

ENTRY %main (x: bf16[8192,8192], w: bf16[{sizes["part"]}]) -> () {{
  %x = bf16[8192,8192]{{1,0}} parameter(0)
  %w = bf16[{sizes["part"]}]{{0}} parameter(1)
  {body}
  ROOT %end = () tuple()
}}
"""


HIDDEN = module(START, MATMUL, DONE)
EXPOSED = module(START, DONE, MATMUL)


def test_a_gather_with_time_to_spare_leaves_sms_to_the_matmul_beside_it():
    co_tuned = co_tune(HIDDEN, HOST)
    assert co_tuned.step.step_s < simulate(HIDDEN, HOST).step_s
    (row,) = co_tuned.rows
    own = HOST.share("all-gather", 56 * MIB, Group(8)).sms
    assert row.channels is not None and row.channels < own
    assert row == ChannelRow(
        kind="all_gather",
        min_bytes=64 * MIB,
        max_bytes=64 * MIB,
        channels=row.channels,
        nodes=1,
        ranks=8,
    )
    assert f"allgather,{64 * MIB},{64 * MIB},ring,simple,{row.channels},1,8" in tuner_csv((row,))


def test_the_step_is_what_the_rows_give():
    co_tuned = co_tune(HIDDEN, HOST)
    assert co_tuned.rows[0].channels is not None
    sent = ("all-gather", 56 * MIB, Group(8))
    cost = dataclasses.replace(HOST, given=((sent, Channels(co_tuned.rows[0].channels, 2 * MIB)),))
    assert co_tuned.step.step_s == pytest.approx(simulate(HIDDEN, cost).step_s, rel=1e-12)


def test_what_only_the_models_lanes_hide_has_no_row():
    """In the model all runs beside all; in the schedule the gather is waited for at once."""
    co_tuned = co_tune(EXPOSED, HOST)
    assert co_tuned.evaluations > 1 and co_tuned.rows == ()
    assert co_tuned.step.step_s == simulate(EXPOSED, HOST).step_s


def test_nothing_is_searched_where_nccl_asks_no_tuner():
    permute = (
        "%g = (bf16[{part}]{{0}}, bf16[{part}]{{0}}) collective-permute-start(%w), "
        "source_target_pairs={{{{0,1}},{{1,0}}}}",
        MATMUL,
        "%g.done = bf16[{part}]{{0}} collective-permute-done(%g)",
    )
    co_tuned = co_tune(module(*permute), HOST)
    assert (co_tuned.evaluations, co_tuned.rows) == (0, ())


def rows(text: str, cost: CostModel) -> tuple[ChannelRow, ...]:
    tuner_rows = co_tune(text, cost).rows
    assert tuner_rows
    return tuner_rows


def test_a_row_names_the_communicator_by_hosts_and_ranks():
    text = module(START, MATMUL, DONE, devices=16, groups="[1,16]<=[16]", ranks=16)
    (row,) = rows(text, cost_model("h100-sxm:2x8"))
    assert (row.nodes, row.ranks) == (2, 16)


def test_in_a_rack_the_same_gather_on_one_host_and_on_two_is_one_row():
    both = [
        line.replace("%g", f"%{name}").replace("%a ", f"%a{name} ").replace("{groups}", groups)
        for name, groups in (("near", "[2,4]<=[8]"), ("far", "[2,4]<=[4,2]T(1,0)"))
        for line in (START, MATMUL, DONE)
    ]
    (row,) = rows(module(*both, ranks=4), cost_model("gb200:2x4"))
    assert (row.nodes, row.ranks) == (None, 4)


# -- the size by which NCCL knows it ----------------------------------------------------------------


def moved(kind: str, operand: int, result: int, ranks: int) -> int:
    """Return the bytes that each device sends, as the audit says."""
    text = f"""HloModule m, is_scheduled=true, num_partitions={ranks}

ENTRY %main (w: s8[{operand}]) -> s8[{result}] {{
  %w = s8[{operand}]{{0}} parameter(0)
  ROOT %g = s8[{result}]{{0}} {kind}(%w), replica_groups=[1,{ranks}]<=[{ranks}]
}}
"""
    (collective,) = audit(text).collectives
    return collective.bytes_moved


@pytest.mark.parametrize(
    ("kind", "sent", "whole"),
    [
        ("all-gather", 7 * MIB, 8 * MIB),
        ("reduce-scatter", 7 * MIB, 8 * MIB),
        ("all-reduce", 14 * MIB, 8 * MIB),
    ],
)
def test_the_closed_forms_of_a_ring_of_eight(kind: str, sent: int, whole: int):
    assert nccl_bytes(kind, sent, 8) == whole


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 576), st.integers(1, 2**40))
def test_nccl_is_told_the_size_that_was_sent(ranks: int, part: int):
    whole = ranks * part
    assert nccl_bytes("all-gather", moved("all-gather", part, whole, ranks), ranks) == whole
    scattered = moved("reduce-scatter", whole, part, ranks)
    assert nccl_bytes("reduce-scatter", scattered, ranks) == whole
    # A sum need not divide by the ranks; a ring's bytes are then rounded down.
    assert nccl_bytes("all-reduce", moved("all-reduce", part, part, ranks), ranks) == part
