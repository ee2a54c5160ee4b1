"""Kernels in CUDA graphs find their instructions: as XLA's profiler wrote them on an H200."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

import jaxoverlap
from jaxoverlap.profiling.formats import xplane
from jaxoverlap.profiling.graphs import with_instructions
from jaxoverlap.profiling.kinds import Classifier
from tests.profiling import synthetic
from tests.profiling.synthetic import GEMM, Ran

_DIMS = '"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]'
_GEMM = (
    'custom-call({0}, %x), custom_call_target="__cublas$lt$matmul", backend_config='
    '{{"gemm_backend_config":{{"alpha_real":1,"beta":0,"dot_dimension_numbers":{{'
    + _DIMS
    + "}}}}}}"
)
_TYPE, _RESULT = "bf16[512,512]{1,0}", "(bf16[512,512]{1,0}, s8[1024]{0})"
MODULE = f"""HloModule jit_step, is_scheduled=true

ENTRY %main (x: bf16[512,512]) -> bf16[512,512] {{
  %x = {_TYPE} parameter(0)
  %loop_multiply_fusion = {_TYPE} multiply(%x, %x)
  %custom-call.7 = {_RESULT} custom-call.A
  %a = {_TYPE} get-tuple-element(%custom-call.7), index=0
  %custom-call.2 = {_RESULT} custom-call.B
  %b = {_TYPE} get-tuple-element(%custom-call.2), index=0
  %loop_add_fusion.3 = {_TYPE} add(%a, %b)
  %custom-call.9 = {_RESULT} custom-call.C
  %c = {_TYPE} get-tuple-element(%custom-call.9), index=0
  ROOT %loop_add_fusion.4 = {_TYPE} add(%c, %b)
}}
"""
for _call, _operand in (("A", "%loop_multiply_fusion"), ("B", "%a"), ("C", "%loop_add_fusion.3")):
    MODULE = MODULE.replace(f"custom-call.{_call}", _GEMM.format(_operand))
FIRST, SUM, LAST = "loop_multiply_fusion", "loop_add_fusion_3", "loop_add_fusion_4"
ALL = (FIRST, "Memset 0", GEMM, GEMM, SUM, GEMM, LAST)
OPS = {
    FIRST: "loop_multiply_fusion",
    SUM: "loop_add_fusion.3",
    LAST: "loop_add_fusion.4",
}


def _launch(number: int, kernels: tuple[str, ...] = ALL) -> list[Ran]:
    """The nodes of one launch of a graph, 10 us each."""
    stats = {"hlo_op": "command_buffer_1", "hlo_module": "jit_step", "program_id": 3}
    stats |= {"cuda_graph_id": 11, "correlation_id": number, "kernel_details": "regs:32"}
    return [
        Ran(name, 1000 * number + 10 * n, 10, stats | {"cuda_graph_node_id": 47 + n})
        for n, name in enumerate(kernels)
    ]


def _written(path: Path, *launches: list[Ran]) -> Path:
    lines = {"Stream #14(Compute,Memset)": [ran for launch in launches for ran in launch]}
    modules = {("jit_step", 3): MODULE}
    return synthetic.write(path / "a.xplane.pb", {"/device:GPU:0": lines}, modules)


def _ops(path: Path) -> list[str]:
    recording = xplane.read(path)
    (device,) = with_instructions(recording, Classifier(recording.modules, 1)).devices
    return [event.op for event in device.events]


def test_kernels_of_xla_by_name_and_of_libraries_by_order(tmp_path: Path):
    first, second, third = (f"custom-call.{n}" for n in (7, 2, 9))
    expected = [OPS[FIRST], first, first, second, OPS[SUM], third, OPS[LAST]]
    assert _ops(_written(tmp_path, _launch(1), _launch(2))) == 2 * expected


@pytest.mark.parametrize(
    ("kernels", "expected"),
    [
        ((FIRST, GEMM, GEMM, GEMM, SUM), [OPS[FIRST], *["command_buffer_1"] * 3, OPS[SUM]]),
        (
            (FIRST, GEMM, GEMM, SUM, GEMM, GEMM, LAST),
            [OPS[FIRST], "custom-call.7", "custom-call.2", OPS[SUM]]
            + ["custom-call.9"] * 2
            + [OPS[LAST]],
        ),
        ((GEMM, "memcpy128"), ["command_buffer_1"] * 2),
        (  # equal fusions share the first one's kernel
            (SUM, GEMM, SUM),
            [OPS[SUM], "custom-call.9", OPS[SUM]],
        ),
    ],
    ids=["another number", "two kernels each", "none known", "a shared kernel"],
)
def test_only_what_fits_is_matched(tmp_path: Path, kernels, expected):
    assert _ops(_written(tmp_path, _launch(1, kernels))) == expected


def test_a_profile_of_graphs_compares_as_one_without(tmp_path: Path):
    """Rows and ratios of a step in graphs are those of the same kernels with instructions."""
    path = _written(tmp_path, *map(_launch, (1, 2, 3)))
    measured = jaxoverlap.profile(path, cluster="h200:1x1")
    assert [(r.kind, r.instructions) for r in measured.ratios] == [("matmul", 3), ("memory", 3)]
    assert measured.ratios[0].measured_s == pytest.approx(40e-6)
    assert measured.incomplete == 0


def test_a_profile_without_the_module_stays(tmp_path: Path):
    recording = xplane.read(_written(tmp_path, _launch(1)))
    recording = dataclasses.replace(recording, modules={})
    assert with_instructions(recording, Classifier({}, 1)) == recording
