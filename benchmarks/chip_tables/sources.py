"""Read the measurements of a chip, and fit its tables to them.

They are those that NVIDIA publishes in the package aiconfigurator-core (extra `chip-tables`):
cuBLAS matmuls, fused attention, and NCCL collectives inside one NVLink domain.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from benchmarks.chip_tables import xla_perf_table
from benchmarks.chip_tables.fit import M_KNOTS, NK_KNOTS, fit_attention, fit_permutes
from jaxoverlap.calibrate import fit
from jaxoverlap.cost.collective_tables import Collectives, Permutes
from jaxoverlap.cost.tables import AttentionTable, ChipTables, MatmulTable, MemoryTable

PACKAGE = "aiconfigurator-core"
_INSTALL = "pip install '.[chip-tables]' in the checkout"
_KINDS = {
    "all_gather": "all-gather",
    "all_reduce": "all-reduce",
    "reduce_scatter": "reduce-scatter",
    "alltoall": "all-to-all",
}
_NCCL_BYTES = {"half": 2, "int8": 1}  # of an element: message_size counts elements
_CHANNELS = 24  # NCCL's log on eight A100s and on eight H100s: "24 coll channels"


@dataclass(frozen=True)
class Source:
    """The source of a chip's measured rows.

    Attributes:
        chip: the chip's name, as `parse_cluster` takes it.
        system: its folder in aiconfigurator-core, under systems/data.
        bf16, fp8: the framework that matmuls are from, in gemm/ there; "" for none.
        attention: the framework that fused attention is from, in attention/ there.
        nccl: the version that collectives are from, in comm/nccl/ there.
        xla: the chip in XLA's own table, which has permutes and larger groups.
    """

    chip: str
    system: str
    bf16: str
    fp8: str
    attention: str
    nccl: str
    xla: str


# Several frameworks called the same libraries; on one H100 their bf16 rows differ by 5 to 8% from
# each other. For fp8 TensorRT-LLM's rows also time how it makes fp8 of its input (12 µs at least),
# which in XLA is a kernel of its own. vLLM's do not, but on the B200 some of them are up to six
# times slower than SGLang's, which stand in there.
_TRTLLM, _VLLM, _SGLANG = "trtllm/1.3.0rc20", "vllm/0.24.0", "sglang/0.5.14"
SOURCES = (
    Source("a100-sxm-80", "a100_sxm", "sglang/0.5.10", "", "trtllm/1.0.0", "2.27.3", "sm_90"),
    Source("h100-sxm", "h100_sxm", _TRTLLM, _VLLM, _TRTLLM, "2.29.2", "sm_90"),
    Source("h200", "h200_sxm", _TRTLLM, _VLLM, _TRTLLM, "2.29.2", "sm_90"),
    Source("b200", "b200_sxm", _TRTLLM, _SGLANG, _TRTLLM, "2.29.2", "sm_100_B200"),
    Source("gb200", "gb200", _TRTLLM, _VLLM, _TRTLLM, "2.29.2", "sm_100_GB200"),
)
_PERMUTES_OF_ANOTHER = ("a100-sxm-80", "h200")
# XLA measured an NVL72 rack in groups of 18, 32 and 64 too: these test what lies between.
_LARGER_GROUPS = {"gb200": (8, 16, 36, 72)}
_LARGEST_BYTES = 4e9
_DTYPE_NAMES = {"bf16": ("bfloat16", 2.0), "fp8": ("fp8", 1.0)}  # theirs, bytes of an element


def chip_tables(source: Source, date: str) -> ChipTables:
    """Make the tables of one chip, from aiconfigurator-core and from JAX's CUDA plugin.

    Raises:
        ImportError: if one of these is not installed.
    """
    matmuls = {dtype: _matmuls(source, dtype) for dtype in _DTYPE_NAMES if getattr(source, dtype)}
    rows = collective_rows(source) + larger_groups(source)
    origin = f"{_origin()} {source.system}/comm/nccl/{source.nccl}"
    if larger_groups(source):
        origin += f"; groups above four: {xla_perf_table.version()} {source.xla}"
    collectives = msgspec.structs.replace(
        fit.fit_collectives(rows, origin),
        graph_sizes=_graph_sizes(source),
    )
    thin = matmuls["bf16"]
    return ChipTables(
        chip=source.chip,
        date=date,
        matmuls=matmuls,
        memory=MemoryTable(
            thin.launch_s, thin.bytes_per_s, "the bf16 matmuls of at most 16 rows, which read all"
        ),
        attention=_attention(source, thin.bytes_per_s),
        collectives=collectives,
        permutes=_permutes(source, collectives),
        channels=_CHANNELS,
    )


def _graph_sizes(source: Source) -> tuple[int, ...]:
    """Return the group sizes whose rows lack a launch: all of aiconfigurator-core's.

    None on a chip whose larger groups are XLA's own: XLA's rows of four GB200s agree with
    aiconfigurator-core's as they are.
    """
    if larger_groups(source):
        return ()
    return tuple(sorted({row.size for row in collective_rows(source)}))


def _matmuls(source: Source, dtype: str) -> MatmulTable:
    rows = matmul_rows(source, dtype)
    rates = fit.fit_rates(rows, _DTYPE_NAMES[dtype][1], 2.0)
    name = f"{_origin()} {source.system}/gemm/{getattr(source, dtype)}, {len(rows)} rows"
    return fit.fit_matmuls(rows, rates, name, M_KNOTS, NK_KNOTS)


def _attention(source: Source, bytes_per_s: float) -> AttentionTable:
    """Fit attention to TensorRT-LLM's kernels on all chips, as there are no rows of cuDNN's."""
    rows = attention_rows(source, "attention", "context_attention_perf.parquet")
    full = None
    if source.attention == _TRTLLM:  # the older version was not measured without a mask
        full = attention_rows(source, "encoder_attention", "encoder_attention_perf.parquet")
    name = f"{_origin()} {source.system}/attention/{source.attention}, {len(rows)} rows"
    return fit_attention(rows, full, bytes_per_s, name)


def _permutes(source: Source, collectives: Collectives) -> Permutes:
    """Fit permutes to XLA's rows; a chip that has none takes another's latency and channels."""
    rows = [r for r in xla_perf_table.collective_rows(source.xla) if r.kind == "collective-permute"]
    fitted = fit_permutes(rows, f"{xla_perf_table.version()} {source.xla}, {len(rows)} rows")
    if source.chip not in _PERMUTES_OF_ANOTHER:
        return fitted
    gathers = collectives.curves["all-gather"].values()
    return msgspec.structs.replace(
        fitted,
        bytes_per_s=max(curve.bytes_per_s for curve in gathers),
        source=f"no rows: as the H100's ({fitted.source}), at most at the all-gathers' rate",
        error=None,
    )


def larger_groups(source: Source) -> list[fit.CollectiveRow]:
    """Read collectives of more devices than aiconfigurator-core has, from XLA's table."""
    if source.chip not in _LARGER_GROUPS:
        return []
    return [
        row
        for row in xla_perf_table.collective_rows(source.xla)
        if row.size in _LARGER_GROUPS[source.chip] and row.bytes_moved <= _LARGEST_BYTES
    ]


def _origin() -> str:
    return f"{PACKAGE} {importlib.metadata.version(PACKAGE)}"


def matmul_rows(source: Source, dtype: str) -> fit.MatmulRows:
    """Read the measured matmuls of one dtype."""
    theirs, _ = _DTYPE_NAMES[dtype]
    columns = _parquet(source, "gemm", getattr(source, dtype), "gemm_perf.parquet")
    mine = columns["gemm_dtype"] == theirs
    m, n, k = (columns[dim][mine].astype(float) for dim in "mnk")
    return fit.MatmulRows(m, n, k, columns["latency"][mine] * 1e-3)


def attention_rows(source: Source, folder: str, file: str) -> fit.MatmulRows:
    """Read measured fused attention in bf16, with as many heads of keys as of queries.

    Whole sequences of 64 and more, no window, no keys from before, heads of 64 to 256. Rows are
    length, heads of all the batch, and their size.
    """
    columns = _parquet(source, folder, source.attention, file)
    mine = (columns["attn_dtype"] == "bfloat16") & (columns["isl"] >= 64)
    mine &= (columns["head_dim"] >= 64) & (columns["head_dim"] <= 256)
    if "num_key_value_heads" in columns:
        mine &= columns["num_heads"] == columns["num_key_value_heads"]
        mine &= (columns["kv_cache_dtype"] == "bfloat16") & (columns["step"] == 0)
        mine &= columns["window_size"] == 0
    names = ("isl", "batch_size", "num_heads", "head_dim")
    length, batch, heads, size = (columns[name][mine].astype(float) for name in names)
    return fit.MatmulRows(length, batch * heads, size, columns["latency"][mine] * 1e-3)


def collective_rows(source: Source) -> list[fit.CollectiveRow]:
    """Read the measured collectives; bytes become what each device sends by a ring."""
    columns = _parquet(source, "comm", f"nccl/{source.nccl}", "nccl_perf.parquet")
    names = ("op_name", "num_gpus", "message_size", "nccl_dtype", "latency")
    rows = []
    for name, size, elements, dtype, ms in zip(*(columns[n] for n in names), strict=True):
        kind, n = _KINDS[name], int(size)
        passes = 2 if kind == "all-reduce" else 1
        moved = passes * int(elements) * _NCCL_BYTES[dtype] * (n - 1) // n
        rows.append(fit.CollectiveRow(kind, n, moved, float(ms) * 1e-3))
    return rows


def _parquet(source: Source, *path: str) -> dict[str, np.ndarray]:
    """Read the columns of one of aiconfigurator-core's files."""
    spec = importlib.util.find_spec("aiconfigurator_core")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(f"the chips' measurements are in {PACKAGE}: {_INSTALL}")
    systems = Path(spec.submodule_search_locations[0]) / "systems" / "data" / source.system
    parquet = importlib.import_module("pyarrow.parquet")  # of the extra, not ours to type
    table = parquet.read_table(systems.joinpath(*path))
    return {name: np.asarray(table[name].to_pylist()) for name in table.column_names}
