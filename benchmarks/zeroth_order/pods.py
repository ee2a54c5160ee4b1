"""OPT's streamed steps on pods: compiled device memory, and seconds by simulation.

    python -m benchmarks.zeroth_order.pods rows --out rows.jsonl
    python -m benchmarks.zeroth_order.pods table rows.jsonl

Each step is compiled for GPUs that are not there, by XLA's compiler; nothing runs on a GPU. Bytes
are those of `compiled.memory_analysis()`. Rows that the file has are not made again.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

import jaxoverlap
from benchmarks import frame
from benchmarks.frame import Job, Out, Row, add_missing, provenance, read_rows
from benchmarks.zeroth_order import opt, steps
from jaxoverlap import parse_cluster
from jaxoverlap._jax.jobs import peak_bytes

PUBLISHED_GB = {"1.3b": 3.75, "13b": 6.18, "30b": 8.86, "66b": 12.07, "175b": 18.04}  # of ZO2
WANTED = (
    *(("175b", "a100-sxm-80", gpus, True) for gpus in (1, 4)),
    ("175b", "a100-sxm-80", 4, False),
    *(("175b", "a100-sxm-80", gpus, True) for gpus in (2, 8)),
    *(
        (name, "a100-sxm-80", gpus, True)
        for name in ("1.3b", "66b", "13b", "30b")
        for gpus in (1, 4)
    ),
    ("175b", "a100-sxm-80", 2, False),
    ("175b", "a100-sxm-80", 8, False),
    *(("175b", "h100-sxm", gpus, True) for gpus in (1, 4)),
)
app = frame.app()


def measured(model: str, chip: str, gpus: int, sliced: bool, layers: int | None) -> dict[str, Any]:
    """Compile a step and return its row."""
    size = opt.SIZES[model] if layers is None else steps.with_layers(opt.SIZES[model], layers)
    began = time.perf_counter()
    lowered, options = steps.lowered(size, chip, gpus, sliced=sliced)
    compiled = lowered.compile(options)
    took = time.perf_counter() - began
    text = compiled.as_text()
    memory = compiled.memory_analysis()
    audit = jaxoverlap.audit(text)
    simulated = jaxoverlap.simulate(text, parse_cluster(f"{chip}:1x{gpus}"))
    rows = max(gpus // 2, 1)
    return dict(
        model=model,
        chip=chip,
        gpus=gpus,
        sliced=sliced,
        layers=size.layers,
        device_bytes=peak_bytes(memory),
        argument_bytes=memory.argument_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        host_bytes=memory.host_argument_size_in_bytes
        + memory.host_output_size_in_bytes
        + memory.host_temp_size_in_bytes
        - memory.host_alias_size_in_bytes,
        step_s=simulated.step_s,
        compute_s=simulated.compute_s,
        slowed_s=simulated.slowdown_s,
        exposed_s=simulated.exposed_s,
        link_s=simulated.link_s,
        unknown=simulated.unknown,
        tokens_per_s=rows * steps.SEQUENCE / simulated.step_s,
        copies={kind: [c.count, c.covered] for kind, c in audit.host_coverage.items()},
        gathers=[audit.total.count, audit.total.covered, audit.total.bytes_moved],
        compile_s=took,
        **provenance(),
    )


@app.command()
def rows(
    out: Out,
    model: str | None = None,
    gpus: int | None = None,
    chip: str | None = None,
    layers: Annotated[int | None, typer.Option(help="Another depth than the model's.")] = None,
) -> None:
    """Compile what is wanted, of one model or all, and write rows."""
    jobs: list[Job] = []
    for one in WANTED:
        labels: Row = dict(zip(("model", "chip", "gpus", "sliced"), one, strict=True))
        asked = dict(model=model, chip=chip, gpus=gpus)
        if all(value in (None, labels[name]) for name, value in asked.items()):
            labels["layers"] = layers or opt.SIZES[one[0]].layers
            jobs.append((labels, partial(measured, *one, layers)))
    add_missing(out, jobs)
    table(out)


@app.command()
def table(path: Path) -> None:
    """Print the rows."""
    sheet = Table(title="OPT, a step by forward passes: GB compiled, seconds simulated", box=None)
    for name in ("model", "GPUs", "uploads", "GB", "ZO2's", "step s", "exposed"):
        sheet.add_column(name, justify="right")
    for name in ("tokens/s", "of 1 GPU", "bare copies"):
        sheet.add_column(name, justify="right")
    found = read_rows(path)
    alone = {(r["model"], r["chip"]): r["tokens_per_s"] for r in found if r["gpus"] == 1}
    for r in found:
        base = alone.get((r["model"], r["chip"]))
        copies, covered = (sum(n) for n in zip(*r["copies"].values(), strict=True))
        sheet.add_row(
            r["model"],
            f"{r['gpus']} {r['chip'].split('-')[0]}",
            "slices" if r["sliced"] and r["gpus"] > 1 else "blocks",
            f"{r['device_bytes'] / 1e9:.2f}",
            str(PUBLISHED_GB.get(r["model"], "")),
            f"{r['step_s']:.2f}",
            f"{r['exposed_s']:.2f}",
            f"{r['tokens_per_s']:.0f}",
            f"{r['tokens_per_s'] / base:.2f}" if base else "",
            f"{copies - covered}/{copies}",
        )
    Console().print(sheet)


if __name__ == "__main__":
    app()
