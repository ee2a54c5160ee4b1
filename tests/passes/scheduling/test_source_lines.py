"""Source lines of a module that came back from a Python pass are put right."""

from __future__ import annotations

from jaxoverlap.passes.scheduling.source_lines import SourceLines
from jaxoverlap.simulation import hlo

HEAD = "HloModule jit_step, is_scheduled=true, num_partitions=8\n"
TABLES = """
FileNames
1 "/home/me/step.py"

FunctionNames
1 "step"

FileLocations
1 {file_name_id=1 function_name_id=1 line=7 end_line=7 column=0 end_column=0}
2 {file_name_id=1 function_name_id=1 line=9 end_line=9 column=0 end_column=0}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}

"""
BODY = """%main (x: f32[8]) -> f32[8] {{
  %x = f32[8]{{0}} parameter(0)
  %y = f32[8]{{0}} negate(%x), metadata={{op_name="jit(step)/neg" stack_frame_id={y}}}
  %new = f32[8]{{0}} copy(%y){new}
  ROOT %z = f32[8]{{0}} abs(%new), metadata={{op_name="jit(step)/abs" stack_frame_id={z}}}
}}
"""
GIVEN = HEAD + TABLES + "ENTRY " + BODY.format(y=1, z=2, new="")
# A Python pass gives this back: one table entry is lost, and the numbers are others.
LOST = TABLES.replace("2 {file_loc", "3 {file_loc").replace("line=7", "line=99")
BACK = HEAD + LOST + "ENTRY " + BODY.format(
    y=3, z=1, new=', metadata={op_name="jit(step)/abs" stack_frame_id=1}'
)  # fmt: skip


def sources(text: str) -> dict[str, str]:
    module = hlo.parse(text)
    return {i.name: module.source(i) for i in module.body(module.entry)}


def test_each_instruction_has_the_line_that_it_had():
    right = {"y": "me/step.py:7", "z": "me/step.py:9"}
    assert {name: sources(GIVEN)[name] for name in right} == right
    assert {name: sources(BACK)[name] for name in right} != right
    restored = sources(SourceLines.of(GIVEN).restored(BACK))
    assert {name: restored[name] for name in right} == right


def test_what_came_later_has_no_line_and_nothing_else_changes():
    restored = SourceLines.of(GIVEN).restored(BACK)
    assert sources(restored)["new"] == ""
    assert 'copy(%y), metadata={op_name="jit(step)/abs"}' in restored
    assert SourceLines.of(GIVEN).restored(GIVEN) == GIVEN
