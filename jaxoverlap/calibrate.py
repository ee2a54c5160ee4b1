"""Make the tables of the cost model: `python -m jaxoverlap.calibrate`.

Without options, of the package's chips, from the measurements that NVIDIA publishes in the package
aiconfigurator-core (extra `calibrate`): cuBLAS matmuls and NCCL collectives inside one NVLink
domain. With `--here`, of the devices that JAX sees on this machine.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import importlib.util
import os
import re
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from jaxoverlap import fit
from jaxoverlap.measured import Memory, Permutes, Tables, decode

PACKAGE = "aiconfigurator-core"
_INSTALL = "pip install 'jaxoverlap[calibrate]'"
_KINDS = {
    "all_gather": "all-gather",
    "all_reduce": "all-reduce",
    "reduce_scatter": "reduce-scatter",
    "alltoall": "all-to-all",
}
_NCCL_BYTES = {"half": 2, "int8": 1}  # of an element: message_size counts elements
_CHANNELS = 24  # NCCL's log on eight A100s and on eight H100s: "24 coll channels"


@dataclass(frozen=True)
class _Source:
    """Where a chip's rows are in aiconfigurator-core: folders under systems/data."""

    chip: str
    system: str
    matmuls: str
    nccl: str
    dtypes: tuple[str, ...]


# Of several frameworks that called the same cuBLAS, TensorRT-LLM's: its fp8 rows time the matmul
# alone. On one H100 the frameworks' bf16 rows differ by 5 to 8% from each other.
_TRTLLM = "trtllm/1.3.0rc20"
SOURCES = (
    _Source("a100-sxm-80", "a100_sxm", "sglang/0.5.10", "2.27.3", ("bf16",)),
    _Source("h100-sxm", "h100_sxm", _TRTLLM, "2.29.2", ("bf16", "fp8")),
    _Source("h200", "h200_sxm", _TRTLLM, "2.29.2", ("bf16", "fp8")),
    _Source("b200", "b200_sxm", _TRTLLM, "2.29.2", ("bf16", "fp8")),
    _Source("gb200", "gb200", _TRTLLM, "2.29.2", ("bf16", "fp8")),
)
_DTYPE_NAMES = {"bf16": ("bfloat16", 2.0), "fp8": ("fp8", 1.0)}  # theirs, bytes of an element


def chip_tables(source: _Source, date: str) -> Tables:
    """The tables of one chip, from aiconfigurator-core.

    Raises:
        ImportError: if that package is not installed.
    """
    origin = f"{PACKAGE} {importlib.metadata.version(PACKAGE)}"
    matmuls = {}
    for dtype in source.dtypes:
        rows = matmul_rows(source, dtype)
        rates = fit.fit_rates(rows, _DTYPE_NAMES[dtype][1], 2.0)
        name = f"{origin}, {source.system}/gemm/{source.matmuls}, {len(rows)} rows"
        matmuls[dtype] = fit.fit_matmuls(rows, rates, name, fit.M_KNOTS, fit.NK_KNOTS)
    collectives = fit.fit_collectives(
        collective_rows(source), f"{origin}, {source.system}/comm/nccl/{source.nccl}"
    )
    curves, thin = collectives.curves, matmuls["bf16"]
    return Tables(
        chip=source.chip,
        date=date,
        matmuls=matmuls,
        memory=Memory(
            thin.launch_s, thin.bytes_per_s, "the bf16 matmuls of at most 16 rows, which read all"
        ),
        collectives=collectives,
        permutes=Permutes(
            latency_s=curves["all-to-all"][2].floor_s,
            bytes_per_s=float(f"{_best_rate(curves['all-gather']):.4g}"),
            source="derived, there are no rows: the smallest all-to-all of two devices, and the "
            "best rate of the all-gathers",
        ),
        channels=_CHANNELS,
    )


def _best_rate(curves: dict[int, object]) -> float:
    return max(curve.bytes_per_s for curve in curves.values())  # pyright: ignore


def matmul_rows(source: _Source, dtype: str) -> fit.MatmulRows:
    """The measured matmuls of one dtype."""
    theirs, _ = _DTYPE_NAMES[dtype]
    found = _parquet(source, "gemm", source.matmuls, "gemm_perf.parquet")
    mine = found["gemm_dtype"] == theirs
    m, n, k = (found[dim][mine].astype(float) for dim in "mnk")
    return fit.MatmulRows(m, n, k, found["latency"][mine] * 1e-3)


def collective_rows(source: _Source) -> list[fit.CollectiveRow]:
    """The measured collectives; bytes turned into what each device sends by a ring."""
    found = _parquet(source, "comm", f"nccl/{source.nccl}", "nccl_perf.parquet")
    names = ("op_name", "num_gpus", "message_size", "nccl_dtype", "latency")
    rows = []
    for name, size, elements, dtype, ms in zip(*(found[n] for n in names), strict=True):
        kind, n = _KINDS[name], int(size)
        passes = 2 if kind == "all-reduce" else 1
        moved = passes * int(elements) * _NCCL_BYTES[dtype] * (n - 1) // n
        rows.append(fit.CollectiveRow(kind, n, moved, float(ms) * 1e-3))
    return rows


def _parquet(source: _Source, *path: str) -> dict[str, np.ndarray]:
    """The columns of one of aiconfigurator-core's files."""
    spec = importlib.util.find_spec("aiconfigurator_core")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(f"the chips' measurements are in {PACKAGE}: {_INSTALL}")
    import pyarrow.parquet  # comes with it

    systems = Path(spec.submodule_search_locations[0]) / "systems" / "data" / source.system
    table = pyarrow.parquet.read_table(systems.joinpath(*path))
    return {name: np.asarray(table[name].to_pylist()) for name in table.column_names}


# -- the command ----------------------------------------------------------------------------------


def write(tables: Tables, path: Path) -> None:
    """Write a table file, whole or not at all.

    Where only the date would change the file keeps the one that it has.
    """
    if path.exists():
        before = decode(path.read_bytes(), str(path))
        if msgspec.structs.replace(tables, date=before.date) == before:
            return
    text = msgspec.json.format(msgspec.json.encode(tables), indent=1).decode()
    text = re.sub(r"\[[^\[\]{}]*\]", lambda found: re.sub(r"\s+", " ", found.group()), text)
    part = path.with_name(f"{path.name}.part{os.getpid()}")
    part.write_text(text + "\n")
    os.replace(part, path)


if __name__ == "__main__":
    today = datetime.date.today().isoformat()
    for source in SOURCES:
        t = chip_tables(source, today)
        write(t, Path(__file__).parent / "tables" / f"{source.chip}.json")
        print(
            source.chip,
            {k: v.error for k, v in t.matmuls.items()},
            t.collectives.error,
            t.collectives.error_new_sizes,
            t.memory,
            t.permutes,
            [(v.launch_s, v.flops_per_s, v.bytes_per_s) for v in t.matmuls.values()],
        )
