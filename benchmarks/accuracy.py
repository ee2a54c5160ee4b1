"""Compare the cost model with what others measured: `python -m benchmarks.accuracy`.

python -m benchmarks.accuracy                        # all tables
python -m benchmarks.accuracy --steps FILE           # predict every step of a file of such rows
python -m benchmarks.accuracy --collectives FILE     # the curves of a file of NCCL's points
python -m benchmarks.accuracy --page                 # benchmarks/results/published_steps.md
python -m benchmarks.accuracy --bands                # writes parallelism/published/bands.json
python -m benchmarks.accuracy --regret               # published recipes against `configure`

The errors of the fits come first, then published values, each next to its prediction. Where a point
had part in a fit, its table or the constant's comment says so. Arithmetic only: no GPU, no compile,
a few seconds.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from benchmarks import lagom
from benchmarks.chip_tables import xla_perf_table
from benchmarks.published import collectives, memory, regret, steps
from jaxoverlap._util.text import human_bytes, table
from jaxoverlap.calibrate import fit
from jaxoverlap.cost import tables as measured
from jaxoverlap.cost.collective_tables import LAUNCH_S
from jaxoverlap.cost.find import cost_model
from jaxoverlap.cost.groups import Group, Share, together_s
from jaxoverlap.cost.interpolation import FitError
from jaxoverlap.cost.model import CostModel
from jaxoverlap.hardware.cluster import chips
from jaxoverlap.parallelism.published import bands
from jaxoverlap.plan.collectives import PERMUTE

Row = tuple[str, ...]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print all tables, or what a file's rows come to."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accuracy")
    parser.add_argument("--steps", type=Path, help="a file with the columns of steps.csv")
    parser.add_argument("--collectives", type=Path, help="a file with the columns of nccl.csv")
    parser.add_argument("--page", action="store_true", help="each published step, as Markdown")
    parser.add_argument("--bands", action="store_true", help="write the package's bands.json")
    parser.add_argument("--regret", action="store_true", help="published recipes, asked again")
    options = parser.parse_args(arguments)
    if options.regret:
        print(regret.by_question())
    if options.collectives:
        print(collectives.by_curve(options.collectives))
    if options.steps:
        print(steps.report(options.steps))
    if options.page:
        print(steps.page())
    if options.bands:
        found = steps.bands(steps.read()[0])
        rows = (json.dumps([*kind, vars(band)]) for kind, band in found.items())
        Path(bands.__file__).with_suffix(".json").write_text("[\n" + ",\n".join(rows) + "\n]\n")
    if not any(vars(options).values()):
        for make in TABLES:
            print(make())
            print()


def against(predicted: float, published: float) -> Row:
    """Show two numbers in the same unit, and how far the first is off."""
    return f"{predicted:.4g}", f"{published:.4g}", f"{predicted / published - 1:+.1%}"


# -- the fits -------------------------------------------------------------------------------------


def fits() -> str:
    """Tabulate the errors of the package's tables."""
    return table(
        "Rows held back from the fit: |predicted / measured - 1|",
        ("chip", "what", "rows held back", "mean", "median", "worst"),
        _fit_rows(),
        right=("rows held back", "mean", "median", "worst"),
    )


def _fit_rows() -> Iterator[Row]:
    for chip in chips():
        tables = measured.packaged(chip.name)
        if tables is None or tables.chip != chip.name:
            continue  # an A100 of 40 GB shares the other one's
        for dtype, matmuls in tables.matmuls.items():
            yield (chip.name, f"{dtype} matmuls", *_percents(matmuls.error))
        if attention := tables.attention:
            yield (chip.name, "bf16 attention, causal", *_percents(attention.error))
            if attention.error_full:
                what = "bf16 attention without a mask (not fitted)"
                yield (chip.name, what, *_percents(attention.error_full))
        yield (chip.name, "collectives", *_percents(tables.collectives.error))
        sizes = tables.collectives.error_new_sizes
        yield (chip.name, "collectives, all rows of a size held back", *_percents(sizes))
        if error := tables.permutes.error:
            yield (chip.name, "permutes (three numbers fitted to all rows)", *_percents(error))


def _percents(error: FitError) -> Row:
    return (str(error.rows), *(f"{e:.1%}" for e in (error.mean, error.median, error.worst)))


def xla() -> str:
    """Compare with the collectives that XLA's authors measured, which were not fitted."""
    return table(
        f"Not fitted: collectives as XLA's authors measured them ({xla_perf_table.version()})",
        ("chip", "devices", "from 1 MB on: rows", "mean", "median", "worst", "below: mean"),
        _xla_rows(),
        right=("devices", "from 1 MB on: rows", "mean", "median", "worst", "below: mean"),
    )


def _xla_rows() -> Iterator[Row]:
    for name, key, sizes in (
        ("h100-sxm", "sm_90", (2, 4, 8)),
        ("b200", "sm_100_B200", (2, 4, 8)),
        ("gb200", "sm_100_GB200", (4, 18, 32, 64)),
    ):
        model = cost_model(f"{name}:{18 if name == 'gb200' else 1}x{4 if name == 'gb200' else 8}")
        rows = [r for r in xla_perf_table.collective_rows(key) if r.kind != "collective-permute"]
        for size in sizes:
            mine = [r for r in rows if r.size == size and r.bytes_moved <= 4e9]
            large = _error(model, [r for r in mine if r.bytes_moved >= 1e6])
            small = _error(model, [r for r in mine if r.bytes_moved < 1e6])
            yield (name, str(size), *_percents(large), f"{small.mean:.1%}")


def _error(model: CostModel, rows: list[fit.CollectiveRow]) -> FitError:
    predicted = [model.collective_s(r.kind, int(r.bytes_moved), Group(r.size)) for r in rows]
    return fit.error(np.array(predicted), np.array([r.seconds for r in rows]))


# -- published points -----------------------------------------------------------------------------


def pallas() -> str:
    """JAX's documentation: a gather, then a matmul, on an H100 host (Pallas collective matmul).

    Its profiler adds up kernels in a loop, so that neither launches nor a step's clocks are in it.
    """
    model, rows = cost_model("h100-sxm:1x8", loops=True), []
    m, n, k = 1024, 4096, 4096  # of a shard, f16
    for devices, published_us in ((2, 147), (4, 290), (8, 565)):
        gather_s = model.collective_s("all-gather", m * k * 2 * (devices - 1), Group(devices))
        matmul_s = model.matmul_s(m * devices, n, k, dtype="f16")
        kernels_s = gather_s - LAUNCH_S + matmul_s
        rows.append((str(devices), *against(kernels_s * 1e6, published_us)))
    return table(
        "JAX Pallas documentation, H100: NCCL all-gather + cuBLAS, µs",
        ("devices", "predicted", "published", "off"),
        rows,
        right=("devices", "predicted", "published", "off"),
    )


def chunks() -> str:
    """Points of the H100's table: m of 8192 at once and in eight chunks; part of the fit."""
    model, rows = cost_model("h100-sxm:1x8", loops=True), []
    for n, k, measured_more in (
        (4096, 4096, 0.056),
        (8192, 8192, 0.086),
        (2048, 8192, 0.078),
        (8192, 1024, 0.128),
        (1024, 8192, 0.43),
    ):
        more = 8 * model.matmul_s(1024, n, k) / model.matmul_s(8192, n, k) - 1
        rows.append((f"8192 x {n} x {k}", f"{more:+.1%}", f"{measured_more:+.1%}"))
    return table(
        "A matmul in eight chunks, H100 bf16: what it costs more (of the measured rows themselves)",
        ("m x n x k", "predicted", "measured"),
        rows,
        right=("predicted", "measured"),
    )


def all_reduces() -> str:
    """Bus bandwidth of all-reduces: stas00/ml-engineering, network/README.md @ 744d01e1."""
    sizes = ("1M", "4M", "16M", "64M", "256M", "1G", "4G")
    rows = []
    for name, what, published in (
        ("a100-sxm-80:1x8", "8 A100", (18.0, 72.3, 106, 172, 194, 229, 234)),
        ("h200:1x8", "8 H200", (39.9, 107, 220, 347, 436, 464, 473)),
        ("b200:1x8", "8 B200", (36.1, 76.5, 255, 401, 646, 723, 741)),
        ("b200:4x8@efa", "4 x 8 B200, 400 Gb/s EFA a GPU", (5.4, 18.9, 64.4, 157, 229, 362, 377)),
    ):
        model = cost_model(name)
        devices = model.cluster.num_devices
        group = Group(devices, model.cluster.num_hosts)
        for size, gigabytes in zip(sizes, published, strict=True):
            count = int(size[:-1]) << {"M": 20, "G": 30}[size[-1]]
            moved = 2 * count * (devices - 1) // devices
            rate = moved / model.collective_s("all-reduce", moved, group) / 1e9
            rows.append((what, size, *against(rate, gigabytes)))
    return table(
        "All-reduce bus bandwidth, GB/s (the last by NCCL's tuning model, EFA's latency fitted)",
        ("where", "bytes", "predicted", "published", "off"),
        rows,
        right=("bytes", "predicted", "published", "off"),
    )


def published_steps() -> str:
    """Sum up the published steps that the form predicts."""
    if not steps.FILE.exists():
        return f"Published steps: {steps.FILE} is not there"
    return steps.by_kind(steps.read()[0])


# -- CommFuse -------------------------------------------------------------------------------------

_VANILLA_MS, _REDUCE_MS, _TP = 122.3, 43.8, 4  # CommFuse, arXiv 2604.24013, table 1
_TOKENS, _HIDDEN = 32 * 4096, 4096


def commfuse() -> str:
    """CommFuse's MLP: a matmul and its reduce-scatter, by a ring and in slices.

    The paper does not name its accelerator. Its vanilla row says how long the matmul takes and how
    slow the link is; an H100 with that link stands in, and only the ratio between whole and
    chunked matmul is taken from its table. Communication takes nothing from compute here.
    """
    model = cost_model("h100-sxm:1x8")
    compute_ms = _VANILLA_MS - _REDUCE_MS
    whole_s = model.matmul_s(_TOKENS, _HIDDEN, _HIDDEN)
    rows = []
    chunk_ms = compute_ms / whole_s * model.matmul_s(_TOKENS // _TP, _HIDDEN, _HIDDEN)
    hop_ms = _REDUCE_MS / (_TP - 1)
    ring_ms = chunk_ms + (_TP - 1) * max(chunk_ms, hop_ms)
    rows.append(_commfuse_row("ring, own slice last", ring_ms - compute_ms, ring_ms, 0.1, 77.1))
    for slices in (4, 8):
        slice_ms = compute_ms / whole_s * model.matmul_s(_TOKENS // slices, _HIDDEN, _HIDDEN)
        part_ms = _REDUCE_MS / slices
        total_ms = slice_ms + (slices - 1) * max(slice_ms, part_ms) + part_ms
        what = f"whole collective in {slices} slices (the paper gives no number)"
        rows.append(_commfuse_row(what, total_ms - compute_ms, total_ms, 7.1, 83.9))
    return table(
        "CommFuse's MLP, 4 devices, ms (compute and link from its own vanilla row)",
        ("how", "exposed", "published", "less by", "published", "end to end", "published", "off"),
        rows,
        right=("exposed", "published", "less by", "end to end", "off"),
    )


def _commfuse_row(how: str, exposed_ms: float, total_ms: float, was: float, total: float) -> Row:
    less, published = 1 - exposed_ms / _REDUCE_MS, 1 - was / _REDUCE_MS
    head = (how, f"{exposed_ms:.1f}", f"{was}", f"{less:.1%}", f"{published:.1%}")
    return (*head, *against(total_ms, total))


# -- userbuffers ----------------------------------------------------------------------------------


def userbuffers() -> str:
    """Compare the model's choices at the matmuls of a public preset with the preset's.

    Userbuffers' preset for GPT3-175B on H100 (NVIDIA-NeMo/Megatron-Bridge): tensor parallel 4,
    sequence 2048, hidden 12288. Its rings copy on one SM (`num_sm 1`), so their hops are taken at
    the link's rate; the last column has hops by NCCL, as XLA's permutes.
    """
    tokens, hidden, rows = 2048, 12288, []
    for site, n, k, kind, preset in (
        ("qkv_fprop", 3 * hidden // 4, hidden, "all-gather", "ring"),
        ("fc1_fprop", hidden, hidden, "all-gather", "ring"),
        ("proj_dgrad", hidden // 4, hidden, "all-gather", "ring"),
        ("fc2_dgrad", hidden, hidden, "all-gather", "ring"),
        ("proj_fprop", hidden, hidden // 4, "reduce-scatter", "pipeline"),
        ("fc2_fprop", hidden, hidden, "reduce-scatter", "ring"),
    ):
        ways = _ways(tokens, n, k, kind, tokens * hidden * 2)
        best = min(("leave", "pipeline", "ring"), key=lambda way: ways[way])
        same = "" if best == preset else "differs"
        rows.append((site, *(f"{ways[w] * 1e6:.0f}" for w in ways), best, preset, same))
    names = ("leave", "pipeline", "ring", "ring by NCCL")
    return table(
        "Userbuffers' sites of GPT3-175B, 4 H100s: µs of each way",
        ("site", *names, "fastest of three", "preset", ""),
        rows,
        right=names,
    )


def _ways(m: int, n: int, k: int, kind: str, num_bytes: int) -> dict[str, float]:
    """Return the seconds of a matmul and its collective among four: in turn, split, as a ring."""
    model, group, parts = cost_model("h100-sxm:1x4"), Group(4), 4
    permutes = model.tables.permutes
    moved = num_bytes * 3 // 4
    split_s = model.collective_s(kind, moved // parts, group)
    split = Share(24, model.share(kind, moved // parts, group).memory_bytes_per_s)  # its num_sm 24
    part_s = model.matmul_s(m // parts, n, k, beside=split)
    hop_s = permutes.latency_s + num_bytes / parts / permutes.bytes_per_s
    copying = Share(1, 2 * permutes.bytes_per_s)

    def ring(hop_s: float, copies: Share) -> float:
        chunk_s = model.matmul_s(m // parts, n, k, beside=copies)
        return model.matmul_s(m // parts, n, k) + (parts - 1) * max(chunk_s, hop_s)

    shard = ("collective-permute", num_bytes // parts, Group(2))
    return {
        "leave": model.matmul_s(m, n, k) + model.collective_s(kind, moved, group),
        "pipeline": model.matmul_s(m // parts, n, k) + (parts - 1) * max(part_s, split_s) + split_s,
        "ring": ring(hop_s, copying),
        "ring by NCCL": ring(model.collective_s(*shard), model.share(*shard)),
    }


def contention() -> str:
    """A matmul during an all-gather of 64 MiB per rank, eight H100s: pytorch pull 172714."""
    model, moved, rows = cost_model("h100-sxm:1x8"), 7 * (64 << 20), []
    alone_s = model.matmul_s(8192, 8192, 8192, dtype="f16")
    gather_s = model.collective_s("all-gather", moved, Group(8))
    rows.append(("in sequence", *against((alone_s + gather_s) * 1e3, 2.96)))
    for what, kind, group, published_ms in (
        ("overlapped, NCCL on SMs", "all-gather", Group(8), 2.02),
        ("overlapped, copy engines", PERMUTE, Group(2, by_copy=True), 1.77),
    ):
        share = model.share(kind, moved, group)
        slowed_s = model.matmul_s(8192, 8192, 8192, dtype="f16", beside=share)
        both_s = together_s(alone_s, slowed_s, model.collective_s(kind, moved, group))
        rows.append((what, *against(both_s * 1e3, published_ms)))
    return table(
        "A matmul of 8192^3 and an all-gather of 64 MiB a rank on eight H100s, ms",
        ("how", "predicted", "published", "off"),
        rows,
        right=("predicted", "published", "off"),
    )


def hops() -> str:
    """Tabulate a hop on NVLink, to which NCCL gives few of its channels."""
    rows = []
    for name in ("h100-sxm:1x8", "b200:1x8", "gb200:18x4"):
        model = cost_model(name)
        for num_bytes in (1 << 20, 8 << 20, 64 << 20, 256 << 20):
            seconds = model.collective_s("collective-permute", num_bytes, Group(2))
            free = dataclasses.replace(model, permute_channels=32)
            all_s = free.collective_s("collective-permute", num_bytes, Group(2))
            sms = model.share("collective-permute", num_bytes, Group(2)).sms
            times = (f"{s * 1e6:.0f}" for s in (seconds, all_s))
            rows.append((name, human_bytes(num_bytes), f"{sms:.0f}", *times))
    return table(
        "A permute within an NVLink domain, µs: on NCCL's channels, and if it had all 32",
        ("cluster", "bytes", "channels", "predicted", "with 32"),
        rows,
        right=("bytes", "channels", "predicted", "with 32"),
    )


TABLES: tuple[Callable[[], str], ...] = (
    fits,
    xla,
    pallas,
    chunks,
    all_reduces,
    collectives.by_curve,
    published_steps,
    memory.by_run,
    contention,
    hops,
    commfuse,
    lagom.contention,
    lagom.patterns,
    userbuffers,
)

if __name__ == "__main__":
    main()
