"""Work is read off instructions as XLA prints them, with bytes and sizes by hand."""

from __future__ import annotations

import pytest

from jaxoverlap.cost.kernels import FREE, KernelWork, MatmulKernel
from jaxoverlap.simulation import hlo
from jaxoverlap.simulation.hlo_work import work

HEAD = "HloModule jit_step, is_scheduled=true, num_partitions=8"
MB = 1_000_000


def of(*lines: str, before: str = "") -> KernelWork:
    """Return the work of the last line."""
    body = "\n".join(f"  {line}" for line in lines)
    module = hlo.parse(f"{HEAD}\n\n{before}\nENTRY %main (x: f32[]) -> f32[] {{\n{body}\n}}\n")
    entry = module.body("main")
    return work(module, entry[-1], {i.name: i.shape for i in entry})


def fused(*lines: str, kind: str = "kLoop") -> KernelWork:
    """Return the work of a fusion of these lines; the parameters' shapes are theirs."""
    body = "\n".join(f"  {line}" for line in lines)
    before = f"%fused (p: f32[]) -> f32[] {{\n{body}\n}}\n"
    return of(f"%f = f32[] fusion(), kind={kind}, calls=%fused", before=before)


# -- matmuls ----------------------------------------------------------------------------------------

CUBLAS = (
    'custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":{'
    '"dot_dimension_numbers":{"lhs_contracting_dimensions":["%s"],'
    '"rhs_contracting_dimensions":["0"],"lhs_batch_dimensions":[%s],"rhs_batch_dimensions":[%s]}}}'
)


@pytest.mark.parametrize(
    ("lhs", "rhs", "out", "dims", "expected"),
    [
        ("bf16[32768,512]", "bf16[512,1024]", "bf16[32768,1024]", ("1", "", ""),
         MatmulKernel(32768, 1024, 512)),
        ("bf16[512,4096]", "bf16[512,2048]", "f32[4096,2048]", ("0", "", ""),
         MatmulKernel(4096, 2048, 512)),
        ("f32[32,4096,128]", "f32[32,128,4096]", "f32[32,4096,4096]", ("2", '"0"', '"0"'),
         MatmulKernel(4096, 4096, 128, batch=32, dtype="f32")),
        ("f8e4m3fn[64,32]", "f8e4m3fn[32,16]", "bf16[64,16]", ("1", "", ""),
         MatmulKernel(64, 16, 32, dtype="f8e4m3fn")),
    ],
)  # fmt: skip
def test_a_call_to_cublas(lhs, rhs, out, dims, expected):
    lines = (f"%l = {lhs}{{1,0}} parameter(0)", f"%r = {rhs}{{1,0}} parameter(1)")
    got = of(*lines, f"%g = ({out}{{1,0}}, s8[4194304]{{0}}) custom-call(%l, %r), {CUBLAS % dims}")
    assert got == KernelWork(matmuls=(expected,))


def test_a_dot_with_batches_anywhere():
    lines = (
        "%l = bf16[8,4096,4,128]{3,2,1,0} parameter(0)",
        "%r = bf16[8,512,4,128]{3,2,1,0} parameter(1)",
        "%d = f32[8,4,4096,512]{3,2,1,0} dot(%l, %r), lhs_batch_dims={0,2}, "
        "lhs_contracting_dims={3}, rhs_batch_dims={0,2}, rhs_contracting_dims={3}",
    )
    assert of(*lines) == KernelWork(matmuls=(MatmulKernel(4096, 512, 128, batch=32),))


def test_a_dot_in_a_fusion_brings_the_bytes_of_the_fusion():
    got = fused(
        "%l = bf16[100,200]{1,0} parameter(0)",
        "%r = s8[200,300]{1,0} parameter(1)",
        "%c = bf16[200,300]{1,0} convert(%r)",
        "ROOT %d = f32[100,300]{1,0} dot(%l, %c), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
        kind="kCustom",
    )
    assert got == KernelWork(
        (MatmulKernel(100, 300, 200),), 2 * 100 * 200 + 200 * 300 + 4 * 100 * 300
    )


@pytest.mark.parametrize(
    ("target", "shapes", "expected"),
    [
        ("Forward", ("2,3,224,224", "768,3,16,16", "2,768,14,14"), (392, 768, 768)),
        ("BackwardFilter", ("2,3,224,224", "2,768,14,14", "768,3,16,16"), (768, 768, 392)),
        ("BackwardInput", ("2,64,14,14", "64,768,3,3", "2,768,14,14"), (392, 6912, 64)),
    ],
)
def test_a_convolution_is_an_implicit_matmul(target, shapes, expected):
    lines = [
        f"%{n} = bf16[{s}]{{3,2,1,0}} parameter(0)" for n, s in zip("lr", shapes, strict=False)
    ]
    got = of(
        *lines,
        f"%c = (bf16[{shapes[2]}]{{3,2,1,0}}, u8[0]{{0}}) custom-call(%l, %r), "
        f'dim_labels=bf01_oi01->bf01, custom_call_target="__cudnn$conv{target}"',
    )
    assert got == KernelWork(matmuls=(MatmulKernel(*expected),))


@pytest.mark.parametrize(("target", "matmuls"), [("Softmax", 2), ("SoftmaxBackward", 5)])
@pytest.mark.parametrize("mask", ["NO_MASK", "CAUSAL"])
def test_flash_attention_has_the_operations_of_its_matmuls(target, matmuls, mask):
    lines = [f"%{n} = bf16[2,1024,8,128]{{3,2,1,0}} parameter(0)" for n in "qkv"]
    config = (
        '"intermediate_tensor_shape":{"element_type":"BF16","dimensions":["2","8","1024","1024"]'
        f'}},"mask_type":"{mask}"'
    )
    got = of(
        *lines,
        "%a = (bf16[2,8,1024,128]{3,1,2,0}, u8[0]{0}) custom-call(%q, %k, %v), "
        f'custom_call_target="__cudnn$fmha{target}", backend_config={{{config}}}',
    )
    flops = matmuls * 2 * 2 * 8 * 1024 * 1024 * 128 / (2 if mask == "CAUSAL" else 1)
    assert got.attention and got.attention.flops == flops
    assert (got.attention.heads, got.attention.head_size) == (16, 128)
    assert got.memory_bytes == 4 * 2 * 2 * 1024 * 8 * 128
    assert not got.unknown


@pytest.mark.parametrize(("way", "matmuls"), [("forward", 2), ("backward", 5)])
@pytest.mark.parametrize("mask", [0, 1, 2, 3])
@pytest.mark.parametrize("head", ["head_dim", "qk_head_dim"])
def test_transformer_engines_attention_has_the_operations_of_its_matmuls(way, matmuls, mask, head):
    """As the call prints with JAX's typed FFI: batch 2, 8 heads of 128, 1024 tokens."""
    lines = [f"%{n} = bf16[2,1024,8,128]{{3,2,1,0}} parameter(0)" for n in "qkv"]
    config = (
        f"attn_heads = 8 : i64, {head} = 128 : i64, input_batch = 2 : i64, is_training = true, "
        f"kv_max_seqlen = 1024 : i64, mask_type = {mask} : i64, num_gqa_groups = 8 : i64, "
        "q_max_seqlen = 1024 : i64, scaling_factor = 1.0e-01 : f32, window_size_left = -1 : i64"
    )
    got = of(
        *lines,
        "%a = (bf16[2,1024,8,128]{3,2,1,0}, f32[2,8,1024,1]{3,2,1,0}) custom-call(%q, %k, %v), "
        f'custom_call_target="te_fused_attn_{way}_ffi", api_version=API_VERSION_TYPED_FFI, '
        f"backend_config={{{config}}}",
    )
    flops = matmuls * 2 * 2 * 8 * 1024 * 1024 * 128 / (2 if mask >= 2 else 1)
    assert got.attention and got.attention.flops == flops
    assert (got.attention.backward, got.attention.heads) == (way == "backward", 16)
    assert got.memory_bytes == 4 * 2 * 2 * 1024 * 8 * 128 + 4 * 2 * 8 * 1024
    assert not got.unknown
    short = of(
        *lines,
        "%a = bf16[2,1024,8,128]{3,2,1,0} custom-call(%q, %k, %v), "
        f'custom_call_target="te_fused_attn_{way}_ffi", backend_config={{mask_type = 2 : i64}}',
    )
    assert short.attention is None and short.unknown == f"te_fused_attn_{way}_ffi"


# -- bytes ------------------------------------------------------------------------------------------


def test_a_loop_fusion_reads_its_parameters_and_writes_its_result():
    got = fused(
        "%a = f32[1000,1000]{1,0} parameter(0)",
        "%b = bf16[1000]{0} parameter(1)",
        "%c = f32[1000]{0} convert(%b)",
        "%d = f32[1000,1000]{1,0} broadcast(%c), dimensions={1}",
        "%e = f32[1000,1000]{1,0} multiply(%a, %d)",
        "ROOT %h = bf16[1000,1000]{1,0} convert(%e)",
    )
    assert got == KernelWork(memory_bytes=4 * MB + 2000 + 2 * MB)


def test_a_slice_in_a_fusion_reads_the_slice():
    got = fused(
        "%w = f32[32,1000,1000]{2,1,0} parameter(0)",
        "%i = s32[] parameter(1)",
        "%z = s32[] constant(0)",
        "%s = f32[1,1000,1000]{2,1,0} dynamic-slice(%w, %i, %z, %z), dynamic_slice_sizes={1,1000,1000}",
        "%b = f32[1000,1000]{1,0} bitcast(%s)",
        "ROOT %c = bf16[1000,1000]{1,0} convert(%b)",
    )
    assert got == KernelWork(memory_bytes=4 * MB + 4 + 2 * MB)


def test_what_is_computed_before_a_slice_is_computed_of_the_slice_only():
    got = fused(
        "%w = bf16[8,1000,1000]{2,1,0} parameter(0)",
        "%c = f32[8,1000,1000]{2,1,0} convert(%w)",
        "ROOT %s = f32[1,1000,1000]{2,1,0} slice(%c), slice={[2:3], [0:1000], [0:1000]}",
    )
    assert got == KernelWork(memory_bytes=2 * MB + 4 * MB)


UPDATE = (
    "%w = f32[32,1000,1000]{2,1,0} parameter(0)",
    "%u = bf16[1000,1000]{1,0} parameter(1)",
    "%i = s32[] parameter(2)",
    "%z = s32[] constant(0)",
    "%c = f32[1000,1000]{1,0} convert(%u)",
    "%b = f32[1,1000,1000]{2,1,0} bitcast(%c)",
)


def test_an_update_in_place_writes_the_update():
    got = fused(
        *UPDATE,
        "ROOT %d = f32[32,1000,1000]{2,1,0} dynamic-update-slice(%w, %b, %i, %z, %z)",
    )
    assert got == KernelWork(memory_bytes=2 * MB + 4 + 4 * MB)


def test_two_updates_of_one_buffer_write_both():
    got = fused(
        *UPDATE,
        "%d = f32[32,1000,1000]{2,1,0} dynamic-update-slice(%w, %b, %i, %z, %z)",
        "ROOT %e = f32[32,1000,1000]{2,1,0} dynamic-update-slice(%d, %b, %z, %z, %z)",
    )
    assert got == KernelWork(memory_bytes=2 * MB + 4 + 8 * MB)


def test_an_update_of_what_the_fusion_makes_writes_all_of_it():
    got = fused(
        *UPDATE[1:],
        "%y = f32[] constant(0)",
        "%w = f32[32,1000,1000]{2,1,0} broadcast(%y), dimensions={}",
        "ROOT %d = f32[32,1000,1000]{2,1,0} dynamic-update-slice(%w, %b, %i, %z, %z)",
    )
    assert got == KernelWork(memory_bytes=2 * MB + 4 + 128 * MB)


def test_a_fusion_of_several_results_writes_each():
    got = fused(
        "%a = f32[1000,1000]{1,0} parameter(0)",
        "%z = f32[] constant(0)",
        "%r = f32[1000]{0} reduce(%a, %z), dimensions={1}, to_apply=%add",
        "%n = f32[1000,1000]{1,0} negate(%a)",
        "ROOT %t = (f32[1000]{0}, f32[1000,1000]{1,0}) tuple(%r, %n)",
        kind="kInput",
    )
    assert got == KernelWork(memory_bytes=4 * MB + 4000 + 4 * MB)


X = "%x = f32[1000,1000]{1,0} parameter(0)"


@pytest.mark.parametrize(
    ("line", "memory_bytes"),
    [
        ("%c = f32[1000,1000]{1,0} copy(%x)", 8 * MB),
        ("%s = f32[10,1000]{1,0} slice(%x), slice={[0:10], [0:1000]}", 80_000),
        ("%g = f32[5,1000]{1,0} gather(%x, %x), offset_dims={1}", 40_000),
        ("%d = f32[1000,1000]{1,0} dynamic-update-slice(%x, %u, %i, %i)", 8000),
        ("%c = (f32[1000,1000]{1,0}, f32[1000,1000]{1,0}, u32[]) copy-start(%x)", 8 * MB),
    ],
)
def test_what_stands_alone(line: str, memory_bytes: int):
    u, i = "%u = f32[1,1000]{1,0} parameter(1)", "%i = s32[] parameter(2)"
    assert of(X, u, i, line) == KernelWork(memory_bytes=memory_bytes)


@pytest.mark.parametrize(
    "line",
    [
        X,
        "%b = f32[1000000]{0} bitcast(%x)",
        "%t = (f32[1000,1000]{1,0}) tuple(%x)",
        "%g = f32[1000,1000]{1,0} get-tuple-element(%x), index=0",
        "%c = f32[] constant(1)",
        "%p = u32[] partition-id()",
        "%d = f32[1000,1000]{1,0} fusion-done(%x)",
        '%a = f32[1000,1000]{1,0} custom-call(), custom_call_target="AllocateBuffer"',
    ],
)
def test_what_no_kernel_runs_for(line: str):
    assert of(X, line) == FREE


def test_a_fusion_beside_others_is_the_fusion():
    inside = "\n".join(
        f"  {line}" for line in (*UPDATE, "ROOT %d = f32[32,1000,1000]{2,1,0} "
        "dynamic-update-slice(%w, %b, %i, %z, %z)")
    )  # fmt: skip
    line = "%s = ((f32[32,1000,1000]{2,1,0}), f32[32,1000,1000]{2,1,0}, u32[]) fusion-start(%x), kind=kLoop, calls=%fused"
    got = of(X, line, before=f"%fused (p: f32[]) -> f32[] {{\n{inside}\n}}\n")
    assert got == KernelWork(memory_bytes=2 * MB + 4 + 4 * MB)


# -- what is not known ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("%s = f32[1000,1000]{1,0} sort(%x), dimensions={1}, to_apply=%less", "sort"),
        ('%m = f32[1000,1000]{1,0} custom-call(%x), custom_call_target="my_matmul"', "my_matmul"),
        ('%m = f32[1000,1000]{1,0} custom-call(%x), custom_call_target="__cudnn$fmhaSoftmax"',
         "__cudnn$fmhaSoftmax"),
        ("%m = f32[1000,1000]{1,0} something-new(%x)", "something-new"),
    ],
)  # fmt: skip
def test_what_is_not_known_is_named_and_costs_its_bytes(line: str, name: str):
    assert of(X, line) == KernelWork((), 8 * MB, name)


def test_what_goes_to_the_host_is_named():
    line = "%c = (f32[1000,1000]{1,0:S(5)}, f32[1000,1000]{1,0}, u32[]) copy-start(%x)"
    assert of(X, line).unknown == "copy-start to or from the host's memory"


def test_what_is_not_known_inside_a_fusion_is_named():
    got = fused(X, '%m = f32[1000,1000]{1,0} custom-call(%x), custom_call_target="mine"')
    assert got == KernelWork((), 8 * MB, "mine")


def test_transcendentals_are_counted_by_the_elements_that_are_needed():
    got = fused(
        "%a = f32[1000,1000]{1,0} parameter(0)",
        "%t = f32[1000,1000]{1,0} tanh(%a)",
        "%s = f32[10,1000]{1,0} slice(%t), slice={[0:10], [0:1000]}",
        "%r = f32[10,1000]{1,0} rsqrt(%s)",
        "ROOT %m = f32[10,1000]{1,0} multiply(%r, %s)",
    )
    assert got.transcendentals == 20_000
    assert got.memory_bytes == 2 * 4 * 10_000
    assert of(X, "%e = f32[1000,1000]{1,0} exponential(%x)").transcendentals == 10**6
    assert of(X, "%e = f32[1000,1000]{1,0} negate(%x)").transcendentals == 0


@pytest.mark.parametrize(
    ("line", "transposed"),
    [
        ("%c = f32[1000,1000]{0,1} copy(%x)", True),
        ("%t = f32[1000,1000]{1,0} transpose(%x), dimensions={1,0}", True),
        ("%t = f32[1000,1000]{0,1} transpose(%x), dimensions={1,0}", False),  # a bitcast
        ("%c = f32[1000,1000]{1,0} copy(%x)", False),
    ],
)
def test_what_is_read_along_one_dim_and_written_along_another(line: str, transposed: bool):
    assert of(X, line).transposed_bytes == (8 * MB if transposed else 0)
    assert fused(X, line.replace("%", "ROOT %", 1)).transposed_bytes == of(X, line).transposed_bytes


def test_only_the_bytes_that_are_needed_are_transposed():
    got = fused(
        "%a = f32[4,1,1000,1000]{3,2,1,0} parameter(0)",
        "%n = f32[4,1,1000,1000]{3,2,1,0} negate(%a)",
        "%h = f32[1,4,1000,1000]{3,2,1,0} transpose(%n), dimensions={1,0,2,3}",  # of heads
        "%t = f32[1,4,1000,1000]{2,3,1,0} transpose(%h), dimensions={0,1,3,2}",
        "%c = f32[1,4,1000,1000]{3,2,1,0} copy(%t)",
        "ROOT %s = f32[1,1,1000,1000]{3,2,1,0} slice(%c), slice={[0:1], [0:1], [0:1000], [0:1000]}",
    )
    assert got == KernelWork(memory_bytes=8 * MB, transposed_bytes=8 * MB)
