"""An audit says which matmuls hide which collectives, of modules as XLA prints them, cut down."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxoverlap.simulation import hlo
from jaxoverlap.simulation.audit import Audit, Collective, Coverage, audit, group_size

HEAD = "HloModule jit_train_step, is_scheduled=true, num_partitions=8"
ADD = """%add.2.clone (x.3: f32[], y.3: f32[]) -> f32[] {
  %x.3 = f32[] parameter(0)
  %y.3 = f32[] parameter(1)
  ROOT %add.1 = f32[] add(%x.3, %y.3)
}
"""
X = "%x = bf16[512,4096]{1,0} parameter(0)"
GEMM = '%gemm = (bf16[512,512]{1,0}, s8[33554432]{0}) custom-call(%x, %x), custom_call_target="__cublas$lt$matmul", metadata={op_name="jit(f)/dot_general"}'
LOOP = "%loop_fusion = bf16[512,4096]{1,0} fusion(%x), kind=kLoop, calls=%fused_negate"
NEGATE = """%fused_negate (p: bf16[512,4096]) -> bf16[512,4096] {
  %p = bf16[512,4096]{1,0} parameter(0)
  ROOT %negate = bf16[512,4096]{1,0} negate(%p)
}
"""
SYNC = 'backend_config={"operation_queue_id":"0","collective_backend_config":{"is_sync":true,"is_pipelined":false}}'
ASYNC = SYNC.replace("true", "false", 1)

START = f"%all-gather-start.8 = ((bf16[512,4096]{{1,0}}), bf16[4096,4096]{{1,0}}) all-gather-start(%x), channel_id=11, replica_groups=mesh['data'=8,'model'=8] {{'model'}}, dimensions={{0}}, use_global_device_ids=true, {ASYNC}"
DONE = "%all-gather-done.8 = bf16[4096,4096]{1,0} all-gather-done(%all-gather-start.8)"
SHARD, WHOLE = 2 * 512 * 4096, 2 * 4096 * 4096


def module(*lines: str, before: str = NEGATE + ADD, root: str = "") -> str:
    """Return a scheduled module whose entry has these lines."""
    body = "\n".join(f"  {line}" for line in (X, *lines, root or "ROOT %end = () tuple()"))
    return f"{HEAD}\n\n{before}\nENTRY %main.1_spmd (x: bf16[512,4096]) -> () {{\n{body}\n}}\n"


def only(*lines: str, before: str = NEGATE + ADD, root: str = "") -> Collective:
    (collective,) = audit(module(*lines, before=before, root=root)).collectives
    return collective


def computation(name: str, *lines: str) -> str:
    body = "\n".join(f"  {line}" for line in lines)
    return f"%{name} (p: bf16[512,4096]) -> bf16[512,4096] {{\n{body}\n}}\n"


# -- starts and dones -------------------------------------------------------------------------------


def test_a_matmul_between_start_and_done_covers():
    got = only(START, GEMM, DONE)
    assert got == Collective(
        name="all-gather-start.8",
        computation="main.1_spmd",
        kind="all-gather",
        bytes_moved=7 * SHARD,
        group_size=8,
        runs=1,
        source="",
        ring=None,
        asynchronous=True,
        matmuls=("gemm",),
        groups="mesh['data'=8,'model'=8] {'model'}",
        stream=0,
    )
    assert got.covered


@pytest.mark.parametrize(
    "lines",
    [(GEMM, START, DONE), (START, DONE, GEMM), (START, LOOP, DONE)],
    ids=["before", "after", "no matmul"],
)
def test_nothing_else_covers(lines: tuple[str, ...]):
    got = only(*lines)
    assert got.asynchronous
    assert got.matmuls == ()
    assert not got.covered


def test_matmuls_are_named_in_their_order():
    gemms = [GEMM.replace("%gemm", f"%gemm.{n}") for n in (2, 1, 3)]
    assert only(START, gemms[0], LOOP, gemms[1], DONE, gemms[2]).matmuls == ("gemm.2", "gemm.1")


def test_one_matmul_may_cover_two():
    start, done = (
        t.replace("-start.8", "-start.9").replace("-done.8", "-done.9") for t in (START, DONE)
    )
    audited = audit(module(START, start, GEMM, DONE, LOOP, done)).collectives
    assert [(c.name, c.matmuls) for c in audited] == [
        ("all-gather-start.8", ("gemm",)),
        ("all-gather-start.9", ("gemm",)),
    ]


def test_a_done_may_stand_far_off_and_be_the_root():
    assert only(START, LOOP, GEMM, root=f"ROOT {DONE}").covered


def test_a_start_that_is_marked_synchronous_hides_behind_nothing():
    got = only(START.replace('"is_sync":false', '"is_sync":true'), GEMM, DONE)
    assert not got.asynchronous
    assert not got.covered
    assert got.matmuls == ()


def test_a_start_that_is_marked_synchronous_sends_what_others_send():
    got = only(START.replace('"is_sync":false', '"is_sync":true'), GEMM, DONE)
    assert got.bytes_moved == 7 * SHARD


def test_a_collective_without_a_start_is_synchronous():
    """XLA prints the synchronous ones plain, with `is_sync` and the name of the start they were."""
    gather = f'%all-gather.35.2 = bf16[4096,4096]{{1,0}} all-gather(%x), channel_id=13, replica_groups=[8,8]<=[64], dimensions={{0}}, use_global_device_ids=true, metadata={{op_name="a" scheduling_name="all-gather-start.9"}}, {SYNC}'
    got = only(gather, GEMM)
    assert (got.kind, got.asynchronous, got.matmuls) == ("all-gather", False, ())
    assert got.bytes_moved == 7 * SHARD


WRAPPED = """%async_computation (param_0: bf16[512,4096]) -> bf16[512,4096] {
  %param_0 = bf16[512,4096]{1,0} parameter(0)
  ROOT %psum.6.1 = bf16[512,4096]{1,0} all-reduce(%param_0), channel_id=1, replica_groups=mesh['x'=8] {'x'}, use_global_device_ids=true, to_apply=%add.2.clone, metadata={op_name="jit(f)/psum" source_file="a/b/c.py" source_line=3}
}
"""
WRAPPED_START = f"%all-reduce-start = ((bf16[512,4096]{{1,0}}), bf16[512,4096]{{1,0}}) async-start(%x), output_to_operand_aliasing={{{{1}}: (0, {{}})}}, calls=%async_computation, {ASYNC}"


def test_a_collective_may_be_wrapped_in_a_start():
    """A start may also be spelled so: the collective is the root of a computation of its own."""
    done = "%all-reduce-done = bf16[512,4096]{1,0} async-done(%all-reduce-start)"
    got = only(WRAPPED_START, GEMM, done, before=ADD + WRAPPED)
    assert (got.name, got.kind, got.group_size) == ("all-reduce-start", "all-reduce", 8)
    assert got.bytes_moved == 2 * SHARD * 7 // 8
    assert got.source == "b/c.py:3"
    assert got.matmuls == ("gemm",)


def test_a_start_may_be_updated_before_it_is_done():
    update = (
        "%update = ((bf16[512,4096]{1,0}), bf16[512,4096]{1,0}) async-update(%all-reduce-start)"
    )
    done = "%all-reduce-done = bf16[512,4096]{1,0} async-done(%update)"
    assert only(WRAPPED_START, update, GEMM, done, before=ADD + WRAPPED).matmuls == ("gemm",)


def test_other_asynchronous_work_is_no_collective():
    fused = "%fusion-start.1 = ((bf16[512,4096]{1,0}), bf16[512,4096]{1,0}, u32[]) fusion-start(%x), kind=kLoop, calls=%fused_negate"
    done = "%fusion-done.1 = bf16[512,4096]{1,0} fusion-done(%fusion-start.1)"
    copy = "%copy-start = (bf16[512,4096]{1,0}, bf16[512,4096]{1,0}, u32[]) copy-start(%x)"
    copied = "%copy-done = bf16[512,4096]{1,0} copy-done(%copy-start)"
    assert audit(module(fused, copy, GEMM, copied, done)).collectives == ()


# -- matmuls ----------------------------------------------------------------------------------------

DOT = "ROOT %dot.1 = bf16[512,512]{1,0} dot(%p, %p), lhs_contracting_dims={1}, rhs_contracting_dims={1}"
P = "%p = bf16[512,4096]{1,0} parameter(0)"


@pytest.mark.parametrize(
    ("line", "is_matmul"),
    [
        (GEMM, True),
        (GEMM.replace("__cublas$lt$matmul", "__cublas$gemm"), True),
        (GEMM.replace("__cublas$lt$matmul", "__cublas$lt$matmul$f8"), True),
        (GEMM.replace("__cublas$lt$matmul", "__onednn$matmul"), True),
        (GEMM.replace("__cublas$lt$matmul", "__op$block_scaled_dot"), True),
        (GEMM.replace("__cublas$lt$matmul", "Sharding"), False),
        (GEMM.replace("__cublas$lt$matmul", "xla_ffi_python_gpu_callback"), False),
        (GEMM.replace("__cublas$lt$matmul", "__cudnn$norm"), False),
        ("%d = bf16[512,512]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={1}", True),
        ("%c = bf16[1,8,8,4]{3,2,1,0} convolution(%x, %x), dim_labels=b01f_01io->b01f", True),
        ('%t = bf16[512,512]{1,0} fusion(%x), kind=kCustom, calls=%with_dot, backend_config={"fusion_backend_config":{"kind":"__triton_gemm"}}', True),
        ('%t = bf16[512,4096]{1,0} fusion(%x), kind=kCustom, calls=%fused_negate, backend_config={"fusion_backend_config":{"kind":"__triton"}}', False),
        ("%f = bf16[512,512]{1,0} fusion(%x), kind=kOutput, calls=%calls_with_dot", True),
        (LOOP, False),
        ("%call = bf16[512,512]{1,0} call(%x), to_apply=%with_dot", True),
        ("%w = bf16[512,4096]{1,0} while(%x), condition=%fused_negate, body=%calls_with_dot", True),
        ("%w = bf16[512,4096]{1,0} while(%x), condition=%fused_negate, body=%fused_negate", False),
        ("%if = bf16[512,4096]{1,0} conditional(%i, %x, %x), branch_computations={%fused_negate, %with_dot}", True),
        ("%s = ((bf16[512,4096]{1,0}), bf16[512,512]{1,0}, u32[]) fusion-start(%x), kind=kCustom, calls=%with_dot", True),
        ('%n = bf16[512,4096]{1,0} negate(%x), metadata={op_name="jit(f)/dot_general/matmul"}', False),
        ("%dot_like = bf16[512,4096]{1,0} add(%x, %x)", False),
    ],
)  # fmt: skip
def test_what_a_matmul_is(line: str, is_matmul: bool):
    before = (
        NEGATE
        + ADD
        + computation("with_dot", P, DOT)
        + computation(
            "calls_with_dot", P, "ROOT %f = bf16[512,512]{1,0} fusion(%p), calls=%with_dot"
        )
    )
    got = only(START, line, DONE, before=before)
    assert got.matmuls == ((line[1:].split()[0],) if is_matmul else ())


# -- how often --------------------------------------------------------------------------------------

REDUCE = "%all-reduce.5 = bf16[512,4096]{1,0} all-reduce(%p), channel_id=1, replica_groups=[1,8]<=[8], use_global_device_ids=true, to_apply=%add.2.clone"
BODY = computation("body.1", P, REDUCE, "ROOT %copy = bf16[512,4096]{1,0} copy(%all-reduce.5)")
COND = "%cond.1 (p: bf16[512,4096]) -> pred[] {\n  ROOT %true = pred[] constant(true)\n}\n"


def loop(trips: int | None, body: str = "body.1", name: str = "while.1", of: str = "x") -> str:
    config = ""
    if trips is not None:
        config = f', backend_config={{"known_trip_count":{{"n":"{trips}"}},"known_init_step":{{"init":"0","step":"1"}}}}'
    return f"%{name} = bf16[512,4096]{{1,0}} while(%{of}), condition=%cond.1, body=%{body}{config}"


@pytest.mark.parametrize(("trips", "runs"), [(4, 4), (1, 1), (None, 1)])
def test_a_loop_runs_its_collectives_as_often_as_it_turns(trips: int | None, runs: int):
    got = only(loop(trips), before=ADD + COND + BODY)
    assert got.runs == runs
    assert got.computation == "body.1"
    assert got.bytes_moved == 2 * SHARD * 7 // 8  # of one run


def test_loops_in_loops_multiply():
    outer = computation("outer", P, loop(3, of="p"))
    got = only(loop(5, "outer"), before=ADD + COND + BODY + outer)
    assert got.runs == 15
    outer = computation("outer", P, loop(None, of="p"))
    assert only(loop(5, "outer"), before=ADD + COND + BODY + outer).runs == 5


def test_a_body_that_two_loops_share_is_counted_in_both():
    audited = audit(module(loop(2), loop(3, name="while.2"), before=ADD + COND + BODY)).collectives
    assert [c.runs for c in audited] == [2, 3]


def test_a_loop_s_condition_runs_too():
    cond = COND.replace("  ROOT", f"  {P}\n  {REDUCE}\n  ROOT")
    (collective,) = audit(
        module(
            loop(3),
            before=NEGATE
            + ADD
            + cond
            + BODY.replace(REDUCE, "%all-reduce.5 = bf16[512,4096]{1,0} copy(%p)"),
        )
    ).collectives
    assert (collective.computation, collective.runs) == ("cond.1", 3)


@pytest.mark.parametrize(
    "line",
    [
        "%if = bf16[512,4096]{1,0} conditional(%i, %x, %x), branch_computations={%body.1, %fused_negate}",
        "%if = bf16[512,4096]{1,0} conditional(%b, %x, %x), true_computation=%fused_negate, false_computation=%body.1",
        "%call = bf16[512,4096]{1,0} call(%x), to_apply=%body.1",
        '%cb = bf16[512,4096]{1,0} call(%x), to_apply=%body.1, frontend_attributes={a="b"}, metadata={op_name="x"}',
    ],
)
def test_branches_and_calls_are_walked(line: str):
    got = only(line, before=NEGATE + ADD + BODY)
    assert (got.computation, got.runs) == ("body.1", 1)


def test_a_computation_that_nothing_runs_is_not_counted():
    assert audit(module(before=ADD + COND + BODY)).collectives == ()


def test_collectives_come_in_schedule_order():
    """Collectives of a loop's body stand after those around the loop, with their own place."""
    start, done = (
        t.replace("-start.8", "-start.9").replace("-done.8", "-done.9") for t in (START, DONE)
    )
    audited = audit(module(START, DONE, loop(2), start, done, before=ADD + COND + BODY)).collectives
    assert sorted(c.name for c in audited) == [
        "all-gather-start.8",
        "all-gather-start.9",
        "all-reduce.5",
    ]
    entry = [c.name for c in audited if c.computation == "main.1_spmd"]
    assert entry == ["all-gather-start.8", "all-gather-start.9"]


# -- groups -----------------------------------------------------------------------------------------


def grouped(attribute: str) -> int:
    text = f"%r = f32[8]{{0}} all-reduce(%x), channel_id=1, {attribute}, to_apply=%add.2.clone"
    instructions = hlo.parse(module(text)).computations["main.1_spmd"]
    return group_size(instructions[1], 8)


@pytest.mark.parametrize(
    ("attribute", "size"),
    [
        ("replica_groups={{0,1},{2,3}}", 2),
        ("replica_groups={{0,3},{1,2},{4,7},{5,6}}", 2),
        ("replica_groups={{0,1,2,3,4,5,6,7}}", 8),
        ("replica_groups={{0},{1}}", 1),
        ("replica_groups=[8,8]<=[64]", 8),
        ("replica_groups=[4,16]<=[64]", 16),
        ("replica_groups=[16,4]<=[64]", 4),
        ("replica_groups=[8,8]<=[8,8]T(1,0)", 8),
        ("replica_groups=[2,4]<=[2,2,2]T(1,0,2)", 4),
        ("replica_groups=mesh['data'=2,'model'=8] {'model'}", 8),
        ("replica_groups=mesh['data'=2,'model'=8] {'data'}", 2),
        ("replica_groups=mesh['a'=2,'b'=2,'c'=4] {'c','a'}", 8),
        ("replica_groups=mesh['axis_0'=64] {'axis_0'}", 64),
        ("source_target_pairs={{0,1},{1,2},{2,3},{3,0}}", 4),
        ("source_target_pairs={{0,1},{1,0},{2,3},{3,2}}", 2),
        ("source_target_pairs={{0,2},{2,4},{4,6},{6,0},{1,3},{3,5},{5,7},{7,1}}", 4),
        ("source_target_pairs={{0,1},{1,2},{2,3}}", 4),  # a shift, with an end
    ],
)
def test_groups_in_every_spelling(attribute: str, size: int):
    assert grouped(attribute) == size


@pytest.mark.parametrize(
    ("groups", "size"),
    [
        ("mesh['x'=8] {'x':(2)4}", 4),  # jax 0.12: x.reshape(2, 4, n).sum(1), with x over 8
        ("mesh['x'=8] {'x':(1)2}", 2),
        ("mesh['a'=2,'b'=4] {'a','b':(2)2}", 4),
    ],
)
def test_groups_of_part_of_an_axis(groups: str, size: int):
    assert grouped(f"replica_groups={groups}") == size


@pytest.mark.parametrize("ids", ["([4,2]T(1,0))", "(0,2,4,6,1,3,5,7)"])
def test_groups_of_a_mesh_in_another_order(ids: str):
    assert grouped(f"replica_groups=mesh['a'=2,'b'=4], device_ids={ids} {{'b'}}") == 4


def test_empty_groups_are_all_devices():
    reduce = REDUCE.replace("[1,8]<=[8]", "{}").replace("%p", "%x")
    got = only(reduce)  # HEAD says num_partitions=8
    assert (got.group_size, got.bytes_moved) == (8, 2 * SHARD * 7 // 8)


def test_a_permute_in_which_the_first_device_keeps_its_own():
    # jax 0.12: from P("b", "a", "c") to P("c", "a", "b") on a mesh of 2 x 2 x 2
    pairs = "{{0,0},{1,2},{4,4},{5,6},{2,1},{3,3},{6,5},{7,7}}"
    assert grouped(f"source_target_pairs={pairs}") == 2


# -- bytes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "moved"),
    [
        ("%c = f32[64]{0} all-gather(%a), replica_groups=[1,8]<=[8], dimensions={0}", 7 * 32),
        ("%c = f32[8]{0} all-reduce(%a), replica_groups=[1,8]<=[8], to_apply=%add.2.clone", 2 * 28),
        ("%c = f32[1]{0} reduce-scatter(%a), replica_groups=[1,8]<=[8], dimensions={0}, to_apply=%add.2.clone", 28),
        ("%c = f32[8]{0} all-to-all(%a), replica_groups=[1,8]<=[8], dimensions={0}", 28),
        ("%c = f32[8]{0} collective-permute(%a), source_target_pairs={{0,1},{1,0}}", 32),
        ("%c = f32[8]{0} collective-broadcast(%a), replica_groups={{0,1,2,3}}", 32),
        # combined: each operand counts
        ("%c = (f32[64]{0}, bf16[16]{0}) all-gather(%a, %b), replica_groups=[1,8]<=[8], dimensions={0}", 7 * (32 + 4)),
        ("%c = (f32[8]{0}, bf16[2]{0}) all-reduce(%a, /*index=1*/%b), replica_groups=[2,4]<=[8], to_apply=%add.2.clone", 2 * 36 * 3 // 4),
        ("%c = (f32[1]{0}, bf16[2]{0}) reduce-scatter(%a, %big), replica_groups=[1,8]<=[8], dimensions={0}, to_apply=%add.2.clone", (32 + 32) * 7 // 8),
        ("%c = (f32[8]{0}, f32[8]{0}) all-to-all(%a, %a), replica_groups={{0,1}}", 32),
        ("%c = (f32[8]{0}, bf16[2]{0}) collective-permute(%a, %b), source_target_pairs={{0,1},{1,0}}", 36),
        # one operand twice is sent twice
        ("%c = (f32[64]{0}, f32[64]{0}) all-gather(%a, %a), replica_groups=[1,8]<=[8], dimensions={0}", 2 * 7 * 32),
    ],
)  # fmt: skip
def test_bytes_that_a_device_sends(line: str, moved: int):
    a, b = "%a = f32[8]{0} constant({...})", "%b = bf16[2]{0} constant({1, 2})"
    assert only(a, b, "%big = bf16[16]{0} broadcast(%b)", line).bytes_moved == moved


@pytest.mark.parametrize(
    ("kind", "shapes", "moved"),
    [
        ("all-reduce", "((f32[8]{0}), f32[8]{0})", 2 * 28),
        ("all-gather", "((f32[8]{0}), f32[64]{0})", 7 * 32),
        ("reduce-scatter", "((f32[8]{0}), f32[1]{0})", 28),
        ("all-to-all", "((f32[8]{0}), f32[8]{0})", 28),
        ("collective-permute", "((f32[8]{0}), f32[8]{0}, u32[], u32[])", 32),
    ],
)
def test_a_start_s_own_shape_does_not_count(kind: str, shapes: str, moved: int):
    """A start gives the operands back beside the result, and some contexts."""
    result = shapes.split("), ")[1].rstrip(")").split(", ")[0]
    groups = (
        "source_target_pairs={{0,1},{1,0}}" if "permute" in kind else "replica_groups=[1,8]<=[8]"
    )
    got = only(
        "%a = f32[8]{0} constant({...})",
        f"%start = {shapes} {kind}-start(%a), {groups}",
        f"%done = {result} {kind}-done(%start)",
    )
    assert (got.kind, got.bytes_moved, got.asynchronous) == (kind, moved, True)


def test_a_ragged_exchange_sends_its_first_operand():
    ragged = "%c = f32[8]{0} ragged-all-to-all(%a, %a, %i, %i, %i, %i), replica_groups=[1,8]<=[8]"
    got = only("%a = f32[8]{0} constant({...})", "%i = s32[8]{0} constant({...})", ragged)
    assert got.bytes_moved == 28


def test_an_operand_may_be_an_element_of_a_tuple():
    """XLA's dumps print it like this, where `Compiled.as_text` has a get-tuple-element."""
    pair = '%pair = (f32[8]{0}, f32[1000]{0}) custom-call(%x), custom_call_target="a"'
    permute = "%c = f32[8]{0} collective-permute(%pair#0), source_target_pairs={{0,1},{1,0}}"
    assert only(pair, permute).bytes_moved == 32


# -- rings and sources ------------------------------------------------------------------------------

RING_OPS = {
    "jit(train_step)/jvp()/while/body/eval_jaxpr/bsd,dnh->bsnh/all_gather_matmul.3/shard_map/ppermute": "all_gather_matmul.3",
    "jit(f)/matmul_reduce_scatter.12/shard_map/ppermute": "matmul_reduce_scatter.12",
    "jit(f)/matmul_all_reduce.0/shard_map/ppermute": "matmul_all_reduce.0",
    # of a matmul that jax.grad has traced without a name of its own
    "jit(f)/jvp(all_gather_matmul.0)/shard_map/ppermute": "all_gather_matmul.0",
    # two hops in one permute, as XLA's combiner names them
    "jit(f)/checkpoint/(rematted_computation/bsd,df->bsf/all_gather_matmul.18/shard_map/ppermute:bsd,df->bsf/all_gather_matmul.19/shard_map/ppermute)": "all_gather_matmul.18",
    "jit(f)/shard_map/ppermute": None,
    "jit(f)/my_all_gather_matmul/ppermute": None,
    "": None,
}  # fmt: skip


@pytest.mark.parametrize(("op_name", "ring"), RING_OPS.items())
def test_a_hop_knows_its_ring(op_name: str, ring: str | None):
    permute = f'%collective-permute-start.99 = ((bf16[512,4096]{{1,0}}), bf16[512,4096]{{1,0}}) collective-permute-start(%x), channel_id=1, source_target_pairs={{{{0,1}},{{1,0}}}}, metadata={{op_name="{op_name}" scheduling_name="collective-permute-start.99"}}'
    done = "%collective-permute-done.99 = bf16[512,4096]{1,0} collective-permute-done(%collective-permute-start.99)"
    got = only(permute, GEMM, done)
    assert got.ring == ring
    assert got.covered


def test_a_collective_of_another_kind_is_no_hop():
    """The gather that ends matmul_all_reduce is XLA's own, and counts as such."""
    start = START.replace(
        ASYNC, 'metadata={op_name="jit(f)/matmul_all_reduce.4/shard_map/all_gather"}'
    )
    assert only(start, DONE).ring is None


def test_a_source_is_looked_up_in_the_tables():
    tables = """
FileNames
1 "/home/user/models/gpt.py"

FunctionNames
1 "<lambda>"

FileLocations
1 {file_name_id=1 function_name_id=1 line=88 end_line=90 column=13 end_column=13}

StackFrames
1 {file_location_id=1 parent_frame_id=1}

"""
    start = START.replace(
        "dimensions={0}", 'dimensions={0}, metadata={op_name="a" stack_frame_id=1}'
    )
    text = module(start, DONE).replace("\n\n", tables, 1)
    (got,) = audit(text).collectives
    assert got.source == "models/gpt.py:88"
    assert "models/gpt.py:88" in str(audit(text))


# -- errors -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "expected the text of an HLO module"),
        ("module @jit_f {}", "expected the text of an HLO module"),
        ("HloModule jit_f, num_partitions=8\n", "jit_f is not scheduled"),
    ],
)
def test_another_text_is_refused(text: str, problem: str):
    with pytest.raises(ValueError, match=problem):
        audit(text)


def test_a_start_that_is_never_waited_for_is_refused():
    with pytest.raises(ValueError, match=r"never waits for all-gather-start\.8.*complete module"):
        audit(module(START, GEMM))


WHOLE_TEXT = module(START, GEMM, DONE, loop(3), before=NEGATE + ADD + COND + BODY)


@pytest.mark.parametrize("cut", ["ENTRY", "  %all-gather-start", "  %while.1", "  ROOT %end"])
def test_half_a_module_is_refused(cut: str):
    with pytest.raises(ValueError):
        audit(WHOLE_TEXT[: WHOLE_TEXT.index(cut)])


def test_a_module_without_a_loop_s_body_is_refused():
    with pytest.raises(ValueError):
        audit(module(loop(3), before=ADD + COND))


# -- sums -------------------------------------------------------------------------------------------


@st.composite
def collectives(draw) -> Collective:
    return Collective(
        name="c",
        computation="main",
        kind=draw(st.sampled_from(["all-gather", "collective-permute"])),
        bytes_moved=draw(st.integers(0, 2**40)),
        group_size=draw(st.integers(1, 64)),
        runs=draw(st.integers(1, 100)),
        source=draw(st.sampled_from(["", "gpt.py:1", "gpt.py:2"])),
        ring=draw(st.sampled_from([None, "all_gather_matmul.1", "all_gather_matmul.2"])),
        asynchronous=draw(st.booleans()),
        matmuls=draw(st.sampled_from([(), ("gemm",), ("gemm", "dot")])),
    )


@settings(max_examples=60, deadline=None)
@given(st.lists(collectives(), max_size=6))
def test_coverage_is_a_sum_over_runs(drawn: list[Collective]):
    unrolled = [c for c in drawn for _ in range(c.runs)]

    def total(what: Callable[[Collective], int]) -> int:
        return sum(what(c) for c in unrolled)

    covers = [bool(c.matmuls) and c.asynchronous for c in unrolled]
    assert Coverage.of(iter(drawn)) == Coverage(
        count=len(unrolled),
        covered=sum(covers),
        bytes_moved=total(lambda c: c.bytes_moved),
        bytes_covered=sum(
            c.bytes_moved for c, covered in zip(unrolled, covers, strict=True) if covered
        ),
        synchronous=total(lambda c: not c.asynchronous),
    )


@settings(max_examples=60, deadline=None)
@given(st.lists(collectives(), max_size=6))
def test_hops_and_the_rest_are_all(drawn: list[Collective]):
    whole = Audit("jit_f", tuple(drawn))
    for field in Coverage.__dataclass_fields__:
        parts = getattr(whole.hops, field) + getattr(whole.rest, field)
        assert getattr(whole.total, field) == parts
    assert whole.hops.count == sum(c.runs for c in drawn if c.ring)


# -- how it reads -----------------------------------------------------------------------------------


def hop(
    ring: str | None,
    *,
    runs: int = 4,
    moved: int = 1_500_000,
    matmuls: tuple[str, ...] = ("g",),
    asynchronous: bool = True,
) -> Collective:
    return Collective(
        name="c", computation="main", kind="collective-permute" if ring else "all-reduce",
        bytes_moved=moved, group_size=8, runs=runs, source="gpt.py:88", ring=ring,
        asynchronous=asynchronous, matmuls=matmuls if asynchronous else (),
    )  # fmt: skip


def rows(text: str) -> list[list[str]]:
    lines = [line.split() for line in text.splitlines()]
    return [cells for cells in lines if cells and cells[0] in ("collective-permute", "all-reduce")]


def test_a_ring_has_a_row_with_its_sums():
    ring = "all_gather_matmul.3"
    hops = (
        hop(ring),
        hop(ring, matmuls=("g", "h")),
        hop(ring, matmuls=()),
        hop(ring, asynchronous=False),
    )
    text = str(Audit("jit_train_step", hops))
    # 4 hops of 4 runs: 24 MB, 12 of 16 asynchronous, 8 covered, by 0 to 2 matmuls
    assert rows(text) == [
        ["collective-permute", ring, "gpt.py:88", "8", "16", "24.0", "MB", "12", "8", "0-2"]
    ]
    assert text.startswith("jit_train_step\n")


def test_the_last_lines_are_the_sums():
    audited = (hop("all_gather_matmul.3"), hop(None, runs=1, moved=500, asynchronous=False))
    assert str(Audit("jit_f", audited)).splitlines()[-3:] == [
        "all collectives: 4 of 5 covered, 6.0 MB of 6.0 MB, 1 synchronous",
        "  ring hops:     4 of 4 covered, 6.0 MB of 6.0 MB, 0 synchronous",
        "  XLA's own:     0 of 1 covered, 0 B of 500 B, 1 synchronous",
    ]


def test_rings_and_lines_have_rows_of_their_own():
    audited = (
        hop("all_gather_matmul.3"),
        hop("all_gather_matmul.4"),
        hop(None),
        hop("all_gather_matmul.3"),
    )
    assert [cells[1] for cells in rows(str(Audit("jit_f", audited)))] == [
        "all_gather_matmul.3", "all_gather_matmul.4", "gpt.py:88",
    ]  # fmt: skip


# -- what XLA prints today --------------------------------------------------------------------------


def test_a_step_compiled_here_is_audited():
    """XLA's CPU backend runs every collective alone; loops still multiply, and groups are read."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import AxisType, NamedSharding
    from jax.sharding import PartitionSpec as P

    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)

    def body(x):
        def turn(x, _):
            return jax.lax.psum(jnp.tanh(x @ x), "b") / 4, None

        return jax.lax.ppermute(jax.lax.scan(turn, x, None, length=3)[0], "a", [(0, 1), (1, 0)])

    step = jax.shard_map(body, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    x = jax.ShapeDtypeStruct((16, 16), jnp.float32, sharding=NamedSharding(mesh, P()))
    audited = audit(jax.jit(step).lower(x).compile()).collectives
    assert sorted(
        (c.kind, c.bytes_moved, c.group_size, c.runs, c.asynchronous) for c in audited
    ) == [
        ("all-reduce", 2 * 16 * 16 * 4 * 3 // 4, 4, 3, False),
        ("collective-permute", 16 * 16 * 4, 2, 1, False),
    ]
    assert all(c.source.startswith("simulation/test_audit.py:") for c in audited)


@pytest.mark.parametrize(
    "groups",
    [
        "replica_groups={{0,1},{2,3}}",
        "replica_groups=[8,8]<=[8,8]T(1,0)",
        "replica_groups=mesh['data'=2,'model'=8] {'model'}",
        "source_target_pairs={{0,1},{1,0}}",
    ],
)
def test_groups_are_told_as_hlo_writes_them(groups: str):
    kind = "collective-permute" if "pairs" in groups else "all-reduce"
    got = only(f"%c = f32[8]{{0}} {kind}(%x), {groups}, channel_id=1")
    assert groups.endswith(f"={got.groups}")
