"""An instruction makes no buffer if its result lies in its operand's memory."""

from __future__ import annotations

from jaxoverlap.passes.estimation.buffers import buffers, leaves
from jaxoverlap.simulation import hlo

TEXT = """HloModule jit_step, is_scheduled=true, num_partitions=8

%update (p.0: f32[8,4], p.1: f32[1,4]) -> f32[8,4] {
  %p.0 = f32[8,4]{1,0} parameter(0)
  %p.1 = f32[1,4]{1,0} parameter(1)
  %zero = s32[] constant(0)
  ROOT %dus = f32[8,4]{1,0} dynamic-update-slice(%p.0, %p.1, %zero, %zero)
}

%body (carry: (f32[8,4])) -> (f32[8,4]) {
  %carry = (f32[8,4]{1,0}) parameter(0)
  %inside = f32[8,4]{1,0} get-tuple-element(%carry), index=0
  ROOT %again = (f32[8,4]{1,0}) tuple(%inside)
}

%condition (carry.1: (f32[8,4])) -> pred[] {
  %carry.1 = (f32[8,4]{1,0}) parameter(0)
  ROOT %no = pred[] constant(false)
}

ENTRY %main (x: f32[8,4]) -> f32[8,4] {
  %x = f32[8,4]{1,0} parameter(0)
  %y = f32[8,4]{1,0} negate(%x)
  %start = ((f32[8,4]{1,0}), f32[8,4]{1,0}) collective-permute-start(%y), source_target_pairs={{0,1},{1,0}}
  %row = f32[1,4]{1,0} slice(%y), slice={[0:1], [0:4]}
  %done = f32[8,4]{1,0} collective-permute-done(%start)
  %new = f32[8,4]{1,0} fusion(%done, %row), kind=kLoop, calls=%update
  %flat = f32[32]{0} bitcast(%new)
  %gemm = (f32[8,8]{1,0}, s8[64]{0}) custom-call(%new, %new), custom_call_target="__cublas$lt$matmul"
  %product = f32[8,8]{1,0} get-tuple-element(%gemm), index=0
  %sum = f32[8,8]{1,0} custom-call(%new, %new, %product), custom_call_target="__cublas$lt$matmul", output_to_operand_aliasing={{}: (2, {})}
  %carried = (f32[8,4]{1,0}) tuple(%new)
  %loop = (f32[8,4]{1,0}) while(%carried), condition=%condition, body=%body
  ROOT %out = f32[8,4]{1,0} get-tuple-element(%loop), index=0
}
"""


def held() -> tuple[dict[str, tuple[int, ...]], list[int]]:
    module = hlo.parse(TEXT)
    entry_buffers = buffers(module, module.entry)
    return {
        name: tuple(leaves(value)) for name, value in entry_buffers.values.items()
    }, entry_buffers.bytes


def test_a_result_is_a_buffer_and_an_argument_none():
    of, size = held()
    assert of["x"] == ()
    assert [size[b] for b in of["y"]] == [128]
    assert [size[b] for b in of["gemm"]] == [256, 64]
    assert of["product"] == of["gemm"][:1]


def test_a_collective_holds_what_it_sends_and_what_arrives():
    of, _ = held()
    assert set(of["start"]) == {*of["y"], *of["done"]} and of["done"] != of["y"]


def test_updates_in_place_bitcasts_and_loops_make_no_buffer():
    of, _ = held()
    assert of["new"] == of["done"] == of["flat"] == of["loop"] == of["out"]
    assert of["sum"] == of["product"]


def test_an_instruction_holds_operands_and_result():
    module = hlo.parse(TEXT)
    entry_buffers = buffers(module, module.entry)
    body = {i.name: i for i in module.body(module.entry)}
    row = entry_buffers.held(body["row"])
    assert set(row) == {*leaves(entry_buffers.values["y"]), *leaves(entry_buffers.values["row"])}


def test_results_in_the_memory_of_arguments_are_not_counted():
    donating = TEXT.replace("num_part", "input_output_alias={ {}: (0, {}, may-alias) }, num_part")
    module = hlo.parse(donating)
    entry_buffers = buffers(module, module.entry)
    assert hlo.parse(TEXT).donated == frozenset() and module.donated == {0}
    assert [entry_buffers.bytes[b] for b in leaves(entry_buffers.values["out"])] == [0]
    assert sum(entry_buffers.bytes) == sum(held()[1]) - 8 * 4 * 4


TWICE = """HloModule jit_step, is_scheduled=true, num_partitions=8

%body (carry: (f32[8], f32[8], f32[8])) -> (f32[8], f32[8], f32[8]) {
  %carry = (f32[8]{0}, f32[8]{0}, f32[8]{0}) parameter(0)
  %a = f32[8]{0} get-tuple-element(%carry), index=0
  %b = f32[8]{0} get-tuple-element(%carry), index=1
  %c = f32[8]{0} get-tuple-element(%carry), index=2
  %more = f32[8]{0} add(%a, %c)
  %less = f32[8]{0} subtract(%b, %c)
  ROOT %again = (f32[8]{0}, f32[8]{0}, f32[8]{0}) tuple(%more, %less, %c)
}

%condition (carry.1: (f32[8], f32[8], f32[8])) -> pred[] {
  %carry.1 = (f32[8]{0}, f32[8]{0}, f32[8]{0}) parameter(0)
  ROOT %no = pred[] constant(false)
}

ENTRY %main (x: f32[8]) -> (f32[8], f32[8]) {
  %x = f32[8]{0} parameter(0)
  %zeros = f32[8]{0} negate(%x)
  %start = (f32[8]{0}, f32[8]{0}, f32[8]{0}) tuple(%zeros, %zeros, %zeros)
  %first = (f32[8]{0}, f32[8]{0}, f32[8]{0}) while(%start), condition=%condition, body=%body
  %sum = f32[8]{0} get-tuple-element(%first), index=0
  %rest = f32[8]{0} get-tuple-element(%first), index=1
  %next = (f32[8]{0}, f32[8]{0}, f32[8]{0}) tuple(%sum, %zeros, %rest)
  %second = (f32[8]{0}, f32[8]{0}, f32[8]{0}) while(%next), condition=%condition, body=%body
  %one = f32[8]{0} get-tuple-element(%second), index=0
  %two = f32[8]{0} get-tuple-element(%second), index=1
  ROOT %out = (f32[8]{0}, f32[8]{0}) tuple(%one, %two)
}
"""


def test_a_loop_copies_what_it_changes_if_others_need_it():
    module = hlo.parse(TWICE)
    of = {n: tuple(leaves(v)) for n, v in buffers(module, module.entry).values.items()}
    assert len({*of["sum"], *of["rest"], *of["zeros"]}) == 3, "the loop also reads the zeros"
    assert of["one"] == of["sum"], "the second loop goes on in place"
    assert of["two"] == of["zeros"], "after the second loop nobody reads them"
    assert of["first"][2:] == of["zeros"], "what is only read is not copied"


def test_an_element_of_another_tuple_is_not_what_the_loop_was_given():
    made = "%pair = (f32[8]{0}, f32[8]{0}) custom-call(%a, %c)\n  %more = f32[8]{0}"
    text = TWICE.replace(
        "%more = f32[8]{0} add(%a, %c)", f"{made} get-tuple-element(%pair), index=0"
    )
    assert text != TWICE
    module = hlo.parse(text)
    of = {n: tuple(leaves(v)) for n, v in buffers(module, module.entry).values.items()}
    assert of["sum"] != of["zeros"], "the loop changes it"
