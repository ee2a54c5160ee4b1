"""Scheduled HLO is read from lines as XLA prints them, cut down by hand."""

from __future__ import annotations

import re

import pytest

from jaxoverlap.simulation.hlo import Instruction, array_shapes, fastest_dim, parse, shape_bytes

HEAD = "HloModule jit_train_step, is_scheduled=true, entry_computation_layout={(f32[8]{0})->f32[8]{0}}, num_partitions=8\n"

# A step of jax 0.12 compiled for H100s: tables, a reducer, a fusion, the entry.
STEP = (
    HEAD
    + """
FileNames
1 "/home/user/models/gpt.py"
2 "train.py"
3 "<string>"

FunctionNames
1 "<lambda>"
2 "attention"

FileLocations
1 {file_name_id=1 function_name_id=2 line=88 end_line=90 column=13 end_column=13}
2 {file_name_id=2 function_name_id=1 line=7 end_line=7 column=28 end_column=28}
3 {file_name_id=3 function_name_id=1 line=10 end_line=10 column=6 end_column=6}

StackFrames
1 {file_location_id=3 parent_frame_id=1}
2 {file_location_id=1 parent_frame_id=2}
3 {file_location_id=2 parent_frame_id=1}


%region_2.2.clone (reduce_max.24: f32[], reduce_max.25: f32[]) -> f32[] {
  %reduce_max.24 = f32[] parameter(0), metadata={op_name="reduce_max" scheduling_name="reduce_max.24"}
  %reduce_max.25 = f32[] parameter(1), metadata={op_name="reduce_max"}
  ROOT %maximum.1 = f32[] maximum(%reduce_max.24, %reduce_max.25), metadata={op_name="jit(f)/max" stack_frame_id=3}
}

%fused_broadcast.7 () -> f32[2,4] {
  %constant.1 = f32[] constant(0)
  ROOT %broadcast.3 = f32[2,4]{1,0} broadcast(%constant.1), dimensions={}
}

ENTRY %main.35_spmd (param.4: s32[], param.17: f32[32,4096]) -> (f32[2,4], f32[]) {
  %param.4 = s32[] parameter(0), metadata={op_name="state[0].step"}
  %param.17 = f32[32,4096]{1,0} parameter(1), metadata={op_name="state[0].params[\\'embed\\']"}
  %fusion.1 = f32[2,4]{1,0} fusion(), kind=kLoop, calls=%fused_broadcast.7, metadata={op_name="jit(train_step)/jvp()/broadcast_in_dim" stack_frame_id=2}
  %constant.9 = f32[] constant(-inf)
  %reduce.6 = f32[] reduce(%param.17, %constant.9), dimensions={0,1}, to_apply=%region_2.2.clone, metadata={op_name="jit(train_step)/jvp()/reduce_max" stack_frame_id=9}
  ROOT %tuple.15 = (f32[2,4]{1,0}, f32[]) tuple(%fusion.1, %reduce.6)
}
"""
)


def line(text: str) -> Instruction:
    """Return the one instruction of a module that has but this line."""
    module = parse(f"{HEAD}\nENTRY %main () -> f32[] {{\n  {text}\n}}\n")
    (only,) = module.computations["main"]
    return only


# -- modules and computations ---------------------------------------------------------------------


def test_a_module_has_a_name_an_entry_and_computations_in_order():
    module = parse(STEP)
    assert module.name == "jit_train_step"
    assert module.entry == "main.35_spmd"
    assert list(module.computations) == ["region_2.2.clone", "fused_broadcast.7", "main.35_spmd"]
    assert [i.name for i in module.computations["main.35_spmd"]] == [
        "param.4", "param.17", "fusion.1", "constant.9", "reduce.6", "tuple.15",
    ]  # fmt: skip
    assert [i.opcode for i in module.computations["region_2.2.clone"]] == [
        "parameter", "parameter", "maximum",
    ]  # fmt: skip


def test_every_line_of_a_computation_is_an_instruction_of_it():
    module = parse(STEP)
    lines = [text for text in STEP.splitlines() if text.startswith("  ")]
    assert [i.line for c in module.computations.values() for i in c] == lines


@pytest.mark.parametrize(
    "header",
    [
        "ENTRY %main.1 (p: f32[8]) -> f32[8] {",
        "ENTRY main.1 (p: f32[8]) -> f32[8] {",
        "ENTRY %main.1 {",
        "ENTRY main.1 {",
        "ENTRY %main.1 (p: (s32[], f32[8]{0}, /*index=5*/f32[8])) -> (f32[8]) {",
    ],
)
def test_a_header_may_leave_out_what_it_can(header: str):
    text = f"{HEAD}\nadd.0 {{\n  ROOT %s = f32[] add(%a, %b)\n}}\n\n{header}\n  ROOT %p = f32[8]{{0}} parameter(0)\n}}\n"
    module = parse(text)
    assert module.entry == "main.1"
    assert [i.name for i in module.computations["main.1"]] == ["p"]
    assert [i.name for i in module.computations["add.0"]] == ["s"]


def test_the_entry_need_not_stand_last():
    text = f"{HEAD}\nENTRY %m () -> f32[] {{\n  ROOT %x = f32[] constant(1)\n}}\n\n%b () -> f32[] {{\n  ROOT %y = f32[] constant(2)\n}}\n"
    module = parse(text)
    assert module.entry == "m"
    assert list(module.computations) == ["m", "b"]


def test_a_computation_on_another_thread_is_one_too():
    """An asynchronous computation closes with the name of its thread."""
    text = f"""{HEAD}
%async_computation (p: f32[8]) -> f32[8] {{
  ROOT %r = f32[8]{{0}} negate(%p)
}}, execution_thread="parallel"

ENTRY %main (p: f32[8]) -> f32[8] {{
  ROOT %p = f32[8]{{0}} parameter(0)
}}
"""
    module = parse(text)
    assert {name: len(c) for name, c in module.computations.items()} == {
        "async_computation": 1,
        "main": 1,
    }


# -- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["", "module @jit_f {\n}", "\nHloModule m, is_scheduled=true\n", "{ lambda ; a:f32[2]."]
)
def test_another_text_is_refused(text: str):
    with pytest.raises(ValueError, match=r"expected the text of an HLO module.*; got '") as error:
        parse(text)
    assert repr(text.split("\n")[0]) in str(error.value)


def test_an_unscheduled_module_is_refused():
    with pytest.raises(ValueError, match=r"^HloModule jit_f is not scheduled: .*compiled"):
        parse("HloModule jit_f, entry_computation_layout={(f32[8]{0})->f32[8]{0}}\n")


def test_a_line_that_ends_too_soon_is_refused():
    cut = STEP[: STEP.index("reduce(%param.17") + 14]
    with pytest.raises(ValueError, match=r"unbalanced parentheses.*%param"):
        parse(cut)


# -- instructions -----------------------------------------------------------------------------------

CUBLAS = """%custom-call.44 = (bf16[512,4096]{1,0}, s8[33554432]{0}) custom-call(%bitcast.10.0, %get-tuple-element.9.0), custom_call_target="__cublas$lt$matmul", metadata={op_name="jit(train_step)/jvp()/while/body/bsd,dnh->bsnh/all_gather_matmul.3/shard_map/dot_general" stack_frame_id=47}, backend_config={"gemm_backend_config":{"alpha_real":1,"epilogue":"DEFAULT"}}"""
GATHER = """%all-gather-start.12 = ((bf16[512,4,128]{2,1,0}, bf16[512,128,4]{1,2,0}), (bf16[4096,4,128]{2,1,0}, /*index=1*/bf16[4096,128,4]{1,2,0})) all-gather-start(%bitcast.9.0, /*index=1*/%bitcast.1271), channel_id=16, replica_groups=[8,8]<=[8,8]T(1,0), dimensions={0}, use_global_device_ids=true, frontend_attributes={is_spmd_generated="true",trivially_pipelineable=""}, metadata={op_name="jit(train_step)/transpose(jvp())/while" stack_frame_id=34}"""
WHILE = """%while.36 = (s32[], bf16[1,512]{1,0}, /*index=5*/f32[4]{0}) while(%tuple.964), condition=%region_5.12_spmd.clone, body=%region_0.11_spmd.clone, metadata={op_name="jit(train_step)/jvp()/while" stack_frame_id=8}, backend_config={"known_trip_count":{"n":"4"},"known_init_step":{"init":"0","step":"1"}}"""


def test_a_line_is_taken_apart():
    gemm = line(CUBLAS)
    assert gemm.name == "custom-call.44"
    assert gemm.shape == "(bf16[512,4096]{1,0}, s8[33554432]{0})"
    assert gemm.opcode == "custom-call"
    assert gemm.operands == ("bitcast.10.0", "get-tuple-element.9.0")
    assert gemm.attribute("custom_call_target") == '"__cublas$lt$matmul"'
    assert gemm.op_name.endswith("all_gather_matmul.3/shard_map/dot_general")


def test_a_combined_collective_has_nested_tuples_and_comments():
    gather = line(GATHER)
    assert gather.opcode == "all-gather-start"
    assert gather.operands == ("bitcast.9.0", "bitcast.1271")
    assert array_shapes(gather.shape) == (
        "bf16[512,4,128]",
        "bf16[512,128,4]",
        "bf16[4096,4,128]",
        "bf16[4096,128,4]",
    )
    assert gather.attribute("replica_groups") == "[8,8]<=[8,8]T(1,0)"
    assert gather.attribute("frontend_attributes") == (
        '{is_spmd_generated="true",trivially_pipelineable=""}'
    )
    assert gather.attribute("dimensions") == "{0}"
    assert gather.attribute("to_apply") == ""


def test_the_last_attribute_ends_with_the_line():
    reduce = line("%r = f32[8]{0} all-reduce(%p), to_apply=%add, replica_groups={{0,1},{2,3}}")
    assert reduce.attribute("replica_groups") == "{{0,1},{2,3}}"


def test_a_while_calls_its_body_and_its_condition():
    loop = line(WHILE)
    assert loop.called == ("region_5.12_spmd.clone", "region_0.11_spmd.clone")
    assert loop.trip_count == 4
    assert loop.operands == ("tuple.964",)


@pytest.mark.parametrize(
    ("config", "trips"),
    [
        (', backend_config={"known_trip_count":{"n":"12"}}', 12),
        (', backend_config={"dynamic_variables":[],"known_trip_count":{"n":"3"}}', 3),
        (', backend_config={"known_trip_count":{"n":3}}', 3),
        (", backend_config={}", None),
        ("", None),
    ],
)
def test_trips_are_known_or_not(config: str, trips: int | None):
    assert line(f"%w = s32[] while(%t), condition=%c, body=%b{config}").trip_count == trips


@pytest.mark.parametrize(
    ("attributes", "called"),
    [
        ("calls=%fused.1", ("fused.1",)),
        ("calls=fused.1", ("fused.1",)),
        ("to_apply=%add.2.clone", ("add.2.clone",)),
        ("true_computation=%region_0.2_spmd, false_computation=%r3", ("region_0.2_spmd", "r3")),
        ("branch_computations={%branch_0, %branch_1.7, %b}", ("branch_0", "branch_1.7", "b")),
        ("called_computations={%body}", ("body",)),
        ('async_execution_thread="parallel", calls=%async', ("async",)),
        ("dimensions={0}", ()),
    ],
)
def test_what_an_instruction_calls(attributes: str, called: tuple[str, ...]):
    assert line(f"%x = f32[8]{{0}} call(%p), {attributes}").called == called


@pytest.mark.parametrize(
    "op_name",
    [
        "jit(f)/(a/ppermute:b/ppermute)",
        "jit(f)/transpose(jvp(bsd,vd->bsv))/dot_general",
        "a, b, c",
        "open ( [ { and no end",
        "close ) ] } and no start",
        "x={1,2}, y=3",
        "state[0].params['embed']",
    ],
)
def test_names_do_not_get_in_the_way(op_name: str):
    text = f'%r = (f32[8]{{0}}, f32[4]{{0}}) all-reduce(%p, %q), replica_groups={{{{0,1}}}}, metadata={{op_name="{op_name}" stack_frame_id=3}}, to_apply=%add'
    reduce = line(text)
    assert reduce.op_name == op_name
    assert reduce.operands == ("p", "q")
    assert reduce.attribute("replica_groups") == "{{0,1}}"
    assert reduce.called == ("add",)


def test_an_instruction_without_operands_or_metadata():
    rank = line("ROOT %id = u32[] partition-id()")
    assert (rank.name, rank.shape, rank.opcode, rank.operands) == (
        "id",
        "u32[]",
        "partition-id",
        (),
    )
    assert rank.op_name == ""
    assert rank.called == ()


def test_operands_may_carry_their_shapes():
    add = line("%a = f32[8]{0} add(f32[8]{0} %x, (f32[8]{0}, s32[]) %y.1)")
    assert add.operands == ("x", "y.1")


def test_the_percent_sign_may_be_left_out():
    """`HloPrintOptions.short_parsable` and XLA's own short dumps print without it."""
    add = line('ROOT add.1 = f32[8]{0} add(x, f32[8]{0} y.1), metadata={op_name="a"}')
    assert add.name == "add.1"
    assert add.operands == ("x", "y.1")


# -- bytes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ("f32[]", 4),
        ("f32[8]", 32),
        ("f64[2,3]{1,0}", 48),
        ("bf16[512,4096]{1,0}", 2 * 512 * 4096),
        ("f16[4]{0:T(256)}", 8),
        ("pred[4,4]{1,0}", 16),
        ("s8[7]{0}", 7),
        ("u8[7]{0}", 7),
        ("s16[3]{0}", 6),
        ("u16[3]{0}", 6),
        ("s32[3]{0}", 12),
        ("u32[]", 4),
        ("s64[3]{0}", 24),
        ("s4[8]{0:E(4)}", 4),
        ("u4[6]{0:E(4)}", 3),
        ("u2[16]{0:E(2)}", 4),
        ("c64[2]{0}", 16),
        ("c128[2]{0}", 32),
        ("f8e4m3fn[16,4]{1,0}", 64),
        ("f8e5m2[16]{0}", 16),
        ("f8e4m3b11fnuz[16]{0}", 16),
        ("f8e8m0fnu[16]{0}", 16),
        ("f32[0,8]{1,0}", 0),
        ("f32[<=8,2]{1,0}", 64),
        ("bf16[4,8]{1,0:T(8,128)(2,1)S(1)}", 64),
        ("(f32[2]{0}, s32[])", 12),
        ("((bf16[512]{0}), bf16[4096]{0}, u32[])", 2 * 512 + 2 * 4096 + 4),
        ("(f32[1]{0}, f32[1]{0}, /*index=5*/f32[2]{0})", 16),
        ("()", 0),
    ],
)
def test_bytes_of_a_shape(shape: str, expected: int):
    assert shape_bytes(shape) == expected


@pytest.mark.parametrize(
    ("shape", "expected"),
    [("token[]", 0), ("(f32[2]{0}, token[])", 8), ("opaque[]", 0), ("f4e2m1fn[8]{0:E(4)}", 4)],
)
def test_bytes_of_odd_shapes(shape: str, expected: int):
    assert shape_bytes(shape) == expected


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ("f32[8,4]{1,0}", 1),
        ("f32[8,4]{0,1}", 0),
        ("f32[8,4]", 1),
        ("f32[8,4,1]{2,0,1:T(8,128)S(5)}", 0),  # along a dim of one nothing lies
        ("f32[8,1]{1,0}", 0),
        ("f32[1,1]{1,0}", None),
        ("f32[]", None),
    ],
)
def test_the_dim_along_which_elements_lie_side_by_side(shape: str, expected: int | None):
    assert fastest_dim(shape) == expected


# -- sources ----------------------------------------------------------------------------------------


def source(text: str, metadata: str) -> str:
    """Return the source of an instruction with this metadata in a module with STEP's tables."""
    head = text[: text.index("%region_2.2.clone")]
    module = parse(
        f"{head}ENTRY %m () -> f32[] {{\n  %x = f32[] y(), metadata={{{metadata}}}\n}}\n"
    )
    return module.source(module.computations["m"][0])


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ('op_name="a" stack_frame_id=2', "models/gpt.py:88"),  # the last two parts of the path
        ('op_name="a" stack_frame_id=3', "train.py:7"),
        ('op_name="a" stack_frame_id=1', "<string>:10"),
        ('op_name="a" stack_frame_id=77', ""),  # a table that does not know it
        ('op_name="a"', ""),
        ("", ""),
        ('op_name="a" source_file="/x/models/gpt.py" source_line=12', "models/gpt.py:12"),
        ('op_type="t" op_name="a" source_file="gpt.py"', "gpt.py:0"),
    ],
)
def test_the_source_of_an_instruction(metadata: str, expected: str):
    assert source(STEP, metadata) == expected


def test_a_module_may_have_no_tables():
    text = HEAD + "\n" + STEP[STEP.index("%region_2.2.clone") :]
    module = parse(text)
    assert module.frames == {}
    assert {module.source(i) for c in module.computations.values() for i in c} == {""}


def test_the_tables_do_not_reach_into_the_computations():
    module = parse(STEP)
    assert set(module.frames) == {1, 2, 3}
    fusion = module.computations["main.35_spmd"][2]
    assert module.source(fusion) == "models/gpt.py:88"


# -- what XLA prints today --------------------------------------------------------------------------


def test_a_module_compiled_here_is_read_line_by_line():
    import jax
    import jax.numpy as jnp

    @jax.jit
    def step(x):
        return jax.lax.fori_loop(0, 3, lambda _, y: jnp.tanh(y @ x), x)

    text = step.lower(jnp.ones((4, 4))).compile().as_text()
    assert text is not None
    module = parse(text)
    assert module.name == "jit_step"
    assert module.entry in module.computations
    lines = [x for x in text.splitlines() if re.match(r"  (ROOT )?%", x)]
    assert [i.line for c in module.computations.values() for i in c] == lines
    everything = [i for c in module.computations.values() for i in c]
    assert [i.trip_count for i in everything if i.opcode == "while"] == [3]
    (dot,) = [i for i in everything if i.opcode == "dot"]
    assert module.source(dot).startswith("simulation/test_hlo.py:")
    for instruction in everything:
        names = {i.name for c in module.computations.values() if instruction in c for i in c}
        assert set(instruction.operands) <= names
        assert set(instruction.called) <= set(module.computations)
