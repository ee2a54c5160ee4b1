"""Each computation may use the step's peak memory, less what is live around it."""

from __future__ import annotations

import functools

import pytest

from jaxoverlap.passes.estimation.buffers import buffers
from jaxoverlap.passes.estimation.memory_limits import rooms
from jaxoverlap.simulation import hlo

MB = 2**20


def loop(name: str, inside_mb: int) -> str:
    """Return a while whose body holds so much at its peak."""
    return f"""
%{name} (carry: (s32[])) -> (s32[]) {{
  %carry = (s32[]) parameter(0)
  %i = s32[] get-tuple-element(%carry), index=0
  %large = u8[{inside_mb * MB}] broadcast(%i), dimensions={{}}
  %used = s32[] reduce(%large, %i), dimensions={{0}}, to_apply=%sum
  ROOT %again = (s32[]) tuple(%used)
}}

%{name}_condition (carry: (s32[])) -> pred[] {{
  %carry = (s32[]) parameter(0)
  ROOT %no = pred[] constant(false)
}}
"""


# Forwards, little is live in the body and nothing around it; backwards, much of both.
STEP = f"""HloModule jit_step, is_scheduled=true, num_partitions=8
{loop("forward", 10)}{loop("backward", 40)}
ENTRY %main (x: s32[]) -> s32[] {{
  %x = s32[] parameter(0)
  %in = (s32[]) tuple(%x)
  %there = (s32[]) while(%in), condition=%forward_condition, body=%forward
  %saved = u8[{30 * MB}] broadcast(%x), dimensions={{}}
  %back = (s32[]) while(%there), condition=%backward_condition, body=%backward
  %grad = s32[] get-tuple-element(%back), index=0
  ROOT %out = s32[] reduce(%saved, %grad), dimensions={{0}}, to_apply=%sum
}}
"""


@pytest.mark.parametrize("slack", [0.0, 0.1])
def test_where_little_is_live_there_is_room_up_to_the_steps_peak(slack: float):
    module = hlo.parse(STEP)
    room_of = rooms(module, functools.partial(buffers, module), slack)
    mb = {name: round(room / MB) for name, room in room_of.items()}
    peak = round(70 * (1 + slack))
    assert (mb["main"], mb["forward"], mb["backward"]) == (peak, peak, peak - 30)


def test_a_computation_called_twice_has_the_room_that_it_has_everywhere():
    module = hlo.parse(STEP.replace("body=%forward\n", "body=%backward\n"))
    room_of = rooms(module, functools.partial(buffers, module))
    assert round(room_of["backward"] / MB) == 40 and "forward" not in room_of


def test_what_the_user_keeps_alive_is_the_outermost_computation_s_alone():
    module = hlo.parse(STEP)
    given = rooms(module, functools.partial(buffers, module), extra_bytes=15 * MB)
    without = rooms(module, functools.partial(buffers, module))
    assert given == {**without, "main": without["main"] + 15 * MB}
