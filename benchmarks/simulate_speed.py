"""Time a simulation by the size of the module: python -m benchmarks.simulate_speed.

The modules are text, generated: layers of tensor and data parallelism written out, as XLA prints
them, metadata and backend_config included. Needs no GPU and no compiler.
"""

import itertools
import time
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

import jaxoverlap
from jaxoverlap.cost.find import cost_model
from jaxoverlap.simulation import hlo
from jaxoverlap.simulation.advice import strays
from jaxoverlap.simulation.replay import replay

CLUSTER, DEVICES = "h100-sxm:8x8", 64
META = (
    'metadata={{op_name="jit(step)/transpose(jvp())/while/body/eval_jaxpr/{op}" '
    'scheduling_name="{name}" stack_frame_id=1}}'
)
GEMM = (
    '{meta}, backend_config={{"operation_queue_id":"0","gemm_backend_config":{{'
    '"selected_algorithm":"0","alpha_real":1,"beta":0,"dot_dimension_numbers":{{'
    '"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"],'
    '"lhs_batch_dimensions":[],"rhs_batch_dimensions":[]}},"alpha_imag":0,"precision_config":{{'
    '"operand_precision":["DEFAULT","DEFAULT"],"algorithm":"ALG_UNSET"}},"epilogue":"DEFAULT",'
    '"lhs_stride":"134217728","rhs_stride":"2097152","autotune_workspace_size":"4194304"}},'
    '"force_earliest_schedule":false,"reification_cost":[],"device_type":"DEVICE_TYPE_INVALID"}}'
)
PAIRS = ",".join(f"{{{d},{d // 8 * 8 + (d + 1) % 8}}}" for d in range(DEVICES))
app = typer.Typer(add_completion=False)


@app.command()
def main(
    sizes: Annotated[list[int] | None, typer.Option("--size", help="Instructions.")] = None,
) -> None:
    """Print seconds to parse, replay and sum up modules of some sizes, and of CPU time in all."""
    table = Table(title=f"seconds of a simulation, {CLUSTER}")
    for name in (
        "instructions",
        "text",
        "parse",
        "replay",
        "sums",
        "whole",
        "CPU",
        "step ms",
    ):
        table.add_column(name, justify="right")
    for size in sizes or (1_000, 10_000, 100_000):
        table.add_row(*measure(module_text(size)))
    Console(width=100).print(table)


def measure(text: str) -> tuple[str, ...]:
    """Measure the cells of one module."""
    cost = cost_model(jaxoverlap.parse_cluster(CLUSTER))
    times, cpu_s = [time.perf_counter()], time.process_time()
    module = hlo.parse(text)
    times.append(time.perf_counter())
    timeline = replay(module, cost)
    times.append(time.perf_counter())
    strays(module, timeline)
    assert timeline.bound_s <= timeline.step_s and not timeline.unknown
    times.append(time.perf_counter())
    cpu_s = time.process_time() - cpu_s
    parts = [b - a for a, b in itertools.pairwise(times)]
    count = sum(map(len, module.computations.values()))
    seconds = [f"{s:.2f}" for s in (*parts, times[-1] - times[0], cpu_s)]
    return (f"{count:,}", f"{len(text) / 1e6:.1f} MB", *seconds, f"{timeline.step_s * 1e3:.1f}")


def module_text(size: int) -> str:
    """A scheduled module of at least so many instructions, a third of them in fusions."""
    fusions, entry, count = [], [], 0
    for n in itertools.count():
        fused, lines = piece(n)
        fusions.append(fused)
        entry += lines
        count += len(lines) + fused.count("\n  ")
        if count >= size:
            break
    head = f"HloModule jit_step, is_scheduled=true, num_partitions={DEVICES}"
    body = "\n".join(f"  {line}" for line in (*SHARED, *entry, "ROOT %end = () tuple()"))
    return f"{head}\n\n{''.join(fusions)}\nENTRY %main (x: bf16[4096,4096]) -> () {{\n{body}\n}}\n"


X = "bf16[4096,4096]{1,0}"
SHARED = (
    "%x = bf16[4096,4096]{1,0} parameter(0)",
    "%w = bf16[4096,2048]{1,0} parameter(1)",
    "%all = bf16[8,4096,2048]{2,1,0} parameter(2)",
    "%at = s32[] parameter(3)",
)


def piece(n: int) -> tuple[str, list[str]]:
    """A hop under a chunk of matmul, and the update of the result: a fusion and five lines."""
    meta = META.format(op="bsd,df->bsf/dot_general", name=f"custom-call.{n}")
    gemm = GEMM.format(meta=meta)
    fused = (
        f"%fused.{n} (p.{n}: bf16[8,4096,2048]) -> bf16[8,4096,2048] {{\n"
        f"  %p.{n} = bf16[8,4096,2048]{{2,1,0}} parameter(0)\n"
        f"  %u.{n} = bf16[4096,2048]{{1,0}} parameter(1)\n"
        f"  %b.{n} = bf16[1,4096,2048]{{2,1,0}} bitcast(%u.{n})\n"
        f"  %i.{n} = s32[] parameter(2)\n"
        f"  ROOT %d.{n} = bf16[8,4096,2048]{{2,1,0}} dynamic-update-slice(%p.{n}, %b.{n}, %i.{n}, "
        f"%i.{n}, %i.{n}), {META.format(op='dynamic_update_slice', name=f'd.{n}')}\n}}\n"
    )
    lines = [
        f"%hop.{n} = ({X}, {X}) collective-permute-start(%x), channel_id={n + 1}, "
        f"source_target_pairs={{{PAIRS}}}, {META.format(op='ppermute', name=f'hop.{n}')}",
        f"%custom-call.{n} = (bf16[4096,2048]{{1,0}}, s8[4194304]{{0}}) custom-call(%x, %w), "
        f'custom_call_target="__cublas$lt$matmul", {gemm}',
        f"%gte.{n} = bf16[4096,2048]{{1,0}} get-tuple-element(%custom-call.{n}), index=0, {meta}",
        f"%update.{n} = bf16[8,4096,2048]{{2,1,0}} fusion(%all, %gte.{n}, %at), kind=kLoop, "
        f"calls=%fused.{n}, {META.format(op='dynamic_update_slice', name=f'update.{n}')}",
        f"%hop.{n}.done = bf16[4096,4096]{{1,0}} collective-permute-done(%hop.{n})",
    ]
    return fused, lines


if __name__ == "__main__":
    app()
